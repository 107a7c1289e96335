//! Products of bfloat16 by a matrix unit: loops of `tiles.rs`.
//!
//! Operands are pairs, as those of `pairs.rs`, filled up to whole steps of the unit: sixteen pairs of elements of a key, or of keys.
//! With weights in several parts, so are queries, keys and values that are not bfloat16: see `matmul/bf16_parts.rs`.

use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{
    KeySource, KeysToPack, Packing, QueryRow, QueryRows, RunKeys, ValuesToPack,
};
use crate::attention::products::pairs::{pack_key_pairs, pack_value_pairs, store_query_pairs, store_weights};
use crate::attention::products::pv::ValueSums;
use crate::attention::products::score_run::ScoreRun;
use crate::attention::products::tiles::{self, ScoreOperands, WeightPlane};
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax::{Scaled, WeightForm, softmax};
use crate::attention::steps::softmax_merge::SoftmaxState;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::bf16_pairs;
use crate::matmul::bf16_parts::{self, KeyRows, MAX_PARTS, PartPairs, Parts, evenly, pairs};
#[cfg(not(matrix_unit_model))]
use crate::matmul::operands::Bf16Pairs;
use crate::matmul::pack::{self, NonFinite};
use crate::simd::aligned::elements_mut;
use crate::simd::exp;
use crate::simd::tiles::{BLOCK, MAX_PAIRS, Product, TILE};
#[cfg(not(matrix_unit_model))]
use crate::simd::{Bf16Dot, Bf16DotWork};
use crate::simd::{Bf16x2, LANES, Simd};
use crate::tensor::element::Dtype;
use crate::tensor::rows::{KEY_BLOCK, Rows};
use core::marker::PhantomData;

/// Products of bfloat16 by a matrix unit, with weights in some number of parts: with one, everything is rounded to bfloat16; with
/// three, everything is in as many parts as its type has.
pub(crate) struct Bf16Tiles<const WEIGHTS: usize>;

/// Number of pairs of keys of a panel.
const PANEL_PAIRS: usize = LANES / 2;
/// Floats from the first part of a row's weights to each: those behind the first lie behind all rows of the row block.
const WEIGHT_PARTS: [usize; MAX_PARTS] = [0, BLOCK * SCORE_STRIDE, BLOCK * SCORE_STRIDE + KEY_BLOCK / 2];

impl<const WEIGHTS: usize> Bf16Tiles<WEIGHTS> {
    /// Returns the number of parts of numbers of a type.
    fn parts(dtype: Dtype) -> usize {
        bf16_parts::count(dtype).min(WEIGHTS)
    }

    /// Returns the number of parts of keys that are packed.
    fn key_parts(keys: &Keys) -> usize {
        match *keys {
            Keys::Rows(rows) | Keys::Packed(rows) => Self::parts(rows.dtype()),
            _ => 1,
        }
    }

    /// Returns keys or values as operands in parts.
    fn of_pairs(pairs: Rows<Bf16x2>) -> Parts {
        Parts { first: pairs, count: 1, bytes: 0 }
    }
}

impl<const WEIGHTS: usize> Multiply for Bf16Tiles<WEIGHTS> {
    const ROUNDS_IN_SOFTMAX: bool = true;
    const SCALES_IN_SOFTMAX: bool = true;
    const PRODUCTS: [f64; 2] = if WEIGHTS == 1 { [16.0; 2] } else { [16.0 / MAX_PAIRS as f64; 2] };
    // Most of it is the softmax, with one part.
    const TIME: f64 = if WEIGHTS == 1 { 0.2 } else { 0.65 };
    const PACKING: usize = if WEIGHTS == 1 { 28 } else { 40 };
    const PARTS: usize = WEIGHTS;
    // Scores of a row block stay in the first-level cache: 34 of 48 KiB.
    const ROW_BLOCK: usize = BLOCK;

    fn tile_rows<S: Simd>() -> usize {
        TILE
    }

    fn query_floats(head_dim: usize) -> usize {
        bf16_parts::floats(head_dim, WEIGHTS)
    }

