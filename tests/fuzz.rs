//! Some cases of the fuzzer; `fuzz/` makes more of them.

#[path = "fuzz/mod.rs"]
mod fuzzer;

use fuzzer::{Kind, bits, golden};
use std::time::Instant;

/// Cases of each kind in the longer run.
const CASES: u64 = 1000;

#[test]
fn random_calls() {
    run(|kind| kind.few);
}

/// Calls with bits recorded in `tests/golden`.
const GOLDEN: u64 = 500;

/// And calls with `Precision::Native`, and with `Precision::Accurate`.
const NATIVE: u64 = 200;

/// Those of the exact ones that measure distances between positions beyond 32 bits.
const FAR: [usize; 3] = [294, 303, 314];

#[test]
fn golden_bits() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let calls = bits::calls(0..GOLDEN, threads, bits::call);
    golden::check(&calls, &golden::EXACT, &FAR, "cargo test --test fuzz golden");
}

/// Calls by the machine's own products of bfloat16.
#[test]
fn golden_bits_of_native_calls() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let calls = bits::calls(0..NATIVE, threads, bits::native_call);
    golden::check(&calls, &golden::NATIVE, &[], "cargo test --test fuzz golden");
}

/// Calls by a matrix unit, of numbers in parts.
#[test]
fn golden_bits_of_accurate_calls() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let calls = bits::calls(0..NATIVE, threads, bits::accurate_call);
    golden::check(&calls, &golden::ACCURATE, &[], "cargo test --test fuzz golden");
}

#[test]
#[ignore = "minutes, if not optimised"]
fn a_thousand_cases_of_each_kind() {
    run(|_| CASES);
}

/// Makes cases of each kind: the number that `cases` says.
fn run(cases: impl Fn(&Kind) -> u64) {
    fuzzer::watch();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut wrong = Vec::new();
    for kind in &fuzzer::KINDS {
        let (start, cases) = (Instant::now(), cases(kind));
        let count = fuzzer::run(kind, 0, 0..cases, threads);
        println!("{}: {cases} cases, {count} wrong, {:.1} s", kind.name, start.elapsed().as_secs_f64());
        wrong.extend((count > 0).then_some((kind.name, count)));
    }
    assert!(wrong.is_empty(), "cases that went wrong: {wrong:?}");
}
