//! Sizes and format of what a cache or a pool stores.

use super::layout::{Format, KeyOrder, MAX_EXACT, Sizes};
use super::token_part::TokenPart;
use crate::kv::value_panels::ValueOrder;
use crate::matmul::hadamard::Basis;
use crate::matmul::int4::Int4;
use crate::matmul::int8::MAX_HEAD_DIM;
use crate::simd::LANES;
use crate::tensor::element::Dtype;

/// Format of the keys or of the values of a cache or a page pool.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum CacheFormat<'a> {
    /// Floating-point elements of this type.
    Elements(Dtype),
    /// Bytes, with a scale for each row of a head (`KeyScales::PerToken`).
    Int8PerToken,
    /// Bytes, with these `[kv_heads × head_dim]` scales for the channels of the keys (`KeyScales::PerChannel`). Values
    /// cannot have it.
    Int8PerChannel(&'a [f32]),
    /// Eight bits as OCP FP8 E4M3, with a scale for each row of a head.
    E4m3PerToken,
    /// Eight bits as OCP FP8 E4M3, with these `[kv_heads]` scales, one for each head (a layer's scale is that of all its heads).
    E4m3PerHead(&'a [f32]),
    /// Four bits; each block of 32 elements has a scale, and optionally a centre (`KvCache::int4`).
    Int4(Int4),
}

impl<'a> CacheFormat<'a> {
    /// Returns the type of the elements; `None` for those of eight and four bits.
    pub(crate) fn dtype(self) -> Option<Dtype> {
        if let Self::Elements(dtype) = self { Some(dtype) } else { None }
    }

    /// Returns the number of bits of an element.
    pub(crate) fn bits(self) -> usize {
        match self {
            Self::Elements(dtype) => 8 * dtype.bytes(),
            Self::Int8PerToken | Self::Int8PerChannel(_) | Self::E4m3PerToken | Self::E4m3PerHead(_) => 8,
            Self::Int4(_) => 4,
        }
    }

    /// Returns true if elements are integers.
    pub fn is_integer(self) -> bool {
        matches!(self, Self::Int8PerToken | Self::Int8PerChannel(_) | Self::Int4(_))
    }

    /// Returns the scales of its heads, if they have such.
    fn head_scales(self) -> Option<&'a [f32]> {
        if let Self::E4m3PerHead(scales) = self { Some(scales) } else { None }
    }

    /// Returns how rows of this format are stored.
    fn stored(self) -> Format {
        match self {
            Self::Elements(dtype) => Format::Elements(dtype),
            Self::Int8PerToken => Format::Int8,
            Self::Int8PerChannel(_) => Format::Int8Channels,
            Self::E4m3PerToken | Self::E4m3PerHead(_) => Format::E4m3,
            Self::Int4(kind) => Format::Int4(kind),
        }
    }
}

/// Format of a cache or a page pool: that of its keys, and that of its values.
///
/// A [`CacheFormat`] alone is that of both; values of bytes then have a scale each, whatever keys have.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct KvFormat<'a> {
    /// Format of the keys.
    pub keys: CacheFormat<'a>,
    /// Format of the values.
    pub values: CacheFormat<'a>,
    /// Basis of the keys' elements. Queries are brought to it when they are quantised.
    pub key_basis: Basis,
    /// Basis of the values' elements. Outputs are brought back from it.
    pub value_basis: Basis,
    /// Number of first tokens of a sequence that are kept as `f32`, too, up to 16: scores and outputs take these in place of their
    /// integers.
    pub exact_first: usize,
}

impl<'a> KvFormat<'a> {
    /// Takes the formats of keys and of values.
    pub fn new(keys: CacheFormat<'a>, values: CacheFormat<'a>) -> Self {
        Self { keys, values, key_basis: Basis::Channels, value_basis: Basis::Channels, exact_first: 0 }
    }

    /// Returns the types of keys and of values; `None` for integers.
    pub(crate) fn dtypes(self) -> [Option<Dtype>; 2] {
        [self.keys, self.values].map(CacheFormat::dtype)
    }

    /// Sets the basis in which integer keys are stored.
    #[must_use]
    pub fn key_basis(self, key_basis: Basis) -> Self {
        Self { key_basis, ..self }
    }

    /// Sets the basis in which integer values are stored.
    #[must_use]
    pub fn value_basis(self, value_basis: Basis) -> Self {
        Self { value_basis, ..self }
    }

    /// Sets the number of first tokens of a sequence that are kept exact beside their integers.
    #[must_use]
    pub fn exact_first(self, tokens: usize) -> Self {
        Self { exact_first: tokens, ..self }
    }
}

impl<'a> From<CacheFormat<'a>> for KvFormat<'a> {
    fn from(format: CacheFormat<'a>) -> Self {
        let bytes = matches!(format, CacheFormat::Int8PerChannel(_));
        Self::new(format, if bytes { CacheFormat::Int8PerToken } else { format })
    }
}

impl PartialEq<CacheFormat<'_>> for KvFormat<'_> {
    fn eq(&self, other: &CacheFormat<'_>) -> bool {
        *self == KvFormat::from(*other)
    }
}

/// Sizes and format of what is stored.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pub(super) sizes: Sizes,
    /// What appending bytes takes, if keys or values are int8 or E4M3.
    pub(super) int8: Option<Int8>,
}

