//! Tests of sums of int8 values, against plain integers.

use super::*;
use crate::attention::products::int8::round_weights;
use crate::attention::products::pv::{ValueSums, Values, WeightSigns};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::simd::Simd;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Int8DotWork, x86::avx2::Avx2};
use crate::tensor::rows::{KEY_BLOCK, Rows};

/// Rounds weights of one span of keys and multiplies them by bytes.
struct Sums<'a> {
    weights: &'a [f32],
    scales: &'a [f32],
    values: &'a [ValueQuad],
    rows: usize,
    span: Span,
    width: usize,
}

/// Running outputs, and what the old ones and the block's sums are multiplied by.
const BEFORE: f32 = 3.5;
const RESCALE: [f32; 2] = [0.75, 1.3];

impl Sums<'_> {
    fn run<S: Simd>(self, s: S) -> Vec<f32> {
        self.by(
            S::TILE_ROWS,
            |row_block| round_weights(s, row_block, self.scales),
            // SAFETY: as `by` says.
            |values| unsafe { s.with_int8_dot(values) },
        )
    }

    /// Runs the two steps: the first rounds weights; the second has values of whole vectors for every key of a span, and
    /// rounded weights.
    fn by(
        &self,
        tile_rows: usize,
        round: impl FnOnce(ScoreBlock<'_>),
        multiply: impl FnOnce(Values<'_, '_, Rows<ValueQuad>>),
    ) -> Vec<f32> {
        let &Self { weights, values, rows, span, width, .. } = self;
        let spans = Spans::of(&vec![span; rows.div_ceil(tile_rows)], tile_rows);
        let [rescale_prev, rescale_block] = RESCALE.map(|factor| vec![factor; rows]);
        let (mut weights, mut out) = (weights.to_vec(), vec![BEFORE; rows * width]);
        round(ScoreBlock { scores: &mut weights, spans: &spans, rows });
        let sums = &mut ValueSums {
            weights: &weights,
            cols: width,
            spans: &spans,
            rows,
            rescale_prev: &rescale_prev,
            rescale_block: &rescale_block,
            fresh: false,
            out: &mut out,
            out_stride: width,
            ends: None,
            signs: WeightSigns::NonNegative,
            prefetch: &mut PrefetchQueue::nothing(),
        };
        multiply(Values { values: Rows::strided(values.as_ptr(), width as isize, 1), sums });
        out
    }

    /// Computes the same with plain integers, `fused` or not, and checks the error of the rounded weights.
    fn expected(&self, fused: bool) -> Vec<f32> {
        let keys = self.span.first_panel() * LANES..self.span.end_panel() * LANES;
        let mut out = Vec::new();
        for weights in self.weights.chunks_exact(SCORE_STRIDE).take(self.rows) {
            let scaled: Vec<f32> = keys.clone().map(|j| weights[j] * self.scales[j]).collect();
            let most = scaled.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let words: Vec<i64> = scaled.iter().map(|x| (x * (32767.0 / most)).round_ties_even() as i64).collect();
            for (x, &word) in scaled.iter().zip(&words) {
                let error = (f64::from(*x) - word as f64 * f64::from(most) / 32767.0).abs();
                assert!(error <= f64::from(most) * 0.51 / 32767.0, "{x} of {most} as {word}: off by {error}");
            }
            for column in 0..self.width {
                let byte = |j: usize| i64::from(self.values[j / 4 * self.width + column].0[j % 4]);
                let sum: i64 = keys.clone().zip(&words).map(|(j, word)| word * byte(j)).sum();
                let sum = i32::try_from(sum).expect("a sum that fits") as f32 * (1.0 / 32767.0) * most;
                let before = BEFORE * RESCALE[0];
                out.push(if fused { sum.mul_add(RESCALE[1], before) } else { sum * RESCALE[1] + before });
            }
        }
        out
    }

    /// Compares every form of every instruction set with plain integers.
    fn check(&self) {
        let [fused, apart] = [true, false].map(|fused| self.expected(fused));
        for isa in Isa::available() {
            let got = dispatch!(isa, |s| Sums { ..*self }.run(s));
            assert_eq!(got, if isa.has_fma() { &*fused } else { &*apart }, "{isa}");
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = Avx2::detect() {
            // Weights may have been rounded by AVX-512.
            for isa in Isa::available().filter(|isa| isa.tile().0 == Avx2::TILE_ROWS) {
                let round = |row_block: ScoreBlock<'_>| dispatch!(isa, |s| round_weights(s, row_block, self.scales));
                // SAFETY: as `by` says.
                let got = self.by(Avx2::TILE_ROWS, round, |values| unsafe { values.run(avx2) });
                assert_eq!(got, fused, "{isa}, then avx2 without vnni");
            }
        }
    }
}

#[test]
fn sums_of_values_are_those_of_plain_integers() {
    let mut numbers = Floats(7);
    for width in [16, 64, 80, 128] {
        for span in [Span::new(0, 16, false), Span::new(16, 48, false), Span::new(0, 256, false)] {
            for rows in 1..=13 {
                let values: Vec<_> = (0..KEY_BLOCK / 4 * width)
                    .map(|_| ValueQuad([numbers.byte(), numbers.byte(), numbers.byte(), numbers.byte()]))
                    .collect();
                let (weights, scales) = (numbers.floats(rows * SCORE_STRIDE), numbers.floats(KEY_BLOCK));
                Sums { weights: &weights, scales: &scales, values: &values, rows, span, width }.check();
            }
        }
    }
}

#[test]
fn the_largest_sums_of_values_are_exact() {
    let (rows, width) = (7, 16);
    let weights = vec![1.0; rows * SCORE_STRIDE];
    for quad in [[127; 4], [-127; 4], [127, -127, 127, -127], [-127, 127, 127, 127], [-128; 4]] {
        let values = vec![ValueQuad(quad); KEY_BLOCK / 4 * width];
        let span = Span::new(0, KEY_BLOCK, false);
        if quad != [-128; 4] {
            Sums { weights: &weights, scales: &[1.0; KEY_BLOCK], values: &values, rows, span, width }.check();
        }
        let alternate: Vec<_> = weights.iter().enumerate().map(|(i, w)| if i % 3 == 0 { -w } else { *w }).collect();
        Sums { weights: &alternate, scales: &[1.0; KEY_BLOCK], values: &values, rows, span, width }.check();
    }
}

#[test]
fn weights_take_their_values_scales() {
    let ones = vec![ValueQuad([1; 4]); KEY_BLOCK / 4 * 16];
    let span = Span::new(0, 32, false);
    let sums = |isa: Isa, weights: &[f32], scales: &[f32]| {
        let sums = Sums { weights, scales, values: &ones, rows: 1, span, width: 16 };
        let got = dispatch!(isa, |s| sums.run(s));
        assert!(got.iter().all(|&x| same(x, got[0])));
        (f64::from(got[0]) - f64::from(BEFORE * RESCALE[0])) / f64::from(RESCALE[1])
    };
    for isa in Isa::available() {
        let mut weights = vec![0.0; SCORE_STRIDE];
        let mut scales = vec![1.0; KEY_BLOCK];
        assert_eq!(sums(isa, &weights, &scales), 0.0, "{isa}: no weight");
        // A weight of 0 stays 0, whatever the scale.
        (weights[3], weights[5], weights[6]) = (1.0, 0.0, -0.0);
        (scales[5], scales[6]) = (f32::NAN, f32::INFINITY);
        assert!((sums(isa, &weights, &scales) - 1.0).abs() < 1e-6, "{isa}");
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            weights[7] = bad;
            assert!(sums(isa, &weights, &scales).is_nan(), "{isa}: {bad}");
        }
        weights[7] = 0.0;
        scales[3] = 1e6;
        assert!((sums(isa, &weights, &scales) - 1e6).abs() < 1.0, "{isa}");
    }
}

#[test]
fn small_weights_keep_their_precision() {
    for isa in Isa::available() {
        for power in [0, -60, -64, -65, -100, -112, -120, -126] {
            let unit = 2f32.powi(power);
            let mut weights = vec![0.0; SCORE_STRIDE];
            for (j, weight) in weights.iter_mut().enumerate().take(16) {
                *weight = (j + 1) as f32 / 16.0;
            }
            let spans = Spans::of(&[Span::new(0, 16, false)], 1);
            let row_block = ScoreBlock { scores: &mut weights, spans: &spans, rows: 1 };
            dispatch!(isa, |s| round_weights(s, row_block, &[unit; 16]));
            assert_eq!(weights[LARGEST_WEIGHT], unit, "{isa}");
            for key in 0..16 {
                // Two words in a float: keys 0 and 2 of four, then 1 and 3.
                let pair = weights[key / 4 * 2 + key % 2].to_bits().cast_signed();
                let word = if key % 4 < 2 { pair << 16 >> 16 } else { pair >> 16 };
                let want = (32767.0 * (key + 1) as f64 / 16.0).round_ties_even();
                assert!((f64::from(word) - want).abs() <= 1.0, "{isa}: 2^{power}, key {key}: {word} for {want}");
            }
        }
    }
}
