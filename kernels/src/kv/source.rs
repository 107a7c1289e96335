//! Sources of keys and values: tensors, pages of a pool, a cache.
//!
//! Whatever the source, the main loop gets a block of up to 256 keys at a time: rows to be packed, or panels that are
//! packed already; and rows of values, or value panels of their columns. So all sources give the same bits.

mod format;

use crate::kv::block_table::Stretch;
use crate::kv::cache::{Cache, CacheFormat, KvFormat, PackedPool, TokenPart};
use crate::kv::gathered::{self, rows_memory};
use crate::kv::key_block::{BlockValues, Keys};
use crate::kv::pages::{Pages, scattered_rows};
use crate::tensor::any::Tensor;
use crate::tensor::element::Dtype;
use crate::tensor::misfit::{Misfit, same_rows};
use crate::tensor::rows::{KEY_BLOCK, Table};
use core::cmp::Ordering;
use core::ops::Range;

/// Keys `[batch, kv_heads, kv_len, head_dim]` and values `[batch, kv_heads, kv_len, value_dim]` of a call. Two tensors
/// that differ in batch, heads or rows are refused, so each key has its value.
#[derive(Debug, Clone, Copy)]
pub struct KeyValues<'a>(Source<'a>);

/// Checks that each key has its value; arguments are the shapes of keys and values.
pub(crate) fn values_fit(k: [usize; 4], v: [usize; 4]) -> Result<(), Misfit> {
    same_rows("v", v, k, "k")
}

/// Source of the keys and values.
#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    /// Two tensors of equal batch, heads and rows.
    Tensors { k: Tensor<'a>, v: Tensor<'a> },
    /// Pages of a pool, with a block table.
    Pages(Pages<'a>),
    /// Cache of packed keys.
    Cache(&'a Cache),
}

impl<'a> From<Pages<'a>> for KeyValues<'a> {
    fn from(pages: Pages<'a>) -> Self {
        Self(Source::Pages(pages))
    }
}

#[doc(hidden)] // its type has no name in `sdpa`
impl<'a> From<&'a Cache> for KeyValues<'a> {
    fn from(cache: &'a Cache) -> Self {
        Self(Source::Cache(cache))
    }
}

impl<'a> KeyValues<'a> {
    /// Makes a source of two tensors, `[batch, kv_heads, kv_len, head_dim]` and `[batch, kv_heads, kv_len, value_dim]`.
    /// `None` if they differ in one of the first three.
    pub fn of_tensors(k: impl Into<Tensor<'a>>, v: impl Into<Tensor<'a>>) -> Option<Self> {
        Self::checked(k.into(), v.into()).ok()
    }

    /// Makes a source of two tensors, as [`Self::of_tensors`] does, or says why they are refused.
    #[doc(hidden)] // its error has no name in `sdpa`
    pub fn checked(k: Tensor<'a>, v: Tensor<'a>) -> Result<Self, Misfit> {
        values_fit(k.shape(), v.shape()).map(|()| Self(Source::Tensors { k, v }))
    }

    /// Names of the keys and values in messages.
    pub(crate) fn names(&self) -> [&'static str; 2] {
        match &self.0 {
            Source::Tensors { .. } => ["k", "v"],
            Source::Pages(_) => ["pages"; 2],
            Source::Cache(_) => ["cache"; 2],
        }
    }

    /// Returns the shape of the keys, `[batch, kv_heads, kv_len, head_dim]`, with the length of the longest sequence.
    ///
    /// Complexity: the number of sequences of a cache; constant for pages and tensors.
    #[inline]
    pub fn k_shape(&self) -> [usize; 4] {
        self.shapes()[0]
    }

    /// Returns the shape of the values, `[batch, kv_heads, kv_len, value_dim]`, with the length of the longest
    /// sequence; complexity as for [`Self::k_shape`].
    #[inline]
    pub fn v_shape(&self) -> [usize; 4] {
        self.shapes()[1]
    }

    #[inline]
    fn shapes(&self) -> [[usize; 4]; 2] {
        match &self.0 {
            Source::Tensors { k, v } => [k, v].map(|x| x.shape()),
            Source::Pages(pages) => pages.shapes(),
            Source::Cache(cache) => cache.shapes(),
        }
    }

