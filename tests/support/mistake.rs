//! Mistakes that callers make, by number, with what becomes of each: the whole message, so that they can be read side by
//! side, or `accepted`.

use std::collections::BTreeSet;

pub(crate) const ACCEPTED: &str = "accepted";

/// A mistake, what became of it, and what should.
pub(crate) struct Mistake {
    number: usize,
    what: &'static str,
    got: String,
    expected: String,
}

pub(crate) fn mistake(number: usize, what: &'static str, got: String, expected: impl Into<String>) -> Mistake {
    Mistake { number, what, got, expected: expected.into() }
}

/// The message of an error, or [`ACCEPTED`].
pub(crate) fn outcome<T, E: core::fmt::Display>(result: Result<T, E>) -> String {
    result.map_or_else(|error| error.to_string(), |_| ACCEPTED.to_owned())
}

/// Prints the list, and fails unless all answers are as they should be and every number from 1 to `last` has a case.
pub(crate) fn check(mut all: Vec<Mistake>, last: usize) {
    let mut wrong = 0;
    let mut seen = BTreeSet::new();
    all.sort_by_key(|mistake| mistake.number);
    for Mistake { number, what, got, expected } in &all {
        println!("{number:2} {what}: {got}");
        if got != expected {
            println!("   should be: {expected}");
            wrong += 1;
        }
        seen.insert(*number);
    }
    assert_eq!(wrong, 0, "of {} answers", all.len());
    assert_eq!(seen, (1..=last).collect(), "every mistake has a case");
}
