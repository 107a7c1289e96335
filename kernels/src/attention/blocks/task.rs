//! Task of the forward pass: some query rows that share a key/value head, and the call, outputs and tiling they need.

use crate::attention::call::checked::CheckedCall;
use crate::attention::call::mods::Position;
use crate::attention::call::outputs::Shared;
use crate::attention::call::row_mods::{Given, RowMods};
use crate::attention::call::tiling::{MAX_ROW_BLOCK, Tiling};
use crate::attention::call::{Call, Sequence, Task};
use crate::attention::steps::dropout::{self, Kept};
use crate::attention::steps::span::Span;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Checked call, and the kernel steps and functions of the caller that compute it: what a worker's tasks share.
#[derive(Clone, Copy)]
pub(crate) struct BoundCall<'t, S> {
    pub(crate) s: S,
    pub(crate) mods: &'t dyn RowMods<S>,
    pub(crate) checked: &'t CheckedCall<'t>,
}

/// Task together with its call, outputs, tiling and kernel steps.
///
/// It stands for three facts, which the unsafe code of its methods relies on: call, outputs and tiling [fit
/// together](CheckedCall); the task lies inside the call and is no larger than the tiling's; and the task's rows of the
/// outputs are this worker's alone. Its fields are set here alone; elsewhere they are read.
pub(crate) struct AttentionTask<'t, S> {
    pub(crate) s: S,
    pub(crate) mods: &'t dyn RowMods<S>,
    /// Functions that `mods` has.
    pub(crate) given: Given,
    pub(crate) call: &'t Call<'t>,
    pub(crate) outputs: &'t Shared<'t>,
    pub(crate) tiling: &'t Tiling,
    pub(crate) task: Task,
    pub(crate) seq: Sequence,
    /// Number of query heads that share a key/value head.
    group_size: usize,
    /// Prediction of the work after this task, for prefetching.
    pub(crate) next: Next,
}

/// Work after a task, whose memory is prefetched.
pub(crate) enum Next {
    /// No next task, or unknown.
    Nothing,
    /// Any task: all the call's memory is in cache, so nothing is prefetched, not even what this task has yet to read.
    Near,
    /// Probably this task.
    Task(Task),
    /// This task is a unit: the address that it accumulates into, and the number of bytes there that are not in cache; and the
    /// task and first key of the next unit of its run, if any.
    Unit { accumulated: (*const u8, usize), next: Option<(Task, usize)> },
}

/// Query row: its number in the row block, its head, its row in the sequence.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) n: usize,
    pub(crate) head: usize,
    pub(crate) i: usize,
}

impl<'t, S: Simd> AttentionTask<'t, S> {
    /// Binds a task to its call.
    ///
    /// # Panics
    /// If the task does not lie inside the call, or has more rows than the tiling's tasks.
    ///
    /// # Safety
    /// While it exists, no other worker reads or writes the outputs of its rows. A task that starts at row 0 also owns
    /// the rows of score outputs beyond its sequence, for its heads.
    // Inlined, here and where a step's operands change type: otherwise the whole struct is copied, a few per cent of a
    // tiny call.
    #[inline(always)]
    pub(crate) unsafe fn new(bound: BoundCall<'t, S>, task: Task) -> Self {
        Self::with_outputs(bound, task, bound.checked.outputs())
    }

    /// Binds a task to its call, to read its inputs alone: it has no outputs.
    ///
    /// # Panics
    /// As [`Self::new`].
    #[inline(always)]
    pub(crate) fn reading(bound: BoundCall<'t, S>, task: Task) -> Self {
        Self::with_outputs(bound, task, &Shared::NOTHING)
    }

    #[inline(always)]
    fn with_outputs(BoundCall { s, mods, checked }: BoundCall<'t, S>, task: Task, outputs: &'t Shared<'t>) -> Self {
        let (call, tiling) = (checked.call(), checked.tiling());
        let (seq, group_size) = (sequence_of(&task, call, tiling), call.group_size());
        Self { s, mods, given: mods.given(), call, outputs, tiling, task, seq, group_size, next: Next::Nothing }
    }

