//! Errors: why a call over several ranks was refused or given up.

use core::fmt;
use std::time::Duration;

/// Reason why a call over several ranks was refused or given up. This rank's outputs are then untouched.
///
/// Match on variants and numbers. The names and sentences in an error are for people to read and may change in any
/// release.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// This rank's own part of the call is wrong.
    Call(sdpa::Error),
    /// Another rank's part of the call is wrong.
    Refused {
        /// That rank.
        rank: usize,
        /// Reason it gave.
        why: String,
    },
    /// Two ranks say different things of the call.
    Disagree {
        /// Name of what they say.
        what: String,
        /// The later of the two ranks.
        rank: usize,
        /// What it says.
        got: String,
        /// The first rank that says something else.
        other: usize,
        /// What that rank says.
        expected: String,
    },
    /// Rows or keys that no rank has.
    Missing {
        /// `rows` or `keys`.
        what: &'static str,
        /// First of them.
        first: usize,
        /// Next that a rank has.
        end: usize,
    },
    /// A row or key that is in two stretches.
    Twice {
        /// `row` or `key`.
        what: &'static str,
        /// Its position.
        at: usize,
        /// Ranks that have the stretches; equal if both are of one rank.
        ranks: [usize; 2],
    },
    /// Nothing came from some ranks, or was taken by them, for as long as the caller allows.
    TimedOut {
        /// Ranks that were waited for.
        ranks: Vec<usize>,
        /// What was waited for.
        what: &'static str,
        /// Time that the caller allows.
        after: Duration,
    },
    /// An earlier call was given up, so messages may still be on their way.
    Broken,
}

impl From<sdpa::Error> for Error {
    fn from(error: sdpa::Error) -> Self {
        Self::Call(error)
    }
}

impl From<sdpa::LayoutError> for Error {
    fn from(error: sdpa::LayoutError) -> Self {
        Self::Call(error.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(error) => error.fmt(f),
            Self::Refused { rank, why } => write!(f, "rank {rank} refused its part of the call: {why}"),
            Self::Disagree { what, rank, got, other, expected } => {
                write!(f, "{what}: rank {rank} has {got}, but rank {other} has {expected}")
            }
            Self::Missing { what, first, end } => write!(f, "{what} {first}..{end}: no rank has them"),
            Self::Twice { what, at, ranks: [a, b] } if a == b => write!(f, "{what} {at}: rank {a} has it twice"),
            Self::Twice { what, at, ranks: [a, b] } => write!(f, "{what} {at}: rank {a} has it, and so has rank {b}"),
            Self::TimedOut { ranks, what, after } => {
                let names: Vec<_> = ranks.iter().map(usize::to_string).collect();
                let (s, names) = (if names.len() == 1 { "" } else { "s" }, names.join(", "));
                write!(f, "waited {after:?} in vain for rank{s} {names}: {what}")
            }
            Self::Broken => f.write_str("an earlier call was given up: take another communicator"),
        }
    }
}

impl core::error::Error for Error {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Call(error) => Some(error),
            _ => None,
        }
    }
}
