//! Description of a cache in a file's metadata.

use crate::cache::KvCache;
use crate::shape::KvShape;
use core::num::NonZeroUsize;
use core::ops::Range;
use sdpa_kernels::{Basis, CacheFormat, Dtype, Int4, KvFormat, TokenPart};
use serde::{Deserialize, Serialize};

/// Version of files with one format of keys and values, in the basis of their channels.
const ONE_FORMAT: u64 = 1;
/// Version of all others, the latest that is read.
pub(super) const VERSION: u64 = 2;

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
    /// Format of the keys, and of the values unless `values` is theirs.
    elements: ElementFormat,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    values: Option<ElementFormat>,
    #[serde(default, skip_serializing_if = "StoredBasis::is_channels")]
    key_basis: StoredBasis,
    #[serde(default, skip_serializing_if = "StoredBasis::is_channels")]
    value_basis: StoredBasis,
    /// Scales of the heads of keys, and of values, where they have such.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    key_scales: Vec<f32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    value_scales: Vec<f32>,
    /// Number of first tokens that are exact.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) exact_first: usize,
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
    #[serde(rename = "e4m3 per token")]
    E4m3PerToken,
    #[serde(rename = "e4m3 per head")]
    E4m3PerHead,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// Returns the scales of heads, if there are any.
fn head_scales(format: CacheFormat<'_>) -> Vec<f32> {
    if let CacheFormat::E4m3PerHead(scales) = format { scales.to_vec() } else { Vec::new() }
}

/// Basis of keys or values, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) enum StoredBasis {
    #[default]
    #[serde(rename = "channels")]
    Channels,
    #[serde(rename = "hadamard")]
    Hadamard,
}

impl StoredBasis {
    /// Returns the name of a basis; `None` if files have no such basis.
    fn of(basis: Basis) -> Option<Self> {
        Some(match basis {
            Basis::Channels => Self::Channels,
            Basis::Hadamard => Self::Hadamard,
            _ => return None,
        })
    }

