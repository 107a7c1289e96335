//! Checks of sizes, and allocations that may fail: each failure is an [`Error`] that names the argument.

use sdpa::{Bound, Error};
pub(crate) use sdpa_kernels::same;

/// Largest length of keys and values.
pub(crate) const LONGEST_DIM: Limit = at_most(sdpa_kernels::MAX_DIM, "the largest possible");

/// Limit of a size.
#[derive(Clone, Copy)]
pub(crate) struct Limit {
    bound: Bound,
    limit: usize,
    /// Meaning of the limit, in messages.
    of: &'static str,
}

pub(crate) const fn at_least(limit: usize, of: &'static str) -> Limit {
    Limit { bound: Bound::AtLeast, limit, of }
}

pub(crate) const fn at_most(limit: usize, of: &'static str) -> Limit {
    Limit { bound: Bound::AtMost, limit, of }
}

pub(crate) const fn exactly(limit: usize, of: &'static str) -> Limit {
    Limit { bound: Bound::Exactly, limit, of }
}

pub(crate) const fn multiple_of(limit: usize, of: &'static str) -> Limit {
    Limit { bound: Bound::MultipleOf, limit, of }
}

impl Limit {
    /// Returns [`Error::Range`] unless `got`, the size `what` of an argument, meets the limit.
    pub(crate) fn check(self, argument: &'static str, what: &'static str, got: usize) -> Result<(), Error> {
        let Self { bound, limit, of } = self;
        if bound.holds(got, limit) { Ok(()) } else { Err(Error::Range { argument, what, got, bound, limit, of }) }
    }
}

/// Returns the product of the sizes, or [`Error::TooLarge`] if that many floats do not fit the address space.
pub(crate) fn floats(what: &'static str, sizes: [usize; 4]) -> Result<usize, Error> {
    sdpa_kernels::floats(sizes).ok_or(Error::TooLarge { what, sizes })
}

/// Returns `len` zeros, or [`Error::Memory`] for `what`.
pub(crate) fn zeros(what: &'static str, len: usize) -> Result<Vec<f32>, Error> {
    sdpa_kernels::zeros(len).ok_or(Error::Memory { what, bytes: len.saturating_mul(size_of::<f32>()) })
}

/// Returns an empty vector with capacity for `len` elements, or [`Error::Memory`] for `what`.
pub(crate) fn room<T>(what: &'static str, len: usize) -> Result<Vec<T>, Error> {
    let mut room = Vec::new();
    match room.try_reserve_exact(len) {
        Ok(()) => Ok(room),
        Err(_) => Err(Error::Memory { what, bytes: len.saturating_mul(size_of::<T>()) }),
    }
}
