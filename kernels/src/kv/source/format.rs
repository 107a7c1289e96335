//! Format of a source's keys and values.

use super::{KeyValues, Source};
use crate::kv::cache::{Cache, CacheFormat, ExactRows, KvFormat, Store};
use crate::matmul::hadamard::Basis;
use crate::tensor::element::Dtype;

impl<'a> KeyValues<'a> {
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

    /// Returns the format of a cache or pool, if that is the source.
    #[inline]
    #[doc(hidden)] // its type is that of caches
    pub fn format(&self) -> Option<KvFormat<'a>> {
        self.store().map(Store::format)
    }

    /// Returns the sizes and the format of a cache or pool, if that is the source.
    #[inline]
    fn store(&self) -> Option<&'a Store> {
        match self.0 {
            Source::Tensors { .. } => None,
            Source::Pages(pages) => Some(pages.pool()?.store()),
            Source::Cache(cache) => Some(cache.store()),
        }
    }

    /// Returns the bases of the elements of keys and of values.
    #[inline]
    pub(crate) fn bases(&self) -> [Basis; 2] {
        self.store().map_or([Basis::Channels; 2], Store::bases)
    }

    /// Returns the exact rows of the first tokens of a sequence, if it has any.
    #[inline]
    pub(crate) fn exact_rows(&self, [b, head]: [usize; 2]) -> Option<ExactRows<'_>> {
        match &self.0 {
            Source::Tensors { .. } => None,
            Source::Pages(pages) => pages.exact_rows(b, head),
            Source::Cache(cache) => cache.exact_rows(b, head),
        }
    }

    /// Returns the scales of the channels of a head's keys, if keys have such.
    #[inline]
    pub(crate) fn key_channels(&self, head: usize) -> Option<&'a [f32]> {
        let scales = self.store()?.channel_scales()?;
        let dim = scales.len() / self.kv_heads();
        Some(&scales[head * dim..][..dim])
    }
}