    /// Returns another task of this call, to prefetch its inputs: it has no outputs.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub(crate) fn peek(&self, task: &Task) -> Self {
        let (task, seq) = (task.clone(), sequence_of(task, self.call, self.tiling));
        Self { task, seq, outputs: &Shared::NOTHING, next: Next::Nothing, ..*self }
    }

    /// Sets the predicted next work: its memory is prefetched while this task is computed.
    #[inline(always)]
    pub(crate) fn followed_by(self, next: Next) -> Self {
        Self { next, ..self }
    }

    /// Returns the row blocks of the task, as ranges of its rows.
    pub(crate) fn row_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<S> {
        let (rows, step) = (self.task.rows.len(), self.tiling.row_block_rows);
        (0..rows).step_by(step).map(move |first| first..rows.min(first + step))
    }

    /// Returns the rows of a row block.
    ///
    /// # Panics
    /// As [`Self::stretches`].
    pub(crate) fn rows(&self, row_block: Range<usize>) -> impl Iterator<Item = Row> + use<S> {
        self.stretches(row_block)
            .flat_map(|(Row { n, head, i }, len)| (0..len).map(move |k| Row { n: n + k, head, i: i + k }))
    }

    /// Returns the rows of a row block by head: the first row of each head, and the number of rows of that head.
    ///
    /// # Panics
    /// If the row block does not lie inside the task: every row returned is one of the task's.
    pub(crate) fn stretches(&self, row_block: Range<usize>) -> impl Iterator<Item = (Row, usize)> + use<S> {
        assert!(row_block.end <= self.task.rows.len(), "a row block outside its task");
        // Divides only if the first row does not belong to the first head.
        let first = self.task.rows.start + row_block.start;
        let q_len = self.seq.q_len;
        let (skipped, i) = if first < q_len { (0, first) } else { (first / q_len, first % q_len) };
        let mut next = Row { n: 0, head: self.task.kv_head * self.group_size + skipped, i };
        core::iter::from_fn(move || {
            let row = next;
            let len = (q_len - row.i).min(row_block.len() - row.n);
            next = Row { n: row.n + len, head: row.head + 1, i: 0 };
            (len > 0).then_some((row, len))
        })
    }

    pub(crate) fn position(&self, row: Row, key: usize) -> Position {
        let position = self.seq.offset.saturating_add_unsigned(row.i);
        Position { batch: self.task.sequence, head: row.head, row: row.i, key, position }
    }

    /// Draws which weights of a row block are kept, against the key block at `first`, if the call drops any.
    pub(crate) fn draw_kept(&self, row_block: Range<usize>, spans: &[Span], first: usize) -> Option<Kept> {
        let dropout = self.call.options.dropout?;
        let (mut rows, heads) = ([[0; 2]; MAX_ROW_BLOCK], self.call.q.shape()[1]);
        for row in self.rows(row_block.clone()) {
            rows[row.n] = [(self.task.sequence * heads + row.head) as u32, row.i as u32];
        }
        let mut kept = Kept { weights: [[0; KEY_BLOCK / LANES]; MAX_ROW_BLOCK], factor: dropout.factor };
        dropout::draw(self.s, spans, first, &rows[..row_block.len()], dropout, &mut kept.weights);
        Some(kept)
    }

    /// Returns the position of key `first` of the sequence in its source: sequence or batch index, head, key.
    pub(crate) fn place(&self, first: usize) -> [usize; 3] {
        [self.seq.source, self.task.kv_head, self.seq.first_key + first]
    }

    /// Returns true if queries and keys are multiplied as bfloat16 pairs.
    pub(crate) fn native_keys(&self) -> bool {
        let [keys, _] = self.call.native(|| self.s.has_bf16_dot());
        keys
    }

    /// Returns true if weights and values are multiplied as bfloat16 pairs.
    pub(crate) fn native_values(&self) -> bool {
        let [_, values] = self.call.native(|| self.s.has_bf16_dot());
        values
    }

    /// Returns true if the softmax writes weights as bfloat16 pairs: those that nothing changes before they meet values.
    pub(crate) fn softmax_rounds(&self) -> bool {
        self.native_values() && !self.given.weight && self.call.options.dropout.is_none()
    }
}

/// Returns the sequence of a task.
///
/// # Panics
/// If the task does not lie inside the call, or is larger than the tiling's.
#[inline(always)]
fn sequence_of(Task { sequence, kv_head, rows }: &Task, call: &Call<'_>, tiling: &Tiling) -> Sequence {
    assert!(*sequence < call.sequences() && *kv_head < call.kv.kv_heads(), "a task of another call");
    let seq = call.sequence(*sequence);
    let all = call.group_size() * seq.q_len;
    assert!(rows.end <= all && rows.len() <= tiling.task_rows, "rows outside the call, or more than a task's");
    seq
}
