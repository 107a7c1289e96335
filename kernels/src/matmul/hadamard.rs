//! Walsh–Hadamard transforms of rows: rotations that spread what a few large channels hold over all of them.
//!
//! The matrix is orthogonal and its own inverse, so that q·k = (Hq)·(Hk), and sums of transformed values are transformed sums.
//! (Ashkboos, Mohtashami, Croci, Li, Cameron, Jaggi, Alistarh, Hoefler and Hensman 2024, arXiv:2404.00456.)

use crate::simd::{LANES, Simd, lanes};

/// Basis that the elements of stored keys or values belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Basis {
    /// Channels, as the caller gives them.
    #[default]
    Channels,
    /// Walsh–Hadamard: a row is divided into blocks of a power of two channels, each the largest that is left, up to 256: 80 is
    /// 64 and 16, 576 is 256, 256 and 64. Element `i` of a block of `n` is Σ ±xⱼ / √n, with −1 where `i` and `j` have an odd number
    /// of ones in common. The one channel that an odd length leaves stays as it is.
    Hadamard,
}

/// Largest number of channels of a block.
pub(crate) const MAX_BLOCK: usize = 256;

/// Signs of the lanes in sums and differences of lanes 1, 2, 4 and 8 apart: −1 for the upper one of two.
const SIGNS: [[f32; LANES]; 4] = {
    let mut signs = [[1.0; LANES]; 4];
    let mut at = 0;
    while at < 4 * LANES {
        let (apart, i) = (1 << (at / LANES), at % LANES);
        if i & apart != 0 {
            signs[at / LANES][i] = -1.0;
        }
        at += 1;
    }
    signs
};

impl Basis {
    /// Takes a row from channels to this basis, or back: it is its own inverse. Blocks of longer rows begin at multiples of
    /// [`MAX_BLOCK`], so that these may be given apart.
    #[inline]
    pub(crate) fn transform<S: Simd>(self, s: S, row: &mut [f32]) {
        match self {
            Self::Channels => (),
            Self::Hadamard => s.vectorize(
                #[inline(always)]
                move || {
                    let mut left = row;
                    while let Some(n) = left.len().checked_ilog2() {
                        let (block, rest) = left.split_at_mut(MAX_BLOCK.min(1 << n));
                        transform_block(s, block);
                        left = rest;
                    }
                },
            ),
        }
    }
}

/// Transforms a block of a power of two elements by sums and differences: of lanes 1, 2, 4 and 8 apart, which are multiplied by the
/// factor, then of vectors 1, 2, 4, … apart.
#[inline(always)]
fn transform_block<S: Simd>(s: S, block: &mut [f32]) {
    let factor = 1.0 / (block.len() as f32).sqrt();
    if block.len() < LANES {
        let (n, mut lanes) = (block.len(), [[0.0; LANES]]);
        lanes[0][..n].copy_from_slice(block);
        transform_vectors(s, factor, &mut lanes);
        return block.copy_from_slice(&lanes[0][..n]);
    }
    let vectors = block.as_chunks_mut::<LANES>().0;
    // As many as there are registers for.
    let mut apart = if S::TILE_VECS > 1 && vectors.len() >= 8 { 8 } else { 4.min(vectors.len()) };
    match apart {
        8 => vectors.as_chunks_mut::<8>().0.iter_mut().for_each(|some| transform_vectors(s, factor, some)),
        4 => vectors.as_chunks_mut::<4>().0.iter_mut().for_each(|some| transform_vectors(s, factor, some)),
        2 => vectors.as_chunks_mut::<2>().0.iter_mut().for_each(|two| transform_vectors(s, factor, two)),
        _ => vectors.as_chunks_mut::<1>().0.iter_mut().for_each(|one| transform_vectors(s, factor, one)),
    }
    while apart < vectors.len() {
        for pair in vectors.chunks_exact_mut(2 * apart) {
            let (low, high) = pair.split_at_mut(apart);
            for (low, high) in low.iter_mut().zip(high) {
                let [a, b] = [lanes::load(s, low), lanes::load(s, high)];
                lanes::store(s, low, s.add(a, b));
                lanes::store(s, high, s.sub(a, b));
            }
        }
        apart *= 2;
    }
}

/// Transforms the lanes of each vector, multiplies them by a factor, and transforms vectors 1, 2, 4, … apart. Products with signs are
/// exact, so the bits are the same with and without FMA.
#[inline(always)]
fn transform_vectors<S: Simd, const N: usize>(s: S, factor: f32, vectors: &mut [[f32; LANES]; N]) {
    let (signs, factor) = (SIGNS.each_ref().map(|signs| lanes::load(s, signs)), s.splat(factor));
    let (mut all, mut apart) = ([factor; N], 1);
    for n in 0..N {
        let mut v = lanes::load(s, &vectors[n]);
        v = s.fma(v, signs[0], s.exchange::<1>(v));
        v = s.fma(v, signs[1], s.exchange::<2>(v));
        v = s.fma(v, signs[2], s.exchange::<4>(v));
        v = s.fma(v, signs[3], s.exchange::<8>(v));
        all[n] = s.mul(v, factor);
    }
    while apart < N {
        for n in (0..N).filter(|n| n & apart == 0) {
            let [a, b] = [all[n], all[n + apart]];
            (all[n], all[n + apart]) = (s.add(a, b), s.sub(a, b));
        }
        apart *= 2;
    }
    for n in 0..N {
        lanes::store(s, &mut vectors[n], all[n]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;

    /// Element of the matrix of a row's blocks.
    fn entry(i: usize, j: usize, dim: usize) -> f64 {
        let (mut start, mut left) = (0, dim);
        loop {
            let n = MAX_BLOCK.min(1 << left.ilog2());
            if i < start + n {
                let sign =
                    if ((i - start) & j.wrapping_sub(start)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                return if (start..start + n).contains(&j) { sign / (n as f64).sqrt() } else { 0.0 };
            }
            (start, left) = (start + n, left - n);
        }
    }

    #[test]
    fn rows_become_products_with_the_matrix_and_come_back() {
        for dim in [1, 2, 3, 8, 15, 16, 17, 31, 64, 80, 96, 128, 200, 255, 256, 257, 576] {
            let row: Vec<f32> = (0..dim).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
            let mut bits = Vec::new();
            for isa in Isa::available() {
                let mut own = row.clone();
                dispatch!(isa, |s| Basis::Hadamard.transform(s, &mut own));
                for (i, &x) in own.iter().enumerate() {
                    let expected: f64 = (0..dim).map(|j| entry(i, j, dim) * f64::from(row[j])).sum();
                    assert!((f64::from(x) - expected).abs() < 2e-5, "{dim}: element {i} is {x}, not {expected}");
                }
                bits.push(own.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
                dispatch!(isa, |s| Basis::Hadamard.transform(s, &mut own));
                assert!(own.iter().zip(&row).all(|(x, y)| (x - y).abs() < 2e-5), "{dim}: {own:?}");
            }
            assert!(bits.windows(2).all(|pair| pair[0] == pair[1]), "{dim}: bits differ by instruction set");
        }
    }
}
