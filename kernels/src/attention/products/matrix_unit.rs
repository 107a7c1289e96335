//! Products of bfloat16 pairs by a matrix unit: a scalar model of its instruction, for tests on any machine.
//!
//! One step multiplies 32 elements of a row by 32 of a column: products of the even elements are one chain of FMAs from 0, those of
//! the odd ones another, and the sum of both is added once to what the steps before left. Subnormal inputs and sums count as 0.
//! (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.)

use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{
    KeySource, KeysToPack, Packing, QueryRow, QueryRows, RunKeys, ValuesToPack,
};
use crate::attention::products::pairs::{pack_value_pairs, store_weights};
use crate::attention::products::pv::ValueSums;
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax::{SoftmaxState, WeightForm, softmax};
use crate::attention::steps::span::MAX_SPAN_ROWS;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::bf16_pairs;
use crate::simd::aligned::elements_mut;
use crate::simd::exp::ForBf16;
use crate::simd::{Bf16x2, LANES, Simd, lanes};
use crate::tensor::any::Typed;
use crate::tensor::element::{Bf16, Element};
use crate::tensor::rows::Rows;

/// Number of elements that a step multiplies.
const STEP: usize = 32;

/// Matrix unit.
pub(crate) struct MatrixUnit;

impl Multiply for MatrixUnit {
    const ROUNDS_IN_SOFTMAX: bool = true;

    fn tile_rows<S: Simd>() -> usize {
        MAX_SPAN_ROWS
    }

    fn query_floats(head_dim: usize) -> usize {
        pairs(head_dim)
    }

    unsafe fn store_query<S: Simd>(_: S, query: QueryRow<'_>, _: &mut [f32], to: &mut [f32]) {
        let QueryRow { row, head_dim, .. } = query;
        for (pair, to) in elements_mut::<Bf16x2>(to).iter_mut().enumerate() {
            // SAFETY: the caller guarantees the query, of `head_dim` elements.
            let element = |i: usize| if i < head_dim { Bf16::narrow(unsafe { row.get(0, i) }) } else { Bf16(0) };
            *to = Bf16x2::new(element(2 * pair).0, element(2 * pair + 1).0);
        }
    }

    fn reads_keys(_: &Keys, _: usize) -> bool {
        false
    }

    fn panel_floats(_: KeySource<'_>, head_dim: usize) -> usize {
        LANES * pairs(head_dim)
    }

    fn depth(head_dim: usize) -> usize {
        pairs(head_dim)
    }

