//! Dropout of weights, and the rule that says which weights of a call are kept.

use crate::error::Error;
use sdpa_kernels::Position;

/// Dropout of weights: each is 0 with probability `p`, the others are multiplied by 1/(1 − p).
///
/// Whether a weight is kept is a function of seed, offset and its indices: Philox4x32-10 (Salmon, Moraes, Dror and Shaw
/// 2011) with the seed as the key and the counter (offset, sequence · heads + head, row, key / 4). So the same weights
/// are dropped forward and backward, on any number of threads. Dropout changes neither the log-sum-exp nor weights that
/// are written out.
///
/// ```
/// use sdpa::{Dropout, Position};
/// let dropout = Dropout { p: 0.25, seed: 1, offset: 0 };
/// let at = |key| Position { batch: 0, head: 0, row: 0, key, position: 0 };
/// let kept = (0..10_000).filter(|&key| dropout.keeps(at(key), 1)).count();
/// assert!((7_300..7_700).contains(&kept));
/// ```
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
        let head = (at.batch * heads + at.head) as u32;
        let number = philox(self.seed, [self.offset, head, at.row as u32, (at.key / 4) as u32])[at.key % 4];
        number >= self.threshold()
    }

    /// Factor of the weights that are kept: 1/(1 − p).
    pub fn factor(&self) -> f32 {
        (1.0 / (1.0 - f64::from(self.p))) as f32
    }

    /// Random number from which on a weight is kept.
    fn threshold(&self) -> u32 {
        (f64::from(self.p) * 2f64.powi(32)).round() as u32
    }

    /// Returns what the kernels are told; `None` if nothing is dropped.
    pub(crate) fn checked(self) -> Result<Option<sdpa_kernels::Dropout>, Error> {
        if !(0.0..1.0).contains(&self.p) {
            return Err(Error::Number { argument: "dropout", got: self.p, expected: "at least 0 and below 1" });
        }
        let Self { seed, offset, .. } = self;
        let (threshold, factor) = (self.threshold(), self.factor());
        Ok((threshold > 0).then_some(sdpa_kernels::Dropout { seed, offset, threshold, factor }))
    }
}

/// Returns the four random numbers of a counter: Philox4x32 of ten rounds.
fn philox(seed: u64, mut counter: [u32; 4]) -> [u32; 4] {
    let (mut low, mut high) = (seed as u32, (seed >> 32) as u32);
    for _ in 0..10 {
        let [a, b] = [(0xd251_1f53, counter[0]), (0xcd9e_8d57, counter[2])].map(|(m, x): (u64, u32)| m * u64::from(x));
        let upper = |x: u64| (x >> 32) as u32;
        counter = [upper(b) ^ counter[1] ^ low, b as u32, upper(a) ^ counter[3] ^ high, a as u32];
        (low, high) = (low.wrapping_add(0x9e37_79b9), high.wrapping_add(0xbb67_ae85));
    }
    counter
}
