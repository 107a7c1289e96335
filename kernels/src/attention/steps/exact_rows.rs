//! Scores and weighted sums of the exact first tokens of a sequence; other tokens are integers.

use crate::kv::cache::{ExactRows, MAX_EXACT};
use crate::matmul::pack::{self, NonFinite};
use crate::simd::{LANES, Simd};
use crate::tensor::any::AnyRows;

/// Number of elements of a query that are widened together.
const PART: usize = 256;

/// Weights of exact tokens in a row.
pub(crate) type ExactWeights = [f32; MAX_EXACT];

/// Exact tokens among the keys of a block, which are its first ones.
#[derive(Clone, Copy)]
pub(crate) struct ExactKeys<'a> {
    rows: ExactRows<'a>,
    /// Token of each of the block's first keys.
    tokens: [usize; MAX_EXACT],
    count: usize,
}

impl<'a> ExactKeys<'a> {
    /// Takes the rows of a sequence, and the tokens of a block's first keys. `None` if none is exact.
    #[inline]
    pub(crate) fn new(rows: ExactRows<'a>, keys: impl Iterator<Item = usize>) -> Option<Self> {
        let (mut tokens, mut count) = ([0; MAX_EXACT], 0);
        for token in keys.take_while(|&token| token < rows.tokens).take(MAX_EXACT) {
            tokens[count] = token;
            count += 1;
        }
        (count > 0).then_some(Self { rows, tokens, count })
    }

    /// Returns the number of exact keys.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Returns true if scores of these keys are exact.
    pub(crate) fn has_keys(&self) -> bool {
        self.rows.keys.is_some()
    }

    /// Returns true if values of these keys are exact.
    pub(crate) fn has_values(&self) -> bool {
        self.rows.values.is_some()
    }

    /// Iterates over rows of these tokens, from an element on.
    #[inline(always)]
    fn rows_of(&self, rows: &'a [f32], first: usize) -> impl Iterator<Item = &'a [[f32; LANES]]> {
        let width = rows.len() / self.rows.tokens;
        let tokens = self.tokens[..self.count].iter();
        tokens.map(move |token| rows[token * width..][..width][first..].as_chunks::<LANES>().0)
    }

    /// Overwrites the scores of exact keys in a row: q·k, a sum in each of sixteen lanes, added by one tree, times `scale`.
    ///
    /// # Safety
    /// The query has `head_dim` elements, which are readable.
    pub(crate) unsafe fn scores<S: Simd>(&self, s: S, query: AnyRows, head_dim: usize, scale: f32, scores: &mut [f32]) {
        let Some(keys) = self.rows.keys else { return };
        let (mut sums, mut part) = ([[0.0; LANES]; MAX_EXACT], [0.0; PART]);
        for first in (0..head_dim).step_by(PART) {
            let n = PART.min(head_dim - first);
            // SAFETY: these are some of the elements, which the caller guarantees.
            unsafe { pack::pack_rows(s, query.columns_from(first), [1, n], NonFinite::Ignored, &mut part) };
            let (part, sums) = (part[..n.next_multiple_of(LANES)].as_chunks::<LANES>().0, &mut sums);
            s.vectorize(
                #[inline(always)]
                move || {
                    for (sum, key) in sums.iter_mut().zip(self.rows_of(keys, first)) {
                        // SAFETY: arrays have sixteen lanes.
                        unsafe {
                            let mut lanes = s.load(sum.as_ptr());
                            for (q, k) in part.iter().zip(key) {
                                lanes = s.fma(s.load(q.as_ptr()), s.load(k.as_ptr()), lanes);
                            }
                            s.store(sum.as_mut_ptr(), lanes);
                        }
                    }
                },
            );
        }
        let sums = &sums[..self.count];
        s.vectorize(
            #[inline(always)]
            move || {
                for (score, sum) in scores.iter_mut().zip(sums) {
                    // SAFETY: the array has sixteen lanes.
                    *score = unsafe { s.reduce_sum(s.load(sum.as_ptr())) } * scale;
                }
            },
        );
    }

    /// Adds the exact values, times their weights and a factor, to an accumulated row, one value after the other.
    pub(crate) fn add_values<S: Simd>(&self, s: S, weights: &ExactWeights, factor: f32, row: &mut [f32]) {
        let Some(values) = self.rows.values else { return };
        s.vectorize(
            #[inline(always)]
            move || {
                let weights = weights.map(|weight| s.splat(weight * factor));
                for (i, sum) in row.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    // SAFETY: arrays have sixteen lanes.
                    let mut lanes = unsafe { s.load(sum.as_ptr()) };
                    for (&weight, value) in weights.iter().zip(self.rows_of(values, i * LANES)) {
                        // SAFETY: as above.
                        lanes = s.fma(weight, unsafe { s.load(value[0].as_ptr()) }, lanes);
                    }
                    // SAFETY: as above.
                    unsafe { s.store(sum.as_mut_ptr(), lanes) }
                }
            },
        );
    }
}
