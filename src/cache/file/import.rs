//! Caches from their files.

use super::description::{Description, ElementFormat, Sequence, VERSION, Version};
use super::file_length::expected_length;
use super::{
    CHANNEL_SCALES, DESCRIPTION, MOST_KEYS, NO_FORMAT, swap_order, tensor_dtype, tensor_name, tensor_shape, too_long,
};
use crate::cache::{KeyScales, KvCache};
use crate::error::Error;
use crate::shape::KvShape;
use safetensors::tensor::{Dtype, Metadata, SafeTensors};
use sdpa_kernels::{Dtype as Elements, F16, Int4, TokenPart, is_int8_scale};

fn wrong(why: impl Into<String>) -> Error {
    Error::File { what: "import", why: why.into() }
}

/// Header of a file, and the bytes of its tensors.
struct File<'a> {
    header: Metadata,
    data: &'a [u8],
}

impl<'a> File<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, Error> {
        let header = SafeTensors::read_metadata(bytes);
        let (len, header) = header.map_err(|e| match expected_length(bytes, &e) {
            Some(expected) => wrong(format!("the file has {} bytes, but its header speaks of {expected}", bytes.len())),
            None => wrong(format!("no safetensors file: {e}")),
        })?;
        Ok(Self { header, data: &bytes[size_of::<u64>() + len..] })
    }

    fn description(&self) -> Result<Description, Error> {
        let all = self.header.metadata().as_ref();
        let Some(text) = all.and_then(|all| all.get(DESCRIPTION)) else {
            return Err(wrong(format!("the file does not describe a cache: there are no metadata {DESCRIPTION:?}")));
        };
        let refuse = |e: serde_json::Error| wrong(format!("metadata {DESCRIPTION:?}: {e}"));
        let Version { version } = serde_json::from_str(text).map_err(refuse)?;
        if version != VERSION {
            return Err(wrong(format!("the file's version is {version}, but must be {VERSION}")));
        }
        serde_json::from_str(text).map_err(refuse)
    }

    /// Returns the bytes of a tensor of this type and shape.
    fn tensor(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&'a [u8], Error> {
        let Some(tensor) = self.header.info(name) else { return Err(wrong(format!("{name}: no such tensor"))) };
        if tensor.dtype != dtype || tensor.shape != shape {
            let (was, is) = (tensor.dtype, &tensor.shape);
            return Err(wrong(format!("{name}: {was} {is:?}, but by the description must be {dtype} {shape:?}")));
        }
        Ok(&self.data[tensor.data_offsets.0..tensor.data_offsets.1])
    }
}

impl KvCache {
    /// Makes a cache from the bytes of a file that [`Self::export`] made, read or memory-mapped. It gives the bits of
    /// the exported cache in every call, on every machine. Takes the feature `safetensors`.
    ///
    /// Everything in the file is checked. Memory is allocated only for tokens that are in the file, in blocks as in any
    /// [`KvCache`].
    ///
    /// # Errors
    /// [`Error::File`], with the reason, for anything but such a file; [`Error::Memory`]; for sizes that no cache can
    /// have, the errors of [`Self::new`], [`Self::latent`], [`Self::int8`] and [`Self::int4`].
    pub fn import(bytes: &[u8]) -> Result<Self, Error> {
        let file = File::read(bytes)?;
        let description = file.description()?;
        let mut cache = empty(&file, &description)?;
        for (sequence, contents) in description.sequences.iter().enumerate() {
            match contents {
                Some(contents) => restore(&mut cache, sequence, contents, &file)?,
                None => _ = cache.removed.insert(sequence),
            }
        }
        Ok(cache)
    }
}

/// Makes a cache as described, without keys.
fn empty(file: &File<'_>, description: &Description) -> Result<KvCache, Error> {
    let &Description { kv_heads, head_dim, value_dim, elements, latent, window, ref sequences, .. } = description;
    if kv_heads == 0 {
        return Err(Error::Empty { argument: "cache", what: "kv_heads" });
    }
    let (sequences, shape) = (sequences.len(), KvShape { kv_heads, head_dim, value_dim });
    let cache = match window {
        Some(keys) => KvCache::sliding(sequences, shape, keys.last, keys.first)?.rollback_room(keys.rollback)?,
        None => KvCache::new(sequences, shape)?,
    };
    let cache = if latent { cache.latent()? } else { cache };
    match elements {
        ElementFormat::F32 => Ok(cache),
        ElementFormat::Bf16 => cache.dtype(Elements::Bf16),
        ElementFormat::F16 => cache.dtype(Elements::F16),
        ElementFormat::Int8PerToken => cache.with_int8(KeyScales::PerToken),
        ElementFormat::Int8PerChannel => {
            let scales = file.tensor(CHANNEL_SCALES, Dtype::F32, &[kv_heads, head_dim])?;
            let scales = scales.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x));
            cache.with_int8(KeyScales::PerChannel(scales.collect()))
        }
        ElementFormat::Int4 => cache.int4(Int4::Symmetric),
        ElementFormat::Int4Centred => cache.int4(Int4::Centred),
    }
}

