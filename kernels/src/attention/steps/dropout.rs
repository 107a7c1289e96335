//! Dropout: weights after the softmax are set to 0 at random, the others multiplied by 1/(1 − p).
//!
//! Random numbers are Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011), a function of a key and a counter: the key is
//! the seed, the counter (offset, sequence · heads + head, row, key / 4). A weight's number thus depends on nothing but
//! its indices, and is the same forward and backward, in any order and on any number of threads.

use crate::attention::call::dropout::{Dropout, MULTIPLIERS, ROUNDS, WEYL};
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::span::Spans;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Row of a row block, as the counter has it: sequence · heads + head, row.
pub(crate) type CounterRow = [u32; 2];

/// Weights of a row that dropout keeps, against a key block: bit `i` of number `p` stands for key 16·p + i.
pub(crate) type KeptWeights = [u16; KEY_BLOCK / LANES];

/// Weights of a row block that dropout keeps, against a key block, and their factor.
pub(crate) struct Kept {
    pub(crate) weights: [KeptWeights; MAX_ROW_BLOCK],
    pub(crate) factor: f32,
}

/// A word of each of some counters, in the low half of a lane, which is where products of 32 bits take their factors from;
/// the upper half may hold anything.
type Word<const COUNTERS: usize> = [u64; COUNTERS];
/// Low half of a lane.
const LOW: u64 = u32::MAX as u64;

/// Counters for two panels of keys, four numbers a counter.
const FOR_TWO_PANELS: usize = LANES / 2;

/// Returns the counter of each lane: of those for two panels, even lanes hold the first half, which goes to one panel,
/// odd lanes the other.
const fn in_lanes<const COUNTERS: usize>() -> Word<COUNTERS> {
    let mut counters = [0; COUNTERS];
    let mut i = 0;
    while i < COUNTERS {
        counters[i] =
            (i / FOR_TWO_PANELS * FOR_TWO_PANELS + i % 2 * (FOR_TWO_PANELS / 2) + i % FOR_TWO_PANELS / 2) as u64;
        i += 1;
    }
    counters
}

/// Keys of the rounds of Philox.
struct RoundKeys([[u64; 2]; ROUNDS]);

impl RoundKeys {
    fn new(seed: u64) -> Self {
        let words = [seed & LOW, seed >> 32];
        Self(core::array::from_fn(|round| {
            core::array::from_fn(|i| u64::from((words[i] as u32).wrapping_add(WEYL[i].wrapping_mul(round as u32))))
        }))
    }
}

/// Product of a word and the multiplier of Philox that goes with it, 64 bits.
#[inline(always)]
fn product<const I: usize>(word: u64) -> u64 {
    u64::from(MULTIPLIERS[I]) * (word & LOW)
}

/// Random numbers of a row: what is the same for all its keys, which is most of the first three rounds, where only the
/// last word of the counter differs.
struct RowNumbers<'a> {
    round_keys: &'a RoundKeys,
    /// Part of word 2 of the first round, which is XORed with the last word of the counter.
    with_counter: u64,
    /// Part of word 0 of the second round, which is XORed with the upper half of a product.
    with_product: u64,
    /// Parts of words 0 and 2 of the third round, which are XORed with word 1 and the upper half of a product.
    with_words: [u64; 2],
    /// Word 1 of the third round.
    word1: u64,
}

impl<'a> RowNumbers<'a> {
    /// Computes what is the same for all counters that begin with three words.
    #[inline(always)]
    fn new(round_keys: &'a RoundKeys, counter: [u32; 3]) -> Self {
        let [word0, word1, word2] = counter.map(u64::from);
        let [key1, key2, key3] = [round_keys.0[0], round_keys.0[1], round_keys.0[2]];
        let (a1, b1) = (product::<0>(word0), product::<1>(word2));
        let a2 = product::<0>((b1 >> 32) ^ word1 ^ key1[0]);
        let b3 = product::<1>((a2 >> 32) ^ a1 ^ key2[1]);
        Self {
            round_keys,
            with_counter: (a1 >> 32) ^ key1[1],
            with_product: b1 ^ key2[0],
            with_words: [(b3 >> 32) ^ key3[0], a2 ^ key3[1]],
            word1: b3,
        }
    }

    /// Returns the random numbers of the counters that end with `last` and those after it: the `t`th number of counter
    /// `in_lanes()[i]` is the low half of `[t][i]`.
    #[inline(always)]
    fn philox<const COUNTERS: usize>(&self, last: u32) -> [Word<COUNTERS>; 4] {
        let in_lane = const { in_lanes::<COUNTERS>() };
        let mut words = [[0; COUNTERS], [0; COUNTERS], [0; COUNTERS], [0; COUNTERS]];
        for i in 0..COUNTERS {
            let b2 = product::<1>(self.with_counter ^ (u64::from(last) + in_lane[i]));
            let a3 = product::<0>((b2 >> 32) ^ self.with_product);
            words[0][i] = b2 ^ self.with_words[0];
            words[1][i] = self.word1;
            words[2][i] = (a3 >> 32) ^ self.with_words[1];
            words[3][i] = a3;
        }
        for &key in &self.round_keys.0[3..] {
            words = round(words, key);
        }
        words
    }

