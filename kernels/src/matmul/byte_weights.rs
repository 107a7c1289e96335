//! Weights as bytes, for values of four bits.
//!
//! In each block of keys and of columns, a row's weights times the scales of their values are rounded to whole units, 255 of
//! which are the largest. Each key has a threshold of its own, a fraction of a unit: what is left beyond whole units is
//! rounded up if it reaches that. Thresholds are spread evenly, also over any run of keys, so many weights that are far below
//! a unit keep their sum; if all were rounded to the nearest, they would be lost.

use crate::simd::LANES;
use crate::tensor::rows::KEY_BLOCK;

/// Place of the unit, in floats, in a row of weights as bytes: behind all keys of a block.
pub(crate) const UNIT: usize = KEY_BLOCK / size_of::<f32>();

/// Place of the weighted sum of the centres of the values.
pub(crate) const CENTRES: usize = UNIT + 1;

/// Number of floats from one row of weights as bytes to the next.
pub(crate) const ROW_FLOATS: usize = UNIT + LANES;
const _: () = assert!(CENTRES < ROW_FLOATS);

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

/// Returns the largest of the weights, each times the scale of its value; ∞ or NaN if a product is not finite. None is below 0;
/// scales are finite, so a weight of 0 stays 0.
#[inline(always)]
pub(crate) fn largest(weights: &[f32], scales: &[f32]) -> f32 {
    // Magnitudes have the order of their bits, NaN last.
    let mut most = 0;
    for (&weight, &scale) in weights.iter().zip(scales) {
        most = most.max((weight * scale).to_bits() & 0x7FFF_FFFF);
    }
    f32::from_bits(most)
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
    /// Makes the unit of weights of which this is the [`largest`]. It is never subnormal.
    #[inline(always)]
    pub(crate) fn new(largest: f32) -> Self {
        let least = MOST * f32::MIN_POSITIVE;
        let large = if largest > least { largest } else { least };
        let size = if largest < f32::INFINITY { large * (1.0 / MOST) } else { f32::NAN };
        Self { size, reciprocal: MOST / large }
    }

    /// Rounds the weights of some keys, from key `first` of the block on. Those that are not finite become any number.
    #[inline(always)]
    pub(crate) fn round(self, weights: &[f32], scales: &[f32], first: usize, bytes: &mut [u8]) {
        for (((byte, &weight), &scale), offset) in bytes.iter_mut().zip(weights).zip(scales).zip(&OFFSETS[first..]) {
            *byte = ((weight * scale * self.reciprocal + offset).to_bits() >> FRACTION) as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds weights; returns their unit.
    fn round(weights: &[f32], scales: &[f32], bytes: &mut [u8]) -> f32 {
        let unit = Unit::new(largest(weights, scales));
        unit.round(weights, scales, 0, bytes);
        unit.size
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
