//! Whether a mask function fits a call: what it is told of the call, and why it may refuse it.

use core::fmt;

/// Facts about a call, for [`MaskMod::fits`](crate::MaskMod::fits).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallFacts {
    /// Number of sequences: each [`Position::batch`](crate::Position::batch) of the call is less.
    pub sequences: usize,
    /// Name of an option that measures the distance from a row's position to a key, `window` or `alibi`, if one is set and
    /// positions are not given for both rows and keys.
    pub distance: Option<&'static str>,
}

impl CallFacts {
    /// Creates the facts of a call of `sequences` sequences without an option that measures distances.
    pub const fn new(sequences: usize) -> Self {
        Self { sequences, distance: None }
    }

    /// Names an option that measures distances.
    #[must_use]
    pub const fn distance(self, option: &'static str) -> Self {
        Self { distance: Some(option), ..self }
    }
}

/// Reason why a mask, or a call with it, was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskError {
    /// A document ends before the previous one.
    Ends {
        /// Index of the document.
        document: usize,
        /// End of the document.
        end: usize,
        /// End of the previous document.
        previous: usize,
    },
    /// The parent of a drafted token does not precede it.
    Parent {
        /// Number of the drafted token.
        token: usize,
        /// Number of its parent.
        parent: usize,
    },
    /// A call with a tree of drafted tokens measures distances, but positions of its rows are indices in the draft, not
    /// depths on a path.
    Distance {
        /// Option that measures distances: `window` or `alibi`.
        option: &'static str,
    },
    /// A row lies behind a tree of drafted tokens, which has no token for it: it would not see its own key.
    Behind {
        /// Sequence of the call.
        sequence: usize,
        /// Position of its last row.
        position: isize,
        /// One past the position of the last drafted token.
        end: usize,
    },
    /// The numbers of masks and sequences differ.
    Sequences {
        /// Number of masks.
        masks: usize,
        /// Number of sequences of the call.
        sequences: usize,
    },
    /// Your own mask does not fit the call: the reason, in words.
    Unfit(&'static str),
}

impl fmt::Display for MaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ends { document, end, previous } => write!(
                f,
                "ends: document {document} ends at {end}, before the one in front of it, which ends at {previous}; ends \
                 are cumulative"
            ),
            Self::Parent { token, parent } => write!(
                f,
                "parents: token {token} has parent {parent}; a parent is an earlier token, counted from the first drafted \
                 one, and tokens without one have `None`"
            ),
            Self::Distance { option } => write!(
                f,
                "{option}: does not go with a tree of drafted tokens unless rows and keys are given positions: it \
                 measures the distance from a row to a key, and rows of a tree stand where they lie in the draft, not where \
                 they lie on their path (`Tree::positions`)"
            ),
            Self::Behind { sequence, position, end } => write!(
                f,
                "mask function: the last row of sequence {sequence} is at position {position}, but its tree of drafted \
                 tokens ends at {end}, so the row would not see its own key; `None` in a PerSequence is the mask of a \
                 sequence without a draft, beside a causal rule"
            ),
            Self::Sequences { masks, sequences } => {
                write!(f, "mask function: PerSequence has {masks} masks, but the call has {sequences} sequences")
            }
            Self::Unfit(why) => write!(f, "mask function: {why}"),
        }
    }
}

impl core::error::Error for MaskError {}
