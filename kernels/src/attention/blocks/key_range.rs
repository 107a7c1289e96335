//! Key range of a task: the key blocks with at least one key that may be visible to some row.

use crate::attention::blocks::task::AttentionTask;
use crate::attention::call::Sequence;
use crate::simd::Simd;
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

impl<'t, S: Simd> AttentionTask<'t, S> {
    /// Returns the first key of each block with a key that the range rules make visible to some row.
    pub(crate) fn blocks(&self) -> impl DoubleEndedIterator<Item = usize> + use<'t, S> {
        let keys = self.keys_to_compute();
        let (kv, source) = (&self.call.kv, self.seq.source);
        numbers(keys).map(|block| block * KEY_BLOCK).filter(move |&first| kv.holds(source, first))
    }

    /// Returns true if the block that starts at key `first` is one of [`Self::blocks`].
    pub(crate) fn holds(&self, first: usize) -> bool {
        let number = first / KEY_BLOCK;
        first.is_multiple_of(KEY_BLOCK)
            && numbers(self.keys_to_compute()).contains(&number)
            && self.call.kv.holds(self.seq.source, first)
    }

    /// Returns the range of keys to compute: all of them if scores are written out, else the visible ones.
    fn keys_to_compute(&self) -> Range<usize> {
        if self.outputs.wants_all_keys() { 0..self.seq.kv_len } else { self.visible_keys() }
    }

    /// Returns a range that holds every key that the range rules make visible to any row of the task.
    fn visible_keys(&self) -> Range<usize> {
        if !self.call.visible.hides_keys() {
            return 0..self.seq.kv_len;
        }
        let (first, last) = self.positions();
        self.call.visible.key_range(first, last, self.seq.kv_len)
    }

    /// Returns the first and the last position of a row of the task; of a row of its sequences, if the task has rows of several
    /// heads.
    pub(crate) fn positions(&self) -> (isize, isize) {
        let (rows, q_len) = (&self.set.rows, self.seq.q_len);
        // Rows of one head are in order; a task that covers several heads may hold any row. One row a head needs no division.
        let in_order = q_len > 1 && rows.start / q_len == (rows.end - 1) / q_len;
        let (first, last) = if in_order { (rows.start % q_len, (rows.end - 1) % q_len) } else { (0, q_len - 1) };
        let position = |i: usize| self.seq.offset.saturating_add_unsigned(i);
        self.set.others.iter().fold((position(first), position(last)), |(first, last), &sequence| {
            let Sequence { offset, q_len, .. } = self.call.sequence(sequence);
            (first.min(offset), last.max(offset.saturating_add_unsigned(q_len.saturating_sub(1))))
        })
    }
}

/// Returns the numbers of the blocks that hold these keys.
#[inline]
fn numbers(keys: Range<usize>) -> Range<usize> {
    keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK)
}
