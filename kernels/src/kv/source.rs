//! Where keys and values come from: tensors, pages of a pool, a cache.
//!
//! Whatever the source, the fused loop sees a block of up to 256 keys at a time: rows to be packed, or panels that are
//! packed already; and rows of values, or value panels of their columns. So all sources have the same bits.

use crate::kv::cache::Cache;
use crate::kv::key_block::{BlockValues, Keys, QueryForm};
use crate::kv::pages::Pages;
use crate::tensor::any::Tensor;
use crate::tensor::element::Dtype;
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::rows::Table;

/// The keys `[batch, kv_heads, kv_len, head_dim]` and values `[batch, kv_heads, kv_len, value_dim]` of a call. There are as
/// many values as keys: made of two tensors that differ in batch, heads or rows, it does not exist.
#[derive(Debug, Clone, Copy)]
pub struct KeyValues<'a>(Source<'a>);

/// Where they are.
#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    /// Two tensors of equal batch, heads and rows.
    Tensors { k: Tensor<'a>, v: Tensor<'a> },
    /// Pages of a pool, by a table.
    Pages(Pages<'a>),
    /// A cache, in which keys lie packed.
    Cache(&'a Cache),
}

impl<'a> From<Pages<'a>> for KeyValues<'a> {
    fn from(pages: Pages<'a>) -> Self {
        Self(Source::Pages(pages))
    }
}

impl<'a> From<&'a Cache> for KeyValues<'a> {
    fn from(cache: &'a Cache) -> Self {
        Self(Source::Cache(cache))
    }
}

impl<'a> KeyValues<'a> {
    /// Two tensors, `[batch, kv_heads, kv_len, head_dim]` and `[batch, kv_heads, kv_len, value_dim]`. `None` if they differ in
    /// one of the first three.
    pub fn of_tensors(k: impl Into<Tensor<'a>>, v: impl Into<Tensor<'a>>) -> Option<Self> {
        let (k, v) = (k.into(), v.into());
        (k.shape()[..3] == v.shape()[..3]).then_some(Self(Source::Tensors { k, v }))
    }

    /// `[batch, kv_heads, kv_len, head_dim]`, by the longest sequence.
    #[inline]
    pub fn k_shape(&self) -> [usize; 4] {
        match &self.0 {
            Source::Tensors { k, .. } => k.shape(),
            Source::Pages(pages) => pages.shapes()[0],
            Source::Cache(cache) => cache.shapes()[0],
        }
    }

    /// `[batch, kv_heads, kv_len, value_dim]`, by the longest sequence.
    #[inline]
    pub fn v_shape(&self) -> [usize; 4] {
        match &self.0 {
            Source::Tensors { v, .. } => v.shape(),
            Source::Pages(pages) => pages.shapes()[1],
            Source::Cache(cache) => cache.shapes()[1],
        }
    }

    /// Key/value heads.
    #[inline]
    pub fn kv_heads(&self) -> usize {
        match &self.0 {
            Source::Tensors { k, .. } | Source::Pages(Pages { k, .. }) => k.shape()[1],
            Source::Cache(cache) => cache.kv_heads(),
        }
    }

    /// Whether a block of keys lies with those of all heads, or a head with all its blocks: a cache, and tensors or pages of
    /// `[keys, heads, dim]`.
    pub(crate) fn has_heads_inside(&self) -> bool {
        match &self.0 {
            Source::Tensors { k, .. } | Source::Pages(Pages { k, .. }) => {
                let [_, head, key, _] = k.strides();
                head.unsigned_abs() < key.unsigned_abs()
            }
            Source::Cache(_) => true,
        }
    }

    /// Bytes of an element of a key and of a value.
    pub fn element_bytes(&self) -> [usize; 2] {
        self.dtypes().map(|dtype| dtype.map_or(1, Dtype::bytes))
    }

    /// Types of keys and of values; `None` for bytes.
    #[inline]
    pub fn dtypes(&self) -> [Option<Dtype>; 2] {
        match &self.0 {
            Source::Tensors { k, v } | Source::Pages(Pages { k, v, .. }) => [k, v].map(|x| Some(x.dtype())),
            Source::Cache(cache) => [cache.dtype(); 2],
        }
    }

