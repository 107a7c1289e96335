//! Int4 format of keys and values: rows in blocks of 32 elements, four bits each.
//!
//! Each block has a scale s and a centre c, both `f16`; the centre may be left out, and then is 0. An element x is stored as
//! the integer n nearest to (x − c)/s, ±7 at most, so that x ≈ c + s·n with an error of half of s. Query rows are bytes, as
//! for int8 keys (`int8.rs`). A score is (scale of the query row)·Σ (s·Σ q·n + c·Σ q), a term for each block of the key,
//! with sums over the block that are exact integers. An output is Σ (w·s)·n + Σ w·c, with weights w·s rounded to bytes
//! (`byte_weights.rs`).
//!
//! ```text
//! keys     [panel of 16 keys][block][4][16][4 bytes]     byte e of part i: element 4·i + e, and element 16 + 4·i + e in its upper half
//! scales   [panel of 16 keys][block][scale, centre][16]
//! values   [block of columns][four keys][16][4 bytes]    byte e of column c: key e, and column c + 16 in its upper half
//! scales   [block of columns][scale, centre][key]
//! ```

use crate::matmul::int8::{QUAD, QuerySize, ROUND, Row};
use crate::simd::aligned::Plain;
use crate::simd::{Half, LANES, Query4, Simd};
use crate::tensor::element::{Element, F16};
use core::marker::PhantomData;

/// Number of elements of a block.
pub(crate) const BLOCK: usize = 32;

/// Number of groups of four elements in a block.
pub(crate) const BLOCK_QUADS: usize = BLOCK / QUAD;

/// Returns the sizes of a query row that meets int4 keys.
pub(crate) const fn query_size(head_dim: usize) -> QuerySize {
    QuerySize { quads: blocks(head_dim) * BLOCK_QUADS, sums: blocks(head_dim) }
}

/// Number of bytes of sixteen keys of a block, or of sixteen values.
pub(crate) const BLOCK_BYTES: usize = BLOCK / 2 * LANES;

/// Largest integer.
const MOST: f32 = 7.0;

/// Returns the number of blocks of a row.
pub(crate) const fn blocks(dim: usize) -> usize {
    dim.div_ceil(BLOCK)
}

/// Kind of int4: which numbers are stored beside each block of 32 elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Int4 {
    /// A scale: elements are symmetric about 0.
    Symmetric,
    /// A scale and a centre, about which elements are symmetric.
    Centred,
}

impl Int4 {
    /// Returns how many numbers a block has.
    pub(crate) const fn numbers(self) -> usize {
        match self {
            Self::Symmetric => 1,
            Self::Centred => 2,
        }
    }

    /// Returns the number of bytes that the numbers of `rows` rows of `dim` elements take.
    pub(crate) const fn number_bytes(self, rows: usize, dim: usize) -> usize {
        rows * blocks(dim) * self.numbers() * size_of::<F16>()
    }
}

/// Values of four keys in two columns, sixteen apart, a half of each byte for either. Columns are counted from those of `H`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct NibbleQuad<H>(pub(crate) [u8; QUAD], PhantomData<H>);

// SAFETY: four bytes; every bit pattern is valid, and a byte's alignment is enough.
unsafe impl<H: Half> Plain for NibbleQuad<H> {}

/// Quantises a block of at most 32 elements of magnitude below 65520; the rest of `out` becomes zeros.
/// Returns its scale and its centre.
pub(crate) fn quantise<S: Simd>(s: S, xs: &[f32], kind: Int4, out: &mut [i8; BLOCK]) -> [F16; 2] {
    s.vectorize(
        #[inline(always)]
        move || {
            let (mut least, mut most) = (0.0f32, 0.0f32);
            if let (Int4::Centred, Some(&first)) = (kind, xs.first()) {
                (least, most) = (first, first);
            }
            let [least_of, most_of] =
                [|a: f32, x: f32| if x < a { x } else { a }, |a: f32, x: f32| if x > a { x } else { a }];
            let (vectors, rest) = xs.as_chunks::<LANES>();
            let (mut lows, mut highs) = ([least; LANES], [most; LANES]);
            for vector in vectors {
                lows = core::array::from_fn(|i| least_of(lows[i], vector[i]));
                highs = core::array::from_fn(|i| most_of(highs[i], vector[i]));
            }
            for (&low, &high) in lows.iter().chain(rest).zip(highs.iter().chain(rest)) {
                (least, most) = (least_of(least, low), most_of(most, high));
            }
            let centre = match kind {
                Int4::Symmetric => F16::from_f32(0.0),
                Int4::Centred => F16::from_f32(0.5 * least + 0.5 * most),
            };
            let c = centre.widen();
            let scale = scale(if most - c > c - least { most - c } else { c - least });
            let s = scale.widen();
            out.fill(0);
            if s > 0.0 {
                for (n, x) in out.iter_mut().zip(xs) {
                    *n = ((x - c) / s + ROUND).to_bits() as i8;
                }
            }
            [scale, centre]
        },
    )
}

