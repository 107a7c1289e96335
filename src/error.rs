//! Errors: everything that can be wrong with a call, under the names of the caller's arguments.

pub(crate) mod messages;

pub(crate) use sdpa_kernels::same;
use sdpa_kernels::{Bound, Fault, LayoutError, MAX_DIM, MaskError, Misfit, PageError, SelectionError};

/// Reason why a call was refused; outputs are then untouched. Or, with [`Error::Stopped`] alone, why it was not completed.
///
/// Match on variants and numbers. The names and sentences in an error are for people to read and may change in any release.
///
/// ```
/// use sdpa::{Error, Inputs, View};
/// let (q, kv) = ([0.0; 2 * 8], [0.0; 3 * 4]);
/// let (q, kv) = (View::bhld(&q, [1, 1, 2, 8])?, View::bhld(&kv, [1, 1, 3, 4])?);
/// let error = Inputs::new(q, kv, kv).shape().unwrap_err();
/// assert!(matches!(error, Error::Mismatch { got: 4, expected: 8, .. }));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// Two arguments disagree about a size.
    Mismatch {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Name of the size: `batch`, `heads`, `head_dim`, …
        what: &'static str,
        /// Size found in that argument.
        got: usize,
        /// Size it should have.
        expected: usize,
        /// Source of the expected size.
        of: &'static str,
    },
    /// A size is beyond its limit, or is not the sum, product or multiple of other sizes that it should be.
    Range {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Name of the size.
        what: &'static str,
        /// Size found in that argument.
        got: usize,
        /// Kind of bound that the size breaks.
        bound: Bound,
        /// Limit of the range.
        limit: usize,
        /// Meaning of the limit.
        of: &'static str,
    },
    /// A size is not the one valid size.
    Size {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Name of the size.
        what: &'static str,
        /// Size found in that argument.
        got: usize,
        /// Size that is valid, and why.
        expected: &'static str,
    },
    /// The number of query heads is not a multiple of the number of key/value heads. If a number is one of rows, heads and rows
    /// are swapped: [`View::bhld`](crate::View::bhld) takes batch, heads, rows, dim; [`View::blhd`](crate::View::blhd) batch,
    /// rows, heads, dim.
    Heads {
        /// Number of query heads.
        q_heads: usize,
        /// Number of key/value heads.
        kv_heads: usize,
        /// Source of the key/value heads: `k`, `cache` or `pages`.
        of: &'static str,
    },
    /// A size that must be at least 1 is 0.
    Empty {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Name of the size.
        what: &'static str,
    },
    /// A number is outside its range.
    Number {
        /// Name of the setting at fault.
        argument: &'static str,
        /// Value found.
        got: f32,
        /// Values that are valid.
        expected: &'static str,
    },
    /// A rule depends on the positions of the rows relative to the keys, but the numbers of rows and keys differ and no
    /// alignment is set.
    Unaligned {
        /// Name of the rule.
        rule: &'static str,
        /// Index of the sequence, in the cache or pages if there is one; `None` if all sequences have the same lengths.
        sequence: Option<usize>,
        /// Query rows of the sequence.
        q_len: usize,
        /// Keys of the sequence.
        kv_len: usize,
    },
    /// The product of sizes does not fit the address space.
    TooLarge {
        /// Name of the data that would be too large.
        what: &'static str,
        /// Factors of the product.
        sizes: [usize; 4],
    },
    /// Memory could not be allocated.
    Memory {
        /// Purpose of the memory.
        what: &'static str,
        /// Size of the allocation in bytes.
        bytes: usize,
    },
    /// A cache has no such sequence.
    Sequence {
        /// Name of the argument with the index.
        argument: &'static str,
        /// Index of the sequence.
        got: usize,
        /// Number of sequences of the cache.
        sequences: usize,
    },
    /// A sequence of a cache was removed, and not added again.
    Removed {
        /// Name of the argument or call at fault.
        argument: &'static str,
        /// Index of the sequence.
        sequence: usize,
    },
    /// A list names a sequence twice.
    Repeated {
        /// Name of the list.
        argument: &'static str,
        /// Index of the sequence.
        sequence: usize,
    },
    /// One of several values is outside its range.
    Entry {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Index of the value in that argument.
        index: usize,
        /// Value found.
        got: usize,
        /// Kind of bound that the value breaks.
        bound: Bound,
        /// Limit of the range.
        limit: usize,
        /// Meaning of the limit.
        of: &'static str,
    },
    /// A sequence of a cache cannot be cut to a length, or at a position.
    Length {
        /// Name of the length or position.
        argument: &'static str,
        /// Index of the sequence.
        sequence: usize,
        /// Length asked for.
        got: usize,
        /// Kind of bound that the length breaks: at most the number of keys, or at least what a sliding cache needs for
        /// the next row.
        bound: Bound,
        /// Limit of the range.
        limit: usize,
    },
    /// A row would see a key that its cache has evicted.
    Evicted {
        /// Index of the sequence in the cache.
        sequence: usize,
        /// Index of the query row.
        row: usize,
        /// First evicted key that the row would see.
        key: usize,
        /// End of the evicted keys (exclusive).
        end: usize,
    },
    /// A call's window shows more keys than its sliding cache was made to keep. It is refused at every length, also while
    /// the cache still has those keys.
    Wider {
        /// Side of the keys on which it is wider, `last` or `first`.
        side: &'static str,
        /// Number of keys on that side that the window shows; the last keys include the row's own.
        got: usize,
        /// Number of keys on that side that the cache keeps.
        keeps: usize,
    },
    /// A block table, or the page pool it refers to, is invalid.
    Pages(PageError),
    /// Lists of selected keys are invalid.
    Selection(SelectionError),
    /// A mask function is invalid, or does not fit the call: [`MaskMod::fits`](crate::MaskMod::fits).
    Mask(MaskError),
    /// The function of [`Run::until`](crate::Run::until) said stop before all work was done. Every row of every output
    /// is either computed, with the bits it always has, or untouched; nothing says which. Key weight sums of a sequence
    /// and head are likewise computed or untouched. Rows that split-KV computes key block by key block are all
    /// untouched unless the last block was done. Gradients are partly written. The workspace serves other calls as
    /// before.
    Stopped,
    /// One of several rows is not valid for its use.
    Row {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Quantity of the row that is wrong.
        what: &'static str,
        /// Index of the row.
        row: usize,
        /// Value found.
        got: f32,
        /// Values that are valid.
        expected: &'static str,
    },
    /// An argument needs another one, or excludes it.
    Needs {
        /// Name of the given argument.
        argument: &'static str,
        /// Argument or condition that is required.
        needs: &'static str,
    },
    /// A file of a cache cannot be made or read: see [`KvCache::import`](crate::KvCache).
    File {
        /// Name of the call.
        what: &'static str,
        /// Reason, in words.
        why: String,
    },
    /// An output is given twice.
    Twice {
        /// Name of the output.
        argument: &'static str,
    },
    /// Two arguments have different settings.
    Differs {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Name of the setting.
        what: &'static str,
        /// Setting found in that argument, in words.
        got: String,
        /// Setting it should have.
        expected: String,
        /// Source of the expected setting.
        of: &'static str,
    },
    /// A number is no multiple of another.
    Multiple {
        /// Name of the number at fault.
        argument: &'static str,
        /// Number found.
        got: usize,
        /// Number that should divide it.
        of: usize,
    },
    /// The keys of a state do not follow those of the state that it is to be merged into.
    Apart {
        /// Position of the state's first key.
        first: usize,
        /// Position after the last key of the state that it is to be merged into.
        end: usize,
    },
    /// A view does not fit its slice.
    Layout(LayoutError),
}

