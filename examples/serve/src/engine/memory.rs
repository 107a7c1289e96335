//! Memory of keys and values, forecast.

use crate::limits::Limits;
use sdpa::LayerCaches;
use std::sync::Arc;

/// Tokens of a block of a cache, which forks share.
const BLOCK: usize = 256;

/// Forecast of the bytes that keys and values take in the caches of all layers.
#[derive(Debug, Clone)]
pub(crate) struct Forecast {
    /// Caches of the decoder, without a token: they know what one takes.
    caches: Arc<LayerCaches>,
    /// Bytes of the prefixes.
    prefixes: usize,
}

impl Forecast {
    /// Takes empty caches, and the bytes of the prefixes.
    pub(crate) fn new(caches: LayerCaches, prefixes: usize) -> Self {
        Self { caches: Arc::new(caches), prefixes }
    }

    /// Bytes that a text of `tokens` tokens holds.
    pub(crate) fn bytes(&self, tokens: usize) -> usize {
        self.caches.bytes_for(tokens)
    }

    /// Bytes that a text holds besides those of the prefix that it is forked from, which has `shared` tokens in common with it: whole
    /// blocks are shared.
    pub(crate) fn beside(&self, shared: usize, tokens: usize) -> usize {
        self.bytes(tokens) - self.bytes(shared.min(tokens) / BLOCK * BLOCK)
    }

    /// Bytes that texts may hold, under these limits.
    pub(crate) fn for_texts(&self, limits: &Limits) -> usize {
        limits.cache_bytes.saturating_sub(self.prefixes)
    }
}
