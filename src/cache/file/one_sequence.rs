//! One sequence of a cache to a file and back: swapped out while others need the memory, and in again.

use super::NO_FORMAT;
use super::description::Description;
use super::import::{SequenceTensors, check_contents};
use crate::cache::KvCache;
use crate::error::{Error, at_most, same};
use crate::tensor_file::{TensorFile, wrong};
use sdpa_kernels::{CacheFormat, KvFormat};

/// Cache or pool that sequences of a file are read into.
pub(crate) struct FileTarget<'a> {
    /// Its name in errors.
    pub(crate) name: &'static str,
    pub(crate) format: KvFormat<'a>,
    /// Description of its sequences.
    pub(crate) description: Description,
}

impl TensorFile<'_> {
    /// Refuses sequences of other sizes or another format than those they are read into.
    pub(crate) fn check_form(&self, prefix: &str, got: &Description, to: &FileTarget<'_>) -> Result<(), Error> {
        let FileTarget { name, format, description: own } = to;
        same("file", "kv_heads", got.kv_heads, own.kv_heads, name)?;
        same("file", "head_dim", got.head_dim, own.head_dim, name)?;
        same("file", "value_dim", got.value_dim, own.value_dim, name)?;
        for ((part, got), (_, expected)) in got.parts().into_iter().zip(own.parts()) {
            if got != expected {
                return Err(wrong(format!("{part} of the file are {got}, but those of {name} are {expected}")));
            }
        }
        match format.keys {
            CacheFormat::Int8PerChannel(scales) if self.channel_scales(prefix, own.shape())? != scales => {
                Err(wrong(format!("the scales of the keys' channels in the file are not those of {name}")))
            }
            _ => Ok(()),
        }
    }
}

impl KvCache {
    /// Returns one sequence as the bytes of a safetensors file, that of a cache with no other ([`Self::export`]): to swap it out
    /// until there is memory again. [`Self::clear`] or [`Self::remove_sequence`] then gives its blocks to others. Takes the feature
    /// `safetensors`.
    ///
    /// ```
    /// use sdpa::{KvCache, KvShape, View};
    /// let mut cache = KvCache::new(2, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 })?;
    /// let rows = [0.5; 3 * 8];
    /// let rows = View::bhld(&rows, [1, 1, 3, 8])?;
    /// cache.append_to(1, rows, rows)?;
    /// let swapped = cache.export_sequence(1)?;
    /// cache.clear(1)?; // other sequences take its memory
    /// cache.import_sequence(0, &swapped)?;
    /// assert_eq!(cache.lens(), [3, 0]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed; otherwise as for
    /// [`Self::export`].
    pub fn export_sequence(&self, sequence: usize) -> Result<Vec<u8>, Error> {
        self.there("sequence", sequence)?;
        self.file_part(String::new(), sequence..sequence + 1)?.alone()
    }

    /// Fills an empty sequence from a file with one sequence, of this cache or of one like it (sizes, format, window), or of a
    /// [`PagePool`](crate::PagePool). It then gives the bits of the exported one. Takes the feature `safetensors`.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Removed`] if it was removed, [`Error::Range`] if it has keys;
    /// [`Error::Mismatch`] for sizes, and [`Error::File`], with the reason, for anything but such a file; [`Error::Memory`]. The
    /// cache is then unchanged.
    pub fn import_sequence(&mut self, sequence: usize, bytes: &[u8]) -> Result<(), Error> {
        let file = TensorFile::read(bytes)?;
        let tensors = self.sequence_of(sequence, &file, "", &file.description()?)?;
        self.restore_sequence(sequence, &tensors)
    }

    /// Checks a file for [`Self::import_sequence`], and returns the tensors of its sequence. Their names begin with this prefix.
    pub(crate) fn sequence_of<'f>(
        &self,
        sequence: usize,
        file: &TensorFile<'f>,
        prefix: &str,
        description: &Description,
    ) -> Result<SequenceTensors<'f>, Error> {
        self.there("sequence", sequence)?;
        at_most("sequence", "number of keys", self.lens()[sequence], 0, "that of an empty sequence")?;
        let own = Description::of(self, 0..0).ok_or_else(|| wrong(NO_FORMAT))?;
        let target = FileTarget { name: "the cache", format: self.format(), description: own };
        file.check_form(prefix, description, &target)?;
        match &description.sequences[..] {
            [Some(contents)] => check_contents(self, 0, contents)?,
            [None] => return Err(wrong("the sequence in the file was removed")),
            all => return Err(wrong(format!("the file has {} sequences, but must have 1", all.len()))),
        }
        file.sequence(prefix, description, 0, |part| self.cache.token_elements(part))
    }
}
