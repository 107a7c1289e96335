//! The crate's own exponential against `f64`: within one unit in the last place for every non-positive `f32`.

use sdpa::{Isa, probe};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const MINUS_ZERO: u32 = 0x8000_0000;
const MINUS_INFINITY: u32 = 0xff80_0000;
/// Values at a time: they, their references and results fit the second-level cache.
const CHUNK: usize = 1 << 14;

/// Where an instruction set did worst.
#[derive(Clone, Copy, Debug, Default)]
struct Worst {
    ulps: f64,
    x: f32,
    got: f32,
}

impl Worst {
    fn or(self, other: Self) -> Self {
        // Written so that a NaN is the worst of all.
        if other.ulps <= self.ulps || self.ulps.is_nan() { self } else { other }
    }
}

/// Spacing of `f32` at the number nearest to a reference in 0..=1, as the factor that makes it 1.
fn per_ulp(nearest: f32) -> f64 {
    let exponent = (nearest.to_bits() >> 23).max(1) as u64;
    f64::from_bits((1023 + 150 - exponent) << 52)
}

/// Memory of one thread.
struct Check {
    isas: Vec<Isa>,
    worst: Vec<Worst>,
    exact: Vec<f64>,
    scale: Vec<f64>,
    got: Vec<f32>,
    fused: Option<Vec<f32>>,
}

impl Check {
    fn new() -> Self {
        let isas: Vec<Isa> = Isa::available().collect();
        let worst = vec![Worst::default(); isas.len()];
        Self { isas, worst, exact: Vec::new(), scale: Vec::new(), got: Vec::new(), fused: None }
    }

    /// One reference for all instruction sets; those with FMA must agree to the bit.
    fn run(&mut self, xs: &[f32]) {
        self.exact.clear();
        self.exact.extend(xs.iter().map(|&x| (x as f64).exp()));
        self.scale.clear();
        self.scale.extend(self.exact.iter().map(|&e| per_ulp(e as f32)));
        self.fused = None;
        for (isa, worst) in self.isas.iter().zip(&mut self.worst) {
            self.got.clear();
            self.got.extend_from_slice(xs);
            probe::exp(*isa, &mut self.got);
            let references = self.exact.iter().zip(&self.scale);
            for ((&x, &got), (&exact, &scale)) in xs.iter().zip(&self.got).zip(references) {
                *worst = worst.or(Worst { ulps: (got as f64 - exact).abs() * scale, x, got });
            }
            if isa.has_fma() {
                let fused = self.fused.get_or_insert_with(|| self.got.clone());
                let same = fused.iter().zip(&self.got).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(same.map(|i| xs[i]), None, "{isa} and another with FMA differ here");
            }
        }
    }
}

/// Every `f32` from one bit pattern to another, both included, on all cores. Prints how far it has come.
fn sweep(from: u32, to: u32) -> Vec<Worst> {
    let chunks = ((to - from) as usize + 1).div_ceil(CHUNK);
    let (next, total) = (AtomicUsize::new(0), Mutex::new(Check::new().worst));
    let start = Instant::now();
    let work = || {
        let (mut check, mut xs) = (Check::new(), Vec::with_capacity(CHUNK));
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                break;
            }
            if chunk % (chunks / 16).max(1) == 0 {
                println!("{:3} % after {:.1?}", 100 * chunk / chunks, start.elapsed());
            }
            let first = from as usize + chunk * CHUNK;
            xs.clear();
            xs.extend((first..(first + CHUNK).min(to as usize + 1)).map(|bits| f32::from_bits(bits as u32)));
            check.run(&xs);
        }
        for (total, worst) in total.lock().unwrap().iter_mut().zip(check.worst) {
            *total = total.or(worst);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(work);
        }
    });
    total.into_inner().unwrap()
}

/// Prints where each instruction set did worst, and holds it against the bound.
fn print_and_check(worst: &[Worst]) {
    for (isa, Worst { ulps, x, got }) in Isa::available().zip(worst) {
        println!("{isa}: worst error {ulps:.6} ULP, at {x:e} ({:#010x}): {got:e}", x.to_bits());
    }
    assert!(worst.iter().all(|worst| worst.ulps <= 1.0), "an error of more than 1 ULP");
}

#[test]
#[ignore = "slow: two thousand million values on every instruction set, a minute on two cores"]
fn every_non_positive_float() {
    print_and_check(&sweep(MINUS_ZERO, MINUS_INFINITY));
}

