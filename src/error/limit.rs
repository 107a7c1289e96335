//! Limits of sizes: what [`Error::Range`] refuses.

use crate::error::Error;
use sdpa_kernels::{Bound, MAX_DIM};

/// Limit of a size.
#[derive(Clone, Copy)]
pub(crate) struct Limit {
    bound: Bound,
    limit: usize,
    /// Meaning of the limit, in messages.
    of: &'static str,
}

/// Largest length of keys and values.
pub(crate) const LONGEST_DIM: Limit = at_most(MAX_DIM, "the largest possible");

pub(crate) const fn at_most(limit: usize, of: &'static str) -> Limit {
    Limit { bound: Bound::AtMost, limit, of }
}

pub(crate) const fn exactly(limit: usize, of: &'static str) -> Limit {
    Limit { bound: Bound::Exactly, limit, of }
}

/// Refuses a number of sequences that is no multiple of the period after which biases and masks repeat.
pub(crate) fn check_period(period: Option<usize>, sequences: usize) -> Result<(), Error> {
    let limit = |limit| Limit { bound: Bound::MultipleOf, limit, of: "the period" };
    period.map_or(Ok(()), |period| limit(period).check("batch period", "number of sequences", sequences))
}

impl Limit {
    /// Returns [`Error::Range`] unless `got`, the size `what` of an argument, meets the limit.
    pub(crate) fn check(self, argument: &'static str, what: &'static str, got: usize) -> Result<(), Error> {
        if self.bound.holds(got, self.limit) { Ok(()) } else { Err(self.error(argument, what, got)) }
    }

    /// Returns the error of a size that does not meet the limit.
    pub(crate) fn error(self, argument: &'static str, what: &'static str, got: usize) -> Error {
        let Self { bound, limit, of } = self;
        Error::Range { argument, what, got, bound, limit, of }
    }
}
