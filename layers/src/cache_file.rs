//! Files of caches, with a description as JSON.

use safetensors::tensor::Dtype;
use sdpa::Error;
use sdpa::tensor_file::{TensorFile, parsed, wrong};
use serde_json::Value;

/// Version of descriptions.
pub(crate) const VERSION: u64 = 1;

/// File with a description.
pub(crate) struct File<'a> {
    file: TensorFile<'a>,
    pub(crate) description: Description,
}

/// Description of a file's tensors.
pub(crate) struct Description {
    key: &'static str,
    value: Value,
}

impl<'a> File<'a> {
    /// Reads the header, and the description under this key.
    pub(crate) fn read(bytes: &'a [u8], key: &'static str) -> Result<Self, Error> {
        let file = TensorFile::read(bytes)?;
        let none = || wrong(format!("the file has another purpose: there are no metadata {key:?}"));
        let value = parsed(key, file.metadata(key).ok_or_else(none)?)?;
        let description = Description { key, value };
        match description.number("version")? {
            VERSION => Ok(Self { file, description }),
            version => Err(wrong(format!("the file's version is {version}, but must be {VERSION}"))),
        }
    }

    /// Number of tensors.
    pub(crate) fn tensors(&self) -> usize {
        self.file.tensors()
    }

    /// Returns the shape and the bytes of a tensor of this type and number of dimensions.
    pub(crate) fn tensor<const DIMS: usize>(
        &self,
        name: &str,
        dtype: Dtype,
    ) -> Result<([usize; DIMS], &'a [u8]), Error> {
        let (tensor, bytes) = self.file.tensor(name)?;
        match <[usize; DIMS]>::try_from(&tensor.shape[..]) {
            Ok(shape) if tensor.dtype == dtype => Ok((shape, bytes)),
            _ => Err(wrong(format!(
                "{name}: {} {:?}, but must be {dtype} with {DIMS} dimensions",
                tensor.dtype, tensor.shape
            ))),
        }
    }
}

impl Description {
    /// Reads a whole number.
    pub(crate) fn number(&self, field: &str) -> Result<u64, Error> {
        self.value[field].as_u64().ok_or_else(|| self.wrong(field, "a whole number"))
    }

    /// Reads a whole number, or null, which is not missing.
    pub(crate) fn number_or_null(&self, field: &str) -> Result<Option<u64>, Error> {
        if self.value.get(field).is_some_and(Value::is_null) { Ok(None) } else { self.number(field).map(Some) }
    }

    /// Refuses a field that is not this word.
    pub(crate) fn check_word(&self, field: &str, expected: &str) -> Result<(), Error> {
        if self.value[field] == expected { Ok(()) } else { Err(self.wrong(field, &format!("{expected:?}"))) }
    }

    fn wrong(&self, field: &str, expected: &str) -> Error {
        wrong(format!("metadata {:?}: {field} is {}, but must be {expected}", self.key, self.value[field]))
    }
}