#[test]
#[ignore = "slow: every NaN on every instruction set"]
fn every_nan_stays_nan() {
    for isa in Isa::available() {
        for sign in [0, MINUS_ZERO] {
            for first in (0x7f80_0001..=0x7fff_ffffu32).step_by(CHUNK) {
                let last = (first + (CHUNK as u32 - 1)).min(0x7fff_ffff);
                let mut xs: Vec<f32> = (first..=last).map(|bits| f32::from_bits(sign | bits)).collect();
                probe::exp(isa, &mut xs);
                assert!(xs.iter().all(|x| x.is_nan()), "{isa}: NaNs from {:#x} on", sign | first);
            }
        }
    }
}

#[test]
fn a_sample_of_every_binade() {
    // A prime step: 80,000 values of every binade, and their low bits take every value.
    let mut check = Check::new();
    let sample: Vec<f32> = (MINUS_ZERO..=MINUS_INFINITY).step_by(101).map(f32::from_bits).collect();
    sample.chunks(CHUNK).for_each(|xs| check.run(xs));
    // Where results are normal numbers, subnormal, and 0: every float would be too many, every 61st is not.
    for (from, to) in [(-88.5f32, -86.5f32), (-104.5, -103.0), (-1.0, -0.3)] {
        let xs: Vec<f32> = (to.to_bits()..=from.to_bits()).step_by(61).map(f32::from_bits).collect();
        assert!(xs.len() > 1000);
        check.run(&xs);
    }
    print_and_check(&check.worst);
}

/// The form for weights that are rounded to bfloat16, which keeps eight bits.
#[test]
fn the_short_form_is_off_by_less_than_2_to_the_minus_13() {
    let sample = (MINUS_ZERO..=(-87.3f32).to_bits()).step_by(101).map(f32::from_bits);
    let near = ((-0.3f32).to_bits()..=(-2.0f32).to_bits()).step_by(61).map(f32::from_bits);
    let xs: Vec<f32> = sample.chain(near).collect();
    for isa in Isa::available() {
        let mut got = xs.clone();
        probe::exp_for_bf16(isa, &mut got);
        let mut worst = (0.0f64, 0.0f32);
        for (&x, &got) in xs.iter().zip(&got) {
            let error = (f64::from(got) / f64::from(x).exp() - 1.0).abs();
            if error.is_nan() || error > worst.0 {
                worst = (error, x);
            }
        }
        println!("{isa}: worst relative error {:.4e}, at {:e}", worst.0, worst.1);
        assert!(worst.0 < 2f64.powi(-13), "{isa}: off by {:e} at {:e}", worst.0, worst.1);
    }
}

#[test]
fn exact_where_it_must_be() {
    for (isa, exp) in Isa::available().flat_map(|isa| [(isa, probe::exp as fn(_, &mut _)), (isa, probe::exp_for_bf16)])
    {
        let mut xs = [
            0.0,
            -0.0,
            f32::NEG_INFINITY,
            f32::MIN,
            -1e30,
            -105.0,
            -f32::MIN_POSITIVE,
            -f32::from_bits(1),
            f32::NAN,
            -f32::NAN,
            f32::from_bits(0x7f80_0001),
            f32::from_bits(0xffff_ffff),
        ];
        exp(isa, &mut xs);
        let bits = xs.map(f32::to_bits);
        assert_eq!(bits[..2], [1f32.to_bits(); 2], "{isa}: exp(0)");
        assert_eq!(bits[2..6], [0; 4], "{isa}: exp of −∞ and of what is far below any result");
        assert_eq!(bits[6..8], [1f32.to_bits(); 2], "{isa}: exp of −tiny");
        assert!(xs[8..].iter().all(|x| x.is_nan()), "{isa}: exp(NaN)");
    }
}

#[test]
fn every_length_of_slice() {
    for isa in Isa::available() {
        for n in 0..70 {
            let xs: Vec<f32> = (0..n).map(|i| -(i as f32) * 0.37).collect();
            let mut all = xs.clone();
            probe::exp(isa, &mut all);
            for (x, got) in xs.iter().zip(&all) {
                let mut one = [*x];
                probe::exp(isa, &mut one);
                assert_eq!(got.to_bits(), one[0].to_bits(), "{isa}: exp({x}) among {n} and alone");
            }
        }
    }
}
