//! Small matrix products, in plain loops that the compiler vectorises.
//!
//! A sum runs over its terms in order, from 0, and is then added to the destination. Vectors run over columns only, so
//! the bits depend neither on the tile nor on the register width.

use sdpa::Isa;
use sdpa_kernels::vectorized;

/// Rows of a tile: with sixteen columns, enough sums to keep the adders of AVX2 and AVX-512 busy without spilling.
pub(super) const ROWS: usize = 4;

/// Rows `stride` apart, read-only.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) data: &'a [f32],
    pub(super) stride: usize,
}

/// Rows `stride` apart, mutable.
pub(super) struct MatrixMut<'a> {
    pub(super) data: &'a mut [f32],
    pub(super) stride: usize,
}

/// Adds `a·b` to `c`, with `a` `m × k`, `b` `k × n`, `c` `m × n`.
#[inline(never)]
pub(super) fn add_product(isa: Isa, c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, sizes: [usize; 3]) {
    vectorized(
        isa,
        #[inline(always)]
        || strips(c, a, b, sizes),
    );
}

#[inline(always)]
fn strips(c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, [m, k, n]: [usize; 3]) {
    if k == 0 {
        return;
    }
    for row in (0..m).step_by(ROWS) {
        let c = MatrixMut { data: &mut c.data[row * c.stride..], stride: c.stride };
        let a = Matrix { data: &a.data[row * a.stride..], stride: a.stride };
        match m - row {
            1 => strip::<1>(c, a, b, [k, n]),
            2 => strip::<2>(c, a, b, [k, n]),
            3 => strip::<3>(c, a, b, [k, n]),
            _ => strip::<ROWS>(c, a, b, [k, n]),
        }
    }
}

#[inline(always)]
fn strip<const M: usize>(mut c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, [k, n]: [usize; 2]) {
    let rows: [&[f32]; M] = core::array::from_fn(|r| &a.data[r * a.stride..][..k]);
    let mut column = 0;
    while column < n {
        let b = Matrix { data: &b.data[column..], stride: b.stride };
        column += match n - column {
            // One row by sixteen columns would be a single chain of dependent additions on AVX-512.
            64.. if M == 1 => tile::<M, 64>(&mut c, column, rows, b),
            16.. => tile::<M, 16>(&mut c, column, rows, b),
            4.. => tile::<M, 4>(&mut c, column, rows, b),
            _ => tile::<M, 1>(&mut c, column, rows, b),
        };
    }
}

/// Computes a tile of `M` rows by `W` columns, from `column` on; returns `W`.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "one index into M slices")]
fn tile<const M: usize, const W: usize>(c: &mut MatrixMut<'_>, column: usize, a: [&[f32]; M], b: Matrix<'_>) -> usize {
    let k = a[0].len();
    // Slices of one length as far as the compiler can see: a bounds check in the loop below would cost more than the
    // loop.
    let a: [&[f32]; M] = a.map(|a| &a[..k]);
    let mut sums = [[0.0f32; W]; M];
    for t in 0..k {
        let b: &[f32; W] = b.data[t * b.stride..].first_chunk().expect("a row of b");
        for r in 0..M {
            sums[r] = add_multiple(sums[r], a[r][t], b);
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        let c = c.data[r * c.stride + column..].first_chunk_mut::<W>().expect("a row of c");
        *c = add_multiple(*c, 1.0, sums);
    }
    W
}

/// Returns `sums + x·b`. Arguments by value keep a tile's sums in registers: updated in place, a tile of four rows is
/// not vectorised and takes fifteen times as long.
#[inline(always)]
fn add_multiple<const W: usize>(mut sums: [f32; W], x: f32, b: &[f32; W]) -> [f32; W] {
    for w in 0..W {
        sums[w] += x * b[w];
    }
    sums
}

/// Returns Σ a·b in sixteen interleaved sums, added up by halves.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    let mut sums = [0.0f32; 16];
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += a * b;
    }
    for n in [8, 4, 2, 1] {
        let (low, high) = sums.split_at_mut(n);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
    }
    sums[0]
}
