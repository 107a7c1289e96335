//! Sizes and format of what a cache or a pool stores.

use super::layout::{Format, KeyOrder, Sizes};
use crate::kv::value_panels::ValueOrder;
use crate::matmul::int4::Int4;
use crate::matmul::int8::MAX_HEAD_DIM;
use crate::simd::LANES;
use crate::tensor::element::Dtype;

/// Format of the elements of a cache or a page pool.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum CacheFormat<'a> {
    /// Floating-point elements of this type.
    Elements(Dtype),
    /// Bytes, with a scale for each key and each value of a head (`KeyScales::PerToken`).
    Int8PerToken,
    /// Bytes, with a scale for each value of a head, and these `[kv_heads × head_dim]` scales for the channels of the
    /// keys (`KeyScales::PerChannel`).
    Int8PerChannel(&'a [f32]),
    /// Four bits; each block of 32 elements has a scale, and optionally a centre (`KvCache::int4`).
    Int4(Int4),
}

impl CacheFormat<'_> {
    /// Returns the type of the elements; `None` for int8 and int4.
    pub(crate) fn dtype(self) -> Option<Dtype> {
        if let Self::Elements(dtype) = self { Some(dtype) } else { None }
    }
}

/// Sizes and format of what is stored.
#[derive(Debug, Clone)]
pub(super) struct Store {
    pub(super) sizes: Sizes,
    /// Scratch and channel scales, if the format is int8.
    pub(super) int8: Option<Int8>,
}

/// State and scratch for appending bytes.
#[derive(Debug, Clone, Default)]
pub(super) struct Int8 {
    /// Scales of the keys' channels, `[kv_heads][head_dim]`, if keys have no scales.
    pub(super) channels: Option<Box<[f32]>>,
    /// Scratch of a row: widened, in whole vectors; then a key and a value as bytes. Empty until it is reserved.
    pub(super) row: Vec<f32>,
    pub(super) bytes: Vec<i8>,
}

impl Store {
    /// Makes the store of blocks of `rows` keys: keys packed, values in panels.
    ///
    /// # Panics
    /// As [`Self::with_format`].
    pub(super) fn new(
        rows: usize,
        kv_heads: usize,
        [head_dim, value_dim]: [usize; 2],
        format: CacheFormat<'_>,
    ) -> Self {
        let (key_order, value_order) = (KeyOrder::Packed, ValueOrder::Panels);
        let floats = Format::Elements(Dtype::F32);
        let sizes = Sizes { format: floats, rows, key_order, value_order, kv_heads, head_dim, value_dim };
        Self { sizes, int8: None }.with_format(format)
    }

    /// Sets the format, without scratch yet.
    ///
    /// # Panics
    /// For int8 and int4, if keys are longer than [`MAX_INT8_HEAD_DIM`](crate::MAX_INT8_HEAD_DIM). If there is not one scale for
    /// each channel, or keys are latent and their channels have scales.
    pub(super) fn with_format(self, format: CacheFormat<'_>) -> Self {
        let Sizes { key_order, kv_heads, head_dim, .. } = self.sizes;
        assert!(head_dim <= MAX_HEAD_DIM || format.dtype().is_some(), "keys are too long for integers");
        let (format, int8) = match format {
            CacheFormat::Elements(dtype) => (Format::Elements(dtype), None),
            CacheFormat::Int8PerToken => (Format::Int8 { key_scales: true }, Some(Int8::default())),
            CacheFormat::Int8PerChannel(scales) => {
                assert!(Some(scales.len()) == kv_heads.checked_mul(head_dim), "a scale for each channel");
                assert!(key_order != KeyOrder::Latent, "a latent key has one scale");
                (Format::Int8 { key_scales: false }, Some(Int8 { channels: Some(scales.into()), ..Int8::default() }))
            }
            CacheFormat::Int4(kind) => (Format::Int4(kind), None),
        };
        Self { sizes: Sizes { format, ..self.sizes }, int8 }
    }

    /// Returns the format.
    pub(super) fn format(&self) -> CacheFormat<'_> {
        match (self.sizes.format, self.channel_scales()) {
            (Format::Elements(dtype), _) => CacheFormat::Elements(dtype),
            (Format::Int8 { .. }, None) => CacheFormat::Int8PerToken,
            (Format::Int8 { .. }, Some(scales)) => CacheFormat::Int8PerChannel(scales),
            (Format::Int4(kind), _) => CacheFormat::Int4(kind),
        }
    }

    /// Returns the scales of the keys' channels, `[kv_heads][head_dim]`, if they have any.
    pub(super) fn channel_scales(&self) -> Option<&[f32]> {
        self.int8.as_ref()?.channels.as_deref()
    }

    /// Allocates the scratch that appending needs, unless it is there already.
    pub(super) fn reserve_scratch(&mut self) {
        let Self { sizes, int8: Some(Int8 { row, bytes, .. }) } = self else { return };
        row.resize(sizes.head_dim.max(sizes.value_dim).next_multiple_of(LANES), 0.0);
        bytes.resize(sizes.head_dim + sizes.width(), 0);
    }
}
