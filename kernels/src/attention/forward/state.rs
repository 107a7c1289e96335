//! Running state of a task's rows: loaded from and saved to the caller's state if keys come in several calls.

use crate::attention::blocks::task::AttentionTask;
use crate::attention::call::tiling::Regions;
use crate::simd::Simd;

/// Direction of a state transfer: from the caller's state into scratch, or back.
#[derive(Clone, Copy)]
pub(crate) enum StateTransfer {
    Load,
    Save,
}

impl StateTransfer {
    /// Copies an element of the caller's state to scratch, or back.
    ///
    /// # Safety
    /// `state` is readable and writable, and no other worker accesses it.
    unsafe fn copy(self, state: *mut f32, scratch: &mut f32) {
        // SAFETY: the caller guarantees access to `state`.
        unsafe {
            match self {
                Self::Load => *scratch = *state,
                Self::Save => *state = *scratch,
            }
        }
    }

    /// Loads the state that earlier calls accumulated for a task's rows, or saves the new one.
    pub(crate) fn run<S: Simd>(self, task: &AttentionTask<'_, S>, regions: &mut Regions<'_>) {
        let Some(state) = &task.outputs.state else { return };
        let width = task.tiling.width();
        for row in task.rows(0..task.set.rows.len()) {
            let (b, h, i) = (row.q_batch, row.head, row.at);
            // SAFETY: the task's rows are inside the state, which has `value_dim` elements of output for each, and they are
            // this worker's alone.
            unsafe {
                self.copy(state.max.row(b, h, i).0, &mut regions.max[row.n]);
                self.copy(state.sum.row(b, h, i).0, &mut regions.sum[row.n]);
                let (out, element) = state.out.row(b, h, i);
                for c in 0..task.tiling.value_dim {
                    self.copy(out.offset(c as isize * element), &mut regions.out[row.n * width + c]);
                }
            }
        }
    }
}
