//! Numbers of eight bits: sign, four bits of exponent (bias 7), three of fraction; no infinities, one NaN (OCP 8-bit floating point
//! specification 1.0, E4M3).

use crate::matmul::pack::NonFinite;
use crate::simd::aligned::Plain;
use crate::simd::vector::Vector;
use crate::simd::{LANES, Simd};
use crate::tensor::element::{Bf16, Element, Load};
use crate::tensor::rows::Rows;

/// Code of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub(crate) struct E4m3(pub(crate) u8);

/// Largest number.
pub(crate) const LARGEST: f32 = 448.0;
/// Factor of the `f16` of the same exponent and fraction: biases are 15 and 7. Products take such `f16`, and the scales of rows this
/// factor. It is a power of two: no bit of a sum changes unless that is subnormal.
pub(crate) const FROM_HALF: f32 = 256.0;

impl E4m3 {
    /// Returns the bits of the `f16` that is a 256th of the number, also where that is subnormal. NaN becomes 480/256.
    #[inline(always)]
    const fn half_bits(self) -> u16 {
        // The sign is extended to the bit that it has in the end.
        ((self.0.cast_signed() as i16) << 7).cast_unsigned() & 0xbf80
    }

    pub(crate) const fn is_nan(self) -> bool {
        self.0 & 0x7f == 0x7f
    }

    /// Returns the number.
    pub(crate) fn widen(self) -> f32 {
        e4m3(self.0).widen()
    }

    /// Returns the nearest number, of two the even one. The largest stands for all that are larger, and NaN for NaN.
    #[inline(always)]
    pub(crate) fn narrow(x: f32) -> Self {
        let (sign, size) = (x.to_bits() >> 24 & 0x80, x.abs().min(LARGEST));
        let bits = size.to_bits();
        // Multiples of 2⁻⁹, by an addition that leaves no more bits; eight of them are the smallest number with an exponent.
        let subnormal = (size + 16384.0).to_bits() & 0xf;
        let normal = ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
        let code = if size < 0.015625 { subnormal } else { normal };
        Self((sign | if x.is_nan() { 0x7f } else { code }) as u8)
    }
}

// SAFETY: a byte of any bits.
unsafe impl Plain for E4m3 {}

/// A 256th of the number, but not of NaN, which would double the time of a load: the scale of a row with NaN is
/// [negative](row_scale).
// SAFETY: an element for each lane is read.
unsafe impl Load for E4m3 {
    #[inline(always)]
    unsafe fn load<W: Vector>(w: W, p: *const Self) -> W::V {
        let mut halves = [0; LANES];
        for (i, half) in halves[..W::LANES].iter_mut().enumerate() {
            // SAFETY: the caller guarantees an element for each lane.
            *half = unsafe { *p.add(i) }.half_bits();
        }
        // SAFETY: the array has sixteen elements.
        unsafe { w.load_f16(halves.as_ptr()) }
    }
}

/// Returns true if a number may be the scale of codes: a normal one with which all are finite.
pub fn is_e4m3_scale(scale: f32) -> bool {
    (f32::MIN_POSITIVE..=f32::MAX / LARGEST).contains(&scale)
}

/// Bits of the bfloat16 of each code.
const WIDENED: [u16; 256] = {
    let (mut all, mut code) = ([0; 256], 0);
    while code < 256 {
        let (sign, exponent, fraction) = ((code as u16 >> 7) << 15, (code as u16 >> 3) & 15, code as u16 & 7);
        all[code] = sign
            | match (exponent, fraction) {
                (15, 7) => 0x7fc0,
                (0, 0) => 0,
                // Subnormal numbers are n · 2⁻⁹: normal ones of bfloat16, counted from their highest bit.
                (0, n) => {
                    let high = n.ilog2() as u16;
                    (127 - 9 + high) << 7 | (n << (7 - high)) & 0x7f
                }
                _ => (exponent + 127 - 7) << 7 | fraction << 4,
            };
        code += 1;
    }
    all
};

/// Returns the number of a code, exactly.
pub fn e4m3(code: u8) -> Bf16 {
    Bf16(WIDENED[code as usize])
}

