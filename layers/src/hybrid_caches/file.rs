//! One sequence of all layers to a file and back.

use super::{HybridCaches, LayerCache, either};
use crate::cache_file::{File, VERSION};
use crate::error::same;
use safetensors::tensor::{Dtype, TensorView};
use sdpa::Error;
use sdpa::tensor_file::{refused, write, wrong};
use serde_json::json;

/// Key of the description in a file's metadata.
const DESCRIPTION: &str = "sdpa.hybrid_caches";

impl HybridCaches {
    /// Returns one sequence of all layers as the bytes of a safetensors file, to swap it out or to store what follows a long
    /// prompt. For layer N it has a tensor U8 `[bytes]`, the layer's own file: `layers.N.keys` as [`KvCache::export_sequence`] makes
    /// it, or `layers.N.states` as [`StateCache::export_sequence`] does. Time is that of copying it three times. Takes the feature
    /// `safetensors`.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape};
    /// use sdpa_layers::{HybridCaches, LayerCache, LinearState, StateCache};
    /// let states = LayerCache::States(StateCache::new(2, &LinearState::new([1, 1, 4, 4])?, 2)?);
    /// let keys = LayerCache::Keys(KvCache::new(2, KvShape { kv_heads: 1, head_dim: 4, value_dim: 4 })?);
    /// let mut caches = HybridCaches::new(vec![states, keys])?;
    /// let swapped = caches.export_sequence(1)?; // after some steps
    /// caches.truncate(1, 0)?; // other sequences take its memory
    /// caches.import_sequence(0, &swapped)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As there.
    ///
    /// [`KvCache::export_sequence`]: sdpa::KvCache::export_sequence
    /// [`StateCache::export_sequence`]: crate::StateCache::export_sequence
    pub fn export_sequence(&self, sequence: usize) -> Result<Vec<u8>, Error> {
        self.check(sequence, 0)?;
        let files = self.layers.iter().map(|cache| either!(cache, cache => cache.export_sequence(sequence)));
        let files = files.collect::<Result<Vec<_>, Error>>()?;
        let mut tensors = Vec::new();
        for ((layer, cache), file) in self.layers.iter().enumerate().zip(&files) {
            let bytes = TensorView::new(Dtype::U8, vec![file.len()], file).map_err(|e| refused(e.to_string()))?;
            tensors.push((name(layer, cache), bytes));
        }
        write(DESCRIPTION, &json!({ "version": VERSION }), tensors)
    }

    /// Fills a sequence that is empty in all layers from a file that [`Self::export_sequence`] made, of these caches or of ones like
    /// them. Takes the feature `safetensors`.
    ///
    /// # Errors
    /// As for [`KvCache::import_sequence`] and [`StateCache::import_sequence`]; [`Error::Mismatch`] for another number of layers,
    /// [`Error::File`] if not all layers can go back to the tokens that all have; all caches are then unchanged.
    ///
    /// [`KvCache::import_sequence`]: sdpa::KvCache::import_sequence
    /// [`StateCache::import_sequence`]: crate::StateCache::import_sequence
    pub fn import_sequence(&mut self, sequence: usize, bytes: &[u8]) -> Result<(), Error> {
        self.check(sequence, 0)?;
        let file = File::read(bytes, DESCRIPTION)?;
        same("file", "number of layers", file.tensors(), self.layers.len(), "the model")?;
        let names = self.layers.iter().enumerate().map(|(layer, cache)| name(layer, cache));
        let files = names.map(|name| Ok(file.tensor::<1>(&name, Dtype::U8)?.1)).collect::<Result<Vec<_>, Error>>()?;
        for (layer, bytes) in files.into_iter().enumerate() {
            let result = either!(&mut self.layers[layer], cache => cache.import_sequence(sequence, bytes));
            if result.is_err() {
                self.empty(sequence, layer)?;
                return result;
            }
        }
        // A step may have ended before all layers had it, and is then taken back.
        let len = self.len(sequence)?;
        if self.check(sequence, len).is_err() {
            self.empty(sequence, self.layers.len())?;
            return Err(wrong(format!("not all layers can go back to the {len} tokens that all have")));
        }
        Ok(())
    }

    /// Empties a sequence in the first layers, in which it was empty before, or would have been refused.
    fn empty(&mut self, sequence: usize, layers: usize) -> Result<(), Error> {
        let mut layers = self.layers[..layers].iter_mut();
        layers.try_for_each(|cache| either!(cache, cache => cache.truncate(sequence, 0)))
    }
}

/// Name of the tensor of a layer.
fn name(layer: usize, cache: &LayerCache) -> String {
    let what = match cache {
        LayerCache::Keys(_) => "keys",
        LayerCache::States(_) => "states",
    };
    format!("layers.{layer}.{what}")
}
