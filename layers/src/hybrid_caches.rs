//! Caches of all layers of a model whose layers are of two kinds: attention, and linear attention.

#[cfg(feature = "safetensors")]
mod file;

use crate::error::{at_most, same};
use crate::linear_attention::StateCache;
use sdpa::{Error, KvCache};

/// Cache of one layer of a hybrid model.
///
/// ```
/// use sdpa::{KvCache, KvShape};
/// use sdpa_layers::{LayerCache, LinearState, StateCache};
/// let state = LinearState::new([1, 2, 8, 8])?;
/// let keys = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 })?;
/// let layers = [LayerCache::States(StateCache::new(1, &state, 3)?), LayerCache::Keys(keys)];
/// # let _ = layers;
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
#[expect(clippy::large_enum_variant, reason = "a few dozen layers")]
pub enum LayerCache {
    /// Keys and values of all tokens, for attention.
    Keys(KvCache),
    /// States, for linear attention.
    States(StateCache),
}

/// Evaluates an expression of the cache of either kind.
macro_rules! either {
    ($layer:expr, $cache:ident => $result:expr) => {
        match $layer {
            LayerCache::Keys($cache) => $result,
            LayerCache::States($cache) => $result,
        }
    };
}
#[cfg(feature = "safetensors")]
use either;

/// Caches of all layers of a hybrid model, such as Qwen3-Next or Kimi Linear, which have the same sequences: rolled back and
/// forked together, all or none. A model of attention alone has [`LayerCaches`](sdpa::LayerCaches).
///
/// In a step each layer appends to its own cache ([`Self::layer_mut`]) or updates its own states
/// ([`LinearAttention::decode`](crate::LinearAttention::decode)). A token counts once all layers have it. If a step ends before
/// that, [`Self::roll_back`] takes back what only some layers have. [`Self::truncate`] takes back rejected drafts, if states have
/// room for them ([`StateCache::new`]). There is no `keep` for trees of drafts: a state has taken in every token before it, so
/// only tokens at the end can go.
///
/// A fork into a sequence that [`Self::add_sequence`] made is a snapshot: it takes no memory until one of the two changes.
///
/// ```
/// use sdpa::{KvCache, KvShape, View, ViewMut};
/// use sdpa_layers::{Compute, HybridCaches, LayerCache, LinearAttention, LinearInputs, LinearState, StateCache, Update};
/// let states = LayerCache::States(StateCache::new(1, &LinearState::new([1, 1, 4, 4])?, 2)?);
/// let keys = LayerCache::Keys(KvCache::new(1, KvShape { kv_heads: 1, head_dim: 4, value_dim: 4 })?);
/// let mut caches = HybridCaches::new(vec![states.clone(), states, keys])?;
/// let (rows, mut out, mut compute) = ([0.5; 3 * 4], [0.0; 3 * 4], Compute::default());
/// let rows = View::bhld(&rows, [1, 1, 3, 4])?; // a token and two drafts
/// for layer in 0..3 {
///     match caches.layer_mut(layer)? {
///         LayerCache::States(states) => {
///             let (inputs, out) = (LinearInputs::new(rows, rows, rows, Update::Linear), ViewMut::bhld(&mut out, [1, 1, 3, 4])?);
///             LinearAttention::new().decode(inputs, states, &[0], out, &mut compute)?;
///         }
///         LayerCache::Keys(keys) => keys.append(rows, rows)?, // … and attention over them …
///         _ => unreachable!("no other kinds were given"),
///     }
/// }
/// caches.truncate(0, 2)?; // the second draft was wrong
/// assert_eq!(caches.len(0)?, 2);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct HybridCaches {
    layers: Vec<LayerCache>,
}

impl HybridCaches {
    /// Takes the cache of each layer, first layer first, of any sizes.
    ///
    /// # Errors
    /// [`Error::Empty`] without layers; [`Error::Mismatch`] if one has another number of sequences than the first, or
    /// [`Error::Removed`] if only some have a sequence.
    pub fn new(layers: Vec<LayerCache>) -> Result<Self, Error> {
        let Some(first) = layers.first() else {
            return Err(Error::Empty { argument: "layers", what: "number of caches" });
        };
        let has = |layer: &LayerCache, sequence| either!(layer, cache => cache.has_sequence(sequence));
        let count = either!(first, cache => cache.sequences());
        for layer in &layers {
            let got = either!(layer, cache => cache.sequences());
            same("a layer", "number of sequences", got, count, "the first layer")?;
            if let Some(sequence) = (0..count).find(|&sequence| has(layer, sequence) != has(first, sequence)) {
                return Err(Error::Removed { argument: "layers", sequence });
            }
        }
        Ok(Self { layers })
    }

