//! Key/value cache: keys and values kept from call to call.

mod append;
mod build;
mod changed_keys;
mod codes;
#[cfg(feature = "safetensors")]
pub(crate) mod file;
mod held;
mod sequences;
mod token_form;

use crate::error::Error;
use crate::shape::KvShape;
pub(crate) use build::check_format;
pub(crate) use codes::widened_codes;
pub use codes::{widen_latent_e4m3, widen_latent_page};
use core::num::NonZeroUsize;
use core::ops::Range;
pub(crate) use held::check_held;
use sdpa_kernels::{Cache, Isa, KvFormat, Sliding};
pub(crate) use sequences::check_accepted;
use std::collections::BTreeSet;
pub(crate) use token_form::{check_elements, check_tokens};

/// Scales of the keys of an int8 cache: see [`KvCache::int8`].
///
/// ```
/// use sdpa::{KeyScales, KvCache, KvShape};
/// // Largest magnitude of each channel among some keys of the model: two heads of four.
/// let largest = [0.5, 0.5, 9.0, 0.5, 0.5, 0.5, 0.5, 12.0];
/// let scales = KeyScales::PerChannel(largest.map(|x| x / 127.0).to_vec());
/// let cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 4, value_dim: 4 })?.int8(scales)?;
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum KeyScales {
    /// One scale per key and head: 1/127 of the key's largest magnitude.
    PerToken,
    /// One fixed scale per channel, `[kv_heads × head_dim]`, positive and finite: for keys in which some channels are
    /// much larger than others. An element beyond ±127 scales is clamped to ±127 scales.
    PerChannel(Vec<f32>),
}

/// Keys that a sliding cache keeps: see [`KvCache::sliding`].
///
/// ```
/// use core::num::NonZeroUsize;
/// use sdpa::{KvCache, KvShape, Window};
/// let last = NonZeroUsize::new(512).unwrap();
/// let cache = KvCache::sliding(1, KvShape { kv_heads: 8, head_dim: 64, value_dim: 64 }, last, 4)?.rollback_room(16)?;
/// let keys = cache.sliding_window().unwrap();
/// assert_eq!((keys.last, keys.first, keys.rollback), (last, 4, 16));
/// let widest = Window::last_tokens(keys.last).keep_first(keys.first); // that calls over it may have
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlidingWindow {
    /// Number of last keys that a row may see, its own included.
    pub last: NonZeroUsize,
    /// Number of first keys that every row may see.
    pub first: usize,
    /// Number of tokens that can be taken back, counted from the greatest length before an append: see
    /// [`KvCache::rollback_room`].
    pub rollback: usize,
}

/// Key/value cache of one layer for a batch of sequences, each with its own length, for decoding. Keys are packed when
/// they are appended, so a decode step reads every byte once and copies none.
///
/// Memory is allocated in blocks of 256 keys. The first block of a sequence begins with room for 16 keys. When full, it
/// is copied to one of twice the size, so a short sequence holds less than twice what its keys need. From 256 keys on,
/// growing copies nothing. [`Self::fork`] shares blocks until one of the two sequences writes to them. Once warm, a
/// decode step (append, attend) allocates only when a sequence crosses 16, 32, 64 or 128 tokens, or a multiple of 256:
/// one block. Each time the number of blocks has doubled, the workspace for accumulation doubles too.
///
/// ```
/// use sdpa::{Alignment, Attention, Inputs, KvCache, KvShape, Outputs, View, ViewMut};
/// # let (q, k, v) = (vec![0.5; 4 * 8], vec![0.25; 2 * 3 * 8], vec![1.0; 2 * 3 * 8]);
/// let mut cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 })?; // one sequence
/// cache.append(View::bhld(&k, [1, 2, 3, 8])?, View::bhld(&v, [1, 2, 3, 8])?)?;
/// let mut out = vec![0.0; 4 * 8];
/// let shape = [1, 4, 1, 8]; // four query heads, one row
/// let inputs = Inputs::cached(View::bhld(&q, shape)?, &cache);
/// let attention = Attention::new().causal().align(Alignment::BottomRight);
/// sdpa::attention(&attention, inputs, Outputs::new(ViewMut::bhld(&mut out, shape)?))?;
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct KvCache {
    cache: Cache,
    isa: Isa,
    /// Sequences that were removed; they have no keys.
    removed: BTreeSet<usize>,
    /// Scratch: the sequences of an append, sorted.
    sorted: Vec<usize>,
}

impl KvCache {
    /// Number of sequences, removed ones included: the batch of a call over the whole cache.
    pub fn sequences(&self) -> usize {
        self.lens().len()
    }

    /// Returns true if there is such a sequence, and it was not removed.
    pub fn has_sequence(&self, sequence: usize) -> bool {
        sequence < self.sequences() && !self.removed.contains(&sequence)
    }

    /// Sizes of the keys and values of a token.
    pub fn shape(&self) -> KvShape {
        let [head_dim, value_dim] = self.cache.dims();
        KvShape { kv_heads: self.cache.kv_heads(), head_dim, value_dim }
    }

    /// Format of keys and values, as [`Self::dtype`], [`Self::int8`], [`Self::int4`] or [`Self::with_format`] set it.
    pub fn format(&self) -> KvFormat<'_> {
        self.cache.format()
    }

    /// Returns true if values are the first columns of the keys ([`Self::latent`]).
    pub fn is_latent(&self) -> bool {
        self.cache.is_latent()
    }

    /// Keys that the cache keeps, if it is a sliding one.
    pub fn sliding_window(&self) -> Option<SlidingWindow> {
        let Sliding { last, first, rollback } = self.cache.sliding()?;
        Some(SlidingWindow { last: NonZeroUsize::new(last)?, first, rollback })
    }

    /// Positions of the keys of a sequence that a sliding cache has evicted; `0..0` if it has evicted none.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed.
    pub fn evicted(&self, sequence: usize) -> Result<Range<usize>, Error> {
        self.there("sequence", sequence)?;
        Ok(self.cache.evicted(sequence))
    }

    /// Number of keys of each sequence, evicted keys of a sliding cache included: the position of the next token. 0 for
    /// removed sequences.
    pub fn lens(&self) -> &[usize] {
        self.cache.lens()
    }

    /// Bytes held; blocks that sequences share are counted once.
    pub fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Bytes that a sequence of `tokens` tokens holds which came one by one and shares no block: a forecast, before a request is
    /// admitted. `usize::MAX` if that overflows.
    ///
    /// [`Self::bytes`] also counts memory that ended sequences left ([`Self::shrink`] gives it back), and what a sliding cache has
    /// of a prompt that came at once, until the next append evicts it.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape, View};
    /// let mut cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 64, value_dim: 64 })?;
    /// let bytes = cache.bytes_for(300);
    /// assert_eq!(bytes, 2 * 256 * 2 * 2 * 64 * 4); // two blocks of 256 keys and values
    /// let rows = vec![0.5; 2 * 300 * 64];
    /// let rows = View::bhld(&rows, [1, 2, 300, 64])?;
    /// cache.append(rows, rows)?;
    /// assert_eq!(cache.bytes(), bytes);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn bytes_for(&self, tokens: usize) -> usize {
        self.cache.bytes_for(tokens)
    }

    pub(crate) fn kernel(&self) -> &Cache {
        &self.cache
    }
}
