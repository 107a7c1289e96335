//! Memory of the backward pass: what workers share, and the scratch of each.

use crate::attention::call::Call;
use crate::attention::scratch::{MAX_ROW_BLOCK, SCORE_STRIDE, Scratch, Tiling};
use crate::attention::steps::key_sums::Chain;
use crate::matmul::bf16_parts;
use crate::simd::LANES;
use crate::simd::aligned::{AlignedBuf, SharedFloats};
use crate::simd::tiles::BLOCK;
use crate::tensor::rows::KEY_BLOCK;
use crate::work_queue::Progress;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory that the workers of a backward pass share: gradients of queries as they accumulate, in `f32`, a few numbers
/// for each row, sums for the parameters of a score function, and the progress of each key block. Grows to the size calls need
/// and is kept.
#[derive(Debug, Default)]
pub struct BackwardMemory {
    rows: AlignedBuf,
    parameter_sums: Mutex<Vec<f64>>,
    pub(crate) progress: Vec<Progress>,
}

impl BackwardMemory {
    /// Creates empty memory; the first use allocates.
    pub const fn new() -> Self {
        Self { rows: AlignedBuf::new(), parameter_sums: Mutex::new(Vec::new()), progress: Vec::new() }
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        let sums = locked(&self.parameter_sums).capacity() * size_of::<f64>();
        self.rows.bytes() + sums + self.progress.capacity() * size_of::<Progress>()
    }

    /// Number of bytes for a call's rows, and for sums for `parameters` parameters; at most `usize::MAX`.
    pub fn bytes_for(call: &Call<'_>, parameters: usize) -> usize {
        let [b, h, l, d] = call.q.shape();
        let rows = [b, h, l, RowMemory::floats(d), size_of::<f32>()].into_iter().fold(1, usize::saturating_mul);
        rows.saturating_add(
            count_sums(call, parameters).map_or(usize::MAX, |sums| sums.saturating_mul(size_of::<f64>())),
        )
    }

    /// Reserves the memory for a call's rows and `columns` key blocks, and for sums for `parameters` parameters. Returns false if
    /// there is not enough.
    #[must_use]
    pub(crate) fn try_reserve(&mut self, call: &Call<'_>, columns: usize, parameters: usize) -> bool {
        let more = columns.saturating_sub(self.progress.len());
        if self.progress.try_reserve(more).is_err() {
            return false;
        }
        self.progress.resize_with(self.progress.len().max(columns), Progress::default);
        self.progress[..columns].fill_with(Progress::default);
        let rows = call.q.shape()[..3].iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        let floats = rows.and_then(|rows| rows.checked_mul(RowMemory::floats(call.q.shape()[3])));
        let sums = count_sums(call, parameters);
        floats.is_some_and(|floats| self.rows.try_reserve(floats))
            && sums.is_some_and(|sums| try_grow(&mut locked(&self.parameter_sums), sums))
    }

    /// Begins a pass in parts: reserves the memory for a call's rows, and clears it. Returns false if there is not enough.
    #[must_use]
    pub fn try_begin(&mut self, call: &Call<'_>) -> bool {
        let enough = self.try_reserve(call, 0, 0);
        self.rows.floats_mut().fill(0.0);
        enough
    }

    /// Returns the rows' memory, the key blocks' progress, and cleared sums for `parameters` parameters.
    pub(crate) fn parts(
        &mut self,
        call: &Call<'_>,
        parameters: usize,
    ) -> (RowMemory<'_>, &[Progress], &Mutex<Vec<f64>>) {
        let [b, h, l, d] = call.q.shape();
        let floats = self.rows.floats_mut();
        assert!(floats.len() >= b * h * l * RowMemory::floats(d), "reserved for another call");
        let n = count_sums(call, parameters).expect("reserved for another call");
        let mut sums = locked(&self.parameter_sums);
        sums.clear();
        sums.resize(n, 0.0);
        drop(sums);
        let rows = RowMemory { memory: SharedFloats::new(floats), heads: h, q_len: l, head_dim: d };
        (rows, &self.progress, &self.parameter_sums)
    }
}

/// Number of sums: sequences × heads × parameters; `None` on overflow.
fn count_sums(call: &Call<'_>, parameters: usize) -> Option<usize> {
    call.sequence_count().checked_mul(call.kv.kv_heads())?.checked_mul(parameters)
}

/// Returns the sums. A panic never left them half changed: nothing panics while they are locked.
pub(crate) fn locked(sums: &Mutex<Vec<f64>>) -> MutexGuard<'_, Vec<f64>> {
    sums.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes room for at least `n` sums. Returns false if there is no memory.
fn try_grow(sums: &mut Vec<f64>, n: usize) -> bool {
    let enough = sums.try_reserve_exact(n.saturating_sub(sums.len())).is_ok();
    if enough {
        sums.resize(sums.len().max(n), 0.0);
    }
    enough
}

