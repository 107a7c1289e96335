//! Caches of all layers of a model.

use crate::cache::KvCache;
#[cfg(feature = "safetensors")]
use crate::cache::file::write;
use crate::error::{Error, at_most, same};
#[cfg(feature = "safetensors")]
use crate::tensor_file::TensorFile;
#[cfg(feature = "safetensors")]
use core::ops::Range;

/// Key of the descriptions of the caches in a file's metadata.
#[cfg(feature = "safetensors")]
const DESCRIPTIONS: &str = "sdpa.kv_caches";

/// Caches of all layers of a model, which have the same sequences: rolled back, forked, kept, saved together, all or none.
///
/// In a step each layer appends to its own cache ([`Self::layer_mut`]) and attends to it. A token counts once all layers have
/// it. If a step ends before that, [`Self::roll_back`] takes back what only some layers have.
///
/// ```
/// use sdpa::{KvCache, KvShape, LayerCaches, View};
/// let layer = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 })?; // layers may differ
/// let mut caches = LayerCaches::new(vec![layer; 12])?;
/// let rows = [0.5; 3 * 8];
/// let rows = View::bhld(&rows, [1, 1, 3, 8])?;
/// for layer in 0..12 {
///     caches.layer_mut(layer)?.append(rows, rows)?;
///     // … attention over caches.layers()[layer] …
/// }
/// assert_eq!(caches.len(0)?, 3);
/// caches.layer_mut(0)?.append(rows, rows)?; // a step that fails in the second layer
/// assert_eq!(caches.len(0)?, 3);
/// caches.roll_back()?;
/// caches.truncate(0, 2)?;
/// assert!(caches.layers().iter().all(|cache| cache.lens() == [2]));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "past_key_values")]
pub struct LayerCaches {
    layers: Vec<KvCache>,
}

impl LayerCaches {
    /// Takes the cache of each layer, first layer first. Their sizes, formats and windows may differ.
    ///
    /// # Errors
    /// [`Error::Empty`] without layers; [`Error::Mismatch`] if one has another number of sequences than the first, or
    /// [`Error::Removed`] if only some have a sequence.
    pub fn new(layers: Vec<KvCache>) -> Result<Self, Error> {
        let Some(first) = layers.first() else {
            return Err(Error::Empty { argument: "layers", what: "number of caches" });
        };
        for cache in &layers {
            same("a layer", "number of sequences", cache.sequences(), first.sequences(), "the first layer")?;
            let unlike = |&sequence: &usize| cache.has_sequence(sequence) != first.has_sequence(sequence);
            if let Some(sequence) = (0..first.sequences()).find(unlike) {
                return Err(Error::Removed { argument: "layers", sequence });
            }
        }
        Ok(Self { layers })
    }

    /// Caches, layer by layer: for [`Inputs::cached`](crate::Inputs::cached).
    pub fn layers(&self) -> &[KvCache] {
        &self.layers
    }

    /// Cache of a layer, to append to. Changes of sequences are for all layers: the methods of this type make them.
    ///
    /// # Errors
    /// [`Error::Range`] if there is no such layer.
    pub fn layer_mut(&mut self, layer: usize) -> Result<&mut KvCache, Error> {
        let last = self.layers.len() - 1;
        at_most("layer", "index", layer, last, "the last layer")?;
        Ok(&mut self.layers[layer])
    }

    /// Number of keys of a sequence that all layers have: the position of its next token.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed.
    pub fn len(&self, sequence: usize) -> Result<usize, Error> {
        self.there("sequence", sequence)?;
        Ok(self.held_by_all(sequence))
    }

