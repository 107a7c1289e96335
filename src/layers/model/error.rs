//! Why a model cannot be made, or cannot take what it is given.

use crate::error::Error;
use core::fmt;

/// Why a model was not made, or a call to it refused; outputs are then untouched.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ModelError {
    /// A tensor that the configuration asks for is not there.
    Missing {
        /// Its name.
        tensor: String,
    },
    /// A tensor is of another shape than the configuration says.
    Shape {
        /// Its name.
        tensor: String,
        /// Its shape.
        got: Vec<usize>,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// A tensor holds numbers that are not read.
    Dtype {
        /// Its name.
        tensor: String,
        /// What they are.
        got: String,
        /// What is read.
        expected: &'static str,
    },
    /// The configuration asks for what cannot be, what is not there, or what is not computed here.
    Config {
        /// Its field.
        field: &'static str,
        /// What stands there.
        got: String,
        /// What should.
        expected: String,
    },
    /// A file is shorter or longer than its own header says.
    Length {
        /// Its bytes.
        got: u64,
        /// The bytes it should have.
        expected: u64,
    },
    /// A file is not of its format.
    Format {
        /// The format.
        format: &'static str,
        /// What its reader says.
        why: String,
    },
    /// A token, or a token's type, beyond the table it is looked up in.
    Token {
        /// Which of them, counted over all sequences.
        index: usize,
        /// The token.
        got: u32,
        /// The table.
        tensor: &'static str,
        /// Its rows.
        rows: usize,
    },
    /// A sequence longer than the model has positions.
    TooLong {
        /// Which sequence.
        sequence: usize,
        /// Its tokens.
        len: usize,
        /// The table of positions.
        tensor: &'static str,
        /// Its rows.
        rows: usize,
    },
    /// What any layer may refuse.
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
