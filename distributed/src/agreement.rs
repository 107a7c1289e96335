//! Agreement: all ranks tell each other what they have of a call, and compare.

use crate::description::{Description, agree};
use crate::error::Error;
use crate::exchange::exchange;
use crate::group::Group;

/// Tells all ranks what this one has of a call, or why it refuses it, and returns what all have. `what` names it in the error of a
/// time-out.
///
/// # Errors
/// [`Error::Disagree`] or [`Error::Refused`], the same on every rank, but [`Error::Call`] on the one that refuses;
/// [`Error::TimedOut`].
pub(crate) fn agreed(
    group: &Group<'_>,
    own: Result<Description, sdpa::Error>,
    what: &'static str,
) -> Result<Vec<Description>, Error> {
    let (description, reason) = match own {
        Ok(description) => (description, None),
        Err(error) => (Description { refused: Some(error.to_string()), ..Description::default() }, Some(error)),
    };
    let told = exchange(group.comm, description.numbers(), what, group.timeout)?;
    let all: Vec<Description> = told.iter().map(|numbers| Description::read(numbers)).collect();
    match (agree(&all), reason) {
        (Ok(()), _) => Ok(all),
        (Err(Error::Refused { rank, .. }), Some(reason)) if rank == group.comm.rank => Err(Error::Call(reason)),
        (Err(error), _) => Err(error),
    }
}

/// Tells all ranks what this one has of the `number`th call, as [`agreed`] does.
///
/// # Errors
/// As [`agreed`].
pub(crate) fn agreement(
    group: &Group<'_>,
    number: u64,
    own: Result<Description, sdpa::Error>,
    what: &'static str,
) -> Result<Vec<Description>, Error> {
    let numbered = |mut own: Description| {
        own.facts.insert(0, ("number of calls before".to_owned(), number.into()));
        own
    };
    agreed(group, own.map(numbered), what)
}
