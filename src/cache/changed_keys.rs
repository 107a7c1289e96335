//! Keys that are changed where they are stored.

use crate::cache::{KvCache, check_elements};
use crate::error::{Error, at_most};
use crate::shape::KvShape;
use core::ops::Range;
use sdpa_kernels::{Cache, CacheFormat, View};

impl KvCache {
    /// Changes stored keys of a sequence: calls `change` with the position, the head and the `head_dim` elements of each, widened
    /// to `f32`, and stores what it leaves there. For keys that are rotated by position (rotary embeddings) and have moved to
    /// other positions, by [`Self::keep`] for example; docs/guide/caches.md shows how a context is shifted.
    ///
    /// Keys are rounded to the cache's format again. Those of `f32`, and elements that `change` leaves alone in `bf16` and `f16`, stay
    /// exact. In int8 and int4 every element of a changed key is rounded with the key's new scales, so each change may add an
    /// error as large as the first ([`Self::int8`], [`Self::int4`]); where channels have fixed scales, elements are
    /// clamped to these. Values stay as they are, but for those of a latent cache, which are the first columns of the keys; a
    /// latent cache of integers refuses, as it would round its values anew.
    ///
    /// Keys that a sliding cache has evicted are passed over. Sequences that share blocks with this one keep theirs. Takes time
    /// in proportion to the keys; until it returns, the blocks that it changes take their memory twice, since all keys change
    /// or none.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape, View};
    /// let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 2, value_dim: 1 })?;
    /// let (k, v) = ([1.0, 2.0, /**/ 3.0, 4.0, /**/ 5.0, 6.0], [0.5; 3]);
    /// cache.append(View::bhld(&k, [1, 1, 3, 2])?, View::bhld(&v, [1, 1, 3, 1])?)?;
    /// cache.change_keys(0, 1..3, |_position, _head, key| key.swap(0, 1))?;
    /// # let none = View::<f32>::bhld(&[], [1, 0, 0, 2])?;
    /// # let stored = sdpa::Inputs::cached(none, &cache).key_values()?;
    /// # assert_eq!([0, 1, 2].map(|j| stored.key([0, 0, j, 0])), [Some(1.0), Some(4.0), Some(6.0)]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; [`Error::Range`] for keys that it does
    /// not have; [`Error::Needs`] for a latent cache of integers; [`Error::Row`] for a key that the format cannot store, as for
    /// [`Self::append`], by its position; [`Error::Memory`]. The cache is then unchanged, as it is if `change` panics.
    pub fn change_keys(
        &mut self,
        sequence: usize,
        keys: Range<usize>,
        mut change: impl FnMut(usize, usize, &mut [f32]),
    ) -> Result<(), Error> {
        self.there("sequence", sequence)?;
        at_most("keys", "end", keys.end, self.lens()[sequence], "the keys of that sequence")?;
        at_most("keys", "first key", keys.start, keys.end, "the end of the keys")?;
        if self.is_latent() && !matches!(self.format().keys, CacheFormat::Elements(_)) {
            let needs = "a latent cache of floats: integers of keys are those of the values, too";
            return Err(Error::Needs { argument: "changed keys", needs });
        }
        let (KvShape { kv_heads, head_dim, .. }, isa, n) = (self.shape(), self.isa, keys.len());
        let mut change = |cache: &Cache, keys: Range<usize>, floats: &mut [f32]| {
            let heads = floats.chunks_exact_mut((keys.len() * head_dim).max(1)).enumerate();
            for (head, floats) in heads {
                for (position, key) in keys.clone().zip(floats.chunks_exact_mut(head_dim)) {
                    change(position, head, key);
                }
            }
            let k = View::bhld(floats, [1, kv_heads, keys.len(), head_dim])?;
            check_elements(cache.format(), isa, [k.into(); 2]).map_err(|error| match error {
                Error::Row { argument, what, row, got, expected } => {
                    Error::Row { argument, what, row: keys.start + row, got, expected }
                }
                error => error,
            })
        };
        self.cache.change_keys(isa, sequence, keys, &mut change).ok_or_else(|| self.no_memory(n))?
    }
}
