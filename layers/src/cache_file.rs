//! Files of caches: safetensors, with a description of the tensors as JSON in the metadata.

use crate::file_length::expected_length;
use safetensors::tensor::{Dtype, Metadata, SafeTensors, View};
use sdpa::Error;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::HashMap;

/// Version of descriptions.
pub(crate) const VERSION: u64 = 1;

/// Makes the error of a file that is refused.
pub(crate) fn wrong(why: impl Into<String>) -> Error {
    Error::File { what: "import", why: why.into() }
}

/// Tensor of a file to be written.
pub(crate) struct NamedTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Elements, in the byte order of files.
    pub(crate) bytes: Vec<u8>,
}

impl View for NamedTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Returns the bytes of a file of these tensors, with a description under a key.
pub(crate) fn write(key: &str, description: &Value, tensors: Vec<NamedTensor>) -> Result<Vec<u8>, Error> {
    let bytes = tensors.iter().map(|tensor| tensor.bytes.len()).sum::<usize>();
    if !sdpa_kernels::has_memory(bytes.div_ceil(size_of::<f32>())) {
        return Err(Error::Memory { what: "export", bytes });
    }
    let metadata = HashMap::from([(key.to_owned(), description.to_string())]);
    let tensors = tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor));
    safetensors::serialize(tensors, Some(metadata)).map_err(|e| Error::File { what: "export", why: e.to_string() })
}

/// Header of a file, and the bytes of its tensors.
pub(crate) struct File<'a> {
    header: Metadata,
    data: &'a [u8],
    /// Description under the key that was asked for.
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
        let (len, header) = SafeTensors::read_metadata(bytes).map_err(|e| match expected_length(bytes, &e) {
            Some(expected) => wrong(format!("the file has {} bytes, but its header speaks of {expected}", bytes.len())),
            None => wrong(format!("no safetensors file: {e}")),
        })?;
        let text = header.metadata().as_ref().and_then(|all| all.get(key));
        let text = text.ok_or_else(|| wrong(format!("the file has another purpose: there are no metadata {key:?}")))?;
        let value = serde_json::from_str(text).map_err(|e| wrong(format!("metadata {key:?}: {e}")))?;
        let description = Description { key, value };
        match description.number("version")? {
            VERSION => Ok(Self { header, data: &bytes[size_of::<u64>() + len..], description }),
            version => Err(wrong(format!("the file's version is {version}, but must be {VERSION}"))),
        }
    }

    /// Number of tensors.
    pub(crate) fn tensors(&self) -> usize {
        self.header.tensors().len()
    }

    /// Returns the shape and the bytes of a tensor of this type and number of dimensions.
    pub(crate) fn tensor<const DIMS: usize>(
        &self,
        name: &str,
        dtype: Dtype,
    ) -> Result<([usize; DIMS], &'a [u8]), Error> {
        let Some(tensor) = self.header.info(name) else { return Err(wrong(format!("{name}: no such tensor"))) };
        match <[usize; DIMS]>::try_from(&tensor.shape[..]) {
            Ok(shape) if tensor.dtype == dtype => Ok((shape, &self.data[tensor.data_offsets.0..tensor.data_offsets.1])),
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