/// Rounds numbers, each divided by a scale, to codes.
pub(crate) fn quantise<S: Simd>(s: S, xs: &[f32], scale: f32, codes: &mut [E4m3]) {
    s.vectorize(
        #[inline(always)]
        move || codes.iter_mut().zip(xs).for_each(|(code, x)| *code = E4m3::narrow(x / scale)),
    );
}

/// Returns the scale that is stored for a row of these codes: negative if one is NaN.
pub(crate) fn row_scale(scale: f32, codes: impl IntoIterator<Item = E4m3>) -> f32 {
    if codes.into_iter().any(E4m3::is_nan) { -scale.abs() } else { scale }
}

/// Widens a 256th of `n` rows of `cols` numbers, whole vectors, to floats, one row after the other. With [`NonFinite::Handled`], NaN
/// becomes zero.
///
/// # Safety
/// The rows are readable.
pub(crate) unsafe fn widen_rows<S: Simd>(
    s: S,
    rows: Rows<E4m3>,
    [n, cols]: [usize; 2],
    nonfinite: NonFinite,
    out: &mut [f32],
) {
    assert!(cols.is_multiple_of(LANES) && out.len() >= n * cols, "{n} rows of {cols} columns");
    s.vectorize(
        #[inline(always)]
        move || {
            for (j, out) in out[..n * cols].chunks_exact_mut(cols).enumerate() {
                for (i, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    // SAFETY: the caller guarantees the row; the array has sixteen lanes.
                    unsafe { s.store(out.as_mut_ptr(), E4m3::load(s, rows.at(j).add(i * LANES))) }
                }
                for (i, x) in out.iter_mut().enumerate().filter(|_| nonfinite == NonFinite::Handled) {
                    // SAFETY: the caller guarantees the row.
                    *x = if unsafe { *rows.at(j).add(i) }.is_nan() { 0.0 } else { *x };
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;

    /// Number that a code stands for, by its definition.
    fn number(code: u8) -> f32 {
        let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
        let size = match (exponent, code & 7) {
            (15, 7) => f32::NAN,
            (0, _) => fraction * 2f32.powi(-6),
            _ => (1.0 + fraction) * 2f32.powi(exponent - 7),
        };
        if code < 128 { size } else { -size }
    }

    #[test]
    fn every_code_is_its_number_and_comes_back() {
        let codes: Vec<E4m3> = (0..=255).map(E4m3).collect();
        for isa in Isa::available() {
            let mut wide = [0.0; 256];
            let rows = Rows::strided(codes.as_ptr(), 32, 1);
            // SAFETY: eight rows of 32 codes.
            dispatch!(isa, |s| unsafe { widen_rows(s, rows, [8, 32], NonFinite::Handled, &mut wide) });
            for (code, wide) in codes.iter().zip(wide) {
                let (expected, one, wide) = (number(code.0), code.widen(), wide * FROM_HALF);
                if code.is_nan() {
                    assert!(one.is_nan() && expected.is_nan() && wide == 0.0, "{isa}, {code:?}: {one}, {wide}");
                    assert!(E4m3::narrow(one).is_nan(), "{one}");
                    continue;
                }
                let bits = [one, wide, expected].map(f32::to_bits);
                assert!(bits == [bits[0]; 3], "{isa}, {code:?}: {one}, {wide}, {expected}");
                assert_eq!(E4m3::narrow(wide), *code);
            }
        }
    }

    #[test]
    fn numbers_become_the_nearest_code() {
        let mut all: Vec<f32> = (0..0x7f).map(number).collect();
        all.push(480.0);
        for pair in all.windows(2).enumerate() {
            let (code, &[low, high]) = (pair.0 as u8, pair.1) else { unreachable!("pairs") };
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            let beside = |x: f32, by: i32| f32::from_bits(x.to_bits().wrapping_add_signed(by));
            let most = |code: u8| code.min(0x7e);
            assert_eq!(E4m3::narrow(middle), E4m3(most(even)), "{middle}");
            assert_eq!(E4m3::narrow(beside(middle, -1)), E4m3(code), "below {middle}");
            assert_eq!(E4m3::narrow(-beside(middle, 1)), E4m3(0x80 | most(code + 1)), "above {middle}");
        }
        assert_eq!([f32::INFINITY, 1e30, -500.0].map(|x| E4m3::narrow(x).0), [0x7e, 0x7e, 0xfe]);
    }
}
