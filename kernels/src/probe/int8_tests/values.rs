//! Tests of sums of int8 values, against the f32 step and against plain sums.

use super::*;
use crate::attention::steps::pv::Values;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::tensor::any::Typed;
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::rows::Rows;

/// Runs the int8 step and the f32 step on the same numbers: `[int8, f32]`.
struct BothValues<'a> {
    weights: &'a [f32],
    bytes: &'a [i8],
    floats: &'a [f32],
    rows: usize,
    keys: usize,
    width: usize,
}

impl BothValues<'_> {
    fn run<S: Steps>(self, s: S) -> [Vec<f32>; 2] {
        let Self { weights, bytes, floats, rows, keys, width } = self;
        let spans = vec![Span::new(0, keys, false); rows.div_ceil(S::TILE_ROWS)];
        let (rescale_prev, rescale_block) = (vec![0.75; rows], vec![1.3; rows]);
        let start: Vec<f32> = (0..rows * width).map(|i| i as f32 / 7.0).collect();
        let mut out = [start.clone(), start];
        let [from_bytes, from_floats] = &mut out;
        macro_rules! values {
            ($values:expr, $out:expr) => {
                Values {
                    weights,
                    values: $values,
                    cols: width,
                    spans: &spans,
                    rows,
                    rescale_prev: &rescale_prev,
                    rescale_block: &rescale_block,
                    fresh: false,
                    out: $out,
                    out_stride: width,
                    ends: None,
                    prefetch: &mut PrefetchQueue::nothing(),
                }
            };
        }
        let bytes = Rows::strided(bytes.as_ptr(), width as isize, 1);
        let floats = Typed::F32(Rows::strided(floats.as_ptr(), width as isize, 1));
        // SAFETY: both hold `keys` rows of `width`, whole vectors.
        unsafe {
            s.values_int8(values!(bytes, from_bytes));
            s.values(values!(floats, from_floats));
        }
        out
    }
}

#[test]
fn values_of_bytes_are_those_of_the_same_floats() {
    let mut numbers = Floats(7);
    for width in [16, 64, 80, 128] {
        for keys in [1, 15, 16, 17, 255, 256] {
            for rows in 1..=7 {
                let bytes: Vec<_> = (0..keys * width).map(|_| numbers.byte()).collect();
                let floats: Vec<_> = bytes.iter().map(|&b| f32::from(b)).collect();
                let weights = numbers.floats(rows * SCORE_STRIDE);
                let mut fused: Option<Vec<f32>> = None;
                for isa in Isa::available() {
                    let case = BothValues { weights: &weights, bytes: &bytes, floats: &floats, rows, keys, width };
                    let [a, b] = dispatch!(isa, |s| case.run(s));
                    assert!(a.iter().zip(&b).all(|(&a, &b)| same(a, b)), "{isa}: {rows} × {keys} × {width}");
                    if isa.has_fma() {
                        let first = fused.get_or_insert_with(|| a.clone());
                        assert!(a.iter().zip(&*first).all(|(&a, &b)| same(a, b)), "{isa}");
                    }
                }
            }
        }
    }
}

#[test]
fn weights_take_their_keys_factors() {
    struct Scale<'a>(&'a mut [f32], &'a [f32], Span);
    impl Scale<'_> {
        fn run<S: Steps>(self, s: S) {
            let spans = vec![self.2; 7usize.div_ceil(S::TILE_ROWS)];
            s.scale_columns(ScoreBlock { scores: self.0, spans: &spans, rows: 7 }, self.1);
        }
    }
    let mut numbers = Floats(8);
    let mut before = numbers.floats(7 * SCORE_STRIDE);
    before[40] = 0.0;
    before[SCORE_STRIDE + 40] = -0.0;
    let mut factors = numbers.floats(KEY_BLOCK);
    factors[40] = f32::NAN;
    for isa in Isa::available() {
        for span in [Span::new(16, 100, false), Span::EMPTY, Span::new(0, KEY_BLOCK, false)] {
            let mut after = before.clone();
            dispatch!(isa, |s| Scale(&mut after, &factors[..span.end_panel() * LANES], span).run(s));
            for (i, (&before, &after)) in before.iter().zip(&after).enumerate() {
                let j = i % SCORE_STRIDE;
                let inside = (span.first_panel()..span.end_panel()).contains(&(j / LANES));
                let want = if !inside {
                    before
                } else if before == 0.0 {
                    0.0
                } else {
                    before * factors[j]
                };
                assert!(same(after, want), "{isa}: row {}, key {j}", i / SCORE_STRIDE);
            }
        }
    }
}
