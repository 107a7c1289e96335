//! Attention of new rows to themselves and to earlier rows in a cache.

use super::{Beside, MultiHeadAttention, MultiHeadInput};
use crate::compute::Compute;
use crate::linear::rows_of;
use crate::next_rows::NextRows;
use sdpa::{Alignment, Error, KvCache, KvShape};

impl MultiHeadAttention {
    /// Creates an empty cache for `sequences` sequences, for [`Self::decode`].
    ///
    /// # Errors
    /// [`Error::Needs`] if rows may see later rows; otherwise as [`KvCache::new`].
    pub fn cache(&self, sequences: usize) -> Result<KvCache, Error> {
        self.check_decodes()?;
        KvCache::new(sequences, KvShape { kv_heads: self.kv_heads, head_dim: self.key_dim, value_dim: self.value_dim })
    }

    /// Decodes the next rows of every sequence, `[sequences, n, inputs]`: appends their keys and values to the cache,
    /// lets each row see the keys up to its own, and writes a row of `out` for it. Rotary positions continue from the
    /// sequence's length. The bits are those of [`Self::forward`] on the whole sequence.
    ///
    /// Takes 2·rows·inputs·outputs operations for each projection, and 4·heads·head_dim for each pair of a row and a
    /// key that it sees.
    ///
    /// # Errors
    /// Any [`Error`]; [`Error::Needs`] if rows may see later rows. `out` is then untouched and the cache unchanged,
    /// except that a sliding cache may have evicted keys.
    pub fn decode(&self, x: &[f32], cache: &mut KvCache, out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        rows_of("x", x, self.q.inputs())?;
        self.decode_ragged(NextRows::of_all(x, self.q.inputs(), cache.sequences())?, cache, out, compute)
    }

    /// Decodes the next rows of some sequences, a different number of each, as [`Self::decode`] does for all: prompts, parts of
    /// prompts and single rows in one call. The bits are those of a call for each sequence.
    ///
    /// ```
    /// # use sdpa::Attention;
    /// # use sdpa_layers::{Compute, Linear, MultiHeadAttention, NextRows, Weights};
    /// # let identity: Vec<f32> = (0..64).map(|i| f32::from(u8::from(i % 9 == 0))).collect();
    /// # let linear = || Weights::rows(&identity, [8, 8]).map(Linear::new);
    /// # let layer = MultiHeadAttention::new([2, 2], [linear()?, linear()?, linear()?, linear()?])?
    /// #     .attention(Attention::new().causal());
    /// let mut cache = layer.cache(3)?;
    /// let (x, mut out) = ([0.5; 6 * 8], [0.0; 6 * 8]); // five rows of sequence 2, one of sequence 0
    /// layer.decode_ragged(NextRows::new(&x, &[2, 0], &[0, 5, 6]), &mut cache, &mut out, &mut Compute::default())?;
    /// assert_eq!(cache.lens(), [1, 0, 5]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::decode`]; [`Error::Sequence`], [`Error::Removed`] or [`Error::Repeated`] for sequences, [`Error::Mismatch`],
    /// [`Error::Empty`] or [`Error::Entry`] for ends that do not fit.
    pub fn decode_ragged(
        &self,
        next: NextRows<'_>,
        cache: &mut KvCache,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let NextRows { rows, parts } = next;
        parts.check(rows_of("x", rows, self.q.inputs())?, cache)?;
        let mark = parts.mark(cache);
        let done = self.run(MultiHeadInput::new(rows, parts.division), out, Beside::Cache(cache, parts), compute);
        if done.is_err() {
            parts.take_back(cache, mark);
        }
        done
    }

    /// Checks that a row's result does not depend on later rows.
    pub(super) fn check_decodes(&self) -> Result<(), Error> {
        let argument = "decoding";
        if !self.attention.is_causal() {
            return Err(Error::Needs { argument, needs: "causal attention" });
        }
        match self.attention.alignment() {
            // In a whole sequence these alignments are equal, and so they are here.
            None | Some(Alignment::TopLeft | Alignment::BottomRight | Alignment::Offset(0)) => Ok(()),
            Some(_) => Err(Error::Needs { argument, needs: "rows that stand at their own keys, no other offset" }),
        }
    }
}