/// Returns `len` zeros, or [`Error::Memory`] for `what`.
pub(crate) fn zeros(what: &'static str, len: usize) -> Result<Vec<f32>, Error> {
    sdpa_kernels::zeros(len).ok_or(Error::Memory { what, bytes: len.saturating_mul(size_of::<f32>()) })
}

impl core::error::Error for Error {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Layout(e) => Some(e),
            Self::Pages(e) => Some(e),
            Self::Mask(e) => Some(e),
            Self::Selection(e) => Some(e),
            _ => None,
        }
    }
}

impl From<LayoutError> for Error {
    fn from(e: LayoutError) -> Self {
        Self::Layout(e)
    }
}

impl From<MaskError> for Error {
    fn from(e: MaskError) -> Self {
        Self::Mask(e)
    }
}

impl From<SelectionError> for Error {
    fn from(e: SelectionError) -> Self {
        Self::Selection(e)
    }
}

impl From<PageError> for Error {
    fn from(e: PageError) -> Self {
        Self::Pages(e)
    }
}

// Users cannot name a misfit.
#[doc(hidden)]
impl From<Misfit> for Error {
    fn from(Misfit { argument, fault }: Misfit) -> Self {
        match fault {
            Fault::Size { what, got, expected, of } => Self::Mismatch { argument, what, got, expected, of },
            Fault::Wide { got, expected } => Self::Size { argument, what: "last dimension", got, expected },
            Fault::Empty(what) => Self::Empty { argument, what },
            Fault::Long { what, got } => {
                let (bound, limit, of) = (Bound::AtMost, MAX_DIM, "the largest possible");
                Self::Range { argument, what, got, bound, limit, of }
            }
            Fault::Heads { q_heads, kv_heads, of } => Self::Heads { q_heads, kv_heads, of },
            Fault::TooLarge(sizes) => Self::TooLarge { what: argument, sizes },
            Fault::Entry { index, got, bound, limit, of } => Self::Entry { argument, index, got, bound, limit, of },
            Fault::Sequence { got, sequences } => Self::Sequence { argument, got, sequences },
            Fault::Needs(needs) => Self::Needs { argument, needs },
            Fault::Twice => Self::Twice { argument },
        }
    }
}

/// Checks that `got`, the size `what` of an argument, is at most a limit, which is `of`.
pub(crate) fn at_most(
    argument: &'static str,
    what: &'static str,
    got: usize,
    limit: usize,
    of: &'static str,
) -> Result<(), Error> {
    let bound = Bound::AtMost;
    if got <= limit { Ok(()) } else { Err(Error::Range { argument, what, got, bound, limit, of }) }
}

/// Returns the product of the sizes, or [`Error::TooLarge`] if that many floats do not fit the address space.
pub(crate) fn floats(what: &'static str, sizes: [usize; 4]) -> Result<usize, Error> {
    sdpa_kernels::floats(sizes).ok_or(Error::TooLarge { what, sizes })
}