    /// Number of keys of each sequence that all layers have, as [`Self::len`] says it; 0 for removed sequences.
    pub fn lens(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers[0].sequences()).map(|sequence| self.held_by_all(sequence))
    }

    /// Takes back tokens that only some layers have.
    ///
    /// # Errors
    /// [`Error::Length`] if a sliding cache has already evicted keys that the next row needs (never so for the last append);
    /// all caches are then unchanged.
    pub fn roll_back(&mut self) -> Result<(), Error> {
        let sequences = (0..self.layers[0].sequences()).filter(|&sequence| self.layers[0].has_sequence(sequence));
        let lens = sequences.map(|sequence| Ok((sequence, self.len(sequence)?))).collect::<Result<Vec<_>, Error>>()?;
        lens.iter().try_for_each(|&(sequence, len)| self.check(|cache| cache.check_truncate(sequence, len)))?;
        lens.iter().try_for_each(|&(sequence, len)| self.each(|cache| cache.truncate(sequence, len)))
    }

    /// Truncates a sequence in all layers: see [`KvCache::truncate`].
    ///
    /// # Errors
    /// As there; all caches are then unchanged.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.check(|cache| cache.check_truncate(sequence, len))?;
        self.each(|cache| cache.truncate(sequence, len))
    }

    /// Removes all keys of a sequence from all layers: see [`KvCache::clear`].
    ///
    /// # Errors
    /// As there; all caches are then unchanged.
    pub fn clear(&mut self, sequence: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        self.each(|cache| cache.clear(sequence))
    }

    /// Keeps accepted tokens of a sequence in all layers: see [`KvCache::keep`].
    ///
    /// # Errors
    /// As there; all caches are then unchanged.
    pub fn keep(&mut self, sequence: usize, from: usize, accepted: &[usize]) -> Result<(), Error> {
        self.each(|cache| cache.prepare_keep(sequence, from, accepted))?;
        self.each(|cache| cache.keep(sequence, from, accepted))
    }

    /// Makes sequence `to` a copy of `from` in all layers: see [`KvCache::fork`].
    ///
    /// # Errors
    /// As there; all caches are then unchanged.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.there("from", from)?;
        self.there("to", to)?;
        self.each(|cache| cache.fork(from, to))
    }

    /// Adds an empty sequence to all layers and returns its index: see [`KvCache::add_sequence`].
    pub fn add_sequence(&mut self) -> usize {
        self.layers.iter_mut().map(KvCache::add_sequence).max().unwrap_or(0)
    }

    /// Removes a sequence from all layers: see [`KvCache::remove_sequence`].
    ///
    /// # Errors
    /// As there; all caches are then unchanged.
    pub fn remove_sequence(&mut self, sequence: usize) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        self.each(|cache| cache.remove_sequence(sequence))
    }

    /// Bytes held by all layers; blocks that sequences share are counted once.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(KvCache::bytes).sum()
    }

    /// Bytes that a sequence of `tokens` tokens holds in all layers: see [`KvCache::bytes_for`].
    pub fn bytes_for(&self, tokens: usize) -> usize {
        self.layers.iter().map(|cache| cache.bytes_for(tokens)).fold(0, usize::saturating_add)
    }

    /// Gives back memory that holds no key, of all layers: see [`KvCache::shrink`].
    pub fn shrink(&mut self) {
        self.layers.iter_mut().for_each(KvCache::shrink);
    }

    /// Returns all caches as the bytes of one safetensors file, with the tensors of [`KvCache::export`] for each layer, their
    /// names behind `layers.N.`, from which [`Self::import`] makes them again. Takes the feature `safetensors`.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape, LayerCaches};
    /// let layer = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 })?;
    /// let bytes = LayerCaches::new(vec![layer; 2])?.export()?;
    /// assert_eq!(LayerCaches::import(&bytes)?.layers().len(), 2);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As there.
    #[cfg(feature = "safetensors")]
    pub fn export(&self) -> Result<Vec<u8>, Error> {
        self.file_of(0..self.layers[0].sequences())
    }

    /// Returns one sequence of all layers as the bytes of a file, to swap it out: see [`KvCache::export_sequence`]. Takes the feature
    /// `safetensors`.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape, LayerCaches};
    /// let layer = KvCache::new(2, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 })?;
    /// let mut caches = LayerCaches::new(vec![layer; 2])?;
    /// let swapped = caches.export_sequence(1)?;
    /// caches.clear(1)?; // other sequences take its memory
    /// caches.import_sequence(0, &swapped)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As there.
    #[cfg(feature = "safetensors")]
    pub fn export_sequence(&self, sequence: usize) -> Result<Vec<u8>, Error> {
        self.there("sequence", sequence)?;
        self.file_of(sequence..sequence + 1)
    }

    #[cfg(feature = "safetensors")]
    fn file_of(&self, sequences: Range<usize>) -> Result<Vec<u8>, Error> {
        let layers = self.layers.iter().enumerate();
        let parts = layers.map(|(layer, cache)| cache.file_part(prefix(layer), sequences.clone()));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        write(DESCRIPTIONS, &parts.iter().map(|part| &part.description).collect::<Vec<_>>(), &parts)
    }

    /// Fills a sequence that is empty in all layers from a file that [`Self::export_sequence`] made: see
    /// [`KvCache::import_sequence`]. Takes the feature `safetensors`.
    ///
    /// # Errors
    /// As there, and [`Error::Mismatch`] for another number of layers; all caches are then unchanged.
    #[cfg(feature = "safetensors")]
    pub fn import_sequence(&mut self, sequence: usize, bytes: &[u8]) -> Result<(), Error> {
        let file = TensorFile::read(bytes)?;
        let descriptions = file.descriptions(DESCRIPTIONS)?;
        same("file", "number of layers", descriptions.len(), self.layers.len(), "the model")?;
        let layers = self.layers.iter().zip(&descriptions).enumerate();
        let tensors = layers.map(|(layer, (cache, it))| cache.sequence_of(sequence, &file, &prefix(layer), it));
        let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
        let mut layers = self.layers.iter_mut().zip(&tensors);
        let restored = layers.try_for_each(|(cache, tensors)| cache.restore_sequence(sequence, tensors));
        if restored.is_err() {
            self.clear(sequence)?;
        }
        restored
    }

    /// Makes caches from the bytes of a file that [`Self::export`] made. Takes the feature `safetensors`.
    ///
    /// # Errors
    /// As for [`KvCache::import`] and [`Self::new`].
    #[cfg(feature = "safetensors")]
    pub fn import(bytes: &[u8]) -> Result<Self, Error> {
        let file = TensorFile::read(bytes)?;
        let layers = file.descriptions(DESCRIPTIONS)?.into_iter().enumerate();
        Self::new(layers.map(|(layer, it)| KvCache::from_file(&file, &prefix(layer), &it)).collect::<Result<_, _>>()?)
    }

    fn held_by_all(&self, sequence: usize) -> usize {
        self.layers.iter().map(|cache| cache.lens()[sequence]).min().unwrap_or(0)
    }

    fn there(&self, argument: &'static str, sequence: usize) -> Result<(), Error> {
        self.check(|cache| cache.there(argument, sequence))
    }

    fn check(&self, check: impl FnMut(&KvCache) -> Result<(), Error>) -> Result<(), Error> {
        self.layers.iter().try_for_each(check)
    }

    fn each(&mut self, change: impl FnMut(&mut KvCache) -> Result<(), Error>) -> Result<(), Error> {
        self.layers.iter_mut().try_for_each(change)
    }
}

/// Prefix of the names of a layer's tensors.
#[cfg(feature = "safetensors")]
fn prefix(layer: usize) -> String {
    format!("layers.{layer}.")
}