/// Scales that rows are stored with, and scratch for appending bytes.
#[derive(Debug, Clone, Default)]
pub(super) struct Int8 {
    /// Scales of the keys' channels, `[kv_heads][head_dim]`, if keys have no scales.
    pub(super) channels: Option<Box<[f32]>>,
    /// Scales of heads of keys, and of values, `[kv_heads]`, if they have such.
    pub(super) heads: [Option<Box<[f32]>>; 2],
    /// Scratch of a row: widened, in whole vectors; then as bytes. Empty until it is reserved.
    pub(super) row: Vec<f32>,
    pub(super) bytes: Vec<i8>,
}

impl Int8 {
    /// Returns the scale of a head of keys or of values, if it has one.
    pub(super) fn head_scale(&self, part: TokenPart, head: usize) -> Option<f32> {
        let heads = &self.heads[usize::from(!part.is_of_key())];
        heads.as_ref().map(|scales| scales[head])
    }
}

impl Store {
    /// Makes the store of blocks of `rows` keys: keys packed, values in panels.
    ///
    /// # Panics
    /// As [`Self::with_format`].
    pub(super) fn new(rows: usize, kv_heads: usize, [head_dim, value_dim]: [usize; 2], format: KvFormat<'_>) -> Self {
        let floats = Format::Elements(Dtype::F32);
        let sizes = Sizes {
            keys: floats,
            values: floats,
            key_basis: Basis::Channels,
            value_basis: Basis::Channels,
            exact: 0,
            rows,
            key_order: KeyOrder::Packed,
            value_order: ValueOrder::Panels,
            kv_heads,
            head_dim,
            value_dim,
        };
        Self { sizes, int8: None }.with_format(format)
    }

    /// Sets the format, without scratch yet.
    ///
    /// # Panics
    /// For integer keys longer than [`MAX_INT8_HEAD_DIM`](crate::MAX_INT8_HEAD_DIM). If there is not one scale for each channel of
    /// keys, or values have such. If keys are latent, and stored otherwise than values or in another basis than their channels. For
    /// floats in another basis, or for more than [`MAX_EXACT`] exact tokens.
    pub(super) fn with_format(self, format: KvFormat<'_>) -> Self {
        let KvFormat { keys, values, key_basis, value_basis, exact_first: exact } = format;
        assert!(exact <= MAX_EXACT, "{exact} exact tokens");
        let Sizes { key_order, kv_heads, head_dim, .. } = self.sizes;
        assert!(head_dim <= MAX_HEAD_DIM || !keys.is_integer(), "keys are too long for integers");
        for (format, basis) in [(keys, key_basis), (values, value_basis)] {
            assert!(basis == Basis::Channels || format.is_integer(), "floats in another basis");
            let scales = format.head_scales();
            assert!(scales.is_none_or(|scales| scales.len() == kv_heads), "a scale for each head");
        }
        let channels = match keys {
            CacheFormat::Int8PerChannel(scales) => Some(scales),
            _ => None,
        };
        assert!(
            channels.is_none_or(|scales| Some(scales.len()) == kv_heads.checked_mul(head_dim)),
            "scales of channels"
        );
        let heads = [keys, values].map(|format| format.head_scales().map(Box::from));
        let [keys, values] = [keys, values].map(CacheFormat::stored);
        assert!(values != Format::Int8Channels, "a value has one scale");
        let plain = exact == 0 && [key_basis, value_basis] == [Basis::Channels; 2] && keys != Format::E4m3;
        assert!(key_order != KeyOrder::Latent || keys == values && plain, "latent keys are the values");
        let bytes = |format| matches!(format, Format::Int8 | Format::Int8Channels | Format::E4m3);
        let bytes = [keys, values].into_iter().any(bytes);
        let int8 = bytes.then(|| Int8 { channels: channels.map(Box::from), heads, ..Int8::default() });
        Self { sizes: Sizes { keys, values, key_basis, value_basis, exact, ..self.sizes }, int8 }
    }

    /// Returns the format.
    pub(crate) fn format(&self) -> KvFormat<'_> {
        let heads = |n: usize| self.int8.as_ref().and_then(|int8| int8.heads[n].as_deref());
        let format = |n: usize, format: Format| match (format, self.channel_scales()) {
            (Format::E4m3, _) => heads(n).map_or(CacheFormat::E4m3PerToken, CacheFormat::E4m3PerHead),
            (Format::Elements(dtype), _) => CacheFormat::Elements(dtype),
            (Format::Int8Channels, Some(scales)) => CacheFormat::Int8PerChannel(scales),
            (Format::Int8 | Format::Int8Channels, _) => CacheFormat::Int8PerToken,
            (Format::Int4(kind), _) => CacheFormat::Int4(kind),
        };
        let Sizes { keys, values, key_basis, value_basis, exact, .. } = self.sizes;
        KvFormat { keys: format(0, keys), values: format(1, values), key_basis, value_basis, exact_first: exact }
    }

    /// Returns the bases of the elements of keys and of values.
    #[inline]
    pub(crate) fn bases(&self) -> [Basis; 2] {
        [self.sizes.key_basis, self.sizes.value_basis]
    }

    /// Returns the scales of the keys' channels, `[kv_heads][head_dim]`, if they have any.
    #[inline]
    pub(crate) fn channel_scales(&self) -> Option<&[f32]> {
        self.int8.as_ref()?.channels.as_deref()
    }

    /// Allocates the scratch that appending needs, unless it is there already.
    pub(super) fn reserve_scratch(&mut self) {
        let Self { sizes, int8: Some(Int8 { row, bytes, .. }) } = self else { return };
        row.resize(sizes.head_dim.max(sizes.value_dim).next_multiple_of(LANES), 0.0);
        bytes.resize(sizes.head_dim.max(sizes.width()), 0);
    }
}
