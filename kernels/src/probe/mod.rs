//! Kernel steps one by one, for this project's tests and benchmarks: what the main loop calls, on data that is checked
//! here. Behind the feature `_probe`, and no part of the public interface.

mod balance;
#[cfg(test)]
mod int8_tests;

pub use self::balance::balance;
pub use crate::machine::peak_flops;
pub use crate::nn::elementwise::exp_in_place as exp;

use crate::attention::products::multiply::Multiply;
use crate::attention::products::operands::{QueryRows, RunKeys};
use crate::attention::products::pv::{ValueSums, WeightSigns};
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::{MAX_ROW_BLOCK, SCORE_STRIDE};
use crate::attention::steps::key_sums::{self, Chain, KeySums};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax;
use crate::attention::steps::softmax_merge::SoftmaxState;
use crate::attention::steps::span::{Span, Spans};
use crate::kv::key_block::{BlockValues, ColumnValues, Keys};
use crate::kv::source::KeyValues;
use crate::matmul::int8::{QUAD, panel_bytes};
use crate::matmul::operands::Floats;
use crate::matmul::prefetch::PrefetchQueue;
use crate::matmul::{finite, int4, pack};
use crate::nn::elementwise::exp_to;
use crate::simd::aligned::AlignedBuf;
use crate::simd::exp::ForBf16;
use crate::simd::isa::Isa;
use crate::simd::{LANES, Simd};
use crate::tensor::any::Typed;
use crate::tensor::element::Dtype;
use crate::tensor::rows::{KEY_BLOCK, MAX_DIM, Rows, Table};

/// Computes `eˣ` of every element in place, as the softmax does for weights that are rounded to bfloat16: for x ≤ 0.
pub fn exp_for_bf16(isa: Isa, xs: &mut [f32]) {
    exp_to::<ForBf16>(isa, xs);
}

/// Reads every float and does next to nothing with it: the time a kernel that waits for memory is held against. Returns true if
/// all are finite.
pub fn read(floats: &[f32]) -> bool {
    crate::machine::read(floats)
}

/// Reads every key and value once, in the order in which a call of few rows would, with almost no arithmetic. Returns
/// true if all are finite.
pub fn read_source(kv: &KeyValues<'_>) -> bool {
    dispatch!(Isa::detect(), |s| read_blocks(s, kv))
}

/// Reads keys and values, as [`read_source`] does.
fn read_blocks<S: Simd>(s: S, kv: &KeyValues<'_>) -> bool {
    let ([sequences, _, longest, d], [.., dv]) = (kv.k_shape(), kv.v_shape());
    let lens = |b: usize| kv.lens().map_or(longest, |lens| lens[b]);
    let (heads, inside) = (kv.kv_heads(), kv.has_heads_inside());
    let blocks = (0..sequences).flat_map(|b| {
        let blocks = lens(b).div_ceil(KEY_BLOCK);
        (0..heads * blocks).map(move |n| if inside { [b, n % heads, n / heads] } else { [b, n / blocks, n % blocks] })
    });
    let mut finite = d > 0 && dv > 0;
    let mut tables = [Table::new(), Table::new()];
    for [b, h, block] in blocks.take_while(|_| d > 0 && dv > 0) {
        let first = block * KEY_BLOCK;
        let len = (lens(b) - first).min(KEY_BLOCK);
        if !kv.holds(b, first) {
            continue;
        }
        let [keys, values] = &mut tables;
        // Int8 data is read as floats, whatever their values.
        let bytes = |at: *const i8, n: usize| {
            let rows = Typed::F32(Rows::strided(at.cast(), 0, 1));
            // SAFETY: `n` bytes that exist, aligned for floats: panels and rows are whole vectors of bytes.
            core::hint::black_box(unsafe { finite::all_finite(s, rows, 1, n / size_of::<f32>()) });
            true
        };
        // SAFETY: the keys exist, and their block is held; a cache's panels and value panels are whole. Of int8 value panels, the
        // number of bytes of `len` keys is read, though perhaps not these bytes.
        finite &= unsafe {
            let at = [b, h, first];
            let keys = match kv.keys(at, len, keys) {
                Keys::Rows(rows) => finite::all_finite(s, rows, len, d),
                Keys::Packed(panels) => finite::all_finite(s, panels, len / LANES, LANES * d),
                Keys::Int8 { panels, .. } => read_rows(panels, len / LANES, panel_bytes(d), bytes),
                Keys::Int4 { panels, .. } => read_rows(panels, len / LANES, int4::blocks(d) * int4::BLOCK_BYTES, bytes),
                // Read with the values.
                Keys::Latent | Keys::Parts(_) => true,
                Keys::E4m3 { panels, .. } => read_rows(panels, len / LANES, LANES * d, bytes),
                Keys::Pairs(panels) => read_rows(panels, len / LANES, d.div_ceil(2) * LANES, bytes),
            };
            keys & match kv.values(at, len, values) {
                BlockValues::Int8 { values, .. } => {
                    values.panels().all(|(columns, fours)| read_rows(fours, len.div_ceil(QUAD), columns.len(), bytes))
                }
                BlockValues::Int4 { values, .. } => {
                    values.panels().all(|(columns, fours)| read_rows(fours, len.div_ceil(QUAD), columns.len(), bytes))
                }
                BlockValues::E4m3 { values, .. } => {
                    values.panels().all(|(columns, rows)| read_rows(rows, len, columns.len(), bytes))
                }
                BlockValues::Pairs(values) => {
                    values.panels().all(|(columns, pairs)| read_rows(pairs, len.div_ceil(2), columns.len(), bytes))
                }
                values => values.all_finite(s, len, dv),
            }
        };
    }
    finite
}

