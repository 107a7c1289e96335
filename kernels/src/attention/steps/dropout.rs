//! Dropout: weights after the softmax are set to 0 at random, the others multiplied by 1/(1 − p).
//!
//! Random numbers are Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011), a function of a key and a counter: the key is
//! the seed, the counter (offset, sequence · heads + head, row, key / 4). A weight's number thus depends on nothing but
//! its indices, and is the same forward and backward, in any order and on any number of threads.

use crate::attention::options::Dropout;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::span::Span;
use crate::attention::tiling::MAX_ROW_BLOCK;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::KEY_BLOCK;

/// Multipliers and increments of the key of Philox4x32.
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Counters whose numbers are taken at once.
const COUNTERS: usize = LANES;
/// Keys of these counters, four numbers each.
const AT_ONCE: usize = 4 * COUNTERS;
const _: () = assert!(KEY_BLOCK.is_multiple_of(AT_ONCE));

/// Row of a row block, as the counter has it: sequence · heads + head, row.
pub(crate) type CounterRow = [u32; 2];

/// Weights of a row that dropout keeps, against a key block: bit `t` of byte `i` stands for key 4·i + t.
pub(crate) type KeptWeights = [u8; KEY_BLOCK / 4];

/// Weights of a row block that dropout keeps, against a key block, and their factor.
pub(crate) struct Kept {
    pub(crate) weights: [KeptWeights; MAX_ROW_BLOCK],
    pub(crate) factor: f32,
}

/// Low half of a lane.
const LOW: u64 = u32::MAX as u64;

/// Returns the random numbers of counters that differ in the last word, `last` and those after it: the
/// `t`th number of counter `i` is the low half of `[t][i]`. Words stay in low halves throughout, which is where products
/// of 32 bits take their factors from; what the upper halves hold does not matter.
#[inline(always)]
fn philox(seed: u64, [first, second, third]: [u32; 3], last: u32) -> [[u64; COUNTERS]; 4] {
    let [first, second, third] = [first, second, third].map(|word| [u64::from(word); COUNTERS]);
    let mut words = [first, second, third, core::array::from_fn(|i| u64::from(last.wrapping_add(i as u32)))];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..ROUNDS {
        let mut next = [[0; COUNTERS]; 4];
        for i in 0..COUNTERS {
            let product = |multiplier: u32, x: u64| u64::from(multiplier) * (x & LOW);
            let (a, b) = (product(MULTIPLIERS[0], words[0][i]), product(MULTIPLIERS[1], words[2][i]));
            next[0][i] = (b >> 32) ^ words[1][i] ^ u64::from(key[0]);
            next[1][i] = b;
            next[2][i] = (a >> 32) ^ words[3][i] ^ u64::from(key[1]);
            next[3][i] = a;
        }
        words = next;
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    words
}

/// Draws which weights of a row block are kept, against the keys of a block that starts at key `first`, a multiple of 256:
/// at least those of each row's span.
#[inline(always)]
pub(crate) fn draw<S: Simd>(
    _: S,
    spans: &[Span],
    first: usize,
    rows: &[CounterRow],
    dropout: Dropout,
    kept: &mut [KeptWeights],
) {
    assert!(spans.len() == rows.len().div_ceil(S::TILE_ROWS));
    let carry = (1 << 32) - u64::from(dropout.threshold);
    for (row, (&[head, i], kept)) in rows.iter().zip(kept).enumerate() {
        let keys = spans[row / S::TILE_ROWS].keys();
        for run in keys.start / AT_ONCE..keys.end.div_ceil(AT_ONCE) {
            let last = ((first + run * AT_ONCE) / 4) as u32;
            let numbers = philox(dropout.seed, [dropout.offset, head, i], last);
            let mut bits = [0; COUNTERS];
            for (counter, bits) in bits.iter_mut().enumerate() {
                // The carry of a number that is no less than the threshold.
                let bit = |t: usize| ((numbers[t][counter] & LOW) + carry) >> 32;
                *bits = (bit(0) | (bit(1) << 1) | (bit(2) << 2) | (bit(3) << 3)) as u8;
            }
            kept[run * COUNTERS..][..COUNTERS].copy_from_slice(&bits);
        }
    }
}

/// Drops weights of a row block: multiplies those that are kept by their factor, the others by 0. Weights of 0 stay 0, and NaN
/// stays NaN.
#[inline(always)]
pub(crate) fn drop_weights<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, kept: &Kept) {
    let (zero, factor) = (s.splat(0.0), s.splat(kept.factor));
    row_block.for_each_row(
        s,
        #[inline(always)]
        |row, panels, weights| {
            for panel in panels {
                // A byte for each of four bits.
                let bits = &kept.weights[row][panel * LANES / 4..][..LANES / 4];
                let mut bytes = [[0u8; 4]; LANES / 4];
                for (bytes, &bits) in bytes.iter_mut().zip(bits) {
                    *bytes = ((u32::from(bits) * 0x0020_4081) & 0x0101_0101).to_le_bytes();
                }
                // SAFETY: a panel of the row's weights; sixteen bytes.
                unsafe {
                    let at = weights.add(panel * LANES);
                    let factors = s.select_bytes(bytes.as_flattened().as_ptr(), zero, factor);
                    s.store(at, s.mul(s.load(at), factors));
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' own implementation, for key and counter of zeros and of ones.
    #[test]
    fn philox_has_the_known_answers() {
        let numbers = philox(0, [0, 0, 0], 0);
        assert_eq!(numbers.map(|word| word[0] as u32), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let numbers = philox(u64::MAX, [u32::MAX; 3], u32::MAX);
        assert_eq!(numbers.map(|word| word[0] as u32), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        // In digits of π: counter, then key.
        let (counter, key) = ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e], 0x299f_31d0_a409_3822);
        let numbers = philox(key, counter, 0x0370_7344);
        assert_eq!(numbers.map(|word| word[0] as u32), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }
}
