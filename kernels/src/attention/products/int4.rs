//! Products of int4: queries as bytes by keys of half bytes; weights, rounded to bytes, by values of half bytes (`pv_int4.rs`).

use crate::attention::products::int8::quantise_query;
use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{
    KeySource, KeysToPack, Packing, QueryRow, QueryRows, RunKeys, ValuesToPack,
};
use crate::attention::products::pv::{ValueSums, Values, WeightSigns};
use crate::attention::products::pv_int4::Int4Values;
use crate::attention::products::qk_int8::{Int8Queries, IntegerKeys, IntegerScores};
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::dot_tile::Later;
use crate::matmul::int4::{self, BLOCK_BYTES, BLOCK_QUADS, blocks};
use crate::matmul::int8::{self, QUAD};
use crate::matmul::key_code::Int4Keys;
use crate::matmul::operands::Int4Fours;
use crate::matmul::tile_shape::MAX_TILE_ROWS;
use crate::simd::aligned::elements_mut;
use crate::simd::{LANES, Simd};
use crate::tensor::element::F16;
use crate::tensor::rows::{KEY_BLOCK, Rows};

impl Multiply for Int4Fours {
    const FINITE: bool = true;

    fn query_floats(head_dim: usize) -> usize {
        int4::query_size(head_dim).floats()
    }

    unsafe fn store_query<S: Simd>(s: S, query: QueryRow<'_>, room: &mut [f32], to: &mut [f32]) {
        let (quads, sums) = int8::cut_query(to, int4::query_size(query.head_dim));
        // SAFETY: same contract.
        let row = unsafe { quantise_query(s, query, room, quads) };
        int4::block_sums(row, quads, sums);
    }

    fn reads_keys(keys: &Keys, _: usize, _: usize) -> bool {
        matches!(keys, Keys::Int4 { .. })
    }

    fn panel_floats(source: KeySource<'_>, head_dim: usize) -> usize {
        let [bytes, numbers] = latent_sizes(source, head_dim);
        (bytes + numbers * size_of::<F16>()) / size_of::<f32>()
    }

    fn depth(head_dim: usize) -> usize {
        int4::blocks(head_dim) * (BLOCK_QUADS / 2)
    }

