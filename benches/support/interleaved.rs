//! For benchmarks that compare: every case in turn, again and again, so that a machine that slows down half-way slows
//! all of them.
#![allow(dead_code, reason = "each benchmark uses its part")]

use std::time::{Duration, Instant};

/// Normal enough, and the same every time: sums of six uniform numbers.
pub(crate) fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..n).map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 2f32.sqrt()).collect()
}

/// The middle one.
pub(crate) fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// How long a case runs before its times count: a core that slept takes milliseconds to be had again.
const WAKE: Duration = Duration::from_millis(10);
/// How long it goes on, at least once.
const BURST: Duration = Duration::from_millis(30);

/// Seconds of each run of a burst.
fn burst(case: &mut dyn FnMut()) -> Vec<f64> {
    let burst = Instant::now();
    while burst.elapsed() < WAKE {
        case();
    }
    let mut seconds = Vec::new();
    loop {
        let start = Instant::now();
        case();
        seconds.push(start.elapsed().as_secs_f64());
        if burst.elapsed() > BURST {
            return seconds;
        }
    }
}

/// Median seconds of each case; in each round, every case has a burst of runs.
pub(crate) fn medians<const N: usize>(rounds: usize, mut cases: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut seconds = [const { Vec::new() }; N];
    for _ in 0..rounds {
        for (case, seconds) in cases.iter_mut().zip(&mut seconds) {
            seconds.extend(burst(case));
        }
    }
    seconds.each_mut().map(|times| median(times))
}

/// Median seconds of each case's burst in each round; the order differs from round to round.
pub(crate) fn shuffled(rounds: usize, cases: &mut [Box<dyn FnMut() + '_>]) -> Vec<Vec<f64>> {
    let mut medians = vec![Vec::new(); cases.len()];
    for round in 0..rounds {
        let keys = random(cases.len(), round as u64);
        let mut order: Vec<_> = (0..cases.len()).collect();
        order.sort_by(|&a, &b| keys[a].total_cmp(&keys[b]));
        for case in order {
            medians[case].push(median(&mut burst(&mut cases[case])));
        }
    }
    medians
}

/// First quartile, median and third quartile.
pub(crate) fn spread(numbers: &mut [f64]) -> [f64; 3] {
    numbers.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| numbers[quarter * (numbers.len() - 1) / 4])
}
