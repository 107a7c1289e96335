//! Linear attention: attention without a softmax, over a state of fixed size.
//!
//! Keys and values are accumulated in a state of fixed size that queries read: one matrix `S` `[head_dim, value_dim]`
//! per key/value head. Time grows with the length, not with its square; memory does not grow at all. With k, v, q the
//! rows of token t, a = eᵍ its decay (g is the logarithm given) and β its strength:
//!
//! | [`Update`] | token t, in order | from |
//! |---|---|---|
//! | `Linear` | S ← S + k vᵀ | Katharopoulos, Vyas, Pappas, Fleuret 2020, arXiv:2006.16236 |
//! | `Gated` | S ← Diag(a) S + k vᵀ | Yang, Wang, Shen, Panda, Kim 2023, arXiv:2312.06635 |
//! | `Delta` | S ← S + β k (v − Sᵀk)ᵀ | Schlag, Irie, Schmidhuber 2021, arXiv:2102.11174 |
//! | `GatedDelta` | S ← Diag(a) S, then as `Delta` | Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464 |
//!
//! After the update, out = scale · Sᵀq. These are the rules of ONNX LinearAttention-27; with one decay per head,
//! `Gated` is the rule of RetNet (Sun et al. 2023, arXiv:2307.08621) and of Mamba-2 (Dao, Gu 2024, arXiv:2405.21060).
//!
//! The recurrent form does this token by token. The chunked form gives the same up to rounding: the tokens of a chunk
//! attend to each other as in attention without a softmax, and to the state before the chunk; the state is written once
//! per chunk. Under a delta rule, the corrections of a chunk come from a triangular system, solved by substitution
//! (Yang, Wang, Zhang, Shen, Kim 2024, arXiv:2406.06484). Decays are only multiplied, never divided by, so even a decay
//! of 0 costs no accuracy.

mod call;
mod check;
mod chunk;
mod forms;
mod head;
mod product;
mod recurrent;
mod settings;
mod state;
mod state_cache;

pub use settings::{FeatureMap, Form, Normaliser, Reach, Update};
pub use state::LinearState;
pub use state_cache::StateCache;

use crate::compute::Compute;
use crate::error::same;
use crate::share;
use call::Call;
use forms::States;
use head::Head;
use sdpa::{Error, View, ViewMut};
use sdpa_kernels::vectorized;

/// Tensors that a call of linear attention reads.
///
/// ```
/// use sdpa::View;
/// use sdpa_layers::{LinearInputs, Update};
/// let (x, log_decay) = ([0.5; 3 * 4], [-0.1]);
/// let (x, log_decay) = (View::bhld(&x, [1, 1, 3, 4])?, View::bhld(&log_decay, [1, 1, 1, 1])?); // one decay for all
/// let inputs = LinearInputs::new(x, x, x, Update::Gated { log_decay });
/// # let _ = inputs;
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct LinearInputs<'a> {
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    update: Update<'a>,
    lens: Option<&'a [usize]>,
}

impl<'a> LinearInputs<'a> {
    /// Takes queries `[batch, heads, len, head_dim]`, keys `[batch, key_heads, len, head_dim]` and values `[batch,
    /// value_heads, len, value_dim]`, any strides, and the update rule.
    ///
    /// There are `kv_heads` states: one for each key head or each value head, whichever are more. That number must be a multiple
    /// of the other, so that neighbouring states share a key or a value, as those of gated delta nets share keys. Likewise query
    /// heads of one group share a state, or neighbouring states a query; the output has a head for each query head or each state,
    /// whichever are more.
    pub fn new(q: View<'a>, k: View<'a>, v: View<'a>, update: Update<'a>) -> Self {
        Self { q, k, v, update, lens: None }
    }

    /// Sets lengths, `[batch]`: the number of keys of each sequence that are there, from the first on. Later ones, which are
    /// padding, do not change the state, whatever they are; with [`Reach::Causal`] their rows give 0.
    #[must_use]
    pub fn lens(self, lens: &'a [usize]) -> Self {
        Self { lens: Some(lens), ..self }
    }
}

