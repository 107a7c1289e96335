//! Ends of sequences that are laid end to end: their cumulative lengths.

use crate::cause::Cause;
use crate::error::Error;
use sdpa_kernels::{Bound, Fault, Misfit};

/// Returns the number of sequences, if `ends` are cumulative lengths from 0 to the number of rows of a tensor.
pub(crate) fn cumulative(argument: &'static str, ends: &[usize], of: (&'static str, usize)) -> Result<usize, Error> {
    sdpa_kernels::cumulative(argument, ends, of.1).map_err(|misfit| of_ends(misfit, ends, of))
}

/// Returns the error of cumulative lengths, with its likely cause.
pub(crate) fn of_ends(misfit: Misfit, ends: &[usize], (of, rows): (&'static str, usize)) -> Error {
    let Fault::Entry { index, got, bound, .. } = misfit.fault else { return misfit.into() };
    let sum = || ends.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
    let lengths = || (sum() == Some(rows)).then_some(Cause::Lengths);
    let cause = match (index, bound) {
        (_, Bound::AtLeast) => lengths(),
        (0, _) if got > 0 => lengths().or(Some(Cause::Begin)),
        _ => Some(Cause::End { of, rows }),
    };
    Error::from(misfit).likely(cause)
}
