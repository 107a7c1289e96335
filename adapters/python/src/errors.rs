//! Errors of Python's, under the names that arguments have there.

use pyo3::PyErr;
use pyo3::exceptions::{PyTypeError, PyValueError};
use sdpa::Error;
use std::fmt::Display;

/// Returns a `ValueError` about an argument.
pub(crate) fn value(argument: &str, why: impl Display) -> PyErr {
    PyValueError::new_err(format!("{argument}: {why}"))
}

/// Returns a `TypeError` about an argument.
pub(crate) fn wrong_type(argument: &str, got: impl Display, expected: &str) -> PyErr {
    PyTypeError::new_err(format!("{argument}: type is {got}, but must be {expected}"))
}

/// Returns a `ValueError` about a shape that is not the one expected.
pub(crate) fn shape(argument: &str, got: &[usize], expected: &[usize]) -> PyErr {
    value(argument, format_args!("shape is {got:?}, but must be {expected:?}"))
}

/// Returns a `ValueError` with the message of one of `sdpa`'s errors.
pub(crate) fn refused(error: Error) -> PyErr {
    PyValueError::new_err(renamed(error).to_string())
}

/// Returns the error with the names of Python's arguments.
fn renamed(error: Error) -> Error {
    match error {
        Error::Mismatch { argument, what, got, expected, of } => {
            Error::Mismatch { argument: name(argument), what, got, expected, of: name(of) }
        }
        Error::Range { argument, what, got, bound, limit, of } => {
            Error::Range { argument: name(argument), what, got, bound, limit, of: name(of) }
        }
        Error::Empty { argument, what } => Error::Empty { argument: name(argument), what },
        Error::Number { argument, got, expected } => Error::Number { argument: name(argument), got, expected },
        Error::Unaligned { rule, sequence, q_len, kv_len } => {
            Error::Unaligned { rule: name(rule), sequence, q_len, kv_len }
        }
        other => other,
    }
}

/// Returns the name that an argument, or the source of a size, has in Python.
fn name(of: &'static str) -> &'static str {
    match of {
        "q" => "query",
        "k" => "key",
        "v" => "value",
        "q (batch)" => "query (batch)",
        "q (heads)" => "query (heads)",
        "k (rows)" => "key (rows)",
        "alibi slopes" => "alibi",
        "dropout" => "dropout_p",
        other => other,
    }
}
