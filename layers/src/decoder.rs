//! Decoding: a causal transformer that continues sequences from the caches of its layers.

use crate::compute::Compute;
use crate::error::same;
use crate::linear::rows_of;
use crate::next_rows::NextRows;
use crate::transformer::Transformer;
use sdpa::{Error, LayerCaches};

impl Transformer {
    /// Creates empty caches of all layers for `sequences` sequences, for [`Self::decode`] of this transformer or any of the same
    /// sizes.
    ///
    /// # Errors
    /// [`Error::Needs`] if a layer is not causal or has cross-attention, [`Error::Empty`] if there are no sequences,
    /// [`Error::Memory`] if they do not fit in memory.
    pub fn caches(&self, sequences: usize) -> Result<LayerCaches, Error> {
        if sequences == 0 {
            return Err(Error::Empty { argument: "caches", what: "number of sequences" });
        }
        if self.layers().iter().any(|layer| layer.cross_attention().is_some()) {
            return Err(Error::Needs { argument: "decoding", needs: "layers without cross-attention" });
        }
        let caches = self.layers().iter().map(|layer| layer.self_attention().cache(sequences));
        LayerCaches::new(caches.collect::<Result<_, _>>()?)
    }

    /// Decodes the next rows of every sequence, `[sequences, n, width]`: a prompt, part of a prompt, or one row each.
    /// Appends their keys and values to the layers' caches, through which they see the earlier rows. Writes a row of `out` for
    /// each, with the bits that [`Self::forward`] gives it in the whole sequence.
    ///
    /// Besides the projections, n rows after p earlier ones take n·(p + n) scores per head and layer. A warm call on
    /// one thread allocates only blocks by which the caches grow: one for each cache every 256 rows.
    ///
    /// ```
    /// # use sdpa::Attention;
    /// use sdpa_layers::{Compute, LayerInput, Sequences, Transformer};
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
    /// let mut caches = transformer.caches(1)?; // one sequence
    /// transformer.decode(&x[..12], &mut caches, &mut out[..12], &mut compute)?; // three rows of four: the prompt
    /// transformer.decode(&x[12..16], &mut caches, &mut out[12..16], &mut compute)?; // and then
    /// transformer.decode(&x[16..], &mut caches, &mut out[16..], &mut compute)?; // row by row
    /// assert_eq!(caches.len(0)?, 5);
    ///
    /// transformer.forward(LayerInput::new(&x, Sequences::one(5)), &mut whole, &mut compute)?;
    /// assert_eq!(out, whole); // to the bit
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// To process prompts of different lengths together, pad each at its end with any rows, then
    /// [truncate](LayerCaches::truncate) each sequence to its own length: a row does not depend on later rows.
    ///
    /// # Errors
    /// Any [`Error`]; [`Error::Needs`] if a layer is not causal or has cross-attention, [`Error::Mismatch`] if the layers have
    /// different numbers of keys of a sequence. `out` is then untouched and the caches unchanged, except that sliding caches may
    /// have evicted keys.
    #[doc(alias = "generate")]
    pub fn decode(
        &self,
        x: &[f32],
        caches: &mut LayerCaches,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        rows_of("x", x, self.width())?;
        let sequences = caches.layers()[0].sequences();
        self.decode_ragged(NextRows::of_all(x, self.width(), sequences)?, caches, out, compute)
    }

    /// Decodes the next rows of some sequences, a different number of each, as [`Self::decode`] does for all: the step of a
    /// server, in which some sequences bring a prompt or a part of one, and others one row. Each row has the bits that
    /// [`Self::forward`] gives it in its whole sequence.
    ///
    /// ```
    /// # use sdpa::Attention;
    /// use sdpa_layers::{Compute, LayerInput, NextRows, Sequences, Transformer};
    /// # use sdpa_layers::{Activation, FeedForward, Linear, MultiHeadAttention, Norm, NormOrder, TransformerLayer, Weights};
    /// # let numbers: Vec<f32> = (0..32).map(|i| (i as f32).sin()).collect();
    /// # let linear = |outputs, inputs| Weights::rows(&numbers[..outputs * inputs], [outputs, inputs]).map(Linear::new);
    /// # let attention = MultiHeadAttention::new([2, 2], [linear(4, 4)?, linear(4, 4)?, linear(4, 4)?, linear(4, 4)?])?
    /// #     .attention(Attention::new().causal());
    /// # let feed_forward = FeedForward::new(Activation::Gelu, linear(8, 4)?, linear(4, 8)?)?;
    /// # let norm = || Norm::layer([1.0; 4], 1e-5);
    /// # let layer = TransformerLayer::encoder(NormOrder::Pre, (attention, norm()?), (feed_forward, norm()?))?;
    /// # let transformer = Transformer::new(vec![layer])?;
    /// # let x: Vec<f32> = (0..6 * 4).map(|i| (i as f32).cos()).collect();
    /// # let (mut out, mut compute) = ([0.0; 4 * 4], Compute::default());
    /// let mut caches = transformer.caches(3)?; // places for three sequences
    /// let mut first = [0.0; 3 * 4];
    /// transformer.decode_ragged(NextRows::new(&x[..12], &[1], &[0, 3]), &mut caches, &mut first, &mut compute)?;
    /// // One more row of sequence 1, and the first three of sequence 0
    /// let next = NextRows::new(&x[8..], &[1, 0], &[0, 1, 4]);
    /// transformer.decode_ragged(next, &mut caches, &mut out, &mut compute)?;
    /// assert_eq!(caches.layers()[0].lens(), [3, 4, 0]);
    ///
    /// let ends = [0, 4, 7]; // both sequences whole
    /// let rows = [&x[..12], &x[8..]].concat();
    /// let mut whole = [0.0; 7 * 4];
    /// transformer.forward(LayerInput::new(&rows, Sequences::Ragged(&ends)), &mut whole, &mut compute)?;
    /// assert_eq!(out, whole[3 * 4..]); // to the bit
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::decode`]; [`Error::Sequence`], [`Error::Removed`] or [`Error::Repeated`] for sequences, [`Error::Mismatch`],
    /// [`Error::Empty`] or [`Error::Entry`] for ends that do not fit.
    pub fn decode_ragged(
        &self,
        next: NextRows<'_>,
        caches: &mut LayerCaches,
        out: &mut [f32],
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let rows = rows_of("x", next.rows, self.width())?;
        same("caches", "number of layers", caches.layers().len(), self.layers().len(), "the transformer")?;
        check_lens(caches)?;
        next.parts.check(rows, &caches.layers()[0])?;
        let mark = next.parts.mark(&caches.layers()[0]);
        let done = self.forward_cached(next, caches, out, compute);
        if done.is_err() {
            // Not by `LayerCaches::roll_back`: the last layer may fail when all have appended.
            for layer in 0..self.layers().len() {
                next.parts.take_back(caches.layer_mut(layer)?, mark);
            }
        }
        done
    }
}

/// Checks that all layers have the same number of keys of each sequence.
fn check_lens(caches: &LayerCaches) -> Result<(), Error> {
    let first = caches.layers()[0].lens();
    for cache in caches.layers() {
        for (&len, &expected) in cache.lens().iter().zip(first) {
            same("caches", "number of keys of a sequence", len, expected, "the first layer")?;
        }
    }
    Ok(())
}
