//! Running state of a task's rows: cleared, and loaded from and saved to the caller's state if keys come in several
//! calls.

use crate::attention::blocks::task::AttentionTask;
use crate::attention::call::tiling::Regions;
use crate::simd::{LANES, Simd};
use core::ops::Range;

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
}

impl<S: Simd> AttentionTask<'_, S> {
    /// Clears maxima, sums and outputs: nothing is accumulated yet.
    pub(crate) fn clear(&self, regions: &mut Regions<'_>) {
        self.clear_state(regions);
        self.clear_outputs(0..self.set.rows.len(), regions);
    }

    /// Clears maxima and sums.
    pub(crate) fn clear_state(&self, regions: &mut Regions<'_>) {
        // Steps work on whole vectors of rows.
        let padded = self.set.rows.len().next_multiple_of(LANES);
        regions.max[..padded].fill(f32::NEG_INFINITY);
        regions.sum[..padded].fill(0.0);
    }

    /// Clears the outputs of some rows.
    pub(crate) fn clear_outputs(&self, rows: Range<usize>, regions: &mut Regions<'_>) {
        let width = self.tiling.width();
        regions.out[rows.start * width..rows.end * width].fill(0.0);
    }

    /// Loads the state that earlier calls accumulated for the task's rows, or saves the new one.
    pub(crate) fn transfer_state(&self, regions: &mut Regions<'_>, way: StateTransfer) {
        let Some(state) = &self.outputs.state else { return };
        let width = self.tiling.width();
        for row in self.rows(0..self.set.rows.len()) {
            let (b, h, i) = (row.batch, row.head, row.at);
            // SAFETY: the task's rows are inside the state, which has `value_dim` elements of output for each, and they are
            // this worker's alone.
            unsafe {
                way.copy(state.max.row(b, h, i).0, &mut regions.max[row.n]);
                way.copy(state.sum.row(b, h, i).0, &mut regions.sum[row.n]);
                let (out, element) = state.out.row(b, h, i);
                for c in 0..self.tiling.value_dim {
                    way.copy(out.offset(c as isize * element), &mut regions.out[row.n * width + c]);
                }
            }
        }
    }
}
