//! Caches as safetensors files.

mod description;
mod file_length;
mod import;

use crate::cache::KvCache;
use crate::error::Error;
use description::{Description, ElementFormat};
use safetensors::tensor::Dtype;
use sdpa_kernels::{Cache, TokenPart};
use std::borrow::Cow;
use std::collections::HashMap;

/// Key of the description in a file's metadata.
const DESCRIPTION: &str = "sdpa.kv_cache";
/// Name of the tensor with the scales of the keys' channels.
const CHANNEL_SCALES: &str = "channel_scales";

/// Largest number of keys of a sequence in a file, evicted ones included. A call over a sliding cache steps over these
/// block by block; no file may make that take for ever.
const MOST_KEYS: usize = u32::MAX as usize;

/// Reason why a cache has no file.
const NO_FORMAT: &str = "files have no form for the format of this cache";

/// Name of the tensor that holds a part of a sequence's tokens.
fn tensor_name(sequence: usize, part: TokenPart) -> String {
    let part = match part {
        TokenPart::Key => "keys",
        TokenPart::KeyScale => "key_scales",
        TokenPart::Value => "values",
        TokenPart::ValueScale => "value_scales",
    };
    format!("sequences.{sequence}.{part}")
}

/// Element type of the tensors with a part of tokens.
fn tensor_dtype(part: TokenPart, format: ElementFormat) -> Dtype {
    match (part, format) {
        (TokenPart::KeyScale | TokenPart::ValueScale, ElementFormat::Int4 | ElementFormat::Int4Centred) => Dtype::F16,
        (TokenPart::KeyScale | TokenPart::ValueScale, _) | (_, ElementFormat::F32) => Dtype::F32,
        (_, ElementFormat::Bf16) => Dtype::BF16,
        (_, ElementFormat::F16) => Dtype::F16,
        (_, ElementFormat::Int8PerToken | ElementFormat::Int8PerChannel) => Dtype::I8,
        (_, ElementFormat::Int4 | ElementFormat::Int4Centred) => Dtype::U8,
    }
}

/// Shape of the tensors with a part of tokens, which has `elements` elements in a head.
fn tensor_shape(part: TokenPart, [heads, held, elements]: [usize; 3], format: ElementFormat) -> Vec<usize> {
    match (part, format) {
        (TokenPart::KeyScale | TokenPart::ValueScale, ElementFormat::Int8PerToken | ElementFormat::Int8PerChannel) => {
            vec![heads, held]
        }
        _ => vec![heads, held, elements],
    }
}

/// Reason why a sequence is too long for a file.
fn too_long(sequence: usize, len: usize) -> String {
    format!("sequence {sequence}: it has {len} keys, but must have at most {MOST_KEYS}")
}

/// Converts elements of `size` bytes from the machine's byte order to that of files, or back.
fn swap_order(elements: &mut [u8], size: usize) {
    if cfg!(target_endian = "big") {
        elements.chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
}

/// Tensor of a file to be written.
struct FileTensor<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    contents: Contents<'a>,
}

/// Contents of a tensor to be written.
enum Contents<'a> {
    Floats(&'a [f32]),
    /// Part of the tokens of a sequence that are held.
    Tokens {
        cache: &'a Cache,
        sequence: usize,
        part: TokenPart,
    },
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
        match self.contents {
            Contents::Floats(floats) => {
                for (bytes, x) in bytes.chunks_exact_mut(size_of::<f32>()).zip(floats) {
                    bytes.copy_from_slice(&x.to_le_bytes());
                }
            }
            Contents::Tokens { cache, sequence, part } => {
                let ([elements, size], evicted) = (cache.token_elements(part), cache.evicted(sequence));
                let held = (0..evicted.start).chain(evicted.end..cache.lens()[sequence]);
                let tokens = (0..self.shape[0]).flat_map(|head| held.clone().map(move |token| [sequence, head, token]));
                for (bytes, at) in bytes.chunks_exact_mut(elements * size).zip(tokens) {
                    cache.read_token(part, at, bytes);
                }
                swap_order(&mut bytes, size);
            }
        }
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
    /// after its scale. The metadata `sdpa.kv_cache` describe the cache in JSON: a version, sizes, element format,
    /// sliding window, and the length of each sequence; removed ones are null. Keys and values that several sequences
    /// share are in the file several times.
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
        if self.shape().kv_heads == 0 {
            return Err(Error::Empty { argument: "cache", what: "kv_heads" });
        }
        let file = |why: String| Error::File { what: "export", why };
        if let Some((sequence, &len)) = self.lens().iter().enumerate().find(|&(_, &len)| len > MOST_KEYS) {
            return Err(file(too_long(sequence, len)));
        }
        let description = Description::of(self).ok_or_else(|| file(NO_FORMAT.into()))?;
        let mut tensors = Vec::new();
        if let Some(scales) = self.cache.channel_scales() {
            let shape = vec![self.shape().kv_heads, self.shape().head_dim];
            let tensor = FileTensor { dtype: Dtype::F32, shape, contents: Contents::Floats(scales) };
            tensors.push((CHANNEL_SCALES.to_owned(), tensor));
        }
        for (sequence, &len) in self.lens().iter().enumerate().filter(|&(_, &len)| len > 0) {
            for part in TokenPart::ALL {
                let ([elements, _], evicted) = (self.cache.token_elements(part), self.cache.evicted(sequence));
                if elements == 0 {
                    continue;
                }
                let sizes = [self.shape().kv_heads, len - evicted.len(), elements];
                let shape = tensor_shape(part, sizes, description.elements);
                let contents = Contents::Tokens { cache: &self.cache, sequence, part };
                let tensor = FileTensor { dtype: tensor_dtype(part, description.elements), shape, contents };
                tensors.push((tensor_name(sequence, part), tensor));
            }
        }
        // The file, and the largest tensor while it is copied there.
        let bytes = tensors.iter().map(|(_, tensor)| safetensors::View::data_len(tensor)).sum::<usize>();
        if !sdpa_kernels::has_memory(bytes.div_ceil(size_of::<f32>())) {
            return Err(Error::Memory { what: "export", bytes });
        }
        let description = serde_json::to_string(&description).map_err(|e| file(e.to_string()))?;
        let metadata = HashMap::from([(DESCRIPTION.to_owned(), description)]);
        safetensors::serialize(tensors, Some(metadata)).map_err(|e| file(e.to_string()))
    }
}
