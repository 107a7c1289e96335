//! Scratch: the memory that a worker computes in, and how it is cut up by a tiling.

pub(crate) mod tiling;

pub(crate) use crate::attention::scratch::tiling::SCORE_STRIDE;
pub use crate::attention::scratch::tiling::{MAX_ROW_BLOCK, MAX_SPLIT_ROWS, MAX_TASK, Tiling};
use crate::simd::LANES;
use crate::simd::aligned::AlignedBuf;
use core::ops::Range;

/// Scratch memory of one worker. Grows to the size a tiling needs and is kept.
#[derive(Default)]
pub struct Scratch {
    buffer: AlignedBuf,
}

impl Scratch {
    /// Creates empty scratch; the first use allocates.
    pub const fn new() -> Self {
        Self { buffer: AlignedBuf::new() }
    }

    /// Reserves the scratch that `tiling` needs. Allocates only if there is less. Returns false if there is no memory.
    #[inline]
    #[must_use]
    pub fn try_reserve(&mut self, tiling: &Tiling) -> bool {
        self.buffer.try_reserve(tiling.lengths().iter().sum())
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    #[inline]
    pub(crate) fn regions(&mut self, tiling: &Tiling) -> Regions<'_> {
        assert!(self.try_reserve(tiling), "no memory for a worker's scratch");
        let mut rest = self.buffer.floats_mut();
        let mut cut = |n: usize| rest.split_off_mut(..n).expect("scratch was reserved for this tiling");
        let [keys, values, scores, out, queries, state, factors, gathered] = tiling.lengths().map(&mut cut);
        let (max, sum) = state.split_at_mut(tiling.most_rows.next_multiple_of(LANES));
        let (rescale_prev, rescale_block) =
            factors.split_at_mut(tiling.most_rows.min(MAX_ROW_BLOCK).next_multiple_of(LANES));
        let query_memory = QueryMemory::Free;
        Regions { keys, values, scores, out, queries, query_memory, max, sum, rescale_prev, rescale_block, gathered }
    }
}

impl core::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Scratch").field("bytes", &self.bytes()).finish()
    }
}

/// Contents of the memory for queries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueryMemory {
    /// Anything.
    Free,
    /// The task's queries, as an earlier call of [`Queries::of`](crate::attention::blocks::queries::Queries::of) has left them.
    Filled,
}

/// Worker's scratch, split into its parts.
pub(crate) struct Regions<'a> {
    /// Packed keys, as the arithmetic of the call lays them out (`products/multiply.rs`).
    pub(crate) keys: &'a mut [f32],
    /// Packed values, in the layout of that arithmetic.
    pub(crate) values: &'a mut [f32],
    /// Scores, then weights, `[row of the row block][SCORE_STRIDE]`.
    pub(crate) scores: &'a mut [f32],
    /// Running output, `[row of the task][width]`.
    pub(crate) out: &'a mut [f32],
    /// Queries of the task, in the layout of that arithmetic, unless they are read where they lie: see `queries.rs`.
    pub(crate) queries: &'a mut [f32],
    /// Contents of that memory.
    pub(crate) query_memory: QueryMemory,
    /// Running maximum and sum of each row of the task.
    pub(crate) max: &'a mut [f32],
    pub(crate) sum: &'a mut [f32],
    /// Factors by which a key block rescales each row of the row block: see `softmax_merge::SoftmaxState`.
    pub(crate) rescale_prev: &'a mut [f32],
    pub(crate) rescale_block: &'a mut [f32],
    /// Block of keys and values that are gathered from several.
    pub(crate) gathered: &'a mut [f32],
}

impl Regions<'_> {
    /// Clears the maxima and sums of a task's `rows` rows: nothing is accumulated yet.
    pub(crate) fn clear_state(&mut self, rows: usize) {
        // Steps work on whole vectors of rows.
        let padded = rows.next_multiple_of(LANES);
        self.max[..padded].fill(f32::NEG_INFINITY);
        self.sum[..padded].fill(0.0);
    }

    /// Clears the running outputs of some rows, of `width` floats each.
    pub(crate) fn clear_outputs(&mut self, rows: Range<usize>, width: usize) {
        self.out[rows.start * width..rows.end * width].fill(0.0);
    }

    /// Returns the same regions for other work; what they hold, queries too, counts as nothing.
    #[inline(always)]
    pub(crate) fn reborrow(&mut self) -> Regions<'_> {
        let Self { keys, values, scores, out, queries, max, sum, rescale_prev, rescale_block, gathered, .. } = self;
        let query_memory = QueryMemory::Free;
        Regions { keys, values, scores, out, queries, query_memory, max, sum, rescale_prev, rescale_block, gathered }
    }
}