/// Linear attention: the settings of a call, without its tensors.
///
/// ```
/// use sdpa_layers::{Compute, Form, LinearAttention, LinearInputs, LinearState, Update};
/// use sdpa::{Exec, View, ViewMut};
/// # let (q, k, v) = (vec![0.5; 4 * 6 * 8], vec![0.25; 2 * 6 * 8], vec![1.0; 2 * 6 * 16]);
/// # let (log_decay, beta) = (vec![-0.1; 2], vec![0.5; 2 * 6]);
/// // batch 1, 4 query heads on 2 key/value heads, 6 tokens, head_dim 8, value_dim 16
/// let (q, k, v) = (View::bhld(&q, [1, 4, 6, 8])?, View::bhld(&k, [1, 2, 6, 8])?, View::bhld(&v, [1, 2, 6, 16])?);
/// // one decay a head, one strength a token
/// let (log_decay, beta) = (View::bhld(&log_decay, [1, 2, 1, 1])?, View::bhld(&beta, [1, 2, 6, 1])?);
/// let inputs = LinearInputs::new(q, k, v, Update::GatedDelta { log_decay, beta });
///
/// let mut state = LinearState::new([1, 2, 8, 16])?;
/// let mut out = vec![0.0; 4 * 6 * 16];
/// let layer = LinearAttention::new().form(Form::Chunked(32));
/// layer.forward(inputs, &mut state, ViewMut::bhld(&mut out, [1, 4, 6, 16])?, &mut Compute::new(Exec::default()))?;
/// let saved = state.as_slice().to_vec(); // all that later tokens need of these
/// # assert!(out.iter().chain(&saved).all(|x| *x > 0.0));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LinearAttention {
    scale: Option<f32>,
    form: Form,
    reach: Reach,
    feature_map: FeatureMap,
    normaliser: Normaliser,
}

impl LinearAttention {
    /// Default settings: causal, recurrent, scaled by 1/√head_dim, no feature map and no normaliser.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the factor of the outputs, 1/√head_dim by default. Any finite value is valid.
    #[must_use]
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Sets the form, that is, the order in which the sums are taken.
    #[must_use]
    pub fn form(self, form: Form) -> Self {
        Self { form, ..self }
    }

    /// Sets the keys that a row sees.
    #[must_use]
    pub fn reach(self, reach: Reach) -> Self {
        Self { reach, ..self }
    }

    /// Sets the function applied to queries and keys first.
    #[must_use]
    pub fn feature_map(self, feature_map: FeatureMap) -> Self {
        Self { feature_map, ..self }
    }

    /// Sets the divisor of the sums.
    #[must_use]
    pub fn normaliser(self, normaliser: Normaliser) -> Self {
        Self { normaliser, ..self }
    }

    /// Updates the state, `[batch, kv_heads, head_dim, value_dim]`, with the tokens and writes to `out`, `[batch, heads, len,
    /// value_dim]`, the results of their queries.
    ///
    /// Each thread takes one key/value head at a time. With D = head_dim, E = value_dim, time is B·L·D·E for each
    /// key/value head (two passes over the state, three under a delta rule) and each query head; chunks of C tokens add
    /// C·(D + E)/2 per token and head. Scratch, O(C·(D + E)) per thread (C = 1 if recurrent), comes from `compute`; a
    /// warm call on one thread allocates nothing.
    ///
    /// Bits depend on the form, but not on threads, batch, layout, or whether heads are grouped or repeated; without
    /// decay and feature map, not on the instruction set either. A token never sees a later one, NaN or not.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Heads`], [`Error::Empty`], [`Error::TooLarge`] for sizes that do not fit together;
    /// [`Error::Entry`] for a length beyond the keys;
    /// [`Error::Number`] for a scale that is not finite; [`Error::Needs`] for settings that do not fit together;
    /// [`Error::Memory`] for scratch. State and output are then unchanged.
    pub fn forward(
        &self,
        inputs: LinearInputs<'_>,
        state: &mut LinearState,
        out: ViewMut<'_>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let call = self.checked(&inputs, state.shape, out.shape(), compute.exec())?;
        let states = state.data.chunks_exact_mut(call.head_dim * call.width);
        each_head(&call, states, out, compute)
    }

