//! Safetensors files of caches, with a description of the tensors as JSON in the metadata: what those of `sdpa-layers` share with
//! these.

use crate::error::Error;
use safetensors::tensor::{Metadata, SafeTensorError, SafeTensors, TensorInfo, View};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Makes the error of a file that is refused.
///
/// ```
/// assert_eq!(sdpa::tensor_file::wrong("no header").to_string(), "import: no header");
/// ```
pub fn wrong(why: impl Into<String>) -> Error {
    Error::File { what: "import", why: why.into() }
}

/// Makes the error of what has no file.
///
/// ```
/// assert_eq!(sdpa::tensor_file::refused("too long").to_string(), "export: too long");
/// ```
pub fn refused(why: impl Into<String>) -> Error {
    Error::File { what: "export", why: why.into() }
}

/// Header of a file, and the bytes of its tensors.
///
/// ```
/// use safetensors::tensor::{Dtype, TensorView};
/// use sdpa::tensor_file::{TensorFile, parsed, write};
/// let gain = TensorView::new(Dtype::U8, vec![2], &[3, 4]).unwrap();
/// let bytes = write("lens", &[7, 9], vec![("gain".to_owned(), gain)])?;
/// let file = TensorFile::read(&bytes)?;
/// assert_eq!(file.tensor("gain")?.1, [3, 4]);
/// assert_eq!(parsed::<Vec<usize>>("lens", file.metadata("lens").unwrap())?, [7, 9]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorFile<'a> {
    header: Metadata,
    data: &'a [u8],
}

impl<'a> TensorFile<'a> {
    /// Reads the header.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn read(bytes: &'a [u8]) -> Result<Self, Error> {
        let header = ends_fit(bytes).and_then(|()| SafeTensors::read_metadata(bytes));
        let (len, header) = header.map_err(|e| match expected_length(bytes, &e) {
            Some(expected) => wrong(format!("the file has {} bytes, but its header speaks of {expected}", bytes.len())),
            None => wrong(format!("no safetensors file: {e}")),
        })?;
        Ok(Self { header, data: &bytes[size_of::<u64>() + len..] })
    }

    /// Number of tensors.
    pub fn tensors(&self) -> usize {
        self.header.tensors().len()
    }

    /// Returns the metadata under a key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// Returns the type and shape of a tensor, and its bytes.
    ///
    /// # Errors
    /// [`Error::File`] if there is no such tensor.
    pub fn tensor(&self, name: &str) -> Result<(&TensorInfo, &'a [u8]), Error> {
        let tensor = self.header.info(name).ok_or_else(|| wrong(format!("{name}: no such tensor")))?;
        Ok((tensor, &self.data[tensor.data_offsets.0..tensor.data_offsets.1]))
    }
}

/// Reads metadata.
///
/// ```
/// assert_eq!(sdpa::tensor_file::parsed::<[u8; 2]>("sizes", "[1, 2]")?, [1, 2]);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// [`Error::File`] if the text is not what is read.
pub fn parsed<'t, T: Deserialize<'t>>(key: &str, text: &'t str) -> Result<T, Error> {
    serde_json::from_str(text).map_err(|e| wrong(format!("metadata {key:?}: {e}")))
}

/// Returns the bytes of a file of these tensors, with a description under a key.
///
/// ```
/// let none: Vec<(String, safetensors::tensor::TensorView)> = Vec::new();
/// let bytes = sdpa::tensor_file::write("lens", &[7], none)?;
/// assert_eq!(sdpa::tensor_file::TensorFile::read(&bytes)?.tensors(), 0);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// [`Error::Memory`], [`Error::File`].
pub fn write<V: View>(key: &str, description: &impl Serialize, tensors: Vec<(String, V)>) -> Result<Vec<u8>, Error> {
    // The file, and the largest tensor while it is copied there.
    let bytes = tensors.iter().map(|(_, tensor)| tensor.data_len()).sum::<usize>();
    if !sdpa_kernels::has_memory(bytes.div_ceil(size_of::<f32>())) {
        return Err(Error::Memory { what: "export", bytes });
    }
    let description = serde_json::to_string(description).map_err(|e| refused(e.to_string()))?;
    let metadata = HashMap::from([(key.to_owned(), description)]);
    safetensors::serialize(tensors, Some(metadata)).map_err(|e| refused(e.to_string()))
}

/// Returns the length by the header, if that is what the reader refused the file for.
///
/// ```
/// let bytes = [&8u64.to_le_bytes()[..], b"{}"].concat(); // six bytes of the header are missing
/// let error = safetensors::SafeTensors::deserialize(&bytes).unwrap_err();
/// assert_eq!(sdpa::tensor_file::expected_length(&bytes, &error), Some(16));
/// ```
pub fn expected_length(bytes: &[u8], e: &SafeTensorError) -> Option<u64> {
    match e {
        SafeTensorError::MetadataIncompleteBuffer => data_end(bytes),
        SafeTensorError::InvalidHeaderLength => header_end(bytes),
        _ => None,
    }
}

/// End of the header; its length is in the first eight bytes.
fn header_end(bytes: &[u8]) -> Option<u64> {
    u64::from_le_bytes(*bytes.first_chunk()?).checked_add(8)
}

/// Checks, before a file is read, that its length by its header is a number: the reader of `safetensors` 0.8 adds up without looking.
///
/// ```
/// let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, u64::MAX);
/// let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
/// assert!(sdpa::tensor_file::ends_fit(&bytes).is_err());
/// ```
///
/// # Errors
/// [`SafeTensorError::ValidationOverflow`].
pub fn ends_fit(bytes: &[u8]) -> Result<(), SafeTensorError> {
    let is_number = |end: u64| header_end(bytes)?.checked_add(end).and_then(|end| usize::try_from(end).ok());
    match last_end(bytes) {
        Some(end) if is_number(end).is_none() => Err(SafeTensorError::ValidationOverflow),
        _ => Ok(()),
    }
}

/// Length of a file by its complete header.
fn data_end(bytes: &[u8]) -> Option<u64> {
    header_end(bytes)?.checked_add(last_end(bytes)?)
}

/// End of the last tensor, behind the header, by a complete header.
fn last_end(bytes: &[u8]) -> Option<u64> {
    /// What a header says of a tensor, or of the file.
    #[derive(Deserialize)]
    struct Described {
        #[serde(default)]
        data_offsets: serde_json::Value,
    }
    let header = bytes.get(8..usize::try_from(header_end(bytes)?).ok()?)?;
    let header: HashMap<String, Described> = serde_json::from_slice(header).ok()?;
    header.values().filter_map(|described| described.data_offsets[1].as_u64()).max()
}
