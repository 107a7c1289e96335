//! Query rows of a row block as the backward pass reads them: queries, output gradients, and what was saved of each row.

use crate::attention::backward::call::Saved;
use crate::attention::blocks::task::{AttentionTask, Row};
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::attention::steps::softmax_backward::{self, Delta, RowDot};
use crate::matmul::finite;
use crate::matmul::pack::{self, NonFinite};
use crate::simd::{LANES, QUIET_NAN, Simd};
use crate::tensor::any::{AnyRows, Tensor, Typed};
use crate::tensor::rows::Rows;
use crate::tensor::view::View;

/// Rows of a tensor that belong to a row block, each contiguous floats in whole vectors.
pub(crate) struct BlockRows {
    rows: Rows<f32>,
    /// Rows of the tensor itself.
    given: AnyRows,
    /// Address of each row.
    at: [*const f32; MAX_ROW_BLOCK],
    n: usize,
    /// Rows with an element that is not finite; in copies made with [`NonFinite::Handled`] it is 0.
    pub(crate) nonfinite: NonFiniteRows,
}

/// A bit for each row of a row block.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct NonFiniteRows(u128);
const _: () = assert!(MAX_ROW_BLOCK <= u128::BITS as usize);

impl NonFiniteRows {
    pub(crate) fn has(self, row: usize) -> bool {
        self.0 >> row & 1 == 1
    }

    pub(crate) fn is_empty(self) -> bool {
        self == Self::default()
    }
}

impl BlockRows {
    /// Returns the address of each row.
    pub(crate) fn addresses(&self) -> &[*const f32] {
        &self.at[..self.n]
    }

    /// Returns the rows of the tensor itself.
    pub(crate) fn given(&self) -> AnyRows {
        self.given
    }

    /// Returns one of the rows, of finite elements: that of the tensor itself, or else its copy.
    ///
    /// # Panics
    /// If there is no such row.
    pub(crate) fn row(&self, n: usize) -> AnyRows {
        assert!(n < self.n, "no such row");
        // SAFETY: there is such a row, and it is one of both.
        unsafe { if self.nonfinite.has(n) { Typed::F32(self.rows.rows_from(n)) } else { self.given.rows_from(n) } }
    }

    /// Returns the rows, which are evenly spaced, and their number.
    pub(crate) fn evenly(&self) -> (Rows<f32>, usize) {
        (self.rows, self.n)
    }
}

impl<S: Simd> AttentionTask<'_, S> {
    /// Returns the task's rows of a tensor: in place if they are contiguous finite floats in whole vectors, otherwise copied to
    /// `copy`. The task's rows belong to one head and are no more than a row block.
    ///
    /// # Safety
    /// The tensor has the batch, heads and rows of q.
    pub(crate) unsafe fn block_rows(&self, tensor: &Tensor<'_>, nonfinite: NonFinite, copy: &mut [f32]) -> BlockRows {
        let (n, [.., dim]) = (self.set.rows.len(), tensor.shape());
        let width = dim.next_multiple_of(LANES);
        assert!(n <= MAX_ROW_BLOCK && copy.len() >= n * width, "more rows than a row block");
        let rows = Rows::strided(core::ptr::null(), width as isize, 1);
        let (at, nonfinite_rows) = ([core::ptr::null(); MAX_ROW_BLOCK], NonFiniteRows::default());
        let mut block = BlockRows { rows, given: Typed::F32(rows), at, n, nonfinite: nonfinite_rows };
        let Some((row, alike)) = self.stretches(0..n).next() else { return block };
        assert!(alike == n, "rows of several heads");
        // SAFETY: the caller guarantees that the task's rows are inside the tensor; they are of one head, so they are
        // evenly spaced.
        unsafe {
            let rows = tensor.rows(row.q_batch, row.head, row.at);
            block.given = rows;
            if nonfinite == NonFinite::Handled && !finite::all_finite(self.s, rows, n, dim) {
                for i in 0..n {
                    let finite = finite::all_finite(self.s, rows.rows_from(i), 1, dim);
                    block.nonfinite.0 |= u128::from(!finite) << i;
                }
            }
            match rows {
                Typed::F32(rows) if rows.element == 1 && width == dim && block.nonfinite.is_empty() => {
                    block.rows = rows
                }
                rows => {
                    pack::pack_rows(self.s, rows, [n, dim], nonfinite, copy);
                    block.rows = Rows::strided(copy.as_ptr(), width as isize, 1);
                }
            }
            (0..n).for_each(|i| block.at[i] = block.rows.at(i));
        }
        block
    }

    /// Returns Σ do·o − dlse of each of the task's rows; `d_out` are their output gradients, `copy` is memory for a row
    /// block of outputs.
    ///
    /// # Safety
    /// The saved tensors fit the call; `d_out` is of this task.
    pub(crate) unsafe fn deltas(
        &self,
        saved: &Saved<'_>,
        d_out: &BlockRows,
        copy: &mut [f32],
    ) -> [Delta; MAX_ROW_BLOCK] {
        let vecs = self.tiling.value_dim.div_ceil(LANES);
        let (mut deltas, mut products) = ([Delta::default(); MAX_ROW_BLOCK], [RowDot::default(); MAX_ROW_BLOCK]);
        // SAFETY: the caller guarantees that the saved output fits the call; block rows are whole vectors.
        unsafe {
            let out = self.block_rows(&saved.out, NonFinite::Ignored, copy);
            softmax_backward::row_dots(self.s, [d_out.addresses(), out.addresses()], vecs, &mut products);
        }
        for row in self.rows(0..self.set.rows.len()) {
            deltas[row.n] = Delta::new(products[row.n], self.d_lse(saved, row));
            if d_out.nonfinite.has(row.n) {
                deltas[row.n].value = QUIET_NAN;
            }
        }
        deltas
    }

    /// Returns the gradient of a row's log-sum-exp: 0 if none was given.
    pub(crate) fn d_lse(&self, saved: &Saved<'_>, row: Row) -> f32 {
        saved.d_lse.as_ref().map_or(0.0, |d_lse| self.of_row(d_lse, row))
    }

    /// Returns a row's element of a view that has one for each.
    pub(crate) fn of_row(&self, view: &View<'_>, row: Row) -> f32 {
        view.get([row.q_batch, row.head, row.at, 0]).copied().unwrap_or(QUIET_NAN)
    }
}

/// Returns the rows as tiles of weighted sums read them: in place if they are contiguous floats in whole vectors and finite,
/// otherwise copied to `copy`, with 0 in place of what is not finite.
///
/// # Safety
/// There are `n` rows of `dim` elements.
pub(crate) unsafe fn finite_rows<S: Simd>(s: S, rows: AnyRows, [n, dim]: [usize; 2], copy: &mut [f32]) -> AnyRows {
    let width = dim.next_multiple_of(LANES);
    // SAFETY: the caller guarantees the rows.
    unsafe {
        if matches!(rows, Typed::F32(_)) && rows.element() == 1 && width == dim && finite::all_finite(s, rows, n, dim) {
            return rows;
        }
        pack::pack_rows(s, rows, [n, dim], NonFinite::Handled, copy);
    }
    Typed::F32(Rows::strided(copy.as_ptr(), width as isize, 1))
}
