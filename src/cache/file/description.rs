//! Description of a cache in a file's metadata.

use crate::cache::{CacheFormat, KvCache};
use core::num::NonZeroUsize;
use sdpa_kernels::{Dtype, Int4};
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
pub(super) struct Description {
    version: u64,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
    pub(super) elements: ElementFormat,
    /// True if values are the first columns of the keys.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub(super) latent: bool,
    /// Keys that a sliding cache keeps.
    pub(super) window: Option<StoredSliding>,
    /// Sequences; none where one was removed.
    pub(super) sequences: Vec<Option<Sequence>>,
}

/// Element format, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ElementFormat {
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

/// Keys that a sliding cache keeps.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct StoredSliding {
    pub(super) last: NonZeroUsize,
    pub(super) first: usize,
    pub(super) rollback: usize,
}

/// Keys of a sequence.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Sequence {
    /// Number of keys, evicted ones included.
    pub(super) len: usize,
    /// First evicted key, and the first held key after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) evicted: Option<[usize; 2]>,
}

impl Description {
    /// Returns the description of a cache; `None` if files have no such format.
    pub(super) fn of(cache: &KvCache) -> Option<Self> {
        let window = cache.sliding_window().map(|keys| StoredSliding {
            last: keys.last,
            first: keys.first,
            rollback: keys.rollback,
        });
        let sequence = |(sequence, &len): (usize, &usize)| {
            let evicted = cache.evicted(sequence).ok()?;
            Some(Sequence { len, evicted: (!evicted.is_empty()).then_some([evicted.start, evicted.end]) })
        };
        Some(Self {
            version: VERSION,
            kv_heads: cache.shape().kv_heads,
            head_dim: cache.shape().head_dim,
            value_dim: cache.shape().value_dim,
            elements: match cache.format() {
                CacheFormat::Elements(Dtype::F32) => ElementFormat::F32,
                CacheFormat::Elements(Dtype::Bf16) => ElementFormat::Bf16,
                CacheFormat::Elements(Dtype::F16) => ElementFormat::F16,
                CacheFormat::Int8PerToken => ElementFormat::Int8PerToken,
                CacheFormat::Int8PerChannel(_) => ElementFormat::Int8PerChannel,
                CacheFormat::Int4(Int4::Symmetric) => ElementFormat::Int4,
                CacheFormat::Int4(Int4::Centred) => ElementFormat::Int4Centred,
                _ => return None,
            },
            latent: cache.is_latent(),
            window,
            sequences: cache.lens().iter().enumerate().map(sequence).collect(),
        })
    }
}
