//! Errors in lists of keys.

use core::fmt;

/// Place of a list: its sequence, head, and the first row of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListPlace {
    /// Sequence of the call.
    pub sequence: usize,
    /// Head, of the heads that have lists.
    pub head: usize,
    /// First row of the group, in its sequence.
    pub row: usize,
}

/// Error in lists of selected keys.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SelectionError {
    /// A size of the shape is 0: `heads`, `rows` or `unit`.
    Empty {
        /// Name of the size.
        what: &'static str,
    },
    /// A size of the given lists is not that of the shape.
    Size {
        /// Name of the size.
        what: &'static str,
        /// Size found.
        got: usize,
        /// Size that the shape says.
        expected: usize,
    },
    /// Starts of lists decrease, or do not begin with 0.
    Starts {
        /// Index of the start.
        index: usize,
        /// Start found.
        got: usize,
        /// Least start that is valid.
        least: usize,
    },
    /// A number is beyond the sequence, or below 0 and not −1.
    Beyond {
        /// List with the number.
        list: ListPlace,
        /// Place of the number in the list.
        place: usize,
        /// Number found.
        got: i64,
        /// Number of units of the sequence.
        units: usize,
    },
    /// A list names a number twice.
    Repeated {
        /// List with the number.
        list: ListPlace,
        /// Places of the number in the list.
        places: [usize; 2],
        /// Number found.
        got: u32,
    },
    /// A number is less than the one before it, where lists must be ascending.
    Order {
        /// List with the number.
        list: ListPlace,
        /// Place of the number in the list.
        place: usize,
        /// Number found.
        got: u32,
        /// Number before it.
        before: u32,
    },
    /// A length of a list is more than its places.
    Length {
        /// List with the length.
        list: ListPlace,
        /// Length found.
        got: i64,
        /// Number of places.
        places: usize,
    },
    /// Numbers would be those of keys beyond the largest that can be listed.
    TooLarge {
        /// Sequence with the number.
        sequence: usize,
        /// One past the last key of the greatest unit.
        keys: usize,
    },
    /// There is no memory for the lists.
    Memory {
        /// Number of units of all lists.
        units: usize,
    },
}

impl fmt::Display for ListPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequence, head, row } = self;
        write!(f, "the list of sequence {sequence}, head {head}, row {row}")
    }
}

impl fmt::Display for SelectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("selected keys: ")?;
        match self {
            Self::Empty { what } => write!(f, "{what} is 0, but must be at least 1"),
            Self::Size { what, got, expected } => write!(f, "{what} is {got}, but the shape says {expected}"),
            Self::Starts { index, got, least } => {
                write!(
                    f,
                    "start {index} is {got}, but must be {} {least}",
                    if *index == 0 { "exactly" } else { "at least" }
                )
            }
            Self::Beyond { list, place, got, units } => {
                write!(
                    f,
                    "{list} has {got} at place {place}, but its sequence has {units} units (−1 marks an absent one)"
                )
            }
            Self::Repeated { list, places: [a, b], got } => write!(f, "{list} has {got} at places {a} and {b}"),
            Self::Order { list, place, got, before } => {
                write!(f, "{list} has {got} at place {place}, after {before}, but must be ascending")
            }
            Self::Length { list, got, places } => {
                write!(f, "{list} has length {got}, but places for 0 to {places} numbers")
            }
            Self::TooLarge { sequence, keys } => {
                write!(
                    f,
                    "sequence {sequence} has units up to key {keys}, but keys up to {} can be listed",
                    super::MAX_KEYS
                )
            }
            Self::Memory { units } => write!(f, "could not allocate memory for {units} units"),
        }
    }
}

impl core::error::Error for SelectionError {}
