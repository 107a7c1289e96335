//! Scores and P·V of float keys and values: the loop for many rows or the one for few.

use crate::attention::steps::pv::{self, ValueSums};
use crate::attention::steps::qk::{self, Scores};
use crate::attention::steps::{pv_many, qk_many};
use crate::matmul::prefetch::READING_ROWS;
use crate::simd::Simd;
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::rows::Rows;

/// Returns true if the time of `rows` rows is that of arithmetic, for which there are loops of their own over columns that
/// are evenly spaced.
#[inline(always)]
fn are_many(rows: usize, columns: Rows<f32>) -> bool {
    rows > READING_ROWS && !columns.are_scattered()
}

/// Computes scores.
///
/// # Safety
/// Same contract as [`qk::scores`].
pub(crate) unsafe fn scores<S: Simd>(s: S, mut a: Scores<'_>) {
    // SAFETY: same contract; many rows read panels side by side.
    unsafe {
        match a.keys {
            Typed::F32(keys) if are_many(a.queries.len(), keys) => qk_many::scores(s, &mut a.of(keys)),
            keys => by_type!(Typed, keys, |keys| qk::scores(s, &mut a.of(keys))),
        }
    }
}

/// Accumulates P·V.
///
/// # Safety
/// Same contract as [`pv::values`].
pub(crate) unsafe fn values<S: Simd>(s: S, a: &mut ValueSums<'_>, values: AnyRows) {
    // SAFETY: same contract.
    unsafe {
        match values {
            Typed::F32(rows) if are_many(a.rows, rows) => pv_many::values(s, a, rows),
            // Few rows: more have them side by side, as floats.
            rows => by_type!(Typed, rows, |rows| pv::values(s, a, rows)),
        }
    }
}