    /// Draws which weights of the row are kept against the key block at key `first`: at least those of `keys`, keys of it.
    #[inline(always)]
    fn draw<S: Simd, const COUNTERS: usize>(
        &self,
        s: S,
        first: usize,
        keys: Range<usize>,
        threshold: u32,
        kept: &mut KeptWeights,
    ) {
        let at_once = const {
            assert!(KEY_BLOCK.is_multiple_of(4 * COUNTERS) && COUNTERS.is_multiple_of(FOR_TWO_PANELS));
            4 * COUNTERS
        };
        let (kept, _) = kept.as_chunks_mut::<2>();
        for run in keys.start / at_once..keys.end.div_ceil(at_once) {
            let [a, b, c, d] = self.philox::<COUNTERS>(((first + run * at_once) / 4) as u32);
            let kept = &mut kept[run * COUNTERS / FOR_TWO_PANELS..];
            for (i, kept) in kept[..COUNTERS / FOR_TWO_PANELS].iter_mut().enumerate() {
                let words = [&a, &b, &c, &d].map(|word| &word.as_chunks().0[i]);
                *kept = s.bits_at_least(words, threshold);
            }
        }
    }
}

/// One round of Philox.
#[inline(always)]
fn round<const COUNTERS: usize>(words: [Word<COUNTERS>; 4], key: [u64; 2]) -> [Word<COUNTERS>; 4] {
    let mut next = [[0; COUNTERS]; 4];
    for i in 0..COUNTERS {
        let (a, b) = (product::<0>(words[0][i]), product::<1>(words[2][i]));
        next[0][i] = (b >> 32) ^ words[1][i] ^ key[0];
        next[1][i] = b;
        next[2][i] = (a >> 32) ^ words[3][i] ^ key[1];
        next[3][i] = a;
    }
    next
}

/// Draws which weights of a row block are kept, against the keys of a block that starts at key `first`, a multiple of 256:
/// at least those of each row's span.
pub(crate) fn draw<S: Simd>(
    s: S,
    spans: &Spans,
    first: usize,
    rows: &[CounterRow],
    dropout: Dropout,
    kept: &mut [KeptWeights],
) {
    s.vectorize(
        #[inline(always)]
        move || {
            assert!(spans.are_of(rows.len()));
            let (round_keys, threshold) = (RoundKeys::new(dropout.seed), dropout.threshold());
            for (row, (&[head, i], kept)) in rows.iter().zip(kept).enumerate() {
                let numbers = RowNumbers::new(&round_keys, [dropout.offset, head, i]);
                let keys = spans.of_row(row).keys();
                let (mut start, whole) = (keys.start, keys.end / (8 * LANES) * (8 * LANES));
                // Where there are registers for it (AVX-512), words of two times the counters: their rounds overlap better.
                if S::TILE_VECS > 1 && start < whole {
                    numbers.draw::<S, { 2 * LANES }>(s, first, start..whole, threshold, kept);
                    start = whole;
                }
                numbers.draw::<S, LANES>(s, first, start..keys.end, threshold, kept);
            }
        },
    )
}

/// Draws which weights of a row block are kept against keys with these numbers: those of each row's span.
pub(crate) fn draw_each(
    spans: &Spans,
    numbers: &[u32],
    rows: &[CounterRow],
    dropout: Dropout,
    kept: &mut [KeptWeights],
) {
    for (row, (&counter, kept)) in rows.iter().zip(kept).enumerate() {
        for j in spans.of_row(row).keys() {
            kept[j / LANES] |= u16::from(dropout.keeps_key(counter, numbers[j] as usize)) << (j % LANES);
        }
    }
}

/// Drops weights of a row block: multiplies those that are kept by their factor, the others by 0. Weights of 0 stay 0, and NaN
/// stays NaN.
pub(crate) fn drop_weights<S: Simd>(s: S, row_block: ScoreBlock<'_>, kept: &Kept) {
    row_block.replace(
        s,
        #[inline(always)]
        move |row, panel, weights| {
            let factors = s.select_bits(kept.weights[row][panel], s.splat(0.0), s.splat(kept.factor));
            s.mul(weights, factors)
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' own implementation, for key and counter of zeros and of ones.
    #[test]
    fn philox_has_the_known_answers() {
        let numbers = RowNumbers::new(&RoundKeys::new(0), [0, 0, 0]).philox::<8>(0);
        assert_eq!(numbers.map(|word| word[0] as u32), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let numbers = RowNumbers::new(&RoundKeys::new(u64::MAX), [u32::MAX; 3]).philox::<8>(u32::MAX);
        assert_eq!(numbers.map(|word| word[0] as u32), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        // Lane 2 is the next counter, which is 0 after the last.
        let first = RowNumbers::new(&RoundKeys::new(u64::MAX), [u32::MAX; 3]).philox::<32>(0);
        assert_eq!(numbers.map(|word| word[2] as u32), first.map(|word| word[0] as u32));
        // In digits of π: counter, then key.
        let (counter, key) = ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e], 0x299f_31d0_a409_3822);
        let numbers = RowNumbers::new(&RoundKeys::new(key), counter).philox::<8>(0x0370_7344);
        assert_eq!(numbers.map(|word| word[0] as u32), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }
}