/// Numbers of a row besides the gradient of its query.
#[derive(Debug, Clone, Copy)]
#[repr(usize)]
pub(crate) enum RowNumber {
    /// Σ do·o − dlse.
    Delta,
    /// Bound of its rounding: [`Delta::rounding`](crate::attention::steps::softmax_backward::Delta).
    DeltaRounding,
    /// Σ over keys of the score's gradient times the distance to the key.
    Distance,
    /// Σ over keys of the score's gradient.
    Bias,
    /// Query times its gradient, without the scale.
    Dot,
    /// 1 once the other numbers are ready.
    Begun,
    /// Log-sum-exp of the scores that are counted from the row's reference: of a row that is far from 0, the rounding error of
    /// the saved one.
    Lse,
    /// Number that scores are counted from: the saved log-sum-exp of a row that is far from 0, otherwise 0.
    Reference,
}

/// Memory of each row of the call: the gradient of its query, without the scale, in whole vectors; then [`RowNumber`]s.
pub(crate) struct RowMemory<'a> {
    /// Memory of all rows; only the worker that has the turn accesses a row's, as `launch.rs` says.
    memory: SharedFloats<'a>,
    heads: usize,
    q_len: usize,
    head_dim: usize,
}

impl RowMemory<'_> {
    /// Number of floats of a row.
    pub(crate) fn floats(head_dim: usize) -> usize {
        head_dim.next_multiple_of(LANES) + LANES
    }

    /// Returns the memory of `n` rows of a head, from one on.
    ///
    /// # Panics
    /// If there is no such head, or it has no such rows.
    ///
    /// # Safety
    /// The batch is one of the call's. Nobody else accesses the rows meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees sole access to the rows")]
    pub(crate) unsafe fn rows(&self, [batch, head, row]: [usize; 3], n: usize) -> &mut [f32] {
        assert!(head < self.heads && row <= self.q_len && n <= self.q_len - row, "no such rows");
        let (at, floats) = ((batch * self.heads + head) * self.q_len + row, Self::floats(self.head_dim));
        // SAFETY: the caller guarantees sole access.
        unsafe { self.memory.part(at * floats..(at + n) * floats) }
    }

    /// Returns a row's gradient and its numbers.
    ///
    /// # Panics
    /// If there is no such head, or it has no such row.
    ///
    /// # Safety
    /// The batch is one of the call's. Nobody else accesses the row meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees sole access to the row")]
    pub(crate) unsafe fn row(&self, [batch, head, row]: [usize; 3]) -> (&mut [f32], &mut [f32; LANES]) {
        // SAFETY: same contract.
        let row = unsafe { self.rows([batch, head, row], 1) };
        row.split_last_chunk_mut().expect("a row is longer than its numbers")
    }
}

/// Scratch memory of one worker of the backward pass. Grows to the size a tiling needs and is kept.
#[derive(Debug, Default)]
pub struct BackwardScratch {
    /// Scratch of the scores, as in the forward pass.
    scores: Scratch,
    own: AlignedBuf,
    parameters: Vec<f64>,
}

/// Scratch of the scores, and room for copies of them: [`ScoreCopies`](crate::attention::blocks::key_block::ScoreCopies).
pub(crate) struct ScoreScratch<'a> {
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) derivatives: &'a mut [f32],
    pub(crate) biased: &'a mut [f32],
}

/// Parts of a worker's scratch that the backward pass adds to the forward pass's.
pub(crate) struct Own<'a> {
    /// Gradients of weights, then of scores, `[row of the row block][SCORE_STRIDE]`.
    pub(crate) gradients: &'a mut [f32],
    /// Packed values, `[panel][value_dim][16]`.
    pub(crate) values: &'a mut [f32],
    /// Copied keys, `[key][head_dim in whole vectors]`.
    pub(crate) keys: &'a mut [f32],
    /// Copies of a row block's queries, output gradients and outputs, rows in whole vectors.
    pub(crate) q: &'a mut [f32],
    pub(crate) d_out: &'a mut [f32],
    pub(crate) out: &'a mut [f32],
    /// Chain of the sums of a row block in `head`.
    pub(crate) chain: Chain,
    /// Gradients of the key block's keys and values of one query head, and of all that share them.
    pub(crate) head: KeyGradients<'a>,
    pub(crate) total: KeyGradients<'a>,
    /// Gradients in the parameters of the score function, summed over the column.
    pub(crate) parameters: &'a mut [f64],
    /// Operands of products of bfloat16; empty if floats are multiplied.
    pub(crate) packed: PackedOperands<'a>,
}

/// Operands of products of bfloat16.
pub(crate) struct PackedOperands<'a> {
    /// Values as keys are packed, and keys as values are.
    pub(crate) values: &'a mut [f32],
    pub(crate) keys: &'a mut [f32],
    /// Output gradients as queries are stored.
    pub(crate) d_out: &'a mut [f32],
    /// Output gradients or queries, as values are packed.
    pub(crate) rows: &'a mut [f32],
    /// Weights or gradients of scores, `[key or row][SCORE_STRIDE]`.
    pub(crate) weights: &'a mut [f32],
}

