//! One sequence of states to a file and back: swapped out while others need the memory, and in again.

use super::{Kept, Slot, StateCache};
use crate::cache_file::{File, VERSION};
use crate::error::{at_most, room, same, zeros};
use crate::linear_attention::settings::Normaliser;
use core::slice::ChunksExact;
use safetensors::tensor::{Dtype, TensorView};
use sdpa::Error;
use sdpa::tensor_file::{refused, write, wrong};
use serde_json::json;

/// Key of the description in a file's metadata.
const DESCRIPTION: &str = "sdpa.state_cache";
/// Name of the tensor.
const STATES: &str = "states";

impl StateCache {
    /// Returns one sequence as the bytes of a safetensors file, to swap it out or to store what follows a long prompt. Takes the
    /// feature `safetensors`.
    ///
    /// The file has one tensor, `states` F32 `[kept, kv_heads, head_dim, value_dim]` (`value_dim + 1` with a normaliser): the
    /// current state, then those before it that the cache keeps, newest first, `room + 2` at most. What can be taken back here can
    /// so be taken back after [`Self::import_sequence`]. The metadata `sdpa.state_cache` are JSON: `version`, 1; `normaliser`, "none" or
    /// "key sum"; `len`, the number of tokens; and `before`, null or the number of tokens of the last state, if that is the one
    /// before a longer call. Time and memory are twice the size of the file.
    ///
    /// ```
    /// use sdpa_layers::{LinearState, StateCache};
    /// let mut cache = StateCache::new(2, &LinearState::new([1, 32, 128, 128])?, 3)?;
    /// let swapped = cache.export_sequence(1)?; // after some calls
    /// cache.truncate(1, 0)?; // gives back its memory
    /// cache.import_sequence(0, &swapped)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; [`Error::Empty`] for states without
    /// heads, [`Error::Memory`].
    pub fn export_sequence(&self, sequence: usize) -> Result<Vec<u8>, Error> {
        let kept = self.kept("sequence", sequence)?;
        let [heads, head_dim, columns] = self.sizes_in_file()?;
        // The state before a long call, unless it is one of those after it.
        let before = kept.start.filter(|&start| start < kept.len - kept.back);
        let shape = vec![kept.back + 1 + usize::from(before.is_some()), heads, head_dim, columns];
        let mut bytes = room("export", shape.iter().product::<usize>().saturating_mul(size_of::<f32>()))?;
        for back in 0..shape[0] {
            for ring in kept.rings.chunks_exact(kept.slots) {
                let slot = &ring[(kept.slots - back) % kept.slots];
                slot.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes()));
            }
        }
        let description =
            json!({ "version": VERSION, "normaliser": self.normaliser(), "len": kept.len, "before": before });
        let states = TensorView::new(Dtype::F32, shape, &bytes).map_err(|e| refused(e.to_string()))?;
        write(DESCRIPTION, &description, vec![(STATES.into(), states)])
    }

    /// Fills an empty sequence from a file that [`Self::export_sequence`] made, of this cache or of one like it (sizes, normaliser,
    /// initial state). Its states, and those of later calls, have the bits of the exported sequence. It goes back as far, or as the
    /// room of this cache allows; with another room the bits of later calls are the same with
    /// [`Form::Recurrent`](crate::Form::Recurrent) alone. Takes time and memory of the file's size, and the feature `safetensors`.
    ///
    /// Numbers are taken as they are, NaN too: a file has no checksum.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed, [`Error::Range`] if it has tokens;
    /// [`Error::Mismatch`] for sizes, and [`Error::File`], with the reason, for anything but such a file; [`Error::Empty`] for
    /// states without heads, [`Error::Memory`]. The cache is then unchanged.
    pub fn import_sequence(&mut self, sequence: usize, bytes: &[u8]) -> Result<(), Error> {
        let len = self.kept("sequence", sequence)?.len;
        at_most(0, "that of an empty sequence").check("sequence", "number of tokens", len)?;
        let kept = self.read(&File::read(bytes, DESCRIPTION)?)?;
        self.sequences[sequence] = Some(kept);
        Ok(())
    }

    /// Returns the states of a file.
    fn read(&self, file: &File<'_>) -> Result<Kept, Error> {
        file.description.check_word("normaliser", self.normaliser())?;
        let ([states, sizes @ ..], bytes) = file.tensor::<4>(STATES, Dtype::F32)?;
        let expected = self.sizes_in_file()?;
        for ((what, got), expected) in
            ["kv_heads", "head_dim", "columns of a state"].into_iter().zip(sizes).zip(expected)
        {
            same("file", what, got, expected, "the cache")?;
        }
        let (len, before) = (file.description.number("len")?, file.description.number_or_null("before")?);
        // As keys of a cache.
        let number = |number: u64| {
            let fits = usize::try_from(number).ok().filter(|_| u32::try_from(number).is_ok());
            fits.ok_or_else(|| wrong(format!("{number} tokens, but must be at most {}", u32::MAX)))
        };
        let (len, before) = (number(len)?, before.map(number).transpose()?);
        // Each of them is the state of one token less, down to more tokens than before the call.
        let (one_by_one, most) = match before {
            None => (states, len.saturating_add(1)),
            Some(before) => (states.saturating_sub(1), len.saturating_sub(before)),
        };
        if one_by_one == 0 || one_by_one > most {
            return Err(wrong(format!("{STATES}: {one_by_one} are of the last tokens, but must be 1 to {most}")));
        }
        let back = one_by_one - 1;
        let each = expected[1] * expected[2];
        let states = bytes.chunks_exact(size_of::<f32>() * expected[0] * each);
        let oldest = states.clone().next_back().unwrap_or_default();
        let oldest = oldest.as_chunks().0.iter().map(|&x| u32::from_le_bytes(x));
        let initial =
            self.empty.rings.iter().step_by(self.empty.slots).flat_map(|slot| slot.iter().map(|x| x.to_bits()));
        if before.unwrap_or(len - back) == 0 && !oldest.eq(initial) {
            return Err(wrong("the state before the first token is not that of the cache"));
        }
        self.with_room(states, Kept { len, back, start: before, ..self.empty.clone() })
    }

    /// Fills the slots of a sequence with its states, newest first, as far as there is room.
    fn with_room(&self, states: ChunksExact<'_, u8>, mut kept: Kept) -> Result<Kept, Error> {
        let most = kept.slots - 1;
        kept.start = kept.start.filter(|_| kept.back < most);
        kept.back = kept.back.min(most);
        let slots = kept.slots;
        for (back, state) in states.take(slots).enumerate() {
            let each = state.len() / self.shape.sizes[1];
            for (ring, bytes) in kept.rings().zip(state.chunks_exact(each)) {
                let mut own = zeros("states", each / size_of::<f32>())?;
                own.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
                ring[(slots - back) % slots] = Slot::new(own);
            }
        }
        Ok(kept)
    }

    /// Sizes of a state in files, `[kv_heads, head_dim, columns]`.
    fn sizes_in_file(&self) -> Result<[usize; 3], Error> {
        let [_, heads, head_dim, value_dim] = self.shape.sizes;
        if heads == 0 {
            return Err(Error::Empty { argument: "cache", what: "kv_heads" });
        }
        Ok([heads, head_dim, value_dim + self.shape.normaliser.columns()])
    }

    /// Name of the normaliser in files.
    fn normaliser(&self) -> &'static str {
        match self.shape.normaliser {
            Normaliser::None => "none",
            Normaliser::KeySum => "key sum",
        }
    }
}