/// Reads rows of `columns` elements, one behind the other where they are evenly spaced, as far as they lie together at a time.
///
/// # Safety
/// There are `n` rows.
unsafe fn read_rows<T>(rows: Rows<T>, n: usize, columns: usize, bytes: impl Fn(*const i8, usize) -> bool) -> bool {
    let mut row = 0;
    while row < n {
        // SAFETY: row `row < n`.
        let (at, together) = unsafe { (rows.at(row), rows.evenly(row).min(n - row)) };
        bytes(at.cast(), together * columns * size_of::<T>());
        row += together;
    }
    true
}

/// One row block and one key block, on which the steps can be run one at a time.
#[derive(Debug)]
pub struct Bench {
    rows: usize,
    keys: usize,
    head_dim: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    packed: AlignedBuf,
    scores: AlignedBuf,
    state: [Vec<f32>; 4],
    out: AlignedBuf,
    key_sums: AlignedBuf,
}

/// Step of the main loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Transposing the keys.
    Pack,
    /// Scores: Q·Kᵀ.
    Scores,
    /// Maximum, exponentials, sum: in place, so that the second time it is the softmax of weights, which takes as long.
    Softmax,
    /// Products of weights and values: P·V.
    Values,
    /// Sums over rows for each key, as the gradients of values are: Pᵀ·Q.
    KeySums,
}

impl Bench {
    /// Makes a bench of rows (at most 96), keys (at most 256, whole panels of 16), and a head_dim of whole vectors;
    /// filled by `fill`.
    ///
    /// # Panics
    /// If the sizes are outside these limits.
    pub fn new(rows: usize, keys: usize, head_dim: usize, mut fill: impl FnMut() -> f32) -> Self {
        assert!(
            rows <= MAX_ROW_BLOCK
                && keys <= KEY_BLOCK
                && keys.is_multiple_of(LANES)
                && head_dim.is_multiple_of(LANES)
                && (1..=MAX_DIM).contains(&head_dim),
            "sizes no step takes: {rows} rows, {keys} keys, head_dim {head_dim}"
        );
        let lines = |floats| AlignedBuf::try_new(floats).expect("memory");
        let mut random = |n: usize| (0..n).map(|_| fill()).collect::<Vec<_>>();
        Self {
            rows,
            keys,
            head_dim,
            q: random(rows * head_dim),
            k: random(keys * head_dim),
            v: random(keys * head_dim),
            packed: lines(keys * head_dim),
            scores: lines(rows * SCORE_STRIDE),
            state: core::array::from_fn(|_| vec![0.0; MAX_ROW_BLOCK]),
            out: lines(rows * head_dim),
            key_sums: lines(keys * head_dim),
        }
    }

    /// Runs one step on the results of the steps before it.
    pub fn run(&mut self, isa: Isa, step: Step) {
        dispatch!(isa, |s| self.step(s, step));
    }