    /// Packs latent keys, which are stored as values are, and the numbers of their blocks behind them.
    unsafe fn pack_keys<S: Simd>(s: S, to_pack: KeysToPack<'_>, out: &mut [f32]) -> Keys {
        let KeysToPack { source, keys, head_dim, packing, .. } = to_pack;
        let &BlockValues::Int4 { mut values, numbers: stored } = source.values else {
            unreachable!("latent keys of half bytes")
        };
        let [bytes, count] = latent_sizes(source, head_dim);
        let (panels, fours) = (keys.start / LANES..keys.end.div_ceil(LANES), keys.start / QUAD);
        let (out, rest) = out.split_at_mut(panels.len() * bytes / size_of::<f32>());
        let (out, numbers) = (elements_mut::<i8>(out), elements_mut::<F16>(rest));
        let kind = stored.kind;
        // SAFETY: the caller guarantees the keys, so their quads and the numbers of their panels are there; the block's memory
        // outlives the result.
        unsafe {
            if packing == Packing::Needed {
                let quads = bytes / (QUAD * LANES);
                // The values are the first columns of the keys.
                values.layout.width = quads * QUAD;
                let at =
                    |four: usize, quad| values.vector(quad / QUAD).at(fours + four).add(QUAD * (quad % QUAD)).cast();
                int8::pack_fours(s, quads, at, out);
                for (panel, numbers) in panels.zip(numbers.chunks_exact_mut(count.max(1))) {
                    for (i, numbers) in numbers.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                        *numbers = *stored.first.at(panel).add(i * stored.step).cast();
                    }
                }
            }
            let panels = Rows::strided(out.as_ptr(), bytes as isize, 1);
            Keys::Int4 { panels, kind, numbers: Rows::strided(numbers.as_ptr(), count as isize, 1) }
        }
    }

    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, RunKeys { keys, later }: RunKeys) {
        let Keys::Int4 { panels, kind, numbers } = keys else { unreachable!("keys are panels of half bytes") };
        let head_dim = queries.head_dim;
        if later.is_some() && !panels.are_scattered() {
            // SAFETY: the caller guarantees the keys' numbers.
            let first = unsafe { numbers.at(0) }.cast();
            Later::prefetch_behind(s, run.rows, first, kind.number_bytes(KEY_BLOCK, head_dim));
        }
        let queries = Int8Queries { rows: queries.rows, size: int4::query_size(head_dim) };
        let keys = IntegerKeys { panels, code: Int4Keys { kind, numbers } };
        // SAFETY: same contract.
        unsafe { s.with_int8_dot(IntegerScores { run, queries, keys }) }
    }

    /// Leaves the weights as they are: they are rounded for each block of columns.
    unsafe fn prepare_weights<S: Simd>(s: S, row_block: ScoreBlock<'_>, values: BlockValues, _: Arithmetic) {
        let BlockValues::Int4 { values, numbers } = values else { unreachable!("values are half bytes") };
        if !values.first.are_scattered() {
            // SAFETY: the caller guarantees the values' numbers.
            let first = unsafe { numbers.first.at(0) }.cast();
            let dim = values.layout.width / LANES * int4::BLOCK;
            Later::prefetch_behind(s, row_block.rows, first, numbers.kind.number_bytes(KEY_BLOCK, dim));
        }
    }

    fn reads_values(_: &Columns, _: usize) -> bool {
        true
    }

    unsafe fn pack_values<S: Simd>(_: S, _: ValuesToPack, _: &mut [f32]) -> ColumnValues {
        unreachable!("values are read where they lie")
    }

    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues) {
        let ColumnValues::Int4 { panels, numbers } = values else { unreachable!("values are half bytes") };
        let values = Int4Values { panels, numbers };
        if sums.signs == WeightSigns::NonNegative {
            // SAFETY: same contract.
            return unsafe { s.with_int8_dot(Values { values, sums }) };
        }
        // Weights of a function are final: nothing is rescaled.
        debug_assert!(!sums.fresh && sums.rescale_prev[..sums.rows].iter().all(|&factor| factor == 1.0));
        for tile in 0..sums.spans.len() {
            for sign in [1.0, -1.0] {
                let mut sums = sums.of_tile(tile, S::TILE_ROWS);
                let (weights, factors) =
                    (part_of(sign, &sums.weights[..sums.rows * SCORE_STRIDE]), [sign; MAX_TILE_ROWS]);
                (sums.weights, sums.rescale_block) = (&weights, &factors);
                // SAFETY: same contract.
                unsafe { s.with_int8_dot(Values { values, sums: &mut sums }) }
            }
        }
    }
}

/// Returns the number of bytes of a packed panel of latent keys, and of numbers beside it.
fn latent_sizes(source: KeySource<'_>, head_dim: usize) -> [usize; 2] {
    let BlockValues::Int4 { numbers, .. } = source.values else { unreachable!("values are half bytes") };
    [blocks(head_dim) * BLOCK_BYTES, numbers.kind.number_bytes(LANES, head_dim) / size_of::<F16>()]
}

/// Returns the magnitudes of a tile's weights of this sign; the others become 0, and NaN stays.
fn part_of(sign: f32, weights: &[f32]) -> [f32; MAX_TILE_ROWS * SCORE_STRIDE] {
    let mut part = [0.0; MAX_TILE_ROWS * SCORE_STRIDE];
    for (part, weight) in part.iter_mut().zip(weights) {
        let weight = sign * weight;
        *part = if weight <= 0.0 { 0.0 } else { weight };
    }
    part
}