    unsafe fn store_query<S: Simd>(s: S, query: QueryRow<'_>, room: &mut [f32], to: &mut [f32]) {
        let (QueryRow { row, head_dim, .. }, parts) = (query, Self::parts(query.row.dtype()));
        if parts == 1 {
            // SAFETY: same contract.
            return unsafe { store_query_pairs(s, query, room, to) };
        }
        let wide = &mut room[..head_dim.next_multiple_of(LANES)];
        // SAFETY: the caller guarantees the query, of `head_dim` elements.
        unsafe { pack::pack_rows(s, row, [1, head_dim], NonFinite::Ignored, wide) };
        let floats = bf16_parts::floats(head_dim, parts);
        bf16_parts::store_query(s, wide, parts, elements_mut(&mut to[..floats]));
    }

    fn reads_keys(keys: &Keys, _: usize, head_dim: usize) -> bool {
        matches!(keys, Keys::Pairs(_)) && pairs(head_dim) == head_dim.div_ceil(2)
    }

    fn panel_floats(source: KeySource<'_>, head_dim: usize) -> usize {
        LANES * bf16_parts::floats(head_dim, Self::key_parts(source.keys))
    }

    fn depth(head_dim: usize) -> usize {
        pairs(head_dim)
    }

    unsafe fn pack_keys<S: Simd>(s: S, to_pack: KeysToPack<'_>, out: &mut [f32]) -> Keys {
        let KeysToPack { source, ref keys, all, head_dim, packing } = to_pack;
        let (n, first) = (keys.len(), keys.start);
        let parts = Self::key_parts(source.keys);
        if parts == 1 {
            // SAFETY: same contract.
            return unsafe { pack_key_pairs(s, to_pack, pairs(head_dim), out) };
        }
        let out = elements_mut::<Bf16x2>(out);
        if packing == Packing::Needed {
            // SAFETY: the caller guarantees the keys; a cache's panels are whole.
            unsafe {
                let rows = match *source.keys {
                    Keys::Rows(rows) => KeyRows::Rows { rows: rows.rows_from(first), n, all },
                    Keys::Packed(panels) => KeyRows::Panels { panels: panels.rows_from(first / LANES), n },
                    _ => unreachable!("keys in parts are made of elements"),
                };
                bf16_parts::pack_keys(s, rows, head_dim, parts, out);
            }
        }
        let (part, panel) = (pairs(head_dim) * LANES, parts * pairs(head_dim) * LANES);
        let first = Rows::strided(out.as_ptr(), panel as isize, 1);
        Keys::Parts(Parts { first, count: parts, bytes: part * size_of::<Bf16x2>() })
    }

    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, keys: RunKeys) {
        let Parts { first: panels, count, bytes } = match keys.keys {
            Keys::Pairs(panels) => Self::of_pairs(panels),
            Keys::Parts(parts) => parts,
            _ => unreachable!("keys are packed as pairs"),
        };
        let depth = pairs(queries.head_dim);
        let of_queries = evenly(depth * size_of::<Bf16x2>());
        let pairs = PartPairs::of(&of_queries[..Self::parts(queries.dtype)], &evenly(bytes)[..count]);
        let operands = ScoreOperands {
            product: Product::Bf16,
            pairs: pairs.as_slice(),
            queries: queries.rows,
            query_bytes: Self::query_floats(queries.head_dim) * size_of::<f32>(),
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
        let step: StoreWeights<'_, WEIGHTS> = StoreWeights::Softmax { row_block, factor, state };
        step.run(s);
    }

    unsafe fn prepare_weights<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, _: BlockValues, from: Arithmetic) {
        if from == Arithmetic::Floats {
            let step: StoreWeights<'_, WEIGHTS> =
                StoreWeights::Finished(ScoreBlock { scores: row_block.scores, ..row_block });
            step.run(s);
        }
        for first in &WEIGHT_PARTS[..WEIGHTS] {
            tiles::clear_beside_spans(&mut row_block, PANEL_PAIRS, *first);
        }
    }

    fn weight(weights: &[f32], key: usize) -> f32 {
        WEIGHT_PARTS[..WEIGHTS].iter().map(|&first| bf16_pairs::rounded(&weights[first..], key)).sum()
    }

    fn reads_values(columns: &Columns, _: usize) -> bool {
        matches!(columns.values, ColumnValues::Pairs(pairs) if !pairs.are_scattered())
    }

    fn value_floats(keys: usize) -> usize {
        if WEIGHTS == 1 { keys.div_ceil(2) } else { bf16_parts::floats(keys, WEIGHTS) }
    }

    unsafe fn pack_values<S: Simd>(s: S, to_pack: ValuesToPack, out: &mut [f32]) -> ColumnValues {
        let ValuesToPack { values, size, nonfinite, packing } = to_pack;
        let rows = match values {
            ColumnValues::Elements(rows) if Self::parts(rows.dtype()) > 1 => rows,
            // SAFETY: same contract.
            _ => return unsafe { pack_value_pairs(s, to_pack, out) },
        };
        let (parts, out) = (Self::parts(rows.dtype()), elements_mut(out));
        ColumnValues::Parts(match packing {
            // SAFETY: the caller guarantees the values.
            Packing::Needed => unsafe { bf16_parts::pack_values(s, rows, size, parts, nonfinite, out) },
            Packing::Done => bf16_parts::packed_values(size, parts, out),
        })
    }

    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues) {
        let Parts { first: values, count, bytes } = match values {
            ColumnValues::Pairs(values) => Self::of_pairs(values),
            ColumnValues::Parts(parts) => parts,
            _ => unreachable!("values are packed as pairs"),
        };
        let of_weights = WEIGHT_PARTS.map(|floats| floats * size_of::<f32>());
        let pairs = PartPairs::of(&of_weights[..WEIGHTS], &evenly(bytes)[..count]);
        assert!(WEIGHTS == 1 || sums.weights.len() >= (sums.rows + BLOCK) * SCORE_STRIDE);
        let plane = WeightPlane { product: Product::Bf16, first: 0, pairs: pairs.as_slice() };
        s.vectorize(
            #[inline(always)]
            // SAFETY: the caller guarantees the values, parts filled up to whole steps, and the outputs; weights beside spans were
            // cleared.
            || unsafe {
                tiles::sums(s, sums, values, PANEL_PAIRS, |tiles, steps, vecs, sums| {
                    let steps = if count > 1 { steps.whole() } else { steps };
                    steps.multiply(s, tiles, plane, vecs, sums);
                });
            },
        );
    }
}

