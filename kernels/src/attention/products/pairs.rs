//! Products of bfloat16 pairs, by the machine's own dot product: see `matmul/bf16_pairs.rs`.

use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{
    KeySource, KeysToPack, Packing, QueryRow, QueryRows, RunKeys, ValuesToPack,
};
use crate::attention::products::pv::{ValueSums, Values, values};
use crate::attention::products::qk;
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax::{WeightForm, softmax};
use crate::attention::steps::softmax_merge::SoftmaxState;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::operands::{Bf16Pairs, HalfPair};
use crate::matmul::pack::{self, NonFinite};
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::matmul::{bf16_pairs, bf16_parts};
use crate::simd::aligned::elements_mut;
use crate::simd::exp::ForBf16;
use crate::simd::{Bf16Dot, Bf16DotWork, Bf16x2, LANES, Simd};
use crate::tensor::any::Typed;
use crate::tensor::element::Bf16;
use crate::tensor::rows::Rows;

impl Multiply for Bf16Pairs {
    const ROUNDS_IN_SOFTMAX: bool = true;
    const PRODUCTS: [f64; 2] = [2.0; 2];
    const PARTS: usize = 1;

    fn query_floats(head_dim: usize) -> usize {
        head_dim.div_ceil(2)
    }

    unsafe fn store_query<S: Simd>(s: S, query: QueryRow<'_>, room: &mut [f32], to: &mut [f32]) {
        // SAFETY: same contract.
        unsafe { store_query_pairs(s, query, room, to) }
    }

    fn reads_keys(keys: &Keys, rows: usize, _: usize) -> bool {
        matches!(keys, Keys::Pairs(panels) if rows <= MEMORY_BOUND_ROWS || !panels.are_scattered())
    }

    fn panel_floats(_: KeySource<'_>, head_dim: usize) -> usize {
        LANES * head_dim.max(LANES)
    }

    fn depth(head_dim: usize) -> usize {
        head_dim.div_ceil(2)
    }

    unsafe fn pack_keys<S: Simd>(s: S, to_pack: KeysToPack<'_>, out: &mut [f32]) -> Keys {
        let pairs = to_pack.head_dim.div_ceil(2);
        // SAFETY: same contract.
        unsafe { pack_key_pairs(s, to_pack, pairs, out) }
    }

    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, keys: RunKeys) {
        // SAFETY: same contract.
        unsafe { s.with_bf16_dot(PairScores { run, queries, keys }) }
    }

    fn softmax<S: Simd>(s: S, row_block: ScoreBlock<'_>, _: f32, state: SoftmaxState<'_>) {
        // SAFETY: the work has no contract.
        unsafe { s.with_bf16_dot(SoftmaxOfPairs { row_block, state }) }
    }

    unsafe fn prepare_weights<S: Simd>(s: S, row_block: ScoreBlock<'_>, _: BlockValues, from: Arithmetic) {
        if from == Arithmetic::Floats {
            // SAFETY: the work has no contract.
            unsafe { s.with_bf16_dot(Round(row_block)) }
        }
    }

    fn weight(weights: &[f32], key: usize) -> f32 {
        bf16_pairs::rounded(weights, key)
    }

    fn reads_values(columns: &Columns, rows: usize) -> bool {
        rows <= MEMORY_BOUND_ROWS || !columns.are_far()
    }

    fn value_floats(keys: usize) -> usize {
        keys.div_ceil(2)
    }

    unsafe fn pack_values<S: Simd>(s: S, values: ValuesToPack, out: &mut [f32]) -> ColumnValues {
        // SAFETY: same contract.
        unsafe { pack_value_pairs(s, values, out) }
    }

    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues) {
        // SAFETY: same contract.
        unsafe { s.with_bf16_dot(Values { values, sums }) }
    }
}

/// Writes a query as pairs, as [`Multiply::store_query`] says, filled up with zeros.
///
/// # Safety
/// As [`Multiply::store_query`].
pub(crate) unsafe fn store_query_pairs<S: Simd>(s: S, query: QueryRow<'_>, room: &mut [f32], to: &mut [f32]) {
    let (QueryRow { row, head_dim, .. }, to) = (query, elements_mut::<Bf16>(to));
    let wide: &mut [Bf16] = &mut elements_mut(room)[..head_dim.next_multiple_of(LANES)];
    // SAFETY: the caller guarantees the query, of `head_dim` elements.
    unsafe { pack::pack_rows(s, row, [1, head_dim], NonFinite::Ignored, wide) };
    // An odd last element is paired with the padding.
    let (to, zeros) = to.split_at_mut(to.len().min(wide.len()));
    to.copy_from_slice(&wide[..to.len()]);
    zeros.fill(Bf16::default());
}

