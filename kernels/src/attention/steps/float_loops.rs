//! Scores and P·V of float keys and values: the loop for many rows or the one for few.

use crate::attention::steps::pv::{self, ValueSums};
use crate::attention::steps::qk::{self, FloatKeys, FloatQueries};
use crate::attention::steps::score_run::ScoreRun;
use crate::attention::steps::{pv_many, qk_many};
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::simd::Simd;
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::rows::Rows;

/// Returns true if the time of `rows` rows is that of arithmetic, for which there are loops of their own over columns that
/// are evenly spaced.
#[inline(always)]
fn are_many(rows: usize, columns: Rows<f32>) -> bool {
    rows > MEMORY_BOUND_ROWS && !columns.are_scattered()
}

/// Computes scores.
///
/// # Safety
/// Same contract as [`qk::scores`].
pub(crate) unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: FloatQueries<'_>, keys: FloatKeys) {
    let FloatKeys { panels, later } = keys;
    // SAFETY: same contract; many rows read panels side by side.
    unsafe {
        match panels {
            Typed::F32(panels) if are_many(run.rows, panels) => qk_many::scores(s, run, queries, panels),
            panels => by_type!(Typed, panels, |panels| qk::scores(s, run, queries, FloatKeys { panels, later })),
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
