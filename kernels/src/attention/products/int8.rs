//! Products of int8: queries as bytes by keys of bytes; weights, rounded to 16 bits, by values of bytes, in fours of keys.

use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{
    KeySource, KeysToPack, LaterKeys, Packing, QueryRow, QueryRows, RunKeys, ValuesToPack,
};
use crate::attention::products::pv::{ValueSums, Values, values};
use crate::attention::products::qk_int8::{Int8Queries, IntegerKeys, IntegerScores};
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::dot_tile::Later;
use crate::matmul::int8::{self, LARGEST_WEIGHT, QUAD, QuerySize, ValueQuad, WeightFactors, scale_weights};
use crate::matmul::key_code::Int8Keys;
use crate::matmul::operands::Int8Fours;
use crate::matmul::pack::{self, NonFinite};
use crate::simd::aligned::elements_mut;
use crate::simd::{Int8Dot, Int8DotWork, LANES, Query4, Simd, Words4};
use crate::tensor::rows::Rows;
use core::ops::Range;

impl Multiply for Int8Fours {
    const FINITE: bool = true;

    fn query_floats(head_dim: usize) -> usize {
        QuerySize::int8(head_dim).floats()
    }

    unsafe fn store_query<S: Simd>(s: S, query: QueryRow<'_>, room: &mut [f32], to: &mut [f32]) {
        let (quads, sums) = int8::cut_query(to, QuerySize::int8(query.head_dim));
        // SAFETY: same contract.
        sums[0] = unsafe { quantise_query(s, query, room, quads) };
    }

    fn reads_keys(keys: &Keys, _: usize, _: usize) -> bool {
        matches!(keys, Keys::Int8 { .. })
    }

    fn panel_floats(_: KeySource<'_>, head_dim: usize) -> usize {
        int8::panel_bytes(head_dim) / size_of::<f32>()
    }

    fn depth(head_dim: usize) -> usize {
        int8::quads(head_dim)
    }

    /// Packs latent keys, which are stored as values are. The values are their first columns.
    unsafe fn pack_keys<S: Simd>(s: S, to_pack: KeysToPack<'_>, out: &mut [f32]) -> Keys {
        let KeysToPack { source, keys, head_dim, packing, .. } = to_pack;
        let &BlockValues::Int8 { values, scales } = source.values else { unreachable!("latent keys of bytes") };
        let (bytes, fours) = (int8::panel_bytes(head_dim), keys.start / QUAD);
        let out = &mut elements_mut::<i8>(out)[..keys.len().div_ceil(LANES) * bytes];
        // SAFETY: the caller guarantees the keys, so their quads are there; the block's memory outlives the result.
        unsafe {
            if packing == Packing::Needed {
                let at = |four: usize, quad| values.first.at(fours + four).add(QUAD * quad).cast();
                int8::pack_fours(s, int8::quads(head_dim), at, out);
            }
            let (_, scales) = (&*scales).split_at(keys.start);
            Keys::Int8 { panels: Rows::strided(out.as_ptr(), bytes as isize, 1), scales: Some(scales) }
        }
    }

    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, RunKeys { keys, later }: RunKeys) {
        // SAFETY: the caller guarantees the keys' scales.
        let (panels, code) = unsafe { panels_of(s, run.rows, keys, later) };
        let queries = Int8Queries { rows: queries.rows, size: QuerySize::int8(queries.head_dim) };
        // SAFETY: same contract.
        unsafe { s.with_int8_dot(IntegerScores { run, queries, keys: IntegerKeys { panels, code } }) }
    }

    /// Multiplies weights by the scales of their values, and rounds them.
    unsafe fn prepare_weights<S: Simd>(s: S, row_block: ScoreBlock<'_>, values: BlockValues, _: Arithmetic) {
        let BlockValues::Int8 { values, scales } = values else { unreachable!("values are bytes") };
        // SAFETY: the caller guarantees the scales.
        let scales = unsafe { &*scales };
        if !values.first.are_scattered() {
            Later::prefetch_behind(s, row_block.rows, scales.as_ptr().cast(), size_of_val(scales));
        }
        round_weights(s, row_block, scales);
    }

    fn reads_values(_: &Columns, _: usize) -> bool {
        true
    }

    unsafe fn pack_values<S: Simd>(_: S, _: ValuesToPack, _: &mut [f32]) -> ColumnValues {
        unreachable!("values are read where they lie")
    }

    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues) {
        let ColumnValues::Int8(values) = values else { unreachable!("values are bytes") };
        // SAFETY: same contract.
        unsafe { s.with_int8_dot(Values { values, sums }) }
    }
}

