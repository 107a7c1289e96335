//! Reasons why a stock mask was refused.

use core::fmt;

/// Reason why a mask was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskError {
    /// A document ends before the one in front of it.
    Ends {
        /// Index of the document.
        document: usize,
        /// End of the document.
        end: usize,
        /// End of the document in front of it.
        previous: usize,
    },
    /// The parent of a drafted token is not in front of it.
    Parent {
        /// Number of the drafted token.
        token: usize,
        /// Number of its parent.
        parent: usize,
    },
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
        }
    }
}

impl core::error::Error for MaskError {}