/// Packs keys in `pairs` pairs, as [`Multiply::pack_keys`] says, filled up with zeros.
///
/// # Safety
/// As [`Multiply::pack_keys`].
pub(crate) unsafe fn pack_key_pairs<S: Simd>(s: S, to_pack: KeysToPack<'_>, pairs: usize, out: &mut [f32]) -> Keys {
    let KeysToPack { source, keys, all, head_dim, packing } = to_pack;
    let (panel, stored) = (pairs * LANES, head_dim.div_ceil(2) * LANES);
    if packing == Packing::Needed {
        // SAFETY: the caller guarantees the keys; a cache's panels are whole.
        unsafe {
            match *source.keys {
                Keys::Rows(Typed::Bf16(rows)) => {
                    let (rows, n) = (rows.rows_from(keys.start), [keys.len(), all]);
                    bf16_pairs::pack(s, rows, n, [head_dim, pairs], elements_mut(out));
                }
                Keys::Pairs(panels) => {
                    let pairs = elements_mut::<Bf16x2>(out).chunks_exact_mut(panel);
                    for (n, pairs) in (keys.start / LANES..keys.end.div_ceil(LANES)).zip(pairs) {
                        let (pairs, zeros) = pairs.split_at_mut(stored);
                        pairs.copy_from_slice(core::slice::from_raw_parts(panels.at(n), stored));
                        zeros.fill(Bf16x2(0));
                    }
                }
                _ => unreachable!("pairs are made of bfloat16"),
            }
        }
    }
    Keys::Pairs(Rows::strided(out.as_ptr().cast(), panel as isize, 1))
}

/// Packs values in pairs of keys, as [`Multiply::pack_values`] says; a last key of an odd number is beside zeros.
///
/// # Safety
/// As [`Multiply::pack_values`].
pub(crate) unsafe fn pack_value_pairs<S: Simd>(s: S, values: ValuesToPack, out: &mut [f32]) -> ColumnValues {
    let ValuesToPack { values, size: [n, cols], nonfinite, packing } = values;
    let (width, out) = (cols.next_multiple_of(LANES), elements_mut::<Bf16x2>(out));
    if packing == Packing::Needed {
        // SAFETY: the caller guarantees the values; pairs have whole vectors of columns.
        unsafe {
            match values {
                ColumnValues::Pairs(pairs) => bf16_pairs::copy_values(s, pairs, [n, width], nonfinite, out),
                values => match values.elements() {
                    rows @ Typed::Bf16(_) => bf16_pairs::pack_values(s, rows, [n, cols], nonfinite, out),
                    // Numbers that are finite stay so.
                    rows => {
                        bf16_parts::pack_values(s, rows, [n, cols], 1, nonfinite, out);
                    }
                },
            }
        }
    }
    ColumnValues::Pairs(Rows::strided(out.as_ptr(), width as isize, 1))
}

/// Scores to compute by pairs.
struct PairScores<'a, 'b> {
    run: &'b mut ScoreRun<'a>,
    queries: QueryRows<'b>,
    keys: RunKeys,
}

/// Same contract as [`qk::scores`], with queries as pairs.
impl Bf16DotWork for PairScores<'_, '_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        let Self { run, queries, keys: RunKeys { keys, later } } = self;
        let Keys::Pairs(panels) = keys else { unreachable!("keys are packed as pairs") };
        // SAFETY: the caller guarantees the contract of `scores` for these keys.
        unsafe { qk::scores(s, run, queries, panels, later) }
    }
}

/// Same contract as [`values`], with rounded weights.
impl Bf16DotWork for Values<'_, '_, ColumnValues> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        // SAFETY: the caller guarantees the contract of `values`.
        unsafe {
            match self.values {
                ColumnValues::Pairs(pairs) => values(s, self.sums, pairs),
                ColumnValues::Elements(Typed::Bf16(rows)) => values(s, self.sums, rows.cast::<HalfPair>()),
                _ => unreachable!("pairs are made of bfloat16"),
            }
        }
    }
}

/// Weights as bfloat16: the pair of keys 2i and 2i + 1 lies where the score of key i was.
impl<S: Bf16Dot> WeightForm<S> for Bf16Pairs {
    const IN_PLACE: bool = false;
    type Accuracy = ForBf16;

    #[inline(always)]
    unsafe fn store(s: S, row: *mut f32, panel: usize, weights: S::V) -> S::V {
        // SAFETY: eight pairs, floats 8·panel to 8·panel + 8 of the row: they end before the panel does, so they lie in it
        // or in those before it, which the caller guarantees are writable and have been read.
        unsafe { s.store_bf16x2(row.add(panel * LANES / 2).cast(), weights) }
    }
}

/// Softmax that stores weights as pairs.
struct SoftmaxOfPairs<'a> {
    row_block: ScoreBlock<'a>,
    state: SoftmaxState<'a>,
}

/// Has no contract: it is safe for any score block.
impl Bf16DotWork for SoftmaxOfPairs<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        softmax::<S, Bf16Pairs>(s, self.row_block, 1.0, self.state);
    }
}

/// Finished weights to round to pairs, in place.
struct Round<'a>(ScoreBlock<'a>);

/// Has no contract: it is safe for any score block.
impl Bf16DotWork for Round<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Bf16Dot>(self, s: S) {
        store_weights::<S, Bf16Pairs>(s, self.0);
    }
}

/// Stores finished weights, floats so far, in another form, in place.
#[inline(always)]
pub(crate) fn store_weights<S: Simd, W: WeightForm<S>>(s: S, mut row_block: ScoreBlock<'_>) {
    let (rows, behind) = (row_block.rows, W::ROWS_BEHIND);
    assert!(row_block.scores.len() >= (rows + behind) * SCORE_STRIDE && (behind == 0 || rows <= behind));
    s.vectorize(
        #[inline(always)]
        || {
            row_block.for_each_row(
                #[inline(always)]
                |_, panels, weights| {
                    for panel in panels {
                        // SAFETY: a panel of the row is read, and its weights are written over it, or over those before it, which
                        // have been read already or belong to no key of the span, and behind the rows, as asserted.
                        unsafe { W::store(s, weights, panel, s.load(weights.add(panel * LANES))) };
                    }
                },
            );
        },
    );
}
