//! Products of bfloat16 pairs by a matrix unit: loops of `tiles.rs`.
//!
//! Operands lie as those of `pairs.rs`, filled up to whole steps of the unit: sixteen pairs of elements of a key, or of keys.

use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{KeySource, KeysToPack, QueryRow, QueryRows, RunKeys, ValuesToPack};
#[cfg(not(matrix_unit_model))]
use crate::attention::products::pairs::SoftmaxOfPairs;
use crate::attention::products::pairs::{pack_key_pairs, pack_value_pairs, store_query_pairs};
use crate::attention::products::pv::ValueSums;
use crate::attention::products::score_run::ScoreRun;
use crate::attention::products::tiles::{self, ScoreOperands, WeightPlane};
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::ScoreBlock;
#[cfg(matrix_unit_model)]
use crate::attention::steps::softmax::{Scaled, softmax};
use crate::attention::steps::softmax_merge::SoftmaxState;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::bf16_pairs;
#[cfg(not(matrix_unit_model))]
use crate::matmul::operands::Bf16Pairs;
use crate::simd::tiles::{BLOCK, Product, TILE};
use crate::simd::{Bf16x2, LANES, Simd};

/// Products of bfloat16 pairs by a matrix unit.
pub(crate) struct Bf16Tiles;

/// Number of pairs of keys of a panel.
const PANEL_PAIRS: usize = LANES / 2;

impl Multiply for Bf16Tiles {
    const ROUNDS_IN_SOFTMAX: bool = true;
    const SCALES_IN_SOFTMAX: bool = true;
    const PRODUCTS: [f64; 2] = [16.0; 2];
    // Most of it is the softmax.
    const TIME: f64 = 0.2;
    const PACKING: usize = 28;
    const VALUE_GROUP: usize = 2;
    // Scores of a row block stay in the first-level cache: 34 of 48 KiB.
    const ROW_BLOCK: usize = BLOCK;

    fn tile_rows<S: Simd>() -> usize {
        TILE
    }

    fn query_floats(head_dim: usize) -> usize {
        pairs(head_dim)
    }

    unsafe fn store_query<S: Simd>(s: S, query: QueryRow<'_>, room: &mut [f32], to: &mut [f32]) {
        // SAFETY: same contract.
        unsafe { store_query_pairs(s, query, room, to) }
    }

    fn reads_keys(keys: &Keys, _: usize, head_dim: usize) -> bool {
        matches!(keys, Keys::Pairs(_)) && pairs(head_dim) == head_dim.div_ceil(2)
    }

    fn panel_floats(_: KeySource<'_>, head_dim: usize) -> usize {
        LANES * pairs(head_dim)
    }

    fn depth(head_dim: usize) -> usize {
        pairs(head_dim)
    }

