//! Agreement: all ranks tell each other what they have of a call, and compare.

use crate::description::{Description, agree};
use crate::error::Error;
use crate::exchange::exchange;
use crate::group::Group;

/// Tells all ranks what this one has of the `number`th call, or why it refuses it, and returns what all have. `what` names it
/// in the error of a time-out.
///
/// # Errors
/// [`Error::Disagree`] or [`Error::Refused`], the same on every rank, but [`Error::Call`] on the one that refuses;
/// [`Error::TimedOut`].
pub(crate) fn agreement(
    group: &Group<'_>,
    number: u64,
    own: Result<Description, sdpa::Error>,
    what: &'static str,
) -> Result<Vec<Description>, Error> {
    let (mut description, reason) = match own {
        Ok(description) => (description, None),
        Err(error) => (Description { refused: Some(error.to_string()), ..Description::default() }, Some(error)),
    };
    description.facts.insert(0, ("number of calls before".to_owned(), number.to_string()));
    let texts = exchange(group.comm, description.text(), what, group.timeout)?;
    let all: Vec<Description> = texts.iter().map(|text| Description::read(text)).collect();
    match (agree(&all), reason) {
        (Ok(()), _) => Ok(all),
        (Err(Error::Refused { rank, .. }), Some(reason)) if rank == group.comm.rank => Err(Error::Call(reason)),
        (Err(error), _) => Err(error),
    }
}
