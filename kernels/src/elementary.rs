//! Elementary functions of `f64` with the same bits on every platform: those of the standard library are the
//! platform's own. For numbers taken once a row, or once a table; scores have the exponential of `simd/exp.rs`.

#[cfg(feature = "nn")]
pub use libm::{cos, pow, sin};
pub(crate) use libm::{exp, exp2};

/// Returns the natural logarithm.
#[inline]
pub(crate) fn ln(x: f64) -> f64 {
    if is_positive(x) { ln_of_positive(x) } else { libm::log(x) }
}

/// Replaces some numbers by their natural logarithms, in a form that the compiler vectorises.
#[inline(always)]
pub(crate) fn ln_each<const N: usize>(numbers: &mut [f64; N]) {
    let all = numbers.iter().fold(true, |all, &x| all & is_positive(x));
    for x in numbers {
        *x = if all { ln_of_positive(*x) } else { ln(*x) };
    }
}

/// Returns true if a number is positive and normal.
#[inline(always)]
fn is_positive(x: f64) -> bool {
    x.is_normal() & x.is_sign_positive()
}

/// Returns the natural logarithm of a [positive](is_positive) number: libm's, with the same bits.
#[inline(always)]
fn ln_of_positive(x: f64) -> f64 {
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
    // Upper bits of √½ and of 1; and 2⁵²: a number added to it shows in its last bits.
    const ROOT: u64 = 0x3FE6_A09E << 32;
    const ONE: u64 = 0x3FF0_0000 << 32;
    const TWO_TO_52: f64 = f64::from_bits(0x4330_0000_0000_0000);
    // x = 2ᵏ·(1 + f), and 1 + f from √½ to √2.
    let bits = x.to_bits() + (ONE - ROOT);
    let k = f64::from_bits(TWO_TO_52.to_bits() | bits >> 52) - (TWO_TO_52 + 1023.0);
    let f = f64::from_bits((bits & 0x000F_FFFF_FFFF_FFFF) + ROOT) - 1.0;
    let (half, s) = (0.5 * f * f, f / (2.0 + f));
    let z = s * s;
    let w = z * z;
    let even = w * (EVEN[2] + w * (EVEN[1] + w * EVEN[0]));
    let odd = z * (ODD[3] + w * (ODD[2] + w * (ODD[1] + w * ODD[0])));
    s * (half + (odd + even)) + k * LN_2[1] - half + f + k * LN_2[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Simd;
    use crate::simd::isa::Isa;

    /// Compares logarithms with libm's, eight together and one alone.
    fn check(numbers: [f64; 8]) {
        let want = numbers.map(|x| libm::log(x).to_bits());
        assert_eq!(numbers.map(|x| ln(x).to_bits()), want, "{numbers:?}");
        for isa in Isa::available() {
            let mut together = numbers;
            dispatch!(isa, |s| s.vectorize(
                #[inline(always)]
                || ln_each(&mut together)
            ));
            assert_eq!(together.map(f64::to_bits), want, "{isa}: {numbers:?}");
        }
    }

    #[test]
    fn logarithms_have_the_bits_of_libm() {
        let of_upper = |upper: u64| [upper << 32, (upper << 32) - 1, upper << 32 | 0xFFFF_FFFF].map(f64::from_bits);
        let root = [0x3FE6_A09E, 0x3FF6_A09E, 0x3FE6_A09F, 0x7FE6_A09E, 0x0016_A09E].map(of_upper).concat();
        let ends = [f64::MIN_POSITIVE, f64::MAX, 1.0, 2.0, 0.5, f64::EPSILON, core::f64::consts::SQRT_2, 1.0 / 3.0];
        for x in ends.into_iter().flat_map(|x| [x.next_down(), x, x.next_up()]).chain(root) {
            check([x; 8]);
        }
        let mut bits = 1u64;
        for _ in 0..50_000 {
            let mut next = || {
                bits = bits.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x1234_5678_9ABC_DEF1);
                bits
            };
            // Sums of weights; positive numbers that are normal.
            check(core::array::from_fn(|_| f64::from(1.0 + (next() >> 40) as f32 / 65536.0)));
            check(core::array::from_fn(|_| f64::from_bits((next() >> 1).clamp(1 << 52, f64::MAX.to_bits()))));
        }
        for other in [0.0, -0.0, -1.0, 5e-324, f64::INFINITY, f64::NAN] {
            check([2.0, 3.0, other, 0.1, 1.0, 7.0, 1e300, 1e-300]);
        }
    }
}