/// Fills an empty sequence.
fn restore(cache: &mut KvCache, sequence: usize, contents: &Sequence, file: &File<'_>) -> Result<(), Error> {
    let &Sequence { len, evicted } = contents;
    if len == 0 && evicted.is_none() {
        return Ok(());
    }
    let evicted = evicted.map_or(0..0, |[start, end]| start..end);
    if !cache.cache.could_have(len, &evicted) {
        return Err(wrong(format!(
            "sequence {sequence}: no cache with this window has {len} keys without {evicted:?}"
        )));
    }
    if len > MOST_KEYS {
        return Err(wrong(too_long(sequence, len)));
    }
    // The file has all the tokens that memory is taken for; what they hold is checked after that.
    let Some(Description { elements, .. }) = Description::of(cache) else { return Err(wrong(NO_FORMAT)) };
    let (heads, held) = (cache.shape().kv_heads, len - evicted.len());
    let mut tensors = Vec::new();
    for part in TokenPart::ALL {
        let [row, size] = cache.cache.token_elements(part);
        if row == 0 {
            continue;
        }
        let (name, shape) = (tensor_name(sequence, part), tensor_shape(part, [heads, held, row], elements));
        let bytes = file.tensor(&name, tensor_dtype(part, elements), &shape)?;
        tensors.push((name, part, row * size, bytes));
    }
    if !cache.cache.try_restore(sequence, len, evicted.clone()) {
        return Err(cache.no_memory(held));
    }
    let tokens = (0..evicted.start).chain(evicted.end..len);
    for (name, part, row, bytes) in tensors {
        check_integers(&name, part, bytes, elements)?;
        let [_, size] = cache.cache.token_elements(part);
        let places = (0..heads).flat_map(|head| tokens.clone().map(move |token| [sequence, head, token]));
        let mut own = Vec::new();
        for (bytes, at) in bytes.chunks_exact(row).zip(places) {
            own.clear();
            own.extend_from_slice(bytes);
            swap_order(&mut own, size);
            cache.cache.write_token(part, at, &own);
        }
    }
    Ok(())
}

/// Refuses elements and scales that no int8 or int4 cache has.
fn check_integers(name: &str, part: TokenPart, bytes: &[u8], elements: ElementFormat) -> Result<(), Error> {
    if let ElementFormat::Int4 | ElementFormat::Int4Centred = elements {
        return check_int4(name, part, bytes, elements);
    }
    let int8 = matches!(elements, ElementFormat::Int8PerToken | ElementFormat::Int8PerChannel);
    match part {
        TokenPart::Key | TokenPart::Value if int8 && bytes.contains(&i8::MIN.cast_unsigned()) => {
            Err(wrong(format!("{name}: an element is -128, but must be at least -127")))
        }
        TokenPart::KeyScale | TokenPart::ValueScale => {
            let mut scales = bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x));
            match scales.find(|&scale| !is_int8_scale(scale)) {
                Some(bad) => Err(wrong(format!("{name}: a scale is {bad}, but must be one that int8 rows have"))),
                None => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// Refuses elements and numbers that no int4 cache has.
fn check_int4(name: &str, part: TokenPart, bytes: &[u8], elements: ElementFormat) -> Result<(), Error> {
    match part {
        TokenPart::Key | TokenPart::Value => match bytes.iter().find(|&&byte| byte & 0x0F == 8 || byte >> 4 == 8) {
            Some(_) => Err(wrong(format!("{name}: an element is -8, but must be at least -7"))),
            None => Ok(()),
        },
        TokenPart::KeyScale | TokenPart::ValueScale => {
            let numbers = bytes.as_chunks().0.iter().map(|&x| F16(u16::from_le_bytes(x)).to_f32());
            let each = if elements == ElementFormat::Int4 { 1 } else { 2 };
            match numbers.enumerate().find(|&(i, x)| !x.is_finite() || i % each == 0 && x < 0.0) {
                Some((i, bad)) if i % each == 0 => {
                    Err(wrong(format!("{name}: a scale is {bad}, but must be finite and not negative")))
                }
                Some((_, bad)) => Err(wrong(format!("{name}: a centre is {bad}, but must be finite"))),
                None => Ok(()),
            }
        }
    }
}