/// Returns panels of bytes and the keys' scales; few rows prefetch what lies behind these.
///
/// # Safety
/// The scales are readable as long as the result is used.
pub(crate) unsafe fn panels_of<'a, S: Simd>(
    s: S,
    rows: usize,
    keys: Keys,
    later: Option<LaterKeys>,
) -> (Rows<i8>, Int8Keys<'a>) {
    let Keys::Int8 { panels, scales } = keys else { unreachable!("keys are panels of bytes") };
    // SAFETY: the caller guarantees the scales.
    let code = Int8Keys(scales.map(|scales| unsafe { &*scales }));
    if let (Some(_), Some(scales)) = (later, code.0)
        && !panels.are_scattered()
    {
        Later::prefetch_behind(s, rows, scales.as_ptr().cast(), size_of_val(scales));
    }
    (panels, code)
}

/// Quantises a query to bytes. It is taken to the keys' basis and multiplied by the scales of their channels first, so that its
/// products with keys read only the keys' bytes.
///
/// # Safety
/// The query is readable.
pub(crate) unsafe fn quantise_query<S: Simd>(
    s: S,
    QueryRow { row, head_dim, scale, channels, basis }: QueryRow<'_>,
    room: &mut [f32],
    quads: &mut [Query4],
) -> int8::Row {
    let wide = &mut room[..head_dim.next_multiple_of(LANES)];
    // SAFETY: the caller guarantees the query, of `head_dim` elements.
    unsafe { pack::pack_rows(s, row, [1, head_dim], NonFinite::Ignored, wide) };
    let row = &mut wide[..head_dim];
    basis.transform(s, row);
    if let Some(channels) = channels {
        s.vectorize(
            #[inline(always)]
            || row.iter_mut().zip(channels).for_each(|(x, scale)| *x *= scale),
        );
    }
    int8::quantise_query(s, row, scale, quads)
}

/// Same contract as [`values`], with rounded weights.
impl Int8DotWork for Values<'_, '_, Rows<ValueQuad>> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) {
        // SAFETY: the caller guarantees the contract of `values`.
        unsafe { values(s, self.sums, self.values) }
    }
}

/// Multiplies weights by the scales of their values and rounds them to 16 bits, in place: four weights become a [`Words4`],
/// which is written to the first half of the row, and the largest [behind them](LARGEST_WEIGHT); it is NaN if a weight is
/// not finite.
pub(crate) fn round_weights<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, scales: &[f32]) {
    s.vectorize(
        #[inline(always)]
        move || {
            assert!(row_block.spans.iter().all(|span| span.is_empty() || span.end_panel() * LANES <= scales.len()));
            row_block.for_each_row(
                #[inline(always)]
                // SAFETY: panels lie inside the row, and inside `scales`.
                |_, panels, weights| unsafe { round_row(weights, panels, scales) },
            );
        },
    )
}

/// Rounds the weights of some panels of a row.
///
/// # Safety
/// The panels lie inside the row, of [`SCORE_STRIDE`] floats, and inside `scales`.
#[inline(always)]
unsafe fn round_row(row: *mut f32, panels: Range<usize>, scales: &[f32]) {
    const { assert!(LARGEST_WEIGHT < SCORE_STRIDE) }
    if panels.is_empty() {
        return;
    }
    let keys = panels.start * LANES..panels.end * LANES;
    // SAFETY: the caller guarantees the panels; a row is longer than a block has keys. Words are written to the first half of
    // the row, over weights that have been read already or belong to no key of the span.
    unsafe {
        let weights = core::slice::from_raw_parts_mut(row.add(keys.start), keys.len());
        let largest = scale_weights(weights, &scales[keys]);
        let round = WeightFactors::new(largest);
        *row.add(LARGEST_WEIGHT) = if largest < f32::INFINITY { largest } else { f32::NAN };
        for panel in panels {
            let weights = *row.add(panel * LANES).cast::<[f32; LANES]>();
            let words = row.cast::<Words4>().add(panel * (LANES / QUAD));
            *words.cast::<[Words4; LANES / QUAD]>() = round.round(&weights);
        }
    }
}
