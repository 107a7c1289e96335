//! Weights as bytes, for values of four bits.
//!
//! In each block of keys and of columns, a row's weights times the scales of their values are rounded to whole units, 255 of
//! which are the largest. Each key has its threshold, a fraction of a unit: what is left beyond whole units is
//! rounded up if it reaches that. Thresholds are spread evenly, also over any run of keys, so weights that are far below
//! a unit keep their sum; if all were rounded to the nearest, they would be lost.

use crate::simd::{Int8Dot, LANES, Simd, lanes};
use crate::tensor::rows::KEY_BLOCK;

/// Place of the unit, in floats, in a row of weights as bytes: behind all keys of a block.
pub(crate) const UNIT: usize = KEY_BLOCK / size_of::<f32>();

/// Place of the weighted sum of the centres of the values.
pub(crate) const CENTRES: usize = UNIT + 1;

/// Number of floats from one row of weights as bytes to the next.
pub(crate) const ROW_FLOATS: usize = UNIT + LANES;
const _: () = assert!(CENTRES < ROW_FLOATS);

/// Number of panels of bytes from one row to the next.
const ROW_PANELS: usize = ROW_FLOATS * size_of::<f32>() / LANES;

/// Largest weight, in units.
const MOST: f32 = 255.0;

/// Number of bits below a unit in a sum with an [offset](OFFSETS).
const FRACTION: u32 = 9;

/// Addends of the weights of a block's keys, in units, before fractions are cut off: 1 less each key's threshold, and a constant
/// that leaves a number below 256 in the lowest bits, as [`FRACTION`] bits of fraction and eight of the integer.
static OFFSETS: [f32; KEY_BLOCK] = {
    let mut offsets = [0.0; KEY_BLOCK];
    let mut key = 0;
    while key < KEY_BLOCK {
        // The multiples of the golden ratio are spread evenly. None is 0 or 1: 0 and 255 units stay what they are.
        let golden = (key * 159 % 256) as f32;
        offsets[key] = 1.5 * (1 << (23 - FRACTION)) as f32 + (2.0 * golden + 1.0) / 512.0;
        key += 1;
    }
    offsets
};

/// Weights of sixteen keys of a row.
pub(crate) type Panel = [f32; LANES];

/// Returns the unit of each of `R` rows of weights, `STRIDE` floats apart. No weight is below 0; the scales of their values are
/// finite.
///
/// # Safety
/// Each row has a readable panel for each of the scales.
#[inline(always)]
pub(crate) unsafe fn units<S: Int8Dot, const R: usize, const STRIDE: usize>(
    s: S,
    weights: *const f32,
    scales: &[Panel],
) -> [Unit; R] {
    let mut most = [s.splat(0.0); R];
    for (panel, scale) in scales.iter().enumerate() {
        let scale = lanes::load(s, scale);
        for r in 0..R {
            // SAFETY: the caller guarantees the panel in row `r < R`.
            let weights = unsafe { s.load(weights.add(r * STRIDE + panel * LANES)) };
            most[r] = s.max_magnitude(s.mul(weights, scale), most[r]);
        }
    }
    let mut units = [Unit::new(0.0); R];
    for r in 0..R {
        let mut magnitudes = [0.0; LANES];
        lanes::store(s, &mut magnitudes, most[r]);
        let mut largest = 0;
        for magnitude in magnitudes {
            largest = largest.max(magnitude.to_bits());
        }
        units[r] = Unit::new(f32::from_bits(largest));
    }
    units
}

/// Rounds the weights of `R` rows, `STRIDE` floats apart, by the scales of their values, to whole units, in rows of bytes
/// [`ROW_FLOATS`] apart. The weights are those of a block's panels from `first` on. Weights that are not finite become any number.
///
/// # Panics
/// If a block has no such panels.
///
/// # Safety
/// Each row has a readable panel for each of the scales, and room for its bytes.
#[inline(always)]
pub(crate) unsafe fn round<S: Int8Dot, const R: usize, const STRIDE: usize>(
    s: S,
    weights: *const f32,
    scales: &[Panel],
    units: [Unit; R],
    first: usize,
    to: *mut [u8; LANES],
) {
    let mut reciprocals = [s.splat(0.0); R];
    for r in 0..R {
        reciprocals[r] = s.splat(units[r].reciprocal);
    }
    let offsets = &OFFSETS.as_chunks().0[first..first + scales.len()];
    for (panel, (scale, offsets)) in scales.iter().zip(offsets).enumerate() {
        let (scale, offsets) = (lanes::load(s, scale), lanes::load(s, offsets));
        for r in 0..R {
            // SAFETY: the caller guarantees the panel, and room for its bytes, in row `r < R`.
            unsafe {
                let weights = s.load(weights.add(r * STRIDE + panel * LANES));
                let bytes = s.bytes::<FRACTION>(s.add(s.mul(s.mul(weights, scale), reciprocals[r]), offsets));
                *to.add(r * ROW_PANELS + panel) = bytes;
            }
        }
    }
}

