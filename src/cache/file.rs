//! Caches as safetensors files.

mod description;
mod import;
mod one_sequence;

use crate::cache::KvCache;
use crate::error::Error;
use crate::tensor_file::{self, refused};
use core::ops::Range;
use description::held;
pub(crate) use description::{Description, ElementFormat};
pub(crate) use one_sequence::FileTarget;
use safetensors::tensor::Dtype;
use sdpa_kernels::{CacheFormat, KvFormat, TokenPart};
use serde::Serialize;
use std::borrow::Cow;

/// Key of the description in a file's metadata.
const DESCRIPTION: &str = "sdpa.kv_cache";
/// Name of the tensor with the scales of the keys' channels.
const CHANNEL_SCALES: &str = "channel_scales";

/// Largest number of keys of a sequence in a file, evicted ones included. A call over a sliding cache steps over these
/// block by block; no file may make that take for ever.
const MAX_KEYS: usize = u32::MAX as usize;

/// Reason why a cache has no file.
pub(crate) const NO_FORMAT: &str = "files have no form for the format of this cache";

/// Name of the tensor that holds a part of a sequence's tokens. Names of a cache among others have a prefix.
fn tensor_name(prefix: &str, sequence: usize, part: TokenPart) -> String {
    let part = match part {
        TokenPart::Key => "keys",
        TokenPart::KeyScale => "key_scales",
        TokenPart::Value => "values",
        TokenPart::ValueScale => "value_scales",
        TokenPart::ExactKey => "exact_keys",
        TokenPart::ExactValue => "exact_values",
    };
    format!("{prefix}sequences.{sequence}.{part}")
}

/// Element type of the tensors with a part of tokens.
fn tensor_dtype(part: TokenPart, formats: [ElementFormat; 2]) -> Dtype {
    match (part, format_of(part, formats)) {
        (TokenPart::ExactKey | TokenPart::ExactValue, _) => Dtype::F32,
        (TokenPart::KeyScale | TokenPart::ValueScale, ElementFormat::Int4 | ElementFormat::Int4Centred) => Dtype::F16,
        (TokenPart::KeyScale | TokenPart::ValueScale, _) | (_, ElementFormat::F32) => Dtype::F32,
        (_, ElementFormat::Bf16) => Dtype::BF16,
        (_, ElementFormat::F16) => Dtype::F16,
        (_, ElementFormat::Int8PerToken | ElementFormat::Int8PerChannel) => Dtype::I8,
        (_, ElementFormat::Int4 | ElementFormat::Int4Centred) => Dtype::U8,
        (_, ElementFormat::E4m3PerToken | ElementFormat::E4m3PerHead) => Dtype::F8_E4M3,
    }
}

/// Shape of the tensors with a part of tokens, which has `elements` elements in a head.
fn tensor_shape(part: TokenPart, [heads, held, elements]: [usize; 3], formats: [ElementFormat; 2]) -> Vec<usize> {
    match (part, format_of(part, formats)) {
        // One scale a row.
        (TokenPart::KeyScale | TokenPart::ValueScale, format)
            if !matches!(format, ElementFormat::Int4 | ElementFormat::Int4Centred) =>
        {
            vec![heads, held]
        }
        _ => vec![heads, held, elements],
    }
}

/// Format of a part of tokens: that of keys, or that of values.
fn format_of(part: TokenPart, [keys, values]: [ElementFormat; 2]) -> ElementFormat {
    if part.is_of_key() { keys } else { values }
}

/// Reason why a sequence is too long for a file.
fn too_long(sequence: usize, len: usize) -> String {
    format!("sequence {sequence}: it has {len} keys, but must have at most {MAX_KEYS}")
}

/// Converts elements of `size` bytes from the machine's byte order to that of files, or back.
fn swap_order(elements: &mut [u8], size: usize) {
    if cfg!(target_endian = "big") {
        elements.chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
}

/// Function that writes the bytes of a tensor's elements.
type WriteBytes<'a> = dyn Fn(&mut [u8]) + 'a;

/// Function that copies the elements of a part of token `[sequence, head, token]`.
type ReadToken<'a> = dyn Fn(TokenPart, [usize; 3], &mut [u8]) + 'a;

/// Tensor of a file to be written.
struct FileTensor<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    write: Box<WriteBytes<'a>>,
}