    fn basis(self) -> Basis {
        match self {
            Self::Channels => Basis::Channels,
            Self::Hadamard => Basis::Hadamard,
        }
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_channels(&self) -> bool {
        *self == Self::Channels
    }
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
            CacheFormat::E4m3PerToken => Self::E4m3PerToken,
            CacheFormat::E4m3PerHead(_) => Self::E4m3PerHead,
            _ => return None,
        })
    }

    /// Returns the format, with these scales if channels have any.
    fn format(self, scales: &[f32]) -> CacheFormat<'_> {
        match self {
            Self::F32 => CacheFormat::Elements(Dtype::F32),
            Self::Bf16 => CacheFormat::Elements(Dtype::Bf16),
            Self::F16 => CacheFormat::Elements(Dtype::F16),
            Self::Int8PerToken => CacheFormat::Int8PerToken,
            Self::Int8PerChannel => CacheFormat::Int8PerChannel(scales),
            Self::Int4 => CacheFormat::Int4(Int4::Symmetric),
            Self::Int4Centred => CacheFormat::Int4(Int4::Centred),
            Self::E4m3PerToken => CacheFormat::E4m3PerToken,
            Self::E4m3PerHead => CacheFormat::E4m3PerHead(scales),
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

impl StoredSliding {
    fn words(self) -> String {
        let Self { last, first, rollback } = self;
        format!("the first {first} and the last {last}, with {rollback} to take back")
    }
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

/// Iterates over the tokens of a sequence that have a part, if the first `exact` are exact.
pub(super) fn held(
    contents: StoredSequence,
    part: TokenPart,
    exact: usize,
) -> impl Iterator<Item = usize> + Clone + use<> {
    let [start, end] = contents.evicted.unwrap_or([0, 0]);
    let most = if part.is_exact() { exact } else { usize::MAX };
    (0..start.min(most)).chain(end..contents.len.min(most).max(end))
}

impl Description {
    /// Returns the description of sequences of these lengths, which have all their keys; `None` if files have no such format.
    pub(crate) fn of_lens(shape: KvShape, format: KvFormat<'_>, lens: &[usize]) -> Option<Self> {
        let values = if format.values == KvFormat::from(format.keys).values { None } else { Some(format.values) };
        Some(Self {
            version: if format == format.keys { ONE_FORMAT } else { VERSION },
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            elements: ElementFormat::of(format.keys)?,
            values: values.map_or(Some(None), |values| ElementFormat::of(values).map(Some))?,
            key_basis: StoredBasis::of(format.key_basis)?,
            value_basis: StoredBasis::of(format.value_basis)?,
            key_scales: head_scales(format.keys),
            value_scales: head_scales(format.values),
            exact_first: format.exact_first,
            latent: false,
            window: None,
            sequences: lens.iter().map(|&len| Some(StoredSequence { len, evicted: None })).collect(),
        })
    }

    /// Returns the sizes of keys and values.
    pub(super) fn shape(&self) -> KvShape {
        KvShape { kv_heads: self.kv_heads, head_dim: self.head_dim, value_dim: self.value_dim }
    }

    /// Returns the formats of keys and of values.
    pub(super) fn formats(&self) -> [ElementFormat; 2] {
        let own = match self.elements {
            ElementFormat::Int8PerChannel => ElementFormat::Int8PerToken,
            keys => keys,
        };
        [self.elements, self.values.unwrap_or(own)]
    }

    /// Returns the format of the cache, with these scales if channels of keys have any.
    pub(crate) fn format<'s>(&'s self, channels: &'s [f32]) -> KvFormat<'s> {
        let [keys, values] = self.formats();
        let of = |format: ElementFormat, heads| format.format(if self.has_channel_scales() { channels } else { heads });
        let (keys, values) = (of(keys, &self.key_scales), values.format(&self.value_scales));
        let format = KvFormat::new(keys, values).exact_first(self.exact_first);
        format.key_basis(self.key_basis.basis()).value_basis(self.value_basis.basis())
    }

    /// Returns the form of the keys and of the values, the number of exact tokens, and which keys are kept, in words.
    pub(super) fn parts(&self) -> [(&'static str, String); 6] {
        let [keys, values] = self.formats();
        let form = |format, basis| match basis {
            StoredBasis::Channels => format!("{format:?}"),
            StoredBasis::Hadamard => format!("{format:?} in the Hadamard basis"),
        };
        [
            ("keys", form(keys, self.key_basis)),
            ("values", form(values, self.value_basis)),
            ("exact first tokens", self.exact_first.to_string()),
            ("scales of heads", format!("{:?} and {:?}", self.key_scales, self.value_scales)),
            ("columns of values", if self.latent { "those of keys" } else { "their own" }.to_string()),
            ("kept keys", self.window.map_or("all".to_string(), StoredSliding::words)),
        ]
    }

    /// Returns the scales of heads that a part has for each row, if it has such.
    pub(super) fn head_scales(&self, part: TokenPart) -> &[f32] {
        match part {
            TokenPart::KeyScale => &self.key_scales,
            TokenPart::ValueScale => &self.value_scales,
            _ => &[],
        }
    }

    /// Returns true if channels of keys have scales.
    pub(crate) fn has_channel_scales(&self) -> bool {
        self.elements == ElementFormat::Int8PerChannel
    }

    /// Returns the description of sequences of a cache; `None` if files have no such format.
    pub(super) fn of(cache: &KvCache, sequences: Range<usize>) -> Option<Self> {
        let window = cache.sliding_window().map(|keys| StoredSliding {
            last: keys.last,
            first: keys.first,
            rollback: keys.rollback,
        });
        let sequence = |sequence| {
            let (len, evicted) = (cache.lens()[sequence], cache.evicted(sequence).ok()?);
            Some(StoredSequence { len, evicted: (!evicted.is_empty()).then_some([evicted.start, evicted.end]) })
        };
        Some(Self {
            latent: cache.is_latent(),
            window,
            sequences: sequences.map(sequence).collect(),
            ..Self::of_lens(cache.shape(), cache.format(), &[])?
        })
    }
}