/// Returns the smallest scale by which no element exceeds [`MOST`].
#[inline(always)]
fn scale(largest: f32) -> F16 {
    let near = F16::from_f32(largest / MOST);
    if near.widen() * MOST < largest { F16(near.0 + 1) } else { near }
}

/// Place of an element among keys or values: a byte and the half of it, and the numbers of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) byte: usize,
    upper: bool,
    scale: usize,
    centre: usize,
}

impl Place {
    /// Returns the place of element `d` of key `j`, where a key has `blocks` blocks.
    pub(crate) const fn of_key(kind: Int4, blocks: usize, [j, d]: [usize; 2]) -> Self {
        let (block, i) = (j / LANES * blocks + d / BLOCK, d % (BLOCK / 2));
        let byte = block * BLOCK_BYTES + (i / QUAD * LANES + j % LANES) * QUAD + i % QUAD;
        let scale = block * kind.numbers() * LANES + j % LANES;
        Self { byte, upper: d % BLOCK >= BLOCK / 2, scale, centre: scale + LANES }
    }

    /// Returns the place of column `c` of value `j`, among `rows` values.
    pub(crate) const fn of_value(kind: Int4, rows: usize, [j, c]: [usize; 2]) -> Self {
        let byte = (c / BLOCK * rows + j / QUAD * QUAD) * LANES + c % LANES * QUAD + j % QUAD;
        let scale = c / BLOCK * kind.numbers() * rows + j;
        Self { byte, upper: c % BLOCK >= LANES, scale, centre: scale + rows }
    }

    /// Returns the indices of the block's scale and centre.
    pub(crate) const fn numbers(self) -> [usize; 2] {
        [self.scale, self.centre]
    }

    /// Returns the element, widened.
    pub(crate) fn read(self, kind: Int4, bytes: &[u8], numbers: &[F16]) -> f32 {
        let byte = bytes[self.byte].cast_signed();
        let n = f32::from(if self.upper { byte >> 4 } else { byte << 4 >> 4 });
        let scaled = numbers[self.scale].widen() * n;
        match kind {
            Int4::Symmetric => scaled,
            Int4::Centred => numbers[self.centre].widen() + scaled,
        }
    }

    /// Writes an element of the first half of a block, and the one of the second half that shares its byte.
    pub(crate) fn write(self, halves: [i8; 2], bytes: &mut [u8]) {
        let [lower, upper] = halves.map(|n| n.cast_unsigned() & 0x0F);
        bytes[self.byte] = lower | upper << 4;
    }

    /// Writes the numbers of the element's block.
    pub(crate) fn write_numbers(self, kind: Int4, [scale, centre]: [F16; 2], numbers: &mut [F16]) {
        numbers[self.scale] = scale;
        if kind == Int4::Centred {
            numbers[self.centre] = centre;
        }
    }
}

