//! Format of a source's keys and values.

use super::{KeyValues, Source};
use crate::kv::cache::{ExactRows, KvFormat, Store};
use crate::matmul::hadamard::Basis;

impl<'a> KeyValues<'a> {
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