/// Gradients of a key block's keys and values, `[key][dimension in whole vectors]`.
pub(crate) struct KeyGradients<'a> {
    pub(crate) k: &'a mut [f32],
    pub(crate) v: &'a mut [f32],
}

impl KeyGradients<'_> {
    /// Clears the gradients of the first `keys` keys.
    pub(crate) fn clear(&mut self, keys: usize) {
        for sums in [&mut *self.k, &mut *self.v] {
            let width = sums.len() / KEY_BLOCK;
            sums[..keys * width].fill(0.0);
        }
    }

    /// Takes in other gradients, and clears them.
    pub(crate) fn take(&mut self, other: &mut Self) {
        self.add(other);
        other.k.fill(0.0);
        other.v.fill(0.0);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (sums, others) in [(&mut *self.k, &*other.k), (&mut *self.v, &*other.v)] {
            sums.iter_mut().zip(others).for_each(|(sum, &other)| *sum += other);
        }
    }
}

impl BackwardScratch {
    /// Creates empty scratch; the first use allocates.
    pub const fn new() -> Self {
        Self { scores: Scratch::new(), own: AlignedBuf::new(), parameters: Vec::new() }
    }

    /// Reserves the scratch that `tiling` and gradients in `parameters` parameters need. Allocates only if there is less. Returns
    /// false if there is no memory.
    #[must_use]
    pub fn try_reserve(&mut self, tiling: &Tiling, parameters: usize) -> bool {
        self.scores.try_reserve(tiling)
            && self.own.try_reserve(Self::lengths(tiling).iter().sum())
            && try_grow(&mut self.parameters, parameters)
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        self.scores.bytes() + self.own.bytes() + self.parameters.capacity() * size_of::<f64>()
    }

    /// Number of bytes that `tiling` needs, without those for parameters. Independent of the number of rows and keys.
    pub fn bytes_for(tiling: &Tiling) -> usize {
        tiling.scratch_bytes() + Self::lengths(tiling).iter().sum::<usize>() * size_of::<f32>()
    }

    /// Returns the lengths in floats of the parts, in the order of [`Self::parts`].
    fn lengths(tiling: &Tiling) -> [usize; 17] {
        let [d, e] = [tiling.head_dim, tiling.value_dim].map(|dim| dim.next_multiple_of(LANES));
        let (block, rows) = (MAX_ROW_BLOCK * SCORE_STRIDE, MAX_ROW_BLOCK);
        let [keys, values] = [d, e].map(|dim| KEY_BLOCK * dim);
        let [packed_values, packed_keys, packed_d_out, packed_rows, packed_weights] = Self::packed_lengths(tiling);
        [
            block,
            block,
            block,
            values,
            keys,
            rows * d,
            rows * e,
            rows * e,
            keys,
            values,
            keys,
            values,
            packed_values,
            packed_keys,
            packed_d_out,
            packed_rows,
            packed_weights,
        ]
    }

    /// Returns the lengths in floats of the operands of products of bfloat16, in the order of [`PackedOperands`].
    fn packed_lengths(tiling: &Tiling) -> [usize; 5] {
        let ([d, e], parts) = ([tiling.head_dim, tiling.value_dim], tiling.parts);
        if parts == 0 {
            return [0; 5];
        }
        let [of_keys, of_rows] = [KEY_BLOCK, MAX_ROW_BLOCK].map(|n| bf16_parts::floats(n, parts));
        let of_value = bf16_parts::floats(e, parts);
        let [of_keys, of_rows] = [(of_keys, d), (of_rows, d.max(e))].map(|(n, dim)| n * dim.next_multiple_of(LANES));
        let weights = MAX_ROW_BLOCK.max(2 * BLOCK) * SCORE_STRIDE;
        [KEY_BLOCK * of_value, of_keys, MAX_ROW_BLOCK * of_value, of_rows, weights]
    }

    /// Returns the scratch of the scores, and the parts of the rest, with memory for gradients in `parameters` parameters.
    ///
    /// # Panics
    /// If there is no memory.
    pub(crate) fn parts(&mut self, tiling: &Tiling, parameters: usize) -> (ScoreScratch<'_>, Own<'_>) {
        assert!(self.try_reserve(tiling, parameters), "no memory for a worker's scratch");
        let mut rest = self.own.floats_mut();
        let cut = |n: usize| rest.split_off_mut(..n).expect("scratch was reserved for this tiling");
        let [gradients, derivatives, biased, values, keys, q, d_out, out, k, v, all_k, all_v, packed @ ..] =
            Self::lengths(tiling).map(cut);
        let [packed_values, packed_keys, packed_d_out, rows, weights] = packed;
        let packed = PackedOperands { values: packed_values, keys: packed_keys, d_out: packed_d_out, rows, weights };
        let (head, total) = (KeyGradients { k, v }, KeyGradients { k: all_k, v: all_v });
        let parameters = &mut self.parameters[..parameters];
        (
            ScoreScratch { scratch: &mut self.scores, derivatives, biased },
            Own { gradients, values, keys, q, d_out, out, chain: Chain::OfBlock, head, total, parameters, packed },
        )
    }
}
