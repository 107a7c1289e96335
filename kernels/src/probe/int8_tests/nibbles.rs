//! Tests of sums of int4 values and weights as bytes, against plain integers.

use super::*;
use crate::attention::steps::pv::Values;
use crate::attention::tiling::MAX_ROW_BLOCK;
use crate::matmul::byte_weights::{CENTRES, ROW_FLOATS, UNIT};
use crate::matmul::int4::{BLOCK, NibbleQuad};
use crate::simd::Lower;
use crate::simd::aligned::elements_mut;
use crate::tensor::rows::{KEY_BLOCK, Rows};

/// Weights of some rows and values of a block of columns; `bytes[four of keys][column][key]` holds columns 0 to 15 in lower
/// halves.
struct Sums<'a> {
    weights: &'a [[u8; KEY_BLOCK]],
    bytes: &'a [[[u8; 4]; LANES]],
    span: Span,
}

impl Sums<'_> {
    fn run<S: Steps>(&self, s: S) -> Vec<f32> {
        let rows = self.weights.len();
        let mut weights = vec![0.0; rows * ROW_FLOATS];
        for (row, bytes) in weights.chunks_exact_mut(ROW_FLOATS).zip(self.weights) {
            elements_mut(row)[..KEY_BLOCK].copy_from_slice(bytes);
            (row[UNIT], row[CENTRES]) = (1.0, 0.0);
        }
        let mut out = vec![f32::NAN; rows * BLOCK];
        // In tiles, as `Int4Tile` does.
        for first in (0..rows).step_by(S::TILE_ROWS) {
            let here = S::TILE_ROWS.min(rows - first);
            let mut values = Values {
                weights: &weights[first * ROW_FLOATS..],
                values: Rows::<NibbleQuad<Lower>>::strided(self.bytes.as_ptr().cast(), LANES as isize, 1),
                cols: BLOCK,
                spans: &[self.span],
                rows: here,
                rescale_prev: &[1.0; MAX_ROW_BLOCK],
                rescale_block: &[1.0; MAX_ROW_BLOCK],
                fresh: true,
                out: &mut out[first * BLOCK..],
                out_stride: BLOCK,
                ends: None,
                prefetch: &mut PrefetchQueue::nothing(),
            };
            // SAFETY: a block's values for every key, and rows of weights with their unit and centres.
            unsafe { s.with_int8_dot(&mut values) };
        }
        out
    }

    fn expected(&self) -> Vec<f32> {
        let mut out = Vec::new();
        for weights in self.weights {
            for column in 0..BLOCK {
                let nibble = |j: usize| {
                    let byte = self.bytes[j / 4][column % LANES][j % 4].cast_signed();
                    i32::from(if column < LANES { byte << 4 >> 4 } else { byte >> 4 })
                };
                let sum: i32 = self.span.keys().map(|j| i32::from(weights[j]) * nibble(j)).sum();
                out.push(sum as f32);
            }
        }
        out
    }

    fn check(&self) {
        for isa in Isa::available() {
            let got = dispatch!(isa, |s| self.run(s));
            assert_eq!(got, self.expected(), "{isa}");
        }
    }
}

#[test]
fn sums_are_those_of_plain_integers() {
    let mut numbers = Floats(11);
    for span in [Span::new(0, 16, false), Span::new(16, 48, false), Span::new(0, 256, false)] {
        for rows in 1..=7 {
            let mut byte = || numbers.byte().cast_unsigned();
            let weights: Vec<_> = (0..rows).map(|_| core::array::from_fn(|_| byte())).collect();
            let bytes: Vec<_> =
                (0..KEY_BLOCK / 4).map(|_| core::array::from_fn(|_| core::array::from_fn(|_| byte()))).collect();
            Sums { weights: &weights, bytes: &bytes, span }.check();
        }
    }
}

#[test]
fn the_largest_sums_are_exact() {
    for four in [[0x77; 4], [0x88; 4], [0x78, 0x87, 0x78, 0x87], [0x70, 0x08, 0x80, 0x07]] {
        let bytes = vec![[four; LANES]; KEY_BLOCK / 4];
        Sums { weights: &[[255; KEY_BLOCK]; 5], bytes: &bytes, span: Span::new(0, KEY_BLOCK, false) }.check();
    }
}