    unsafe fn pack_keys<S: Simd>(_: S, to_pack: KeysToPack<'_>, out: &mut [f32]) -> Keys {
        let KeysToPack { source, keys, head_dim, packing, .. } = to_pack;
        let panel = LANES * pairs(head_dim);
        if packing == Packing::Needed {
            // SAFETY: the caller guarantees the keys, of `head_dim` elements.
            let element = |j: usize, i: usize| unsafe {
                match *source.keys {
                    _ if j >= keys.end || i >= head_dim => 0,
                    Keys::Rows(Typed::Bf16(rows)) => (*rows.at(j).offset(i as isize * rows.element)).0,
                    Keys::Pairs(panels) => (*panels.at(j / LANES).add(i / 2 * LANES + j % LANES)).elements()[i % 2],
                    _ => unreachable!("pairs are made of bfloat16"),
                }
            };
            let out = elements_mut::<Bf16x2>(out)[..keys.len().div_ceil(LANES) * panel].iter_mut().enumerate();
            for (place, out) in out {
                let (j, i) = (keys.start + place / panel * LANES + place % LANES, place % panel / LANES * 2);
                *out = Bf16x2::new(element(j, i), element(j, i + 1));
            }
        }
        Keys::Pairs(Rows::strided(out.as_ptr().cast(), panel as isize, 1))
    }

    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, keys: RunKeys) {
        let Keys::Pairs(panels) = keys.keys else { unreachable!("keys are packed as pairs") };
        let depth = pairs(queries.head_dim);
        for row in 0..run.rows {
            let span = run.spans[row / MAX_SPAN_ROWS];
            for panel in span.first_panel().max(run.panels.start)..span.end_panel().min(run.panels.end) {
                // SAFETY: the caller guarantees the queries and the panels.
                let (query, panel_keys) = unsafe {
                    let query = core::slice::from_raw_parts(queries.rows[row].cast::<Bf16x2>(), depth);
                    (query, core::slice::from_raw_parts(panels.at(panel - run.panels.start), depth * LANES))
                };
                let sums = s.vectorize(
                    #[inline(always)]
                    || dot_products(query, |pair| panel_keys.as_chunks::<LANES>().0[pair]),
                );
                let scores = &mut run.out[row * SCORE_STRIDE + panel * LANES..][..LANES];
                for (score, sum) in scores.iter_mut().zip(sums) {
                    *score = sum * queries.scale;
                }
            }
        }
    }

    fn softmax<S: Simd>(s: S, row_block: ScoreBlock<'_>, state: SoftmaxState<'_>) {
        softmax::<S, Self>(s, row_block, state);
    }

    unsafe fn prepare_weights<S: Simd>(s: S, row_block: ScoreBlock<'_>, _: BlockValues, from: Arithmetic) {
        if from == Arithmetic::Floats {
            store_weights::<S, Self>(s, row_block);
        }
    }

    fn weight(weights: &[f32], key: usize) -> f32 {
        bf16_pairs::rounded(weights, key)
    }

    fn reads_values(_: &Columns, _: usize) -> bool {
        false
    }

    unsafe fn pack_values<S: Simd>(s: S, values: ValuesToPack, out: &mut [f32]) -> ColumnValues {
        // SAFETY: same contract.
        unsafe { pack_value_pairs(s, values, out) }
    }

    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues) {
        let ColumnValues::Pairs(values) = values else { unreachable!("values are packed as pairs") };
        for row in 0..sums.rows {
            let span = sums.spans[row / MAX_SPAN_ROWS];
            if span.is_empty() {
                continue;
            }
            // Keys outside the span have weight 0; steps begin at multiples of 32.
            let (first, end) = (span.first_panel() * LANES / 2, span.keys().end.div_ceil(2));
            let mut weights = [Bf16x2(0); SCORE_STRIDE / 2];
            for (pair, weight) in weights.iter_mut().enumerate().take(end).skip(first) {
                *weight = Bf16x2(sums.weights[row * SCORE_STRIDE + pair].to_bits());
            }
            let steps = first / (STEP / 2) * (STEP / 2)..end;
            for vec in 0..sums.vecs() {
                // SAFETY: the caller guarantees the values of the block's keys, in whole vectors.
                let column = |pair: usize| unsafe { *values.at(pair).add(vec * LANES).cast::<[Bf16x2; LANES]>() };
                let sum = s.vectorize(
                    #[inline(always)]
                    || dot_products(&weights[steps.clone()], |pair| column(steps.start + pair)),
                );
                // SAFETY: the row and the vector are some of these.
                unsafe {
                    let (running, mut sum) = (sums.running(row, vec), [[lanes::load(s, &sum)]]);
                    running.merge(s, &mut sum);
                    running.rows.store(s, &sum);
                }
            }
        }
    }
}

/// Returns the number of pairs of a row, in whole steps.
fn pairs(head_dim: usize) -> usize {
    head_dim.next_multiple_of(STEP) / 2
}

/// Returns the dot products of a row and sixteen columns, in whole steps from the first pair on; pairs beyond the row count as 0.
#[inline(always)]
fn dot_products(row: &[Bf16x2], columns: impl Fn(usize) -> [Bf16x2; LANES]) -> [f32; LANES] {
    let mut totals = [0.0; LANES];
    for (step, row) in row.chunks(STEP / 2).enumerate() {
        let mut chains = [[0.0; LANES]; 2];
        for (pair, &x) in row.iter().enumerate() {
            let (x, y) = (halves(x), columns(step * (STEP / 2) + pair));
            for lane in 0..LANES {
                let y = halves(y[lane]);
                for half in 0..2 {
                    chains[half][lane] = flushed(x[half].mul_add(y[half], chains[half][lane]));
                }
            }
        }
        for lane in 0..LANES {
            totals[lane] = flushed(totals[lane] + flushed(chains[0][lane] + chains[1][lane]));
        }
    }
    totals
}

/// Returns both numbers of a pair, as the unit reads them.
#[inline(always)]
fn halves(pair: Bf16x2) -> [f32; 2] {
    [pair.0 << 16, pair.0 & 0xFFFF_0000].map(|bits| flushed(f32::from_bits(bits)))
}

/// Returns 0 for subnormal numbers, others as they are.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x }
}

/// Weights as bfloat16: the pair of keys 2i and 2i + 1 lies where the score of key i was.
impl<S: Simd> WeightForm<S> for MatrixUnit {
    const IN_PLACE: bool = false;
    type Accuracy = ForBf16;

    #[inline(always)]
    unsafe fn store(s: S, row: *mut f32, panel: usize, weights: S::V) -> S::V {
        let mut rounded = [0.0; LANES];
        lanes::store(s, &mut rounded, weights);
        for (i, x) in rounded.iter_mut().enumerate() {
            *x = flushed(Bf16::narrow(flushed(*x)).widen());
            // SAFETY: half of a float that ends before the panel does, so it lies in it or in those before it, which the caller
            // guarantees are writable and have been read.
            unsafe { *row.cast::<u16>().add(panel * LANES + i) = (x.to_bits() >> 16) as u16 };
        }
        lanes::load(s, &rounded)
    }
}
