//! Norms: against f64, at every width that ends inside a vector, with means far from zero, NaN, threads, refusals.

use crate::counting::counted;
use crate::support::{Rng, UNWRITTEN};
use crate::vectors::{bits, unwritten};
use sdpa::{Error, Exec, Isa};
use sdpa_layers::{Compute, Norm};

const WIDTHS: [usize; 12] = [1, 2, 15, 16, 17, 31, 32, 33, 48, 100, 384, 4099];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Layer,
    Rms,
}

/// A norm, and what it is made of.
struct Case {
    kind: Kind,
    norm: Norm,
    gain: Vec<f32>,
    bias: Vec<f32>,
    eps: f32,
}

impl Case {
    fn new(kind: Kind, width: usize, eps: f32) -> Self {
        let gain = normal(width, 1.0, 0.0, 101);
        let bias = if kind == Kind::Layer { normal(width, 1.0, 0.0, 102) } else { vec![0.0; width] };
        let norm = match kind {
            Kind::Layer => Norm::layer(&gain[..], eps).unwrap().bias(&bias[..]).unwrap(),
            Kind::Rms => Norm::rms(&gain[..], eps).unwrap(),
        };
        Self { kind, norm, gain, bias, eps }
    }

    fn cases(width: usize, eps: f32) -> [Self; 2] {
        [Kind::Layer, Kind::Rms].map(|kind| Self::new(kind, width, eps))
    }

    fn expected(&self, row: &[f32]) -> Vec<f64> {
        let n = row.len() as f64;
        let mean = if self.kind == Kind::Rms { 0.0 } else { row.iter().map(|&x| f64::from(x)).sum::<f64>() / n };
        let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
        let factor = 1.0 / (variance + f64::from(self.eps)).sqrt();
        let y = |((&x, &gain), &bias): ((&f32, &f32), &f32)| {
            (f64::from(x) - mean) * factor * f64::from(gain) + f64::from(bias)
        };
        row.iter().zip(&self.gain).zip(&self.bias).map(y).collect()
    }

    /// Largest error, relative to the result or to the gain, whichever is larger.
    fn error(&self, x: &[f32], got: &[f32]) -> f64 {
        let width = self.gain.len();
        let mut worst = 0.0;
        for (x, got) in x.chunks_exact(width).zip(got.chunks_exact(width)) {
            for ((expected, &got), &gain) in self.expected(x).iter().zip(got).zip(&self.gain) {
                let off = (f64::from(got) - expected).abs() / expected.abs().max(f64::from(gain).abs());
                worst = if off.is_nan() { f64::INFINITY } else { off.max(worst) };
            }
        }
        worst
    }
}

fn normal(n: usize, spread: f32, mean: f32, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| mean + spread * rng.normal()).collect()
}

fn forward(norm: &Norm, x: &[f32], exec: Exec) -> Vec<f32> {
    let mut out = unwritten(x.len());
    norm.forward(x, &mut out, &mut Compute::new(exec)).unwrap();
    out
}

#[test]
fn every_width_is_right_on_every_instruction_set() {
    let mut worst = 0.0f64;
    for width in WIDTHS {
        for case in Case::cases(width, 1e-5) {
            // The last two: a mean with a spread of a thousandth, and numbers that are all but equal.
            for (spread, mean) in [(1.0, 0.0), (1e-3, 0.0), (1e6, 3e6), (1.0, 1000.0), (1e-3, 1.0)] {
                let x = normal(3 * width, spread, mean, width as u64);
                for isa in Isa::available() {
                    let error = case.error(&x, &forward(&case.norm, &x, Exec::serial().isa(isa)));
                    assert!(error < 1e-6, "{:?} of {width}, {mean} ± {spread}, on {isa}: {error:e}", case.kind);
                    worst = worst.max(error);
                }
            }
        }
    }
    println!("largest error: {worst:.2e}");
}

#[test]
fn a_sum_is_added_and_then_normed() {
    for width in WIDTHS {
        for case in Case::cases(width, 1e-5) {
            let (x, add) = (normal(3 * width, 1.0, 0.0, 7), normal(3 * width, 1.0, 0.0, 8));
            let sum: Vec<f32> = x.iter().zip(&add).map(|(a, b)| a + b).collect();
            for isa in Isa::available() {
                let exec = Exec::serial().isa(isa);
                let (mut x, mut out) = (x.clone(), unwritten(3 * width));
                case.norm.add_and_forward(&mut x, &add, &mut out, &mut Compute::new(exec)).unwrap();
                assert_eq!(bits(&x), bits(&sum), "{width} on {isa}");
                assert_eq!(bits(&out), bits(&forward(&case.norm, &sum, exec)), "{:?} of {width} on {isa}", case.kind);
            }
        }
    }
}

