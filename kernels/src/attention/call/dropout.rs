//! Dropout of weights, and the rule that says which weights of a call are kept.

use crate::attention::call::mods::Position;

/// Multipliers of Philox4x32, and increments of its key.
pub(crate) const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
pub(crate) const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
pub(crate) const ROUNDS: usize = 10;

/// Dropout of weights: each is 0 with probability `p`, the others are multiplied by 1/(1 − p).
///
/// Whether a weight is kept is a function of seed, offset and its indices: Philox4x32-10 (Salmon, Moraes, Dror and Shaw
/// 2011) with the seed as the key and the counter (offset, sequence · heads + head, row, key / 4). So the same weights
/// are dropped forward and backward, on any number of threads. Dropout changes neither the log-sum-exp nor weights that
/// are written out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Probability of a weight to be dropped, at least 0 and below 1.
    pub p: f32,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Offset of the random numbers: another one for each call with the same seed.
    pub offset: u32,
}

impl Dropout {
    /// Returns true if the weight at a position is kept, in a call of `heads` query heads.
    pub fn keeps(&self, at: Position, heads: usize) -> bool {
        self.keeps_key([(at.batch * heads + at.head) as u32, at.row as u32], at.key)
    }

    /// Returns true if the weight of a key is kept in a row, by its counter: sequence · heads + head, row.
    pub(crate) fn keeps_key(&self, [head, row]: [u32; 2], key: usize) -> bool {
        philox(self.seed, [self.offset, head, row, (key / 4) as u32])[key % 4] >= self.threshold()
    }

    /// Factor of the weights that are kept: 1/(1 − p).
    pub fn factor(&self) -> f32 {
        (1.0 / (1.0 - f64::from(self.p))) as f32
    }

    /// Random number from which on a weight is kept.
    pub(crate) fn threshold(&self) -> u32 {
        (f64::from(self.p) * 2f64.powi(32)).round() as u32
    }
}

/// Returns the four random numbers of a counter: Philox4x32 of ten rounds.
fn philox(seed: u64, mut counter: [u32; 4]) -> [u32; 4] {
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..ROUNDS {
        let [a, b] = [0, 1].map(|i| u64::from(MULTIPLIERS[i]) * u64::from(counter[2 * i]));
        let upper = |x: u64| (x >> 32) as u32;
        counter = [upper(b) ^ counter[1] ^ key[0], b as u32, upper(a) ^ counter[3] ^ key[1], a as u32];
        key = [0, 1].map(|i| key[i].wrapping_add(WEYL[i]));
    }
    counter
}
