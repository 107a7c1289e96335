//! Elementary functions of `f64` whose bits are the same on every platform: those of the standard library are the
//! platform's own. For numbers taken once a row, or once a table; scores have the exponential of `simd/exp.rs`.

#[cfg(feature = "nn")]
pub use libm::{cos, pow, sin};
pub(crate) use libm::{exp, exp2, log as ln};

/// Replaces some numbers by their natural logarithms, with the bits of [`ln`], in a form that the compiler vectorises.
#[inline(always)]
pub(crate) fn ln_each<const N: usize>(numbers: &mut [f64; N]) {
    if !numbers.iter().fold(true, |normal, x| normal & (x.is_normal() & x.is_sign_positive())) {
        return numbers.iter_mut().for_each(|x| *x = ln(*x));
    }
    // Terms of atanh's series, as in libm (FreeBSD's e_log.c), smallest first of either half.
    const EVEN: [f64; 3] = [
        f64::from_bits(0x3FC3_9A09_D078_C69F),
        f64::from_bits(0x3FCC_71C5_1D8E_78AF),
        f64::from_bits(0x3FD9_9999_9997_FA04),
    ];
    const ODD: [f64; 4] = [
        f64::from_bits(0x3FC2_F112_DF3E_5244),
        f64::from_bits(0x3FC7_4664_96CB_03DE),
        f64::from_bits(0x3FD2_4924_9422_9359),
        f64::from_bits(0x3FE5_5555_5555_5593),
    ];
    // Logarithm of 2, in two parts.
    const LN_2: [f64; 2] = [f64::from_bits(0x3FE6_2E42_FEE0_0000), f64::from_bits(0x3DEA_39EF_3579_3C76)];
    // Upper bits of √½ and of 1, and what makes a number of an exponent.
    const ROOT: u64 = 0x3FE6_A09E << 32;
    const ONE: u64 = 0x3FF0_0000 << 32;
    const TWO_TO_52: f64 = f64::from_bits(0x4330_0000_0000_0000);
    for x in numbers {
        // x = 2ᵏ·(1 + f), and 1 + f from √½ to √2.
        let bits = x.to_bits() + (ONE - ROOT);
        let k = f64::from_bits(TWO_TO_52.to_bits() | bits >> 52) - (TWO_TO_52 + 1023.0);
        let f = f64::from_bits((bits & 0x000F_FFFF_FFFF_FFFF) + ROOT) - 1.0;
        let (half, s) = (0.5 * f * f, f / (2.0 + f));
        let z = s * s;
        let w = z * z;
        let even = w * (EVEN[2] + w * (EVEN[1] + w * EVEN[0]));
        let odd = z * (ODD[3] + w * (ODD[2] + w * (ODD[1] + w * ODD[0])));
        *x = s * (half + (odd + even)) + k * LN_2[1] - half + f + k * LN_2[0];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_together_have_the_bits_of_each_alone() {
        let ends = [f64::MIN_POSITIVE, f64::MAX, 1.0, 2.0, 0.5, f64::EPSILON, core::f64::consts::SQRT_2, 1.0 / 3.0];
        let (mut numbers, mut bits) = (ends.to_vec(), 1u64);
        for x in ends {
            numbers.extend([x.next_down(), x.next_up()]);
        }
        for i in 0..200_000 {
            bits = bits.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x1234_5678_9ABC_DEF1);
            // Sums of weights, and any number.
            let sum = f64::from((1.0 + (bits >> 40) as f32 / 65536.0) * if i % 2 == 0 { 1.0 } else { 1e-3 });
            numbers.extend([sum, f64::from_bits(bits >> 1)]);
        }
        numbers.extend([0.0, -0.0, -1.0, f64::INFINITY, f64::NAN]);
        numbers.resize(numbers.len().next_multiple_of(8), 7.0);
        for eight in numbers.as_chunks::<8>().0 {
            let mut together = *eight;
            ln_each(&mut together);
            assert_eq!(together.map(f64::to_bits), eight.map(|x| ln(x).to_bits()), "{eight:?}");
        }
    }
}