/// Returns the sum of the weights times these numbers, for each of `R` rows, `STRIDE` floats apart.
///
/// # Safety
/// Each row has a readable panel for each panel of numbers.
#[inline(always)]
pub(crate) unsafe fn weighted_sums<S: Simd, const R: usize, const STRIDE: usize>(
    s: S,
    weights: *const f32,
    numbers: &[Panel],
) -> [f32; R] {
    let mut sums = [s.splat(0.0); R];
    for (panel, numbers) in numbers.iter().enumerate() {
        let numbers = lanes::load(s, numbers);
        for r in 0..R {
            // SAFETY: the caller guarantees the panel in row `r < R`.
            sums[r] = s.fma(unsafe { s.load(weights.add(r * STRIDE + panel * LANES)) }, numbers, sums[r]);
        }
    }
    let mut totals = [0.0; R];
    for r in 0..R {
        totals[r] = s.reduce_sum(sums[r]);
    }
    totals
}

/// Unit of a row's weights.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    /// The unit; NaN if a weight times its scale is not finite.
    pub(crate) size: f32,
    /// Number of units in 1.
    reciprocal: f32,
}

impl Unit {
    /// Makes the unit of weights from the largest; ∞ or NaN if one is not finite. It is never subnormal.
    #[inline(always)]
    fn new(largest: f32) -> Self {
        let least = MOST * f32::MIN_POSITIVE;
        let large = if largest > least { largest } else { least };
        let size = if largest < f32::INFINITY { large * (1.0 / MOST) } else { f32::NAN };
        Self { size, reciprocal: MOST / large }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Int8DotWork;
    use crate::simd::isa::Isa;

    /// Weights and scales of a row, in whole panels, and room for the rounded weights.
    struct Rounding<'a>(&'a [Panel], &'a [Panel], &'a mut [[u8; LANES]]);

    impl Int8DotWork for Rounding<'_> {
        type Output = f32;
        unsafe fn run<S: Int8Dot>(self, s: S) -> f32 {
            let Self(weights, scales, bytes) = self;
            s.vectorize(
                #[inline(always)]
                || {
                    assert!(weights.len() == scales.len() && bytes.len() == scales.len());
                    let weights = weights.as_flattened().as_ptr();
                    // SAFETY: the row has a panel, and room for its bytes, for each of the scales.
                    unsafe {
                        let [unit] = units::<S, 1, 0>(s, weights, scales);
                        super::round::<S, 1, 0>(s, weights, scales, [unit], 0, bytes.as_mut_ptr());
                        unit.size
                    }
                },
            )
        }
    }

    /// Rounds weights, on every instruction set alike; returns their unit.
    fn round(weights: &[f32], scales: &[f32], bytes: &mut [u8]) -> f32 {
        let panels = |xs: &[f32]| -> Vec<Panel> {
            xs.chunks(LANES).map(|xs| core::array::from_fn(|i| xs.get(i).copied().unwrap_or(0.0))).collect()
        };
        let (weights, scales) = (panels(weights), panels(scales));
        let results = Isa::available().map(|isa| {
            let mut rounded = vec![[99; LANES]; weights.len()];
            // SAFETY: the work has no contract.
            let unit = dispatch!(isa, |s| unsafe { s.with_int8_dot(Rounding(&weights, &scales, &mut rounded)) });
            (unit, rounded)
        });
        let results: Vec<_> = results.collect();
        for (unit, rounded) in &results {
            assert_eq!((unit.to_bits(), rounded), (results[0].0.to_bits(), &results[0].1));
        }
        bytes.copy_from_slice(&results[0].1.as_flattened()[..bytes.len()]);
        results[0].0
    }

    /// Rounds weights without scales; returns them as they are multiplied.
    fn rounded(weights: &[f32]) -> Vec<f32> {
        let mut bytes = vec![99; weights.len()];
        let unit = round(weights, &vec![1.0; weights.len()], &mut bytes);
        bytes.iter().map(|&byte| unit * f32::from(byte)).collect()
    }

    #[test]
    fn errors_are_below_a_unit() {
        for size in [1.0, 1e-30, 3e-38, 1e38] {
            let weights: Vec<f32> = (0..KEY_BLOCK).map(|j| size * ((j * 89 % 251) as f32 / 250.0).powi(3)).collect();
            let unit = (size / MOST).max(f32::MIN_POSITIVE);
            for (key, (weight, rounded)) in weights.iter().zip(rounded(&weights)).enumerate() {
                assert!((weight - rounded).abs() <= 1.001 * unit, "key {key}: {weight}, {rounded}");
                assert!(*weight > 0.0 || rounded == 0.0, "key {key}");
            }
        }
        assert_eq!(rounded(&[0.5; KEY_BLOCK]), [0.5; KEY_BLOCK], "the largest are exact");
    }

    #[test]
    fn small_weights_keep_their_sum() {
        for small in [0.5, 0.1, 0.02, 0.011] {
            let mut weights = [small / MOST; KEY_BLOCK];
            weights[17] = 1.0;
            let sum = rounded(&weights).iter().sum::<f32>() - 1.0;
            let expected = small / MOST * 255.0;
            assert!((sum - expected).abs() <= 1.01 / MOST, "{small} units each: {sum}, not {expected}");
        }
    }

    #[test]
    fn what_is_not_a_weight() {
        let bytes = &mut [99; 4];
        let unit = round(&[1.0, 3.0, 0.0, -0.0], &[2.0, 0.0, f32::MAX, 1.0], bytes);
        assert!((unit * MOST - 2.0).abs() < 1e-6, "{unit}");
        assert_eq!(*bytes, [255, 0, 0, 0]);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            assert!(round(&[1.0, bad], &[1.0; 2], bytes).is_nan(), "{bad}");
        }
        assert!(round(&[0.0; 4], &[1.0; 4], bytes) > 0.0);
        assert_eq!(*bytes, [0; 4]);
    }
}
