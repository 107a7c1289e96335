//! The key blocks that a task goes through: those of which some row may see something.

use crate::attention::forward::task::AttentionTask;
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::steps::by_isa::Steps;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

impl<'t, 'a, S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> AttentionTask<'t, 'a, S, Mods<A, B, C>> {
    /// The first keys of the blocks of which some row may see something, by the rules that are ranges.
    pub(crate) fn blocks(&self) -> impl DoubleEndedIterator<Item = usize> + use<'t, 'a, S, A, B, C> {
        let keys = self.needed();
        let (kv, batch) = (&self.call.kv, self.seq.batch);
        numbers(keys).map(|block| block * KEY_BLOCK).filter(move |&first| kv.holds(batch, first))
    }

    /// Whether [`Self::blocks`] has this one.
    pub(crate) fn holds(&self, first: usize) -> bool {
        numbers(self.needed()).contains(&(first / KEY_BLOCK)) && self.call.kv.holds(self.seq.batch, first)
    }

    fn needed(&self) -> Range<usize> {
        if self.outputs.wants_all_keys() { 0..self.seq.kv_len } else { self.visible() }
    }

    /// A range that holds every key that any row of the task may see by the rules that are ranges.
    fn visible(&self) -> Range<usize> {
        if !self.call.visible.uses_position() {
            return 0..self.seq.kv_len;
        }
        let (rows, q_len) = (&self.task.rows, self.seq.q_len);
        // Rows of one head stand in order; a task that runs over several heads may hold any row.
        let one_head = rows.start / q_len == (rows.end - 1) / q_len;
        let (first, last) = if one_head { (rows.start % q_len, (rows.end - 1) % q_len) } else { (0, q_len - 1) };
        let position = |i: usize| self.seq.offset.saturating_add_unsigned(i);
        self.call.visible.hull(position(first), position(last), self.seq.kv_len)
    }
}

/// The numbers of the blocks that hold these keys.
#[inline]
fn numbers(keys: Range<usize>) -> Range<usize> {
    keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK)
}
