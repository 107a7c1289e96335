//! Files of tensors from what is easily changed.

use std::borrow::Cow;

/// Returns a file of tensors. What begins with a brace is a description, then, after a byte of zero, the tensors: the length that
/// comes first in a file is put before it. Anything else is a file as it stands.
pub(crate) fn file(bytes: &[u8]) -> Cow<'_, [u8]> {
    if !bytes.starts_with(b"{") {
        return bytes.into();
    }
    let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    let tensors = bytes.get(len + 1..).unwrap_or_default();
    [&(len as u64).to_le_bytes()[..], &bytes[..len], tensors].concat().into()
}
