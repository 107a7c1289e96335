//! Length that a safetensors file has by its own header.

use safetensors::tensor::SafeTensorError;

/// Returns the length by the header, if that is what the reader refused the file for.
pub(crate) fn expected_length(bytes: &[u8], e: &SafeTensorError) -> Option<u64> {
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

/// End of the last tensor, by a complete header.
fn data_end(bytes: &[u8]) -> Option<u64> {
    let end = header_end(bytes)?;
    let header = bytes.get(8..usize::try_from(end).ok()?)?;
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    let ends = header.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64());
    end.checked_add(ends.max()?)
}
