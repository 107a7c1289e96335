//! Products of floats: the loop for many rows or the one for few.

use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{
    KeySource, KeysToPack, Packing, QueryRow, QueryRows, RunKeys, ValuesToPack,
};
use crate::attention::products::pv::{self, ValueSums};
use crate::attention::products::qk;
use crate::attention::products::score_run::ScoreRun;
use crate::attention::products::{pv_many, qk_many};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::bf16_pairs;
use crate::matmul::e4m3;
use crate::matmul::operands::{Floats, PairElement, ValuePair};
use crate::matmul::pack::{self, NonFinite};
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::simd::{LANES, Simd};
use crate::tensor::any::Typed;
use crate::tensor::rows::Rows;

/// Returns true if `rows` rows are compute-bound, for which there are loops of their own over columns that are evenly spaced.
#[inline(always)]
fn are_many(rows: usize, columns: Rows<f32>) -> bool {
    rows > MEMORY_BOUND_ROWS && !columns.are_scattered()
}

impl Multiply for Floats {
    const READS_QUERIES: bool = true;

    fn query_floats(head_dim: usize) -> usize {
        head_dim
    }

    /// Copies the query, widened.
    unsafe fn store_query<S: Simd>(s: S, QueryRow { row, head_dim, .. }: QueryRow<'_>, _: &mut [f32], to: &mut [f32]) {
        // SAFETY: the caller guarantees the query, of `head_dim` elements.
        unsafe {
            if head_dim.is_multiple_of(LANES) {
                pack::pack_rows(s, row, [1, head_dim], NonFinite::Ignored, to);
            } else {
                to.iter_mut().enumerate().for_each(|(i, x)| *x = row.get(0, i));
            }
        }
    }

    fn reads_keys(keys: &Keys, rows: usize, _: usize) -> bool {
        match *keys {
            // Many rows read panels of floats, side by side.
            Keys::Packed(Typed::F32(panels)) => rows <= MEMORY_BOUND_ROWS || !panels.are_scattered(),
            Keys::Packed(_) | Keys::Pairs(_) | Keys::E4m3 { .. } => rows <= MEMORY_BOUND_ROWS,
            _ => false,
        }
    }

    fn panel_floats(_: KeySource<'_>, head_dim: usize) -> usize {
        LANES * head_dim.max(LANES)
    }

    fn depth(head_dim: usize) -> usize {
        head_dim
    }

    unsafe fn pack_keys<S: Simd>(s: S, to_pack: KeysToPack<'_>, out: &mut [f32]) -> Keys {
        let KeysToPack { source, keys, all, head_dim, packing } = to_pack;
        if packing == Packing::Needed {
            // SAFETY: the caller guarantees the keys; a cache's panels are whole.
            unsafe {
                match *source.keys {
                    Keys::Packed(panels) => {
                        let (panels, n) = (panels.rows_from(keys.start / LANES), keys.len().div_ceil(LANES));
                        pack::pack_rows(s, panels, [n, head_dim * LANES], NonFinite::Ignored, out);
                    }
                    Keys::Pairs(panels) => {
                        let n = keys.len().div_ceil(LANES) * LANES * head_dim;
                        bf16_pairs::widen_panels(s, panels.rows_from(keys.start / LANES), head_dim, &mut out[..n]);
                    }
                    Keys::E4m3 { panels, .. } => {
                        let (panels, n) = (panels.rows_from(keys.start / LANES), keys.len().div_ceil(LANES));
                        e4m3::widen_rows(s, panels, [n, head_dim * LANES], NonFinite::Ignored, out);
                    }
                    Keys::Rows(rows) => {
                        pack::pack_keys(s, rows.rows_from(keys.start), [keys.len(), all], head_dim, out);
                    }
                    _ => unreachable!("keys of integers meet bytes"),
                }
            }
        }
        Keys::Packed(Typed::F32(Rows::strided(out.as_ptr(), (head_dim * LANES) as isize, 1)))
    }

    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, RunKeys { keys, later }: RunKeys) {
        // SAFETY: same contract; many rows read panels side by side. Pairs are elements of the same size, two by two.
        unsafe {
            match keys {
                Keys::Packed(Typed::F32(panels)) if are_many(run.rows, panels) => {
                    qk_many::scores(s, run, queries, panels);
                }
                Keys::Packed(panels) => by_type!(Typed, panels, |panels| qk::scores(s, run, queries, panels, later)),
                Keys::Pairs(panels) => qk::scores(s, run, queries, panels.elements::<PairElement>(2), later),
                Keys::E4m3 { panels, .. } => qk::scores(s, run, queries, panels, later),
                _ => unreachable!("keys are packed"),
            }
        }
    }

    unsafe fn prepare_weights<S: Simd>(_: S, _: ScoreBlock<'_>, _: BlockValues, _: Arithmetic) {}

    fn reads_values(columns: &Columns, rows: usize) -> bool {
        // Larger row blocks share one copy, as floats that lie evenly and near.
        let even = matches!(columns.values, ColumnValues::Elements(Typed::F32(rows)) if !rows.are_scattered());
        rows <= MEMORY_BOUND_ROWS || even && !columns.are_far()
    }

    unsafe fn pack_values<S: Simd>(s: S, values: ValuesToPack, out: &mut [f32]) -> ColumnValues {
        let ValuesToPack { values, size: [n, cols], nonfinite, packing } = values;
        let width = cols.next_multiple_of(LANES);
        if packing == Packing::Needed {
            // SAFETY: the caller guarantees the values; pairs have whole vectors of columns.
            unsafe {
                match values {
                    ColumnValues::Pairs(pairs) => {
                        let out = &mut out[..n * width];
                        bf16_pairs::widen_values(s, pairs, width, out);
                        nonfinite.treat(out);
                    }
                    ColumnValues::E4m3(rows) => {
                        e4m3::widen_rows(s, rows, [n, width], nonfinite, out);
                    }
                    values => pack::pack_rows(s, values.elements(), [n, cols], nonfinite, out),
                }
            }
        }
        ColumnValues::Elements(Typed::F32(Rows::strided(out.as_ptr(), width as isize, 1)))
    }

    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues) {
        // SAFETY: same contract.
        unsafe {
            match values {
                ColumnValues::Elements(Typed::F32(rows)) if are_many(sums.rows, rows) => pv_many::values(s, sums, rows),
                // Few rows: more have them side by side, as floats.
                ColumnValues::Elements(rows) => by_type!(Typed, rows, |rows| pv::values(s, sums, rows)),
                ColumnValues::Pairs(pairs) => pv::values(s, sums, pairs.cast::<ValuePair>()),
                ColumnValues::E4m3(rows) => pv::values(s, sums, rows),
                ColumnValues::Parts(_) | ColumnValues::Int8(_) | ColumnValues::Int4 { .. } => {
                    unreachable!("values of another arithmetic")
                }
            }
        }
    }
}