    /// Updates the states of a cache with new tokens, as [`Self::forward`] does: batch entry b belongs to sequence `sequences[b]`.
    /// Keeps the states after the last tokens of each sequence, so that these can be taken back: see [`StateCache`].
    ///
    /// With [`Form::Recurrent`], results and states have the bits of [`Self::forward`] over the whole sequence, however it is
    /// divided into calls, forked and rolled back. With [`Form::Chunked`], they have those of several calls of
    /// [`Self::forward`]: one for each of the last `room` tokens of a call, and one for all the first of them.
    ///
    /// Takes the time of [`Self::forward`], and of each of the last `room + 1` tokens a copy of the state. States of 32 heads of
    /// 128 by 128 then take 1.2 to 2.4 times as long a token (`cargo bench -p sdpa-layers --bench linear_attention`). A warm call
    /// on one thread allocates lists of sequences; and states, if forks share those that it would write over.
    ///
    /// ```
    /// use sdpa::{View, ViewMut};
    /// use sdpa_layers::{Compute, LinearAttention, LinearInputs, LinearState, StateCache, Update};
    /// let mut cache = StateCache::new(2, &LinearState::new([1, 1, 4, 4])?, 2)?; // two sequences, two drafts
    /// let (rows, mut out, mut compute) = ([0.5; 3 * 4], [0.0; 3 * 4], Compute::default());
    /// let rows = View::bhld(&rows, [1, 1, 3, 4])?; // a token and two drafts, of sequence 1 alone
    /// let inputs = LinearInputs::new(rows, rows, rows, Update::Linear);
    /// let out = ViewMut::bhld(&mut out, [1, 1, 3, 4])?;
    /// LinearAttention::new().decode(inputs, &mut cache, &[1], out, &mut compute)?;
    /// cache.truncate(1, 2)?; // the second draft was wrong
    /// assert_eq!([cache.len(0)?, cache.len(1)?], [0, 2]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::forward`]; [`Error::Sequence`] or [`Error::Removed`] for a sequence that is not there, [`Error::Repeated`] for
    /// one that is named twice; [`Error::Needs`] for [`Reach::Whole`]. States and output are then unchanged; after
    /// [`Error::Memory`], fewer tokens may be taken back.
    pub fn decode(
        &self,
        inputs: LinearInputs<'_>,
        cache: &mut StateCache,
        sequences: &[usize],
        out: ViewMut<'_>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        if self.reach == Reach::Whole {
            return Err(Error::Needs { argument: "decoding", needs: "causal reach: no row sees a later key" });
        }
        same("sequences", "length", sequences.len(), inputs.q.shape()[0], "the batch")?;
        let mut shape = cache.shape;
        shape.sizes[0] = sequences.len();
        let call = self.checked(&inputs, shape, out.shape(), compute.exec())?;
        let tokens = (0..sequences.len()).map(|b| call.lens.map_or(call.kv_len, |lens| lens[b]));
        let mut chosen = cache.choose(sequences)?;
        chosen.iter_mut().zip(tokens.clone()).try_for_each(|(kept, tokens)| kept.reserve(tokens))?;
        each_head(&call, chosen.iter_mut().flat_map(|kept| kept.rings()), out, compute)?;
        chosen.iter_mut().zip(tokens).for_each(|(kept, tokens)| kept.advance(tokens));
        Ok(())
    }
}

/// Updates the states of each head of a checked call: those of the first batch entry first.
fn each_head<S: States>(
    call: &Call<'_>,
    states: impl Iterator<Item = S> + Send,
    out: ViewMut<'_>,
    compute: &mut Compute,
) -> Result<(), Error> {
    let parts = call.q.shape()[0] * call.kv_heads;
    if parts == 0 || call.kv_len == 0 && call.q.shape()[2] == 0 {
        return Ok(());
    }
    let workers = share::workers(compute.exec(), call.flops()).min(parts);
    let each = forms::scratch_len(call);
    let mut scratch = compute.buffer("scratch", [workers, each])?;
    let heads = states.zip(out.into_heads(call.group)).enumerate();
    share::parts(compute.exec(), &mut scratch, each, heads, |scratch, (index, (states, mut out))| {
        let (b, h) = (index / call.kv_heads, index % call.kv_heads);
        vectorized(
            call.isa,
            #[inline(always)]
            || states.update(&Head::new(call, b, h), &mut out, scratch),
        );
    });
    compute.recycle(scratch);
    Ok(())
}
