//! Tests of sums of int4 values and weights as bytes, against plain integers.

use super::*;
use crate::attention::products::pv::{ValueSums, Values, WeightSigns};
use crate::attention::products::pv_int4::{ByteRow, Int4Values, RowTile};
use crate::kv::key_block::Int4Numbers;
use crate::kv::value_panels::{ValueLayout, ValueOrder, ValuePanels};
use crate::matmul::byte_weights::{CENTRES, ROW_FLOATS, UNIT};
use crate::matmul::int4::{BLOCK, Int4};
use crate::matmul::int8::QUAD;
use crate::matmul::operands::{Int4Fours, MulAdd};
use crate::matmul::tile_shape::{MAX_TILE_ROWS, next_part};
use crate::simd::aligned::elements_mut;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86::avx2::Avx2;
use crate::simd::{Int8Dot, Int8DotWork, Simd, lanes};
use crate::tensor::rows::{KEY_BLOCK, Rows};

/// Weights of some rows and values of a block of columns; `bytes[four of keys][column][key]` holds columns 0 to 15 in lower
/// halves.
struct Sums<'a> {
    weights: &'a [[u8; KEY_BLOCK]],
    bytes: &'a [[[u8; 4]; LANES]],
    span: Span,
}

/// Rows of a tile of a block of columns, and their weights.
struct Multiply<'a, 'b>(Values<'a, 'b, Int4Values>, Vec<ByteRow>);

impl Int8DotWork for Multiply<'_, '_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) {
        let Self(mut values, weights) = self;
        values.check::<S>(0);
        let (mut row, rows, span) = (0, values.sums.rows, values.sums.spans[0]);
        while row < rows {
            let here = next_part(rows - row, <Int4Fours as MulAdd<S>>::TILE_ROWS);
            by_tile_rows!(here, most <Int4Fours as MulAdd<S>>::TILE_ROWS, |MR| {
                let weights = weights[row..].first_chunk::<MR>().expect("as many rows");
                // SAFETY: there are these rows, and the block's values for every key.
                s.vectorize(
                    #[inline(always)]
                    || unsafe { values.multiply::<S, MR>(s, RowTile { row, span }, 0, weights) },
                );
            });
            row += here;
        }
    }
}

impl Sums<'_> {
    /// Runs `multiply` on tiles of at most `tile_rows` rows.
    fn run(&self, tile_rows: usize, multiply: impl Fn(Multiply<'_, '_>)) -> Vec<f32> {
        let mut weights = vec![[0.0; ROW_FLOATS]; self.weights.len()];
        for (row, bytes) in weights.iter_mut().zip(self.weights) {
            elements_mut(row)[..KEY_BLOCK].copy_from_slice(bytes);
            (row[UNIT], row[CENTRES]) = (1.0, 0.0);
        }
        let layout = ValueLayout { order: ValueOrder::Vectors, rows: KEY_BLOCK / QUAD, width: LANES };
        let mut out = vec![f32::NAN; weights.len() * BLOCK];
        for (weights, out) in weights.chunks(tile_rows).zip(out.chunks_mut(tile_rows * BLOCK)) {
            let sums = &mut ValueSums {
                weights: &[],
                cols: BLOCK,
                spans: &[self.span],
                rows: weights.len(),
                rescale_prev: &[1.0; MAX_TILE_ROWS],
                rescale_block: &[1.0; MAX_TILE_ROWS],
                fresh: true,
                out,
                out_stride: BLOCK,
                ends: None,
                signs: WeightSigns::NonNegative,
                prefetch: &mut PrefetchQueue::nothing(),
            };
            let values = Int4Values {
                panels: ValuePanels::together(self.bytes.as_ptr().cast(), layout),
                numbers: Int4Numbers { kind: Int4::Symmetric, first: Rows::strided(core::ptr::null(), 0, 1), step: 0 },
            };
            multiply(Multiply(Values { values, sums }, weights.to_vec()));
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
            // SAFETY: the work asks for nothing.
            let got = dispatch!(isa, |s| self.run(isa.tile().0, |work| unsafe { s.with_int8_dot(work) }));
            assert_eq!(got, self.expected(), "{isa}");
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = Avx2::detect() {
            // SAFETY: the work asks for nothing.
            let got = self.run(Avx2::TILE_ROWS, |work| unsafe { work.run(avx2) });
            assert_eq!(got, self.expected(), "avx2 without vnni");
        }
    }
}

/// Eight elements of a query with a load of keys.
#[derive(Clone, Copy)]
struct Eight<'a>([i8; 8], &'a [[i8; 4]; LANES]);

impl Int8DotWork for Eight<'_> {
    type Output = [f32; LANES];
    #[inline(always)]
    unsafe fn run<S: Int8Dot>(self, s: S) -> [f32; LANES] {
        let [a, b, c, d, e, f, g, h] = self.0;
        let (lower, upper) = (Query4::new([a, b, c, d]), Query4::new([e, f, g, h]));
        s.vectorize(
            #[inline(always)]
            || {
                // SAFETY: a load is 64 bytes.
                let keys = unsafe { s.nibbles(self.1.as_ptr().cast()) };
                let sums = s.dot8(s.start_nibbles(lower.total() + upper.total()), &lower, &upper, keys);
                let mut out = [0.0; LANES];
                lanes::store(s, &mut out, s.to_f32(sums));
                out
            },
        )
    }
}

#[test]
fn scores_are_those_of_plain_integers() {
    let mut numbers = Floats(13);
    for query in [[127; 8], [-127; 8], [127, -127, 127, -127, -127, 127, -127, 127], [0; 8]] {
        for case in 0..18 {
            let query = if case < 2 { query } else { query.map(|_| numbers.byte()) };
            let byte = |n: i8| if case < 2 { [0x77, -0x78][case] } else { n };
            let keys = core::array::from_fn(|_| core::array::from_fn(|_| byte(numbers.byte())));
            let nibble = |key: usize, e: usize| {
                let byte: i8 = keys[key][e % 4];
                i32::from(if e < 4 { byte << 4 >> 4 } else { byte >> 4 })
            };
            let want: [f32; LANES] =
                core::array::from_fn(|key| (0..8).map(|e| i32::from(query[e]) * nibble(key, e)).sum::<i32>() as f32);
            let work = Eight(query, &keys);
            for isa in Isa::available() {
                // SAFETY: the work asks for nothing.
                assert_eq!(dispatch!(isa, |s| unsafe { s.with_int8_dot(work) }), want, "{isa}");
            }
            #[cfg(target_arch = "x86_64")]
            if let Some(avx2) = Avx2::detect() {
                // SAFETY: the work asks for nothing.
                assert_eq!(unsafe { work.run(avx2) }, want, "avx2 without vnni");
            }
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