#[test]
fn bits_are_the_same_on_all_threads_and_on_every_instruction_set_with_fma() {
    let width = 387;
    let rows = 2000; // enough for four threads
    let x = normal(rows * width, 1.0, 0.3, 9);
    for case in Case::cases(width, 1e-12) {
        let mut fused = None;
        for isa in Isa::available() {
            let one = bits(&forward(&case.norm, &x, Exec::serial().isa(isa)));
            let alone = bits(&forward(&case.norm, &x[..width], Exec::serial().isa(isa)));
            assert_eq!(alone, one[..width]);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
            for threads in [2, 3, 4] {
                let exec = Exec::serial().isa(isa).threads(threads);
                assert!(pool.install(|| bits(&forward(&case.norm, &x, exec))) == one, "{threads} threads on {isa}");
            }
            if isa.has_fma() {
                assert!(*fused.get_or_insert(one.clone()) == one, "{:?} on {isa}", case.kind);
            }
        }
    }
}

#[test]
fn nan_and_infinity_spoil_their_row_and_no_other() {
    for width in [1, 16, 17, 40] {
        for case in Case::cases(width, 1e-5) {
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for isa in Isa::available() {
                    let mut x = normal(3 * width, 1.0, 0.0, 3);
                    x[2 * width - 1] = poison;
                    let out = forward(&case.norm, &x, Exec::serial().isa(isa));
                    let spoilt = |row: &[f32]| row.iter().filter(|y| y.is_nan()).count();
                    let counts: Vec<usize> = out.chunks_exact(width).map(spoilt).collect();
                    // Under the RMS norm an infinity makes everything else 0.
                    let expected = if case.kind == Kind::Rms && poison.is_infinite() { 1 } else { width };
                    assert_eq!(counts, [0, expected, 0], "{:?} of {width} with {poison} on {isa}", case.kind);
                }
            }
        }
    }
}

#[test]
fn equal_numbers_have_no_spread() {
    for width in WIDTHS {
        let norm = Norm::layer(vec![1.0; width], 1e-5).unwrap().bias(vec![0.5; width]).unwrap();
        for x in [0.0, 1.0, 0.1, -1e20] {
            let got = forward(&norm, &vec![x; width], Exec::serial());
            assert!(got.iter().all(|y| *y == 0.5), "{width} times {x}: {got:?}");
        }
    }
}

#[test]
fn a_warm_call_allocates_nothing() {
    let case = Case::new(Kind::Layer, 100, 1e-5);
    let (mut x, add, mut out) = (normal(300, 1.0, 0.0, 4), normal(300, 1.0, 0.0, 5), unwritten(300));
    let mut compute = Compute::new(Exec::serial());
    let calls = counted(|| {
        case.norm.forward(&add, &mut out, &mut compute).unwrap();
        case.norm.add_and_forward(&mut x, &add, &mut out, &mut compute).unwrap();
    });
    assert_eq!(calls, (0, 0));
}

#[test]
fn refusals_say_what_is_wrong_and_write_nothing() {
    let message = |e: Error| e.to_string();
    assert_eq!(message(Norm::rms([], 1e-5).unwrap_err()), "norm: width is 0, but must be at least 1");
    for eps in [-1.0, f32::NAN, f32::INFINITY] {
        let text = message(Norm::layer([1.0], eps).unwrap_err());
        assert_eq!(text, format!("norm eps: {eps}, but must be finite and not negative"));
    }
    let norm = Norm::layer([1.0; 4], 1e-5).unwrap();
    assert_eq!(message(norm.clone().bias([0.0; 3]).unwrap_err()), "norm bias: length is 3, but the gain has 4");
    let mut compute = Compute::default();
    let (mut x, mut out) = (vec![1.0; 8], unwritten(8));
    let texts = [
        norm.forward(&[1.0; 7], &mut out, &mut compute),
        norm.forward(&[1.0; 4], &mut out, &mut compute),
        norm.add_and_forward(&mut x, &[1.0; 4], &mut out, &mut compute),
        norm.add_and_forward(&mut x[..4], &[1.0; 4], &mut out, &mut compute),
    ];
    let texts = texts.map(|refused| message(refused.unwrap_err()));
    assert_eq!(
        texts,
        [
            "x: length is 7, but must be a multiple of 4, the width of a row",
            "out: length is 8, but x has 4",
            "add: length is 4, but x has 8",
            "out: length is 8, but x has 4",
        ]
    );
    assert_eq!((x, bits(&out)), (vec![1.0; 8], vec![UNWRITTEN; 8]));
}