impl safetensors::View for FileTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.data_len()];
        (self.write)(&mut bytes);
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl KvCache {
    /// Returns the cache as the bytes of a safetensors file, from which [`Self::import`] makes a cache that gives the
    /// same bits in every call. Takes the feature `safetensors`.
    ///
    /// For every sequence with keys, the file has the tensors `sequences.N.keys` `[kv_heads, len, head_dim]` and
    /// `sequences.N.values` `[kv_heads, len, value_dim]` in the type of the cache's elements, without what a sliding
    /// cache has evicted; a latent cache has no `values` and no `value_scales`. An int8 cache has bytes, and scales:
    /// `sequences.N.value_scales`, and for the keys either `sequences.N.key_scales`, both `[kv_heads, len]`, or, by
    /// channel, one tensor `channel_scales` `[kv_heads, head_dim]`. An int4 cache has `U8` `[kv_heads, len,
    /// 16·blocks]`, with a block for each 32 elements of a row, the last filled up with zeros: the lower four bits of
    /// byte `i` of a block are element `i`, the upper four element `16 + i`, in two's complement. `key_scales` and
    /// `value_scales` are `F16` `[kv_heads, len, blocks]`, or `[kv_heads, len, 2·blocks]` with each block's centre
    /// after its scale. An E4M3 cache has codes `F8_E4M3` and scales as an int8 cache. Exact first tokens are
    /// `sequences.N.exact_keys` and `sequences.N.exact_values`, `F32` `[kv_heads, tokens, …]`, values in their basis.
    ///
    /// The metadata `sdpa.kv_cache` describe the cache in JSON: a version, sizes, element format (that of values, if it differs, the
    /// basis of either, and the number of exact tokens), sliding window, and the length of each sequence; removed ones are null. Keys
    /// and values that several sequences share are in the file several times.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape, View};
    /// let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 })?;
    /// let rows = [0.5; 3 * 8];
    /// let rows = View::bhld(&rows, [1, 1, 3, 8])?;
    /// cache.append(rows, rows)?;
    /// let bytes = cache.export()?; // for `std::fs::write`
    /// let mut imported = KvCache::import(&bytes)?;
    /// imported.append(rows, rows)?;
    /// assert_eq!(imported.lens(), [6]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Empty`] for a cache without heads, [`Error::Memory`], [`Error::File`] for more sequences than the
    /// header of a safetensors file can list (about half a million), or for a sequence of 2³² keys or more.
    pub fn export(&self) -> Result<Vec<u8>, Error> {
        self.file_part(String::new(), 0..self.sequences())?.alone()
    }

    /// Returns what a file has of these sequences of the cache.
    pub(crate) fn file_part(&self, prefix: String, sequences: Range<usize>) -> Result<FilePart<'_>, Error> {
        let first = sequences.start;
        let description = Description::of(self, sequences).ok_or_else(|| refused(NO_FORMAT))?;
        let elements = TokenPart::ALL.map(|part| self.cache.token_elements(part));
        let read = move |part, [sequence, head, token]: [usize; 3], to: &mut [u8]| {
            self.cache.read_token(part, [first + sequence, head, token], to);
        };
        Ok(FilePart { prefix, description, format: self.format(), elements, read: Box::new(read) })
    }
}

/// Cache, or sequences of a pool, to be written to a file.
pub(crate) struct FilePart<'a> {
    /// Prefix of the names of its tensors.
    pub(crate) prefix: String,
    pub(crate) description: Description,
    pub(crate) format: KvFormat<'a>,
    /// Numbers of elements of the parts of a token in one head, and the bytes of each.
    pub(crate) elements: [[usize; 2]; TokenPart::ALL.len()],
    pub(crate) read: Box<ReadToken<'a>>,
}

impl FilePart<'_> {
    /// Returns the bytes of a file of this part alone.
    pub(crate) fn alone(&self) -> Result<Vec<u8>, Error> {
        write(DESCRIPTION, &self.description, core::slice::from_ref(self))
    }

    /// Adds the part's tensors, by name.
    fn add_tensors<'p>(&'p self, tensors: &mut Vec<(String, FileTensor<'p>)>) -> Result<(), Error> {
        let &Description { kv_heads, head_dim, ref sequences, .. } = &self.description;
        let formats = self.description.formats();
        if kv_heads == 0 {
            return Err(Error::Empty { argument: "cache", what: "kv_heads" });
        }
        if let CacheFormat::Int8PerChannel(scales) = self.format.keys {
            let write = move |bytes: &mut [u8]| {
                for (bytes, x) in bytes.chunks_exact_mut(size_of::<f32>()).zip(scales) {
                    bytes.copy_from_slice(&x.to_le_bytes());
                }
            };
            let (shape, write) = (vec![kv_heads, head_dim], Box::new(write));
            tensors.push((format!("{}{CHANNEL_SCALES}", self.prefix), FileTensor { dtype: Dtype::F32, shape, write }));
        }
        for (sequence, &contents) in sequences.iter().enumerate() {
            let Some(contents) = contents.filter(|contents| contents.len > 0) else { continue };
            if contents.len > MAX_KEYS {
                return Err(refused(too_long(sequence, contents.len)));
            }
            for (part, [each, size]) in TokenPart::ALL.into_iter().zip(self.elements).filter(|(_, [each, _])| *each > 0)
            {
                let held = held(contents, part, self.description.exact_first);
                let shape = tensor_shape(part, [kv_heads, held.clone().count(), each], formats);
                let write = move |bytes: &mut [u8]| {
                    let of = |head| held.clone().map(move |token| [sequence, head, token]);
                    for (to, at) in bytes.chunks_exact_mut(each * size).zip((0..kv_heads).flat_map(of)) {
                        (self.read)(part, at, to);
                    }
                    swap_order(bytes, size);
                };
                let tensor = FileTensor { dtype: tensor_dtype(part, formats), shape, write: Box::new(write) };
                tensors.push((tensor_name(&self.prefix, sequence, part), tensor));
            }
        }
        Ok(())
    }
}

/// Returns the bytes of a file of these parts, with a description under a key.
pub(crate) fn write(key: &str, description: &impl Serialize, parts: &[FilePart<'_>]) -> Result<Vec<u8>, Error> {
    let mut tensors = Vec::new();
    parts.iter().try_for_each(|part| part.add_tensors(&mut tensors))?;
    tensor_file::write(key, description, tensors)
}