    /// Returns the number of key/value heads.
    #[inline]
    pub fn kv_heads(&self) -> usize {
        match &self.0 {
            Source::Tensors { k, .. } => k.shape()[1],
            Source::Pages(pages) => pages.kv_heads(),
            Source::Cache(cache) => cache.kv_heads(),
        }
    }

    /// Returns the number of sequences: the batch of the keys.
    #[inline]
    pub(crate) fn sequences(&self) -> usize {
        self.lens().map_or_else(|| self.k_shape()[0], <[usize]>::len)
    }

    /// Returns the lengths of a key and of a value.
    #[inline]
    #[doc(hidden)] // for `sdpa`
    pub fn dims(&self) -> [usize; 2] {
        match &self.0 {
            Source::Tensors { k, v } => [k, v].map(|x| x.shape()[3]),
            Source::Pages(pages) => pages.dims(),
            Source::Cache(cache) => cache.dims(),
        }
    }

    /// Returns true if a block of keys of one head is stored beside the same block of the other heads (a cache, and
    /// tensors or pages of `[keys, heads, dim]`), false if it is stored beside the other blocks of its head.
    pub(crate) fn has_heads_inside(&self) -> bool {
        match &self.0 {
            Source::Tensors { k, .. } => k.has_heads_inside(),
            Source::Pages(pages) => pages.has_heads_inside(),
            Source::Cache(_) => true,
        }
    }

    /// Returns true if two sequences may have keys in the same memory.
    pub(crate) fn may_share_memory(&self) -> bool {
        match &self.0 {
            Source::Tensors { k, v } => k.strides()[0] == 0 && v.strides()[0] == 0,
            Source::Pages(_) | Source::Cache(_) => true,
        }
    }

    /// Compares two sequences by the memory of a key block that both have: equal if it is the same for every head.
    pub(crate) fn compare_memory(&self, sequences: [usize; 2], block: usize) -> Ordering {
        match &self.0 {
            Source::Tensors { .. } if self.may_share_memory() => Ordering::Equal,
            Source::Tensors { .. } => sequences[0].cmp(&sequences[1]),
            Source::Pages(pages) => pages.compare_entries(sequences, block * KEY_BLOCK..(block + 1) * KEY_BLOCK),
            Source::Cache(cache) => cache.compare_memory(sequences, block),
        }
    }

    /// Returns the number of bytes of a key and its value in one head, without scales.
    pub fn token_bytes(&self) -> usize {
        let [key, value] = match self.format() {
            Some(KvFormat { keys, values, .. }) => [keys, values].map(CacheFormat::bits),
            None => self.dtypes().map(|dtype| dtype.map_or(8, |dtype| 8 * dtype.bytes())),
        };
        let [k, v] = self.dims();
        let v = if self.cache().is_some_and(Cache::is_latent) { 0 } else { v };
        (k * key + v * value).div_ceil(8)
    }

    /// Returns the types of keys and of values; `None` for those of eight and four bits.
    #[inline]
    pub fn dtypes(&self) -> [Option<Dtype>; 2] {
        match &self.0 {
            Source::Tensors { k, v } => [k, v].map(|x| Some(x.dtype())),
            Source::Pages(pages) => pages.dtypes(),
            Source::Cache(cache) => cache.format().dtypes(),
        }
    }

    /// Returns the two tensors, if that is the source.
    pub fn tensors(&self) -> Option<[Tensor<'a>; 2]> {
        match self.0 {
            Source::Tensors { k, v } => Some([k, v]),
            _ => None,
        }
    }

    /// Returns true if values are stored in panels: see `value_panels.rs`.
    pub(crate) fn has_value_panels(&self) -> bool {
        match &self.0 {
            Source::Tensors { .. } => false,
            Source::Pages(pages) => pages.pool().is_some(),
            Source::Cache(cache) => !cache.is_latent(),
        }
    }

    /// Returns true if the source is pages.
    pub(crate) fn is_paged(&self) -> bool {
        matches!(self.0, Source::Pages(_))
    }

