//! Dropout: weights after the softmax are set to 0 at random, the others multiplied by 1/(1 − p).
//!
//! Random numbers are Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011), a function of a key and a counter: the key is
//! the seed, the counter (offset, sequence · heads + head, row, key / 4). A weight's number thus depends on nothing but
//! its indices, and is the same forward and backward, in any order and on any number of threads.

use crate::attention::options::Dropout;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::KEY_BLOCK;

/// Multipliers and increments of the key of Philox4x32.
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Keys whose random numbers are taken at once: a counter in each lane, four numbers a counter.
const AT_ONCE: usize = 4 * LANES;
const _: () = assert!(KEY_BLOCK.is_multiple_of(AT_ONCE));

/// Row of a row block, as the counter has it: sequence · heads + head, row.
pub(crate) type CounterRow = [u32; 2];

/// Returns the random numbers of sixteen counters that differ in the last word, `last` and the fifteen after it: the
/// `t`th number of counter `i` is `[t][i]`.
#[inline(always)]
fn philox(seed: u64, [first, second, third]: [u32; 3], last: u32) -> [[u32; LANES]; 4] {
    let mut words = [[first; LANES], [second; LANES], [third; LANES], [0; LANES]];
    for (i, word) in words[3].iter_mut().enumerate() {
        *word = last.wrapping_add(i as u32);
    }
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..ROUNDS {
        let mut next = [[0; LANES]; 4];
        for i in 0..LANES {
            let product = |multiplier: u32, x: u32| u64::from(multiplier) * u64::from(x);
            let (a, b) = (product(MULTIPLIERS[0], words[0][i]), product(MULTIPLIERS[1], words[2][i]));
            next[0][i] = (b >> 32) as u32 ^ words[1][i] ^ key[0];
            next[1][i] = b as u32;
            next[2][i] = (a >> 32) as u32 ^ words[3][i] ^ key[1];
            next[3][i] = a as u32;
        }
        words = next;
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    words
}

/// Drops weights of a row block against the keys of a block that starts at key `first`, a multiple of 256: multiplies them by
/// 0 or the factor. Weights of 0 stay 0, and NaN stays NaN.
#[inline(always)]
pub(crate) fn dropout<S: Simd>(
    s: S,
    mut row_block: ScoreBlock<'_>,
    first: usize,
    rows: &[CounterRow],
    dropout: Dropout,
) {
    assert!(rows.len() >= row_block.rows);
    let (zero, factor) = (s.splat(0.0), s.splat(dropout.factor));
    row_block.for_each_row(
        s,
        #[inline(always)]
        |row, panels, weights| {
            let [head, i] = rows[row];
            let mut kept = [0u8; AT_ONCE];
            let mut drawn = usize::MAX;
            for panel in panels {
                let key = panel * LANES;
                if drawn != key / AT_ONCE {
                    drawn = key / AT_ONCE;
                    let last = ((first + drawn * AT_ONCE) / 4) as u32;
                    let numbers = philox(dropout.seed, [dropout.offset, head, i], last);
                    for (counter, kept) in kept.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                        for (kept, numbers) in kept.iter_mut().zip(&numbers) {
                            *kept = u8::from(numbers[counter] >= dropout.threshold);
                        }
                    }
                }
                let kept = &kept[key % AT_ONCE..][..LANES];
                // SAFETY: a panel of the row's weights; sixteen bytes.
                unsafe {
                    let at = weights.add(key);
                    s.store(at, s.mul(s.load(at), s.select_bytes(kept.as_ptr(), zero, factor)));
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
        assert_eq!(numbers.map(|word| word[0]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let numbers = philox(u64::MAX, [u32::MAX; 3], u32::MAX);
        assert_eq!(numbers.map(|word| word[0]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        // In digits of π: counter, then key.
        let (counter, key) = ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e], 0x299f_31d0_a409_3822);
        let numbers = philox(key, counter, 0x0370_7344);
        assert_eq!(numbers.map(|word| word[0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }
}
