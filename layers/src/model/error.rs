//! Errors of models.

use core::fmt;
use sdpa::Error;

/// Reason why a model was not made, or a call to it refused; outputs are then untouched.
///
/// ```
/// use sdpa_layers::{Bert, BertConfig, ModelError, Tensor};
/// use std::collections::HashMap;
/// let weights: HashMap<String, Tensor<'_>> = HashMap::new();
/// let error = Bert::new(BertConfig::default(), &weights).unwrap_err();
/// assert!(matches!(error, ModelError::Missing { tensor } if tensor == "embeddings.word_embeddings.weight"));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ModelError {
    /// A tensor that the configuration requires is missing.
    Missing {
        /// Name of the tensor.
        tensor: String,
    },
    /// A tensor does not have the shape that the configuration requires.
    Shape {
        /// Name of the tensor.
        tensor: String,
        /// Shape found.
        got: Vec<usize>,
        /// Shape required.
        expected: Vec<usize>,
    },
    /// A tensor has an element type that is not supported.
    Dtype {
        /// Name of the tensor.
        tensor: String,
        /// Element type found.
        got: String,
        /// Element types supported.
        expected: &'static str,
    },
    /// A field of the configuration is invalid, missing or not supported.
    Config {
        /// Name of the field.
        field: &'static str,
        /// Value found.
        got: String,
        /// Values that are valid.
        expected: String,
    },
    /// A file is shorter or longer than its own header says.
    Length {
        /// Length of the file in bytes.
        got: u64,
        /// Length by its header, in bytes.
        expected: u64,
    },
    /// A file is not valid in its format.
    Format {
        /// Name of the format.
        format: &'static str,
        /// Message of its reader.
        why: String,
    },
    /// A token, or a token's type, is beyond the table it is looked up in.
    Token {
        /// Index of the token, counted over all sequences.
        index: usize,
        /// Token or type found.
        got: u32,
        /// Name of the table.
        tensor: &'static str,
        /// Number of rows of the table.
        rows: usize,
    },
    /// A sequence is longer than the model has positions.
    TooLong {
        /// Index of the sequence.
        sequence: usize,
        /// Number of its tokens.
        len: usize,
        /// Name of the table of positions.
        tensor: &'static str,
        /// Number of rows of the table.
        rows: usize,
    },
    /// Any error of a layer.
    Layer(Error),
}

impl fmt::Display for ModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { tensor } => write!(f, "{tensor}: no such tensor"),
            Self::Shape { tensor, got, expected } => {
                write!(f, "{tensor}: shape is {got:?}, but by the configuration must be {expected:?}")
            }
            Self::Dtype { tensor, got, expected } => write!(f, "{tensor}: dtype is {got}, but must be {expected}"),
            Self::Config { field, got, expected } => {
                write!(f, "configuration: {field} is {got}, but must be {expected}")
            }
            Self::Length { got, expected } => {
                write!(f, "the file has {got} bytes, but its header speaks of {expected}")
            }
            Self::Format { format, why } => write!(f, "not {format}: {why}"),
            Self::Token { index, got, tensor, rows } => {
                write!(f, "token {index} is {got}, but {tensor} has {rows} rows")
            }
            Self::TooLong { sequence, len, tensor, rows } => {
                write!(f, "sequence {sequence} has {len} tokens, but {tensor} has {rows} rows")
            }
            Self::Layer(e) => e.fmt(f),
        }
    }
}

impl core::error::Error for ModelError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Layer(e) => Some(e),
            _ => None,
        }
    }
}

impl From<Error> for ModelError {
    fn from(e: Error) -> Self {
        Self::Layer(e)
    }
}
