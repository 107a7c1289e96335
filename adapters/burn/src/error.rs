//! Errors, under the names of burn's arguments.

use burn_tensor::DType;
use core::fmt;

/// Reason why a call was refused.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A tensor is not on burn's CPU backend, Flex, or has another strategy of autodiff than the others.
    Backend {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Reason, in burn's words.
        reason: String,
    },
    /// A tensor has elements of a type that cannot be read here.
    Dtype {
        /// Name of the argument at fault.
        argument: &'static str,
        /// Type found.
        got: DType,
        /// Types that can be read.
        expected: &'static str,
    },
    /// The tensors or settings do not fit together.
    Attention(sdpa::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backend { argument, reason } => {
                write!(f, "{argument}: not a tensor of burn's Flex backend like the others: {reason}")
            }
            Self::Dtype { argument, got, expected } => {
                write!(f, "{argument}: elements are {got:?}, but must be {expected}")
            }
            Self::Attention(e) => e.fmt(f),
        }
    }
}

impl core::error::Error for Error {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Attention(e) => Some(e),
            _ => None,
        }
    }
}

impl From<sdpa::Error> for Error {
    fn from(e: sdpa::Error) -> Self {
        Self::Attention(e)
    }
}

impl From<sdpa::LayoutError> for Error {
    fn from(e: sdpa::LayoutError) -> Self {
        Self::Attention(e.into())
    }
}
