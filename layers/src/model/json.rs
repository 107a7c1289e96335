//! Configuration files: one JSON object, read field by field.

use super::ModelError;
use serde_json::{Map, Value};

/// JSON object; its fields are read by name and type.
pub(crate) struct Json(Map<String, Value>);

impl Json {
    pub(crate) fn new(bytes: &[u8]) -> Result<Self, ModelError> {
        let why = |e: serde_json::Error| ModelError::Format { format: "a configuration in JSON", why: e.to_string() };
        serde_json::from_slice(bytes).map(Self).map_err(why)
    }

    /// Returns a field; null counts as missing.
    fn field(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    fn wrong(&self, field: &'static str, expected: impl Into<String>) -> ModelError {
        let got = self.field(field).map_or_else(|| "missing".to_owned(), Value::to_string);
        ModelError::Config { field, got, expected: expected.into() }
    }

    /// Reads a whole number.
    pub(crate) fn count(&self, field: &'static str) -> Result<usize, ModelError> {
        let count = self.field(field).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        count.ok_or_else(|| self.wrong(field, "a whole number"))
    }

    /// Reads a whole number, or returns `default` if the field is missing.
    pub(crate) fn count_or(&self, field: &'static str, default: usize) -> Result<usize, ModelError> {
        if self.field(field).is_some() { self.count(field) } else { Ok(default) }
    }

    /// Reads a number, or returns `default` if the field is missing.
    pub(crate) fn number_or(&self, field: &'static str, default: f32) -> Result<f32, ModelError> {
        let Some(value) = self.field(field) else { return Ok(default) };
        value.as_f64().map(|x| x as f32).ok_or_else(|| self.wrong(field, "a number"))
    }

    /// Reads one of several words and returns its value; the first one's if the field is missing.
    pub(crate) fn one_of<T: Copy>(&self, field: &'static str, words: &[(&str, T)]) -> Result<T, ModelError> {
        let Some(value) = self.field(field) else { return Ok(words[0].1) };
        let known = words.iter().find(|(word, _)| value.as_str() == Some(word));
        known.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let words: Vec<String> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
            self.wrong(field, words.join(" or "))
        })
    }

    /// Checks that a switch is off, because what it turns on is not supported.
    pub(crate) fn off(&self, field: &'static str) -> Result<(), ModelError> {
        match self.field(field) {
            None | Some(Value::Bool(false)) => Ok(()),
            Some(_) => Err(self.wrong(field, "false")),
        }
    }
}