    unsafe fn pack_keys<S: Simd>(s: S, to_pack: KeysToPack<'_>, out: &mut [f32]) -> Keys {
        let pairs = pairs(to_pack.head_dim);
        // SAFETY: same contract.
        unsafe { pack_key_pairs(s, to_pack, pairs, out) }
    }

    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, keys: RunKeys) {
        let Keys::Pairs(panels) = keys.keys else { unreachable!("keys are packed as pairs") };
        let depth = pairs(queries.head_dim);
        let operands = ScoreOperands {
            product: Product::Bf16,
            queries: queries.rows,
            query_bytes: depth * size_of::<Bf16x2>(),
            depth,
            later: keys.later.filter(|_| !panels.are_scattered()),
        };
        let factor = (queries.scale != 1.0).then(|| s.splat(queries.scale));
        s.vectorize(
            #[inline(always)]
            // SAFETY: the caller guarantees the queries and the panels; sums are those of rows of scores.
            || unsafe {
                let panel_at = |n| panels.at(n).cast();
                tiles::scores(s, run, operands, panel_at, |sums, rows, panels| {
                    let Some(factor) = factor else { return };
                    for row in 0..rows.len() {
                        for panel in 0..panels.len() {
                            let score = sums.add(row * SCORE_STRIDE + panel * LANES);
                            s.store(score, s.mul(s.load(score), factor));
                        }
                    }
                });
            },
        );
    }

    fn softmax<S: Simd>(s: S, row_block: ScoreBlock<'_>, factor: f32, state: SoftmaxState<'_>) {
        #[cfg(not(matrix_unit_model))]
        // SAFETY: the work has no contract.
        unsafe {
            s.with_bf16_dot(SoftmaxOfPairs { row_block, factor: Some(factor), state });
        }
        #[cfg(matrix_unit_model)]
        softmax::<S, Scaled<model::Rounded>>(s, row_block, factor, state);
    }

    unsafe fn prepare_weights<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, _: BlockValues, from: Arithmetic) {
        if from == Arithmetic::Floats {
            let row_block = ScoreBlock { scores: row_block.scores, ..row_block };
            #[cfg(not(matrix_unit_model))]
            Bf16Pairs::round(s, row_block);
            #[cfg(matrix_unit_model)]
            crate::attention::products::pairs::store_weights::<S, model::Rounded>(s, row_block);
        }
        tiles::clear_beside_spans(&mut row_block, PANEL_PAIRS, 0);
    }

    fn weight(weights: &[f32], key: usize) -> f32 {
        bf16_pairs::rounded(weights, key)
    }

    fn reads_values(columns: &Columns, _: usize) -> bool {
        matches!(columns.values, ColumnValues::Pairs(pairs) if !pairs.are_scattered())
    }

    unsafe fn pack_values<S: Simd>(s: S, values: ValuesToPack, out: &mut [f32]) -> ColumnValues {
        // SAFETY: same contract.
        unsafe { pack_value_pairs(s, values, out) }
    }

    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues) {
        let ColumnValues::Pairs(values) = values else { unreachable!("values are packed as pairs") };
        s.vectorize(
            #[inline(always)]
            // SAFETY: the caller guarantees the values and the outputs; weights beside spans were cleared.
            || unsafe {
                tiles::sums(s, sums, values, PANEL_PAIRS, |tiles, steps, vecs, sums| {
                    steps.multiply(s, tiles, WeightPlane { product: Product::Bf16, first: 0 }, vecs, sums);
                });
            },
        );
    }
}

/// Returns the number of pairs of a query or key, in whole steps.
fn pairs(head_dim: usize) -> usize {
    head_dim.div_ceil(2).next_multiple_of(TILE)
}

/// Weights as the model of the unit reads them.
#[cfg(matrix_unit_model)]
mod model {
    use crate::attention::steps::softmax::WeightForm;
    use crate::simd::exp::ForBf16;
    use crate::simd::portable::tiles::flushed;
    use crate::simd::{LANES, Simd, lanes};
    use crate::tensor::element::{Bf16, Element};

    /// Weights as bfloat16, as AVX512_BF16 rounds them: the pair of keys 2i and 2i + 1 lies where the score of key i was.
    pub(super) struct Rounded;

    impl<S: Simd> WeightForm<S> for Rounded {
        const IN_PLACE: bool = false;
        type Accuracy = ForBf16;

        #[inline(always)]
        unsafe fn store(s: S, row: *mut f32, panel: usize, weights: S::V) -> S::V {
            let mut rounded = [0.0; LANES];
            lanes::store(s, &mut rounded, weights);
            for (i, x) in rounded.iter_mut().enumerate() {
                *x = flushed(Bf16::narrow(flushed(*x)).widen());
                // SAFETY: half of a float that ends before the panel does, so it lies in it or in those before it, which the
                // caller guarantees are writable and have been read.
                unsafe { *row.cast::<u16>().add(panel * LANES + i) = (x.to_bits() >> 16) as u16 };
            }
            lanes::load(s, &rounded)
        }
    }
}
