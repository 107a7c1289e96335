//! Split: how a call is cut over ranks.

use crate::costs::Costs;

/// Way in which a call is cut over ranks. Bits do not depend on it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub enum Split {
    /// By rows: each rank computes its own rows, and keys and values travel to the rows that see them.
    #[default]
    Rows,
    /// By heads: each rank computes all rows of some key/value heads and of the query heads that share them. Queries, keys and
    /// values travel there, and the rows of biases and masks; results travel back (all-to-all, as in DeepSpeed-Ulysses,
    /// arXiv:2309.14509). Weight functions, positions of rows and keys, and biases and masks over the last keys are possible.
    /// Every rank names a stretch of rows, if only an empty one, and all give biases and masks in one form: the same batch and
    /// heads, and a row for each row or one for all. More ranks than key/value heads have nothing to compute.
    Heads,
    /// The way that [`Forecast`](crate::Forecast) says is faster, by costs that must be the same on every rank; or the only one
    /// that the options of the call allow. Takes one more exchange of numbers.
    Chosen(Costs),
}
