//! Description of a cache in a file's metadata.

use crate::cache::KvCache;
use crate::shape::KvShape;
use core::num::NonZeroUsize;
use sdpa_kernels::{CacheFormat, Dtype, Int4};
use serde::{Deserialize, Serialize};

/// Version of the format that is written, the only one that is read.
pub(super) const VERSION: u64 = 1;

/// Version of a description; whatever else it has depends on that.
#[derive(Debug, Deserialize)]
pub(super) struct Version {
    pub(super) version: u64,
}

/// Description of a cache.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Description {
    version: u64,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) elements: ElementFormat,
    /// True if values are the first columns of the keys.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub(crate) latent: bool,
    /// Keys that a sliding cache keeps.
    pub(crate) window: Option<StoredSliding>,
    /// Sequences; none where one was removed.
    pub(crate) sequences: Vec<Option<StoredSequence>>,
}

/// Element format, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ElementFormat {
    #[serde(rename = "f32")]
    F32,
    #[serde(rename = "bf16")]
    Bf16,
    #[serde(rename = "f16")]
    F16,
    #[serde(rename = "int8 per token")]
    Int8PerToken,
    #[serde(rename = "int8 per channel")]
    Int8PerChannel,
    #[serde(rename = "int4")]
    Int4,
    #[serde(rename = "int4 with centres")]
    Int4Centred,
}

impl ElementFormat {
    /// Returns the name of a format; `None` if files have no such format.
    fn of(format: CacheFormat<'_>) -> Option<Self> {
        Some(match format {
            CacheFormat::Elements(Dtype::F32) => Self::F32,
            CacheFormat::Elements(Dtype::Bf16) => Self::Bf16,
            CacheFormat::Elements(Dtype::F16) => Self::F16,
            CacheFormat::Int8PerToken => Self::Int8PerToken,
            CacheFormat::Int8PerChannel(_) => Self::Int8PerChannel,
            CacheFormat::Int4(Int4::Symmetric) => Self::Int4,
            CacheFormat::Int4(Int4::Centred) => Self::Int4Centred,
            _ => return None,
        })
    }

    /// Returns the format, with these scales if channels have any.
    pub(super) fn format(self, scales: &[f32]) -> CacheFormat<'_> {
        match self {
            Self::F32 => CacheFormat::Elements(Dtype::F32),
            Self::Bf16 => CacheFormat::Elements(Dtype::Bf16),
            Self::F16 => CacheFormat::Elements(Dtype::F16),
            Self::Int8PerToken => CacheFormat::Int8PerToken,
            Self::Int8PerChannel => CacheFormat::Int8PerChannel(scales),
            Self::Int4 => CacheFormat::Int4(Int4::Symmetric),
            Self::Int4Centred => CacheFormat::Int4(Int4::Centred),
        }
    }
}

/// Keys that a sliding cache keeps.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct StoredSliding {
    pub(super) last: NonZeroUsize,
    pub(super) first: usize,
    pub(super) rollback: usize,
}

/// Keys of a sequence.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct StoredSequence {
    /// Number of keys, evicted ones included.
    pub(crate) len: usize,
    /// First evicted key, and the first held key after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) evicted: Option<[usize; 2]>,
}

impl StoredSequence {
    /// Iterates over the keys that are held.
    pub(super) fn held(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let [start, end] = self.evicted.unwrap_or([0, 0]);
        (0..start).chain(end..self.len)
    }
}

impl Description {
    /// Returns the description of sequences of these lengths, which have all their keys; `None` if files have no such format.
    pub(crate) fn of_lens(shape: KvShape, format: CacheFormat<'_>, lens: &[usize]) -> Option<Self> {
        Some(Self {
            version: VERSION,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            elements: ElementFormat::of(format)?,
            latent: false,
            window: None,
            sequences: lens.iter().map(|&len| Some(StoredSequence { len, evicted: None })).collect(),
        })
    }

    /// Returns the description of a cache; `None` if files have no such format.
    pub(super) fn of(cache: &KvCache) -> Option<Self> {
        let window = cache.sliding_window().map(|keys| StoredSliding {
            last: keys.last,
            first: keys.first,
            rollback: keys.rollback,
        });
        let sequence = |(sequence, &len): (usize, &usize)| {
            let evicted = cache.evicted(sequence).ok()?;
            Some(StoredSequence { len, evicted: (!evicted.is_empty()).then_some([evicted.start, evicted.end]) })
        };
        Some(Self {
            latent: cache.is_latent(),
            window,
            sequences: cache.lens().iter().enumerate().map(sequence).collect(),
            ..Self::of_lens(cache.shape(), cache.format(), &[])?
        })
    }
}