    /// Caches, layer by layer.
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    /// Cache of a layer, to append to or to update. Changes of sequences are for all layers: the methods of this type make them.
    ///
    /// # Errors
    /// [`Error::Range`] if there is no such layer.
    pub fn layer_mut(&mut self, layer: usize) -> Result<&mut LayerCache, Error> {
        at_most(self.layers.len() - 1, "the last layer").check("layer", "index", layer)?;
        Ok(&mut self.layers[layer])
    }

    /// Number of tokens of a sequence that all layers have: the position of its next token.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed.
    pub fn len(&self, sequence: usize) -> Result<usize, Error> {
        self.check(sequence, 0)?;
        let len = |layer: &LayerCache| match layer {
            LayerCache::Keys(cache) => Ok(cache.lens()[sequence]),
            LayerCache::States(cache) => cache.len(sequence),
        };
        self.layers.iter().try_fold(usize::MAX, |least, layer| Ok(least.min(len(layer)?)))
    }

    /// Takes back tokens that only some layers have.
    ///
    /// # Errors
    /// As [`Self::truncate`], but never so if each layer has had one call since the last token that all have; all caches are then
    /// unchanged.
    pub fn roll_back(&mut self) -> Result<(), Error> {
        let sequences = 0..either!(&self.layers[0], cache => cache.sequences());
        let there = sequences.filter(|&sequence| either!(&self.layers[0], cache => cache.has_sequence(sequence)));
        let lens = there.map(|sequence| Ok((sequence, self.len(sequence)?))).collect::<Result<Vec<_>, Error>>()?;
        lens.iter().try_for_each(|&(sequence, len)| self.check(sequence, len))?;
        lens.iter().try_for_each(|&(sequence, len)| self.truncate(sequence, len))
    }

    /// Truncates a sequence in all layers: see [`KvCache::truncate`] and [`StateCache::truncate`].
    ///
    /// # Errors
    /// As there; all caches are then unchanged.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.check(sequence, len)?;
        self.each(|layer| either!(layer, cache => cache.truncate(sequence, len)))
    }

    /// Makes sequence `to` a copy of `from` in all layers: see [`KvCache::fork`] and [`StateCache::fork`].
    ///
    /// # Errors
    /// As there; all caches are then unchanged.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.check(from, 0)?;
        self.check(to, 0)?;
        self.each(|layer| either!(layer, cache => cache.fork(from, to)))
    }

    /// Adds an empty sequence to all layers and returns its index: the lowest of the removed sequences', otherwise one more than the
    /// last.
    pub fn add_sequence(&mut self) -> usize {
        self.layers.iter_mut().map(|layer| either!(layer, cache => cache.add_sequence())).max().unwrap_or(0)
    }

    /// Removes a sequence from all layers: see [`KvCache::remove_sequence`] and [`StateCache::remove_sequence`].
    ///
    /// # Errors
    /// As there; all caches are then unchanged.
    pub fn remove_sequence(&mut self, sequence: usize) -> Result<(), Error> {
        self.check(sequence, 0)?;
        self.each(|layer| either!(layer, cache => cache.remove_sequence(sequence)))
    }

    /// Bytes held by all layers; what sequences share is counted once.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| either!(layer, cache => cache.bytes())).sum()
    }

    /// Returns an error unless all layers can go back to this length; without such a sequence, none can.
    fn check(&self, sequence: usize, len: usize) -> Result<(), Error> {
        self.layers.iter().try_for_each(|layer| either!(layer, cache => cache.check_truncate(sequence, len)))
    }

    fn each(&mut self, change: impl FnMut(&mut LayerCache) -> Result<(), Error>) -> Result<(), Error> {
        self.layers.iter_mut().try_for_each(change)
    }
}