    /// Returns the scores of row `r`, after [`Step::Scores`]; its weights, after [`Step::Softmax`].
    pub fn scores(&self, r: usize) -> &[f32] {
        &self.scores.floats()[r * SCORE_STRIDE..][..self.keys]
    }

    /// Returns the output of row `r`, not normalised, after [`Step::Values`].
    pub fn out(&self, r: usize) -> &[f32] {
        &self.out.floats()[r * self.head_dim..][..self.head_dim]
    }

    /// Returns the sums of key `j`, after [`Step::KeySums`].
    pub fn key_sums(&self, j: usize) -> &[f32] {
        &self.key_sums.floats()[j * self.head_dim..][..self.head_dim]
    }

    /// Returns query row `r`, key `j`, value `j`.
    pub fn inputs(&self, r: usize, j: usize) -> [&[f32]; 3] {
        let d = self.head_dim;
        [&self.q[r * d..][..d], &self.k[j * d..][..d], &self.v[j * d..][..d]]
    }

    fn step<S: Simd>(&mut self, s: S, step: Step) {
        let (d, rows) = (self.head_dim, self.rows);
        let spans = vec![Span::new(0, self.keys, false); rows.div_ceil(S::TILE_ROWS)];
        let spans = Spans::of(&spans, S::TILE_ROWS);
        let [max, sum, rescale_prev, rescale_block] = &mut self.state;
        match step {
            Step::Pack => {
                let keys = Typed::F32(Rows::strided(self.k.as_ptr(), d as isize, 1));
                // SAFETY: `k` holds `keys` rows of `head_dim`.
                unsafe { pack::pack_keys(s, keys, [self.keys; 2], d, self.packed.floats_mut()) }
            }
            Step::Scores => {
                let queries: Vec<_> = self.q.chunks_exact(d).map(<[f32]>::as_ptr).collect();
                // SAFETY: the query pointers point to rows of `head_dim`.
                unsafe {
                    let queries = QueryRows { rows: &queries, head_dim: d, dtype: Dtype::F32, scale: 1.0 };
                    let panels = Typed::F32(Rows::strided(self.packed.floats().as_ptr(), (d * LANES) as isize, 1));
                    let run = &mut ScoreRun {
                        rows,
                        panels: 0..self.keys / LANES,
                        spans: &spans,
                        next_bias: None,
                        prefetch: &mut PrefetchQueue::nothing(),
                        out: self.scores.floats_mut(),
                    };
                    Floats::scores(s, run, queries, RunKeys { keys: Keys::Packed(panels), later: None });
                }
            }
            Step::Softmax => {
                max.fill(f32::NEG_INFINITY);
                sum.fill(0.0);
                let row_block = ScoreBlock { scores: self.scores.floats_mut(), spans: &spans, rows };
                softmax::softmax::<_, Floats>(
                    s,
                    row_block,
                    1.0,
                    SoftmaxState { max, sum, rescale_prev, rescale_block },
                );
            }
            // SAFETY: `v` holds `keys` rows of `head_dim`, whole vectors.
            Step::Values => unsafe {
                let values = Typed::F32(Rows::strided(self.v.as_ptr(), d as isize, 1));
                Floats::sums(
                    s,
                    &mut ValueSums {
                        weights: self.scores.floats(),
                        cols: d,
                        spans: &spans,
                        rows,
                        rescale_prev,
                        rescale_block,
                        fresh: false,
                        out: self.out.floats_mut(),
                        out_stride: d,
                        ends: None,
                        signs: WeightSigns::NonNegative,
                        prefetch: &mut PrefetchQueue::nothing(),
                    },
                    ColumnValues::Elements(values),
                );
            },
            // SAFETY: `q` holds `rows` rows of `head_dim`, whole vectors.
            Step::KeySums => unsafe {
                let sums = self.key_sums.floats_mut();
                sums.fill(0.0);
                key_sums::key_sums(
                    s,
                    KeySums {
                        weights: self.scores.floats(),
                        spans: &spans,
                        rows: (Rows::strided(self.q.as_ptr(), d as isize, 1), rows),
                        vecs: d / LANES,
                        sums,
                        chain: Chain::OfBlock,
                        prefetch: &mut PrefetchQueue::nothing(),
                    },
                );
            },
        }
    }
}
