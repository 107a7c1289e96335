//! Reasons why arguments do not fit together, and checks of sizes and lists that find them.

use core::fmt;

/// Reason why arguments of a call do not fit together. `sdpa` makes its error of it, by the same names; a launch panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Misfit {
    /// Name of the argument at fault.
    pub argument: &'static str,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A size differs from that of another argument.
    Size {
        /// Name of the size.
        what: &'static str,
        /// Size found.
        got: usize,
        /// Size it should have.
        expected: usize,
        /// Source of the expected size.
        of: &'static str,
    },
    /// The last dimension is not 1.
    Wide {
        /// Last dimension found.
        got: usize,
        /// The valid one, and why.
        expected: &'static str,
    },
    /// A size, named here, is 0.
    Empty(&'static str),
    /// The length of a key or value is beyond [`MAX_DIM`](crate::MAX_DIM).
    Long {
        /// Name of the length.
        what: &'static str,
        /// Length found.
        got: usize,
    },
    /// Query heads are no multiple of key/value heads.
    Heads {
        /// Number of query heads.
        q_heads: usize,
        /// Number of key/value heads.
        kv_heads: usize,
        /// Source of the key/value heads.
        of: &'static str,
    },
    /// The product of these sizes does not fit the address space.
    TooLarge([usize; 4]),
    /// An entry of a list is outside its range.
    Entry {
        /// Index of the entry.
        index: usize,
        /// Entry found.
        got: usize,
        /// Kind of bound that it breaks.
        bound: Bound,
        /// Limit of the range.
        limit: usize,
        /// Meaning of the limit.
        of: &'static str,
    },
    /// A cache or pages have no such sequence.
    Sequence {
        /// Index of the sequence.
        got: usize,
        /// Number of sequences.
        sequences: usize,
    },
    /// The argument needs another one, or excludes it, in these words.
    Needs(&'static str),
    /// An output is given twice.
    Twice,
}

/// Relation that a value must have to a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bound {
    /// At least the limit.
    AtLeast,
    /// At most the limit.
    AtMost,
    /// Exactly the limit.
    Exactly,
    /// A multiple of the limit.
    MultipleOf,
}

impl Bound {
    /// Returns true if a size meets the bound.
    pub fn holds(self, size: usize, limit: usize) -> bool {
        match self {
            Self::AtLeast => size >= limit,
            Self::AtMost => size <= limit,
            Self::Exactly => size == limit,
            Self::MultipleOf => size.is_multiple_of(limit),
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AtLeast => "at least",
            Self::AtMost => "at most",
            Self::Exactly => "exactly",
            Self::MultipleOf => "a multiple of",
        })
    }
}

impl Fault {
    /// Makes it the fault of an argument.
    pub(crate) fn of<T>(self, argument: &'static str) -> Result<T, Misfit> {
        Err(Misfit { argument, fault: self })
    }
}

/// Checks that `got`, the size `what` of an argument, is what another one, `of`, has.
pub fn same(
    argument: &'static str,
    what: &'static str,
    got: usize,
    expected: usize,
    of: &'static str,
) -> Result<(), Misfit> {
    if got == expected { Ok(()) } else { Fault::Size { what, got, expected, of }.of(argument) }
}

/// Checks that the first dimensions of a tensor, batch, heads and rows, are those of another one, `of`.
pub(crate) fn same_rows(
    argument: &'static str,
    got: [usize; 4],
    expected: [usize; 4],
    of: &'static str,
) -> Result<(), Misfit> {
    let mut sizes = ["batch", "heads", "rows"].into_iter().zip(got).zip(expected);
    sizes.try_for_each(|((what, got), expected)| same(argument, what, got, expected, of))
}

/// Checks that the last dimension is 1: one value a row.
pub(crate) fn one_a_row(argument: &'static str, got: usize) -> Result<(), Misfit> {
    if got == 1 { Ok(()) } else { Fault::Wide { got, expected: "1 (one value a row)" }.of(argument) }
}

/// Checks that a log-sum-exp has one value a row, or two: a second column has its rounding error.
pub fn one_or_two_a_row(argument: &'static str, got: usize) -> Result<(), Misfit> {
    let expected = "1 (one value a row), or 2 (and its rounding error)";
    if matches!(got, 1 | 2) { Ok(()) } else { Fault::Wide { got, expected }.of(argument) }
}

/// Returns the number of sequences, if `ends` are cumulative lengths from 0 to `rows`, the rows of a tensor.
pub fn cumulative(argument: &'static str, ends: &[usize], rows: usize) -> Result<usize, Misfit> {
    let entry =
        |index: usize, bound, limit, of| Fault::Entry { index, got: ends[index], bound, limit, of }.of(argument);
    let Some(last) = ends.len().checked_sub(1) else {
        return Fault::Empty("the list of cumulative lengths").of(argument);
    };
    if ends[0] != 0 {
        return entry(0, Bound::Exactly, 0, "where cumulative lengths begin");
    }
    if let Some(index) = (1..ends.len()).find(|&i| ends[i] < ends[i - 1]) {
        return entry(index, Bound::AtLeast, ends[index - 1], "the entry before it");
    }
    if ends[last] == rows { Ok(last) } else { entry(last, Bound::Exactly, rows, "the number of rows") }
}
