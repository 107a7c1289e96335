//! Activations: against f64 over all of f32, tails, limits, and the same bits on every instruction set with FMA.

use crate::support::Rng;
use sdpa::Isa;
use sdpa_layers::Activation;

const ALL: [Activation; 5] =
    [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu];

/// ½·erfc(−x/√2): a series of positive terms near 0, a continued fraction beyond. Good to 1e-13 of itself.
fn normal_cdf(x: f64) -> f64 {
    let a = x.abs();
    let bell = (-a * a / 2.0).exp() / core::f64::consts::TAU.sqrt();
    let tail = if a < 3.0 {
        // Φ(a) − ½ = φ(a)·(a + a³/3 + a⁵/15 + …)
        let (mut term, mut sum, mut n) = (a, a, 1.0);
        while term > sum * 1e-18 {
            n += 2.0;
            term *= a * a / n;
            sum += term;
        }
        0.5 - bell * sum
    } else {
        // 1 − Φ(a) = φ(a) / (a + 1/(a + 2/(a + 3/(a + …
        bell / (1..200).rev().fold(a, |rest, n| a + f64::from(n) / rest)
    };
    if x < 0.0 { tail } else { 1.0 - tail }
}

fn exact(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::Gelu => x * normal_cdf(x),
        Activation::GeluTanh => {
            let u = (2.0 / core::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            x / (1.0 + (-2.0 * u).exp())
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
        _ => x,
    }
}

/// Every `step`-th finite f32.
fn floats(step: usize) -> Vec<f32> {
    (0..=u32::MAX).step_by(step).map(f32::from_bits).filter(|x| x.is_finite()).collect()
}

fn apply(activation: Activation, isa: Isa, xs: &[f32]) -> Vec<f32> {
    let mut ys = xs.to_vec();
    activation.apply(isa, &mut ys);
    ys
}

fn bits(xs: &[f32]) -> Vec<u32> {
    xs.iter().map(|x| x.to_bits()).collect()
}

/// No further from f64 than 7e-8 beyond half a unit in the last place, anywhere.
fn check(step: usize) {
    // The range where something happens is covered evenly as well.
    let mut xs = floats(step);
    xs.extend((-20 * 4096..20 * 4096).step_by(step.div_ceil(4096)).map(|i| i as f32 / 4096.0));
    for activation in ALL {
        let expected: Vec<f64> = xs.iter().map(|&x| exact(activation, f64::from(x))).collect();
        for isa in Isa::available() {
            let (mut worst, mut at) = (0.0, 0.0);
            for ((&x, y), expected) in xs.iter().zip(apply(activation, isa, &xs)).zip(&expected) {
                let off = (f64::from(y) - expected).abs() - expected.abs() * f64::from(f32::EPSILON) / 2.0;
                if off.is_nan() || off > worst {
                    (worst, at) = (off, x);
                }
            }
            println!("{activation:?} on {isa}: {worst:.2e} at {at:e}");
            assert!(worst < 7e-8, "{activation:?} on {isa}: off by {worst:e} at {at:e}");
        }
    }
}

#[test]
fn close_to_f64() {
    check(40_009);
}

#[test]
#[ignore = "slow"]
fn close_to_f64_everywhere() {
    check(509);
}

#[test]
fn tails_are_like_the_rest() {
    let mut rng = Rng::new(1);
    let xs: Vec<f32> = (0..100).map(|_| 3.0 * rng.normal()).collect();
    for (activation, isa) in ALL.into_iter().flat_map(|a| Isa::available().map(move |isa| (a, isa))) {
        let all = apply(activation, isa, &xs);
        for len in [0, 1, 15, 16, 17, 31, 32, 33, 100] {
            assert_eq!(bits(&apply(activation, isa, &xs[..len])), bits(&all[..len]), "{activation:?} {isa} {len}");
        }
    }
}

#[test]
fn bits_are_the_same_on_every_instruction_set_with_fma() {
    let xs = floats(99_991);
    for activation in ALL {
        let mut fused = Isa::available().filter(|isa| isa.has_fma()).map(|isa| bits(&apply(activation, isa, &xs)));
        if let Some(first) = fused.next() {
            assert!(fused.all(|other| other == first), "{activation:?}");
        }
    }
}

#[test]
fn limits_are_limits_and_nan_is_nan() {
    let xs = [f32::INFINITY, f32::MAX, f32::NEG_INFINITY, f32::MIN, 0.0, -0.0, f32::NAN];
    for (activation, isa) in ALL.into_iter().skip(1).flat_map(|a| Isa::available().map(move |isa| (a, isa))) {
        let ys = apply(activation, isa, &xs);
        assert_eq!(ys[..6], [f32::INFINITY, f32::MAX, 0.0, 0.0, 0.0, 0.0], "{activation:?} on {isa}");
        assert!(ys[6].is_nan(), "{activation:?} on {isa}");
    }
}

#[test]
fn a_gate_is_the_function_times_the_other() {
    let mut rng = Rng::new(2);
    for isa in Isa::available() {
        for len in [0, 1, 15, 16, 17, 40] {
            let (gate, up): (Vec<f32>, Vec<f32>) = (0..len).map(|_| (rng.normal(), rng.normal())).unzip();
            for activation in ALL {
                let mut got = gate.clone();
                activation.gate(isa, &mut got, &up);
                let expected: Vec<f32> = apply(activation, isa, &gate).iter().zip(&up).map(|(g, u)| g * u).collect();
                assert_eq!(bits(&got), bits(&expected), "{activation:?} on {isa}, {len}");
            }
        }
    }
}