    /// Returns the cache, if that is the source.
    #[doc(hidden)] // its type has no name in `sdpa`
    pub fn cache(&self) -> Option<&'a Cache> {
        if let Source::Cache(cache) = self.0 { Some(cache) } else { None }
    }

    /// Returns the lengths of the sequences, if the source has its own.
    #[inline]
    pub fn lens(&self) -> Option<&'a [usize]> {
        match &self.0 {
            Source::Tensors { .. } => None,
            Source::Pages(pages) => Some(pages.lens()),
            Source::Cache(cache) => Some(cache.lens()),
        }
    }

    /// Returns element `[b, h, j, d]` of the keys; `None` outside the shape, or where a cache has evicted the key.
    ///
    /// Complexity: constant; the length of a key where a cache has another basis, as the whole key is taken back from it.
    pub fn key(&self, index: [usize; 4]) -> Option<f32> {
        self.element(TokenPart::Key, index)
    }

    /// Returns element `[b, h, j, d]` of the values, as [`Self::key`] does.
    pub fn value(&self, index: [usize; 4]) -> Option<f32> {
        self.element(TokenPart::Value, index)
    }

    /// Returns an element of a key or of a value.
    fn element(&self, part: TokenPart, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        match &self.0 {
            Source::Tensors { k, v } => if part == TokenPart::Key { k } else { v }.get([b, h, j, d]),
            _ => Some(self.elements(part, [b, h, j], d..d.checked_add(1)?)?[0]),
        }
    }

    /// Returns some elements of key or value `[b, h, j]`, widened; `None` outside the shape, or where a cache has evicted the key.
    #[doc(hidden)] // the parts have no name in `sdpa`
    pub fn elements(&self, part: TokenPart, at: [usize; 3], of: Range<usize>) -> Option<Vec<f32>> {
        match &self.0 {
            Source::Tensors { k, v } => if part == TokenPart::Key { k } else { v }.elements(at, of),
            Source::Pages(pages) => pages.elements(part, at, of),
            Source::Cache(cache) => cache.elements(part, at, of),
        }
    }

    /// Returns true if the block of keys that starts at `first` is held: a sliding cache evicts blocks.
    #[inline]
    pub(crate) fn holds(&self, b: usize, first: usize) -> bool {
        match &self.0 {
            Source::Tensors { .. } | Source::Pages(_) => true,
            Source::Cache(cache) => cache.holds(b, first / KEY_BLOCK),
        }
    }

    /// Asserts, in debug builds, that keys `first .. first + len` of a head exist, are of one block, and are held.
    #[inline(always)]
    fn debug_assert_inside(&self, [b, h, first]: [usize; 3], len: usize) {
        let end = || self.lens().map_or_else(|| self.k_shape()[2], |lens| lens[b]);
        debug_assert!(h < self.kv_heads() && (1..=KEY_BLOCK).contains(&len), "{len} keys of head {h}");
        debug_assert!(first + len <= end() && self.holds(b, first), "keys {first}..{} of {}", first + len, end());
    }

    /// Calls `f(address, bytes)` for the memory of a run of keys of head `h` of sequence `b`, or of their values, about, to prefetch
    /// it. The keys exist, and their blocks are held.
    pub(crate) fn memory_of(
        &self,
        part: TokenPart,
        [b, h]: [usize; 2],
        run: Range<usize>,
        f: &mut impl FnMut(*const u8, usize),
    ) {
        match &self.0 {
            Source::Tensors { k, v } => rows_memory(if part == TokenPart::Key { k } else { v }, [b, h], run, f),
            Source::Pages(pages) => pages.memory_of(part, [b, h], run, f),
            Source::Cache(cache) => cache.memory_of(part, [b, h], run, f),
        }
    }

    /// Number of floats of room for a block of keys and values that are gathered. `None` if it overflows.
    pub(crate) fn gathered_floats(&self) -> Option<usize> {
        let packed = match &self.0 {
            Source::Tensors { .. } => None,
            Source::Pages(pages) => pages.pool().map(PackedPool::gathered_floats),
            Source::Cache(cache) => Some(cache.gathered_floats()),
        };
        packed.unwrap_or_else(|| {
            let bytes = self.dtypes().map(|dtype| dtype.map_or(1, Dtype::bytes));
            let [key, value] = [0, 1].map(|n| gathered::row_floats(self.dims()[n], bytes[n]));
            key?.checked_add(value?)
        })
    }

    /// Returns all keys and values of head `h` of sequence `b` from key `first` on, if they are rows of tensors.
    ///
    /// # Safety
    /// The key exists.
    pub(crate) unsafe fn head_rows(&self, [b, h, first]: [usize; 3]) -> Option<(Keys, BlockValues)> {
        let [k, v] = self.tensors()?;
        // SAFETY: same contract.
        let [keys, values] = [k, v].map(|x| unsafe { x.rows(b, h, first) });
        Some((Keys::Rows(keys), BlockValues::Rows { rows: values, readable: v.shape()[3] }))
    }

    /// Returns keys and values of head `h` of sequence `b`, at most a block, from runs of keys `(first, len)`. Those that need not be
    /// copied to `room` are read where they lie.
    ///
    /// # Safety
    /// The keys exist, and their blocks are held. The tables and the room outlive the result, and do not change meanwhile.
    pub(crate) unsafe fn listed(
        &self,
        [b, h]: [usize; 2],
        runs: impl Iterator<Item = (usize, usize)> + Clone,
        tables: [&mut Table; 2],
        room: &mut [f32],
    ) -> (Keys, BlockValues) {
        let mut all = runs.clone();
        if let (Some((first, len)), None) = (all.next(), all.next())
            && (self.tensors().is_some() || first.is_multiple_of(KEY_BLOCK))
        {
            let [key_table, value_table] = tables;
            // SAFETY: same contract: the caller guarantees the keys; one run is rows of a tensor, or begins with a block.
            return unsafe { (self.keys([b, h, first], len, key_table), self.values([b, h, first], len, value_table)) };
        }
        match &self.0 {
            Source::Tensors { k, v } => {
                let [key_table, value_table] = tables;
                let stretches = runs.map(|(row, len)| Stretch { page: b, row, len });
                // SAFETY: the caller guarantees that the keys exist.
                let [keys, values] = unsafe {
                    [scattered_rows(k, h, stretches.clone(), key_table), scattered_rows(v, h, stretches, value_table)]
                };
                (Keys::Rows(keys), BlockValues::Rows { rows: values, readable: v.shape()[3] })
            }
            // SAFETY: same contract.
            Source::Pages(pages) => unsafe { pages.listed([b, h], runs, tables, room) },
            Source::Cache(cache) => cache.listed([b, h], runs, tables, room),
        }
    }

    /// Returns keys `first .. first + len` of a head; `first` is counted in the tensor and, except for tensors, a
    /// multiple of 256.
    ///
    /// # Safety
    /// The keys exist, and their block is held. The table outlives the result.
    #[inline]
    pub(crate) unsafe fn keys(&self, [b, h, first]: [usize; 3], len: usize, table: &mut Table) -> Keys {
        self.debug_assert_inside([b, h, first], len);
        // SAFETY: same contract: the caller guarantees that the keys exist and their block is held.
        unsafe {
            match &self.0 {
                Source::Tensors { k, .. } => Keys::Rows(k.rows(b, h, first)),
                Source::Pages(pages) => pages.keys([b, h, first], len, table),
                Source::Cache(cache) => cache.keys(b, h, first / KEY_BLOCK),
            }
        }
    }

    /// Returns the values of keys `first .. first + len` of a head.
    ///
    /// # Safety
    /// Same contract as [`Self::keys`].
    #[inline]
    pub(crate) unsafe fn values(&self, [b, h, first]: [usize; 3], len: usize, table: &mut Table) -> BlockValues {
        self.debug_assert_inside([b, h, first], len);
        // SAFETY: same contract: the caller guarantees that the keys exist and their block is held.
        unsafe {
            match &self.0 {
                Source::Tensors { v, .. } => BlockValues::Rows { rows: v.rows(b, h, first), readable: v.shape()[3] },
                Source::Pages(pages) => pages.values([b, h, first], len, table),
                Source::Cache(cache) => cache.values(b, h, first / KEY_BLOCK),
            }
        }
    }
}
