//! Running state of a task's rows: loaded from and saved to the caller's state if keys come in several calls.

use crate::attention::blocks::task::AttentionTask;
use crate::attention::call::outputs::Seen;
use crate::attention::scratch::Regions;
use crate::simd::Simd;
use core::slice;

/// Direction of a state transfer: from the caller's state into scratch, or back.
#[derive(Clone, Copy)]
pub(crate) enum StateTransfer {
    Load,
    Save,
}

impl StateTransfer {
    /// Copies numbers of the caller's state, `stride` elements apart, to scratch, or back.
    ///
    /// # Safety
    /// `state` is readable and writable for the number of elements of scratch, and no other worker accesses them.
    unsafe fn copy(self, (state, stride): (*mut f32, isize), scratch: &mut [f32]) {
        // SAFETY: the caller guarantees access to the state; nobody else has the scratch, so they do not overlap.
        unsafe {
            match (self, stride) {
                (Self::Load, 1) => scratch.as_mut_ptr().copy_from_nonoverlapping(state, scratch.len()),
                (Self::Save, 1) => state.copy_from_nonoverlapping(scratch.as_ptr(), scratch.len()),
                (Self::Load, _) => (0..).zip(scratch).for_each(|(n, x)| *x = *state.offset(n * stride)),
                (Self::Save, _) => (0..).zip(scratch).for_each(|(n, x)| *state.offset(n * stride) = *x),
            }
        }
    }

    /// Loads the state that earlier calls accumulated for a task's rows, or saves the new one. If they had seen no keys, nothing
    /// is loaded.
    pub(crate) fn run<S: Simd>(self, task: &AttentionTask<'_, S>, regions: &mut Regions<'_>) {
        let Some(state) = &task.outputs.state else { return };
        if let (Self::Load, Seen::Nothing) = (self, state.seen) {
            return;
        }
        let width = task.tiling.width();
        for row in task.rows(0..task.set.rows.len()) {
            let (b, h, i) = (row.q_batch, row.head, row.at);
            let out = &mut regions.out[row.n * width..][..task.tiling.value_dim];
            // SAFETY: the task's rows are inside the state, which has `value_dim` elements of output for each, and they are
            // this worker's alone.
            unsafe {
                self.copy((state.max.row(b, h, i).0, 1), slice::from_mut(&mut regions.max[row.n]));
                self.copy((state.sum.row(b, h, i).0, 1), slice::from_mut(&mut regions.sum[row.n]));
                self.copy(state.out.row(b, h, i), out);
            }
        }
    }
}