/// Step that stores weights as the unit reads them, in some number of parts.
enum StoreWeights<'a, const WEIGHTS: usize> {
    /// Softmax of scores times a factor.
    Softmax { row_block: ScoreBlock<'a>, factor: f32, state: SoftmaxState<'a> },
    /// Finished weights, floats so far.
    Finished(ScoreBlock<'a>),
}

impl<const WEIGHTS: usize> StoreWeights<'_, WEIGHTS> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        #[cfg(not(matrix_unit_model))]
        // SAFETY: the work has no contract.
        unsafe {
            s.with_bf16_dot(self);
        }
        #[cfg(matrix_unit_model)]
        self.run_as::<S, model::Rounded>(s);
    }

    /// Carries out the step; `W` rounds to bfloat16.
    #[inline(always)]
    fn run_as<S: Simd, W: WeightForm<S>>(self, s: S) {
        match self {
            Self::Softmax { row_block, factor, state } if const { WEIGHTS == 1 } => {
                softmax::<S, Scaled<W>>(s, row_block, factor, state);
            }
            Self::Softmax { row_block, factor, state } => {
                softmax::<S, Scaled<InParts<W>>>(s, row_block, factor, state);
            }
            Self::Finished(row_block) if const { WEIGHTS == 1 } => store_weights::<S, W>(s, row_block),
            Self::Finished(row_block) => store_weights::<S, InParts<W>>(s, row_block),
        }
    }
}

/// Has no contract: it is safe for any score block.
#[cfg(not(matrix_unit_model))]
impl<const WEIGHTS: usize> Bf16DotWork for StoreWeights<'_, WEIGHTS> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        self.run_as::<S, Bf16Pairs>(s);
    }
}

/// Weights in three parts, each rounded by `W`.
struct InParts<W>(PhantomData<W>);

impl<S: Simd, W: WeightForm<S>> WeightForm<S> for InParts<W> {
    const IN_PLACE: bool = false;
    const ROWS_BEHIND: usize = BLOCK;
    type Accuracy = exp::Full;

    #[inline(always)]
    unsafe fn store(s: S, row: *mut f32, panel: usize, weights: S::V) -> S::V {
        let mut rest = weights;
        for first in WEIGHT_PARTS {
            // SAFETY: the caller guarantees the row, for the first part, and the one that is `BLOCK` rows behind.
            rest = s.sub(rest, unsafe { W::store(s, row.add(first), panel, rest) });
        }
        weights
    }
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
