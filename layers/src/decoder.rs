//! Decoder state: what a causal transformer keeps from token to token.

use crate::compute::Compute;
use crate::error::room;
use crate::layer_input::LayerInput;
use crate::linear::rows_of;
use crate::sequences::Sequences;
use crate::transformer::Transformer;
use sdpa::{Error, KvCache};

impl Transformer {
    /// Decodes the next rows of every sequence, `[sequences, n, width]`: a prompt, part of a prompt, or one row each.
    /// Appends them to `state`, through which they see the earlier rows. Writes a row of `out` for each, with the bits
    /// that [`Self::forward`] gives it in the whole sequence.
    ///
    /// Besides the projections, n rows after p earlier ones take n·(p + n) scores per head and layer. A warm call on
    /// one thread allocates only blocks by which the caches grow: one for each cache every 256 rows.
    ///
    /// # Errors
    /// Any [`Error`]; [`Error::Needs`] if a layer is not causal or has cross-attention. `out` is then untouched and
    /// `state` unchanged.
    pub fn decode(
        &self,
        x: &[f32],
        state: &mut DecoderState,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let rows = rows_of("x", x, self.width())?;
        let sequences = Sequences::even(rows, state.lens.len())?;
        let done = self.forward_cached(LayerInput::new(x, sequences), &mut state.caches, out, compute);
        match done {
            Ok(()) => state.lens.iter_mut().enumerate().for_each(|(s, len)| *len += sequences.rows(s).len()),
            Err(_) => state.roll_back(),
        }
        done
    }
}

/// State of a causal [`Transformer`] for a batch of sequences: the cached keys and values of every layer, each sequence
/// with its own length. [`Transformer::decode`] advances it by a prompt, part of a prompt, or a token.
///
/// Memory: layers · (key width + value width) floats per row, in blocks like those of any [`KvCache`](sdpa::KvCache).
///
/// ```
/// # use sdpa::Attention;
/// use sdpa_layers::{Compute, DecoderState, LayerInput, Sequences, Transformer};
/// # use sdpa_layers::{Activation, FeedForward, Linear, MultiHeadAttention, Norm, NormOrder, TransformerLayer, Weights};
/// # let numbers: Vec<f32> = (0..32).map(|i| (i as f32).sin()).collect();
/// # let linear = |outputs, inputs| Weights::rows(&numbers[..outputs * inputs], [outputs, inputs]).map(Linear::new);
/// # let attention = MultiHeadAttention::new([2, 2], [linear(4, 4)?, linear(4, 4)?, linear(4, 4)?, linear(4, 4)?])?
/// #     .attention(Attention::new().causal());
/// # let feed_forward = FeedForward::new(Activation::Gelu, linear(8, 4)?, linear(4, 8)?)?;
/// # let norm = || Norm::layer([1.0; 4], 1e-5);
/// # let layer = TransformerLayer::encoder(NormOrder::Pre, (attention, norm()?), (feed_forward, norm()?))?;
/// # let transformer = Transformer::new(vec![layer])?;
/// # let x: Vec<f32> = (0..5 * 4).map(|i| (i as f32).cos()).collect();
/// # let (mut out, mut whole, mut compute) = ([0.0; 5 * 4], [0.0; 5 * 4], Compute::default());
/// let mut state = DecoderState::new(&transformer, 1)?; // one sequence
/// transformer.decode(&x[..12], &mut state, &mut out[..12], &mut compute)?; // three rows of four: the prompt
/// transformer.decode(&x[12..16], &mut state, &mut out[12..16], &mut compute)?; // and then
/// transformer.decode(&x[16..], &mut state, &mut out[16..], &mut compute)?; // row by row
/// assert_eq!(state.lens(), [5]);
///
/// transformer.forward(LayerInput::new(&x, Sequences::one(5)), &mut whole, &mut compute)?;
/// assert_eq!(out, whole); // to the bit
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// To process prompts of different lengths together, pad each at its end with any rows, then truncate each sequence to
/// its own length: a row does not depend on later rows.
#[derive(Debug, Clone)]
#[doc(alias = "KvCache", alias = "past_key_values")]
pub struct DecoderState {
    /// One cache for each layer.
    caches: Vec<KvCache>,
    /// Number of rows of each sequence. Caches may be longer only during a call.
    lens: Vec<usize>,
}

impl DecoderState {
    /// Creates a state of `sequences` empty sequences, for this transformer or any of the same sizes.
    ///
    /// # Errors
    /// [`Error::Needs`] if a layer is not causal or has cross-attention, [`Error::Empty`] if there are no sequences,
    /// [`Error::Memory`] if they do not fit in memory.
    pub fn new(transformer: &Transformer, sequences: usize) -> Result<Self, Error> {
        if sequences == 0 {
            return Err(Error::Empty { argument: "state", what: "number of sequences" });
        }
        if transformer.layers().iter().any(|layer| layer.cross_attention().is_some()) {
            return Err(Error::Needs { argument: "decoding", needs: "layers without cross-attention" });
        }
        let mut lens = room("state", sequences)?;
        lens.resize(sequences, 0);
        let caches = transformer.layers().iter().map(|layer| layer.self_attention().cache(sequences));
        Ok(Self { caches: caches.collect::<Result<_, _>>()?, lens })
    }

    /// Number of rows of each sequence so far, which is the position of its next row: starts for
    /// [`Embedding::add_positions`].
    ///
    /// [`Embedding::add_positions`]: crate::Embedding::add_positions
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Removes the rows of a sequence from position `len` on: a rollback. Memory is kept for later rows.
    ///
    /// # Errors
    /// [`Error::Sequence`] if there is no such sequence, [`Error::Length`] if it is shorter than `len`; the state is
    /// then unchanged.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.caches.iter_mut().try_for_each(|cache| cache.truncate(sequence, len))?;
        self.lens[sequence] = len;
        Ok(())
    }

    /// Removes all rows of all sequences. Memory is kept for later rows.
    pub fn reset(&mut self) {
        self.lens.fill(0);
        self.roll_back();
    }

    /// Makes sequence `to` a copy of `from`, so that a prompt is processed once for many continuations. The two share
    /// memory, block by block, until one of them writes to it.
    ///
    /// # Errors
    /// [`Error::Sequence`] if either sequence does not exist.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.caches.iter_mut().try_for_each(|cache| cache.fork(from, to))?;
        self.lens[to] = self.lens[from];
        Ok(())
    }

    /// Adds an empty sequence and returns its index.
    pub fn add_sequence(&mut self) -> usize {
        self.caches.iter_mut().for_each(|cache| _ = cache.add_sequence());
        self.lens.push(0);
        self.lens.len() - 1
    }

    /// Key/value cache of each layer.
    pub fn caches(&self) -> &[KvCache] {
        &self.caches
    }

    /// Bytes held; blocks that sequences share are counted once.
    pub fn bytes(&self) -> usize {
        self.caches.iter().map(KvCache::bytes).sum()
    }

    /// Truncates caches that are longer than their sequences.
    fn roll_back(&mut self) {
        for cache in &mut self.caches {
            for (sequence, &len) in self.lens.iter().enumerate() {
                // Refused if the cache is not longer, which is harmless.
                let _ = cache.truncate(sequence, len);
            }
        }
    }
}