/// Gives each block of a query row the sum of its bytes, and the row's factor.
#[inline(always)]
pub(crate) fn block_sums(row: Row, quads: &[Query4], blocks: &mut [Row]) {
    for (block, quads) in blocks.iter_mut().zip(quads.as_chunks::<BLOCK_QUADS>().0) {
        let mut total = 0;
        for quad in quads {
            total += quad.total();
        }
        *block = Row { total, ..row };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::portable::Portable;

    /// Pseudo-random numbers between −1 and 1.
    fn numbers(n: usize) -> impl Iterator<Item = f32> {
        let mut state = 1u64;
        (0..n).map(move |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
    }

    /// Returns a block's error, in its scale, and its integers.
    fn error(xs: &[f32], kind: Int4) -> (f32, [i8; BLOCK]) {
        let mut out = [99; BLOCK];
        let [scale, centre] = quantise(Portable, xs, kind, &mut out).map(|x| x.widen());
        let off = |(x, n): (&f32, &i8)| (f64::from(centre) + f64::from(scale) * f64::from(*n) - f64::from(*x)).abs();
        let most = xs.iter().zip(&out).map(off).fold(0.0, f64::max);
        assert!(out.iter().all(|n| (-7..=7).contains(n)) && out[xs.len()..].iter().all(|n| *n == 0));
        (if scale > 0.0 { (most / f64::from(scale)) as f32 } else { most as f32 }, out)
    }

    #[test]
    fn elements_are_off_by_half_a_scale() {
        for kind in [Int4::Symmetric, Int4::Centred] {
            for len in [1, 2, 31, 32] {
                for size in [1.0, 1e-3, 1e-6, 6e4] {
                    for shift in [0.0, 0.9, -0.9] {
                        let xs: Vec<f32> = numbers(len).map(|x| size * (x * 0.1 + shift)).collect();
                        let (off, _) = error(&xs, kind);
                        assert!(off <= 0.501, "{kind:?}, {len} of {size} at {shift}: {off} scales");
                    }
                }
            }
            for zeros in [[0.0; 3], [-0.0; 3]] {
                assert_eq!(error(&zeros, kind), (0.0, [0; BLOCK]));
            }
            let (off, _) = error(&[2f32.powi(-26), -2f32.powi(-26)], kind);
            assert!(off <= 0.501, "{off}: smaller than any scale");
        }
        // The bounds of the documentation.
        for (kind, size, shift) in
            [(Int4::Symmetric, 1.0, 0.3), (Int4::Centred, 0.05, 130.0), (Int4::Centred, 3.0, -1.0)]
        {
            let xs: Vec<f32> = numbers(BLOCK).map(|x| size * x + shift).collect();
            let [low, high] = [f32::min, f32::max].map(|f| xs.iter().copied().fold(xs[0], f));
            let largest = high.max(-low);
            let bound = match kind {
                Int4::Symmetric => largest / 14.0,
                Int4::Centred => (high - low) / 28.0 + largest / 28_672.0,
            };
            let mut out = [0; BLOCK];
            let [scale, centre] = quantise(Portable, &xs, kind, &mut out).map(|x| x.widen());
            let off = xs.iter().zip(out).map(|(x, n)| (centre + scale * f32::from(n) - x).abs()).fold(0.0, f32::max);
            assert!(
                off <= 1.001 * bound + 3e-8 + 1e-7 * largest && 3.0 * off > bound,
                "{kind:?}: {off}, bound {bound}"
            );
        }
        // What a centre is for.
        let xs: Vec<f32> = numbers(BLOCK).map(|x| 10.0 + x).collect();
        let mut out = [0; BLOCK];
        let [symmetric, centred] =
            [Int4::Symmetric, Int4::Centred].map(|kind| quantise(Portable, &xs, kind, &mut out)[0].widen());
        assert!(centred * 9.0 < symmetric, "{centred}, {symmetric}");
    }

    #[test]
    fn places_are_the_elements_own() {
        let (dim, rows) = (70, 48);
        for kind in [Int4::Symmetric, Int4::Centred] {
            let of_key = |j: usize, d: usize| Place::of_key(kind, blocks(dim), [j, d]);
            let of_value = |j: usize, d: usize| Place::of_value(kind, rows, [j, d]);
            for of in [&of_key as &dyn Fn(usize, usize) -> Place, &of_value] {
                let mut bytes = vec![0u8; rows * blocks(dim) * BLOCK / 2];
                let mut own = vec![F16(0); rows * blocks(dim) * kind.numbers()];
                for (j, d) in (0..rows).flat_map(|j| (0..dim).map(move |d| (j, d))) {
                    let n = |d: usize| ((j * 31 + d * 7) % 15) as i8 - 7;
                    if d % BLOCK < BLOCK / 2 {
                        of(j, d).write([n(d), n(d + BLOCK / 2)], &mut bytes);
                    }
                    let number = |x: usize| F16::from_f32(x as f32);
                    of(j, d).write_numbers(kind, [number(1 + j), number(j + d / BLOCK * 64)], &mut own);
                }
                for (j, d) in (0..rows).flat_map(|j| (0..dim).map(move |d| (j, d))) {
                    let n = ((j * 31 + d * 7) % 15) as f32 - 7.0;
                    let centre = if kind == Int4::Centred { (j + d / BLOCK * 64) as f32 } else { 0.0 };
                    assert_eq!(of(j, d).read(kind, &bytes, &own), centre + n * (1 + j) as f32, "{j}, {d}");
                }
            }
        }
    }
}
