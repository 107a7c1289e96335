//! A few calls of the fuzzer; `fuzz/` makes more of them.

#[path = "fuzz/mod.rs"]
mod fuzzer;

/// Calls in a run of the tests: a few seconds.
const CALLS: u64 = 400;

#[test]
fn random_calls() {
    fuzzer::watch();
    let wrong = (0..CALLS).filter(|&number| !fuzzer::call(0, number)).count();
    assert_eq!(wrong, 0, "calls that went wrong, of {CALLS}");
}