    /// Two tensors, if that is what they are.
    pub fn tensors(&self) -> Option<[Tensor<'a>; 2]> {
        match self.0 {
            Source::Tensors { k, v } => Some([k, v]),
            _ => None,
        }
    }

    /// True if they are in pages.
    pub(crate) fn is_paged(&self) -> bool {
        matches!(self.0, Source::Pages(_))
    }

    /// The cache, if that is what they are in.
    pub fn cache(&self) -> Option<&'a Cache> {
        if let Source::Cache(cache) = self.0 { Some(cache) } else { None }
    }

    /// Lengths of the sequences, where the source has its own.
    #[inline]
    pub fn lens(&self) -> Option<&'a [usize]> {
        match &self.0 {
            Source::Tensors { .. } => None,
            Source::Pages(pages) => Some(pages.lens()),
            Source::Cache(cache) => Some(cache.lens()),
        }
    }

    /// Element `d` of key `j`; `None` outside the shape, or where a cache has evicted the key.
    pub fn key(&self, index: [usize; 4]) -> Option<f32> {
        let [b, h, j, d] = index;
        match &self.0 {
            Source::Tensors { k, .. } => k.get([b, h, j, d]),
            Source::Pages(pages) => pages.element(&pages.k, [b, h, j, d]),
            Source::Cache(cache) => cache.key([b, h, j, d]),
        }
    }

    /// Element `d` of value `j`, likewise.
    pub fn value(&self, index: [usize; 4]) -> Option<f32> {
        let [b, h, j, d] = index;
        match &self.0 {
            Source::Tensors { v, .. } => v.get([b, h, j, d]),
            Source::Pages(pages) => pages.element(&pages.v, [b, h, j, d]),
            Source::Cache(cache) => cache.value([b, h, j, d]),
        }
    }

    /// What query rows are to be for the keys of a head.
    #[inline]
    pub(crate) fn query_form(&self, head: usize) -> QueryForm<'a> {
        match &self.0 {
            Source::Tensors { .. } | Source::Pages(_) => QueryForm::Floats,
            Source::Cache(cache) => {
                cache.channels(head).map_or(QueryForm::Floats, |channels| QueryForm::Bytes { channels })
            }
        }
    }

    /// True if the block of keys that starts at `first` is there at all: a cache that keeps a window evicts blocks.
    #[inline]
    pub(crate) fn holds(&self, b: usize, first: usize) -> bool {
        match &self.0 {
            Source::Tensors { .. } | Source::Pages(_) => true,
            Source::Cache(cache) => cache.holds(b, first / KEY_BLOCK),
        }
    }

    /// Keys `first .. first + len` of a head; `first` is counted in the tensor and, but for tensors, a multiple of 256.
    ///
    /// # Safety
    /// The keys exist, and their block is held. The table outlives the result.
    #[inline]
    pub(crate) unsafe fn keys(&self, [b, h, first]: [usize; 3], len: usize, table: &mut Table) -> Keys {
        // SAFETY: passed on.
        unsafe {
            match &self.0 {
                Source::Tensors { k, .. } => Keys::Rows(k.rows(b, h, first)),
                Source::Pages(pages) => Keys::Rows(pages.rows(&pages.k, [b, h, first], len, table)),
                Source::Cache(cache) => cache.keys(b, h, first / KEY_BLOCK),
            }
        }
    }

    /// Their values.
    ///
    /// # Safety
    /// As for [`Self::keys`].
    #[inline]
    pub(crate) unsafe fn values(&self, [b, h, first]: [usize; 3], len: usize, table: &mut Table) -> BlockValues {
        // SAFETY: passed on.
        unsafe {
            match &self.0 {
                Source::Tensors { v, .. } => BlockValues::Rows { rows: v.rows(b, h, first), readable: v.shape()[3] },
                Source::Pages(pages) => {
                    let rows = pages.rows(&pages.v, [b, h, first], len, table);
                    BlockValues::Rows { rows, readable: self.v_shape()[3] }
                }
                Source::Cache(cache) => cache.values(b, h, first / KEY_BLOCK),
            }
        }
    }
}
