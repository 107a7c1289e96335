//! Where keys and values come from: tensors, pages of a pool, a cache.
//!
//! Whatever the source, the fused loop sees a block of up to 256 keys at a time: rows to be packed, or panels that are
//! packed already; and rows of values, or strips of their columns. So all sources have the same bits.

use crate::block::KEY_BLOCK;
use crate::cache::Cache;
use crate::element::Dtype;
use crate::pages::Pages;
use crate::rows::Table;
use crate::steps::Steps;
use crate::strips::{Strips, strip};
use crate::tensor::{AnyPanels, AnyRows, AnyStrips, Tensor, Typed};
use core::ops::Range;

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

/// The keys of a block.
#[derive(Clone, Copy)]
pub(crate) enum Keys {
    /// Rows, yet to be packed.
    Rows(AnyRows),
    /// `[panel][head_dim][16]`, whole panels.
    Packed(AnyPanels),
    /// Bytes of a whole block: see `int8.rs`.
    Int8 { keys: *const [i8], scales: Option<*const [f32]> },
}

/// The values of a block.
#[derive(Clone, Copy)]
pub(crate) enum BlockValues {
    /// Rows, and columns that may be read of each: as many as there are, or more.
    Rows { rows: AnyRows, readable: usize },
    /// Strips.
    Strips(AnyStrips),
    /// Strips of bytes, all finite; and the scales of a whole block.
    Int8 { strips: Strips<i8>, scales: *const [f32] },
}

/// Columns of a block's values that lie together.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    /// Rows from the first of them on.
    pub(crate) rows: AnyRows,
    pub(crate) first: usize,
    pub(crate) cols: usize,
}

impl BlockValues {
    /// Some of the columns, in runs. Of bytes, none.
    ///
    /// # Safety
    /// The values have these columns.
    pub(crate) unsafe fn runs(self, columns: Range<usize>) -> impl Iterator<Item = Run> {
        let mut first = columns.start;
        core::iter::from_fn(move || {
            if first >= columns.end {
                return None;
            }
            // SAFETY: the caller vouches for column `first`.
            let (rows, together) = unsafe {
                match self {
                    Self::Rows { rows, .. } => (rows.columns_from(first), usize::MAX),
                    Self::Strips(strips) => (strips.from(first), strip(first, self.readable()).end - first),
                    Self::Int8 { .. } => return None,
                }
            };
            let run = Run { rows, first, cols: together.min(columns.end - first) };
            first += run.cols;
            Some(run)
        })
    }

    /// Whether they are `f32`.
    pub(crate) fn are_floats(self) -> bool {
        matches!(self, Self::Rows { rows: Typed::F32(_), .. } | Self::Strips(Typed::F32(_)))
    }

    /// Columns that may be read of each row.
    #[inline]
    pub(crate) fn readable(self) -> usize {
        match self {
            Self::Rows { readable, .. } => readable,
            Self::Strips(strips) => by_type!(Typed, strips, |strips| strips.width),
            Self::Int8 { strips, .. } => strips.width,
        }
    }

    /// True if nothing of `len` keys' values is infinite or NaN.
    ///
    /// # Safety
    /// There are so many, of so many columns.
    pub(crate) unsafe fn all_finite<S: Steps>(self, s: S, len: usize, cols: usize) -> bool {
        // SAFETY: passed on.
        unsafe { self.runs(0..cols).all(|run| s.all_finite(run.rows, len, run.cols)) }
    }
}

/// What query rows are to be, for the keys they will meet.
#[derive(Clone, Copy)]
pub(crate) enum QueryForm<'a> {
    Floats,
    /// Bytes; the scales of the keys' channels, if there are such, belong into them.
    Bytes {
        channels: Option<&'a [f32]>,
    },
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
