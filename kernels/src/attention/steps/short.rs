//! Attention of a few rows over at most one panel of keys, in registers: scores, weights, weighted sums.

use crate::attention::steps::epilogue::{if_finite, normalised};
use crate::matmul::float_tile::{Chains, add_products};
use crate::matmul::pack::pack_few_keys;
use crate::matmul::tile_rows::TileRows;
use crate::matmul::tile_shape::{MAX_TILE_ROWS, next_part};
use crate::simd::exp::{self, Full};
use crate::simd::terms::{Columns, TermRows};
use crate::simd::{LANES, Simd};
use crate::tensor::rows::Rows;

/// Rows of a task, and the panel of keys that they see.
pub(crate) struct ShortRows<'a> {
    /// Address of each query.
    pub(crate) queries: &'a [*const f32],
    /// Keys, contiguous and evenly spaced.
    pub(crate) rows: Rows<f32>,
    /// Memory for the keys in a panel, `[head_dim][16]`.
    pub(crate) packed: &'a mut [f32],
    /// Number of keys, at least 1.
    pub(crate) keys: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    /// Values, evenly spaced.
    pub(crate) values: Rows<f32>,
    /// Length of a value, in whole vectors.
    pub(crate) value_dim: usize,
    /// Address that each row is written to.
    pub(crate) out: &'a [*mut f32],
}

/// Weights of `R` rows, and the factors that normalise these, each in two parts.
struct Weights<V, const R: usize> {
    of_keys: [[f32; LANES]; R],
    factors: [[V; 2]; R],
}

/// Writes the rows, normalised. `end` takes a row's number, the maximum of its scores and the sum of their exponentials,
/// and returns the factor that normalises it, in two parts. Returns true if everything accumulated is finite; if not, the
/// rows are not valid.
///
/// # Safety
/// Queries and keys have `head_dim` floats, values and outputs `value_dim`; each key has its value; the outputs are this
/// worker's alone.
#[inline(always)]
pub(crate) unsafe fn attend<S: Simd>(
    s: S,
    a: &mut ShortRows<'_>,
    mut end: impl FnMut(usize, f32, f32) -> (f32, f32),
) -> bool {
    assert!(a.queries.len() == a.out.len() && a.packed.len() >= LANES * a.head_dim);
    assert!((1..=LANES).contains(&a.keys) && a.value_dim.is_multiple_of(LANES));
    const { assert!(S::TILE_ROWS <= MAX_TILE_ROWS) };
    // SAFETY: the caller guarantees the keys.
    unsafe { pack_few_keys(a.rows, a.keys, a.head_dim, a.packed) };
    let (mut row, mut finite) = (0, s.splat(0.0));
    while row < a.queries.len() {
        let rows = next_part(a.queries.len() - row, S::TILE_ROWS);
        // SAFETY: same contract, for some of the rows.
        let found = unsafe { by_tile_rows!(rows, most S::TILE_ROWS, |R| tile::<S, R>(s, a, row, &mut end)) };
        finite = s.add(finite, found);
        row += rows;
    }
    s.reduce_sum(finite) == 0.0
}

/// Computes `R` rows, from `first` on. Returns zeros if everything accumulated is finite.
///
/// # Safety
/// As [`attend`], for these rows.
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize>(
    s: S,
    a: &ShortRows<'_>,
    first: usize,
    end: &mut impl FnMut(usize, f32, f32) -> (f32, f32),
) -> S::V {
    // SAFETY: same contract.
    let scores = unsafe { scores::<S, R>(s, a, first) };
    let mut exponentials = scores;
    let mut maxima = [0.0; R];
    for r in 0..R {
        maxima[r] = s.reduce_max(scores[r]);
        let reference = if maxima[r] == f32::NEG_INFINITY { 0.0 } else { maxima[r] };
        exponentials[r] = s.sub(scores[r], s.splat(reference));
    }
    // Two at a time: more would not have registers everywhere.
    let (pairs, rest) = exponentials.as_chunks_mut::<2>();
    for pair in pairs {
        *pair = exp::end::<S, Full, 2>(s, exp::begin(s, *pair));
    }
    for x in rest {
        *x = exp::exp(s, *x);
    }
    let mut weights = Weights { of_keys: [[0.0; LANES]; R], factors: [[s.splat(0.0); 2]; R] };
    for r in 0..R {
        // SAFETY: sixteen floats.
        unsafe { s.store(weights.of_keys[r].as_mut_ptr(), exponentials[r]) };
        let (high, low) = end(first + r, maxima[r], s.reduce_sum(exponentials[r]));
        weights.factors[r] = [s.splat(high), s.splat(low)];
    }
    // SAFETY: same contract.
    unsafe { write(s, a, first, &weights) }
}

/// Computes the scores of `R` rows; −∞ beyond the keys.
///
/// # Safety
/// As [`attend`], for these rows.
#[inline(always)]
unsafe fn scores<S: Simd, const R: usize>(s: S, a: &ShortRows<'_>, first: usize) -> [S::V; R] {
    let queries: &[*const f32; R] = a.queries[first..].first_chunk().expect("R rows");
    let keys = Columns { first: a.packed.as_ptr(), step: LANES as isize, apart: 0 };
    let mut kept = [[0.0; LANES]; R];
    let kept = TileRows::over(&mut kept);
    // SAFETY: the queries have the depth, as the caller guarantees, and so have the packed keys, as `attend` asserts.
    let scores: [[S::V; 1]; R] = unsafe { Chains::new::<S>(a.head_dim).dot_products(s, queries, keys, kept, || ()) };
    let (there, hidden) = (u16::MAX >> (LANES - a.keys), s.splat(f32::NEG_INFINITY));
    let mut visible = [hidden; R];
    for r in 0..R {
        visible[r] = s.select_bits(there, hidden, s.mul(scores[r][0], s.splat(a.scale)));
    }
    visible
}

/// Writes the weighted sums of `R` rows, times their factors. Returns zeros if all sums are finite.
///
/// # Safety
/// As [`attend`], for these rows.
#[inline(always)]
unsafe fn write<S: Simd, const R: usize>(s: S, a: &ShortRows<'_>, first: usize, weights: &Weights<S::V, R>) -> S::V {
    let out: &[*mut f32; R] = a.out[first..].first_chunk().expect("R rows");
    let rows = TermRows::<R>::strided(weights.of_keys.as_ptr().cast(), LANES, 1);
    let mut finite = s.splat(0.0);
    for column in (0..a.value_dim).step_by(LANES) {
        let mut sums = [[s.splat(0.0); 1]; R];
        // SAFETY: each of at most sixteen keys has its value, which has these columns.
        unsafe {
            let values = Columns { first: a.values.at(0).add(column), step: a.values.step(), apart: 0 };
            add_products(s, rows, values, 0..a.keys, &mut sums, || ());
        }
        for r in 0..R {
            finite = if_finite(s, sums[r][0], finite);
            // SAFETY: sixteen columns of a row that is this worker's.
            unsafe { s.store(out[r].add(column), normalised(s, sums[r][0], weights.factors[r])) };
        }
    }
    finite
}
