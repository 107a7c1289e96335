//! Everything that can be wrong with a call, in the caller's words.

use core::fmt;
use sdpa_kernels::{LayoutError, PageError};

/// Why a call was refused. Outputs are untouched.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// Two arguments disagree about a size.
    Mismatch {
        /// The argument at fault.
        argument: &'static str,
        /// Which size: `batch`, `heads`, `head_dim`, …
        what: &'static str,
        /// Its size there.
        got: usize,
        /// The size it should have.
        expected: usize,
        /// Where that comes from.
        of: &'static str,
    },
    /// The number of query heads is not a multiple of the number of key/value heads.
    Heads {
        /// Heads of q.
        q_heads: usize,
        /// Heads of k.
        kv_heads: usize,
    },
    /// A dimension that must be at least 1 is 0.
    Empty {
        /// The argument at fault.
        argument: &'static str,
        /// Which size.
        what: &'static str,
    },
    /// A number outside its range.
    Number {
        /// The setting at fault.
        argument: &'static str,
        /// Its value.
        got: f32,
        /// What it must be.
        expected: &'static str,
    },
    /// Rows and keys differ in number, a rule depends on where rows stand among the keys, and nothing says where.
    Unaligned {
        /// The rule that needs to know.
        rule: &'static str,
        /// Rows of the sequence.
        q_len: usize,
        /// Keys of the sequence.
        kv_len: usize,
    },
    /// Sizes whose product does not fit the address space.
    TooLarge {
        /// What would be too large.
        what: &'static str,
        /// The factors.
        sizes: [usize; 4],
    },
    /// Memory that could not be had.
    Memory {
        /// What it was for.
        what: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// A sequence that a cache does not have.
    Sequence {
        /// The argument that names it.
        argument: &'static str,
        /// The sequence.
        got: usize,
        /// Sequences there are.
        sequences: usize,
    },
    /// One of several values is outside its range.
    Entry {
        /// The argument at fault.
        argument: &'static str,
        /// Which of its values.
        index: usize,
        /// That value.
        got: usize,
        /// The bound it breaks: at least, or at most, `limit`.
        bound: Bound,
        /// The limit.
        limit: usize,
    },
    /// A row would see a key that its cache has evicted.
    Evicted {
        /// The sequence.
        sequence: usize,
        /// The row.
        row: usize,
        /// The first such key.
        key: usize,
        /// The evicted keys end here.
        end: usize,
    },
    /// A block table, or the pool it is for, is not as it should be.
    Pages(PageError),
    /// One of several rows is not fit for what is to be done with it.
    Row {
        /// The argument at fault.
        argument: &'static str,
        /// Which quantity of the row.
        what: &'static str,
        /// Which row.
        row: usize,
        /// Its value.
        got: f32,
        /// What it must be.
        expected: &'static str,
    },
    /// An argument that only makes sense with another.
    Needs {
        /// The argument given.
        argument: &'static str,
        /// What must be given too, or must not be.
        needs: &'static str,
    },
    /// A view that does not fit its slice.
    Layout(LayoutError),
}

/// Which side of a limit a value must be on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// No smaller than the limit.
    AtLeast,
    /// No larger than the limit.
    AtMost,
    /// The limit itself.
    Exactly,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AtLeast => "at least",
            Self::AtMost => "at most",
            Self::Exactly => "exactly",
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mismatch { argument, what, got, expected, of } => {
                write!(f, "{argument}: {what} is {got}, but {of} has {expected}")
            }
            Self::Heads { q_heads, kv_heads } => {
                write!(f, "q: {q_heads} heads are no multiple of the {kv_heads} heads of k")
            }
            Self::Empty { argument, what } => write!(f, "{argument}: {what} is 0, but must be at least 1"),
            Self::Number { argument, got, expected } => write!(f, "{argument}: {got}, but must be {expected}"),
            Self::Unaligned { rule, q_len, kv_len } => write!(
                f,
                "{rule}: {q_len} rows and {kv_len} keys differ, and no alignment says where the rows stand among the keys \
                 (top-left, bottom-right or an offset)"
            ),
            Self::TooLarge { what, sizes } => write!(f, "{what}: sizes {sizes:?} do not fit the address space"),
            Self::Memory { what, bytes } => write!(f, "{what}: {bytes} bytes cannot be had"),
            Self::Sequence { argument, got, sequences } => {
                write!(f, "{argument}: there is no sequence {got}, the cache has {sequences}")
            }
            Self::Entry { argument, index, got, bound, limit } => {
                write!(f, "{argument}: entry {index} is {got}, but must be {bound} {limit}")
            }
            Self::Row { argument, what, row, got, expected } => {
                write!(f, "{argument}: {what} of row {row} is {got}, but must be {expected}")
            }
            Self::Evicted { sequence, row, key, end } => write!(
                f,
                "cache: row {row} of sequence {sequence} sees key {key}, but the sliding cache has evicted keys before {end}: \
                 the call's window (or that of rows so far back) is wider than what the cache keeps"
            ),
            Self::Pages(e) => e.fmt(f),
            Self::Needs { argument, needs } => write!(f, "{argument}: needs {needs}"),
            Self::Layout(e) => e.fmt(f),
        }
    }
}

/// So many zeros, or the error that says what there is no memory for.
pub(crate) fn zeros(what: &'static str, len: usize) -> Result<Vec<f32>, Error> {
    sdpa_kernels::zeros(len).ok_or(Error::Memory { what, bytes: len.saturating_mul(size_of::<f32>()) })
}

impl core::error::Error for Error {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Layout(e) => Some(e),
            Self::Pages(e) => Some(e),
            _ => None,
        }
    }
}

impl From<LayoutError> for Error {
    fn from(e: LayoutError) -> Self {
        Self::Layout(e)
    }
}

impl From<PageError> for Error {
    fn from(e: PageError) -> Self {
        Self::Pages(e)
    }
}

/// The product of sizes, if so many floats fit the address space.
pub(crate) fn floats(what: &'static str, sizes: [usize; 4]) -> Result<usize, Error> {
    let len = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    // A Vec holds at most isize::MAX bytes.
    len.filter(|&n| n <= isize::MAX as usize / size_of::<f32>()).ok_or(Error::TooLarge { what, sizes })
}

/// Room for so many, if it can be had.
pub(crate) fn room<T>(what: &'static str, len: usize) -> Result<Vec<T>, Error> {
    let mut room = Vec::new();
    match room.try_reserve_exact(len) {
        Ok(()) => Ok(room),
        Err(_) => Err(Error::Memory { what, bytes: len.saturating_mul(size_of::<T>()) }),
    }
}

/// Refuses sizes that are not the same.
pub(crate) fn same(
    argument: &'static str,
    what: &'static str,
    got: usize,
    expected: usize,
    of: &'static str,
) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Mismatch { argument, what, got, expected, of }) }
}
