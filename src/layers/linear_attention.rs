//! Linear attention: what a softmax is not needed for.
//!
//! Keys and values are gathered in a state of fixed size, one matrix `S` `[head_dim, value_dim]` a key/value head, and a
//! query reads it. Time grows with the length, not with its square, and memory does not grow at all. With k, v, q the
//! rows of token t, a = eᵍ its decay (g the logarithm that is given) and β its strength:
//!
//! | [`Update`] | token t, in order | from |
//! |---|---|---|
//! | `Linear` | S ← S + k vᵀ | Katharopoulos, Vyas, Pappas, Fleuret 2020, arXiv:2006.16236 |
//! | `Gated` | S ← Diag(a) S + k vᵀ | Yang, Wang, Shen, Panda, Kim 2023, arXiv:2312.06635 |
//! | `Delta` | S ← S + β k (v − Sᵀk)ᵀ | Schlag, Irie, Schmidhuber 2021, arXiv:2102.11174 |
//! | `GatedDelta` | S ← Diag(a) S, then as `Delta` | Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464 |
//!
//! and then out = scale · Sᵀq. These are the rules of ONNX LinearAttention-27; one decay a head makes `Gated` that of
//! RetNet (Sun et al. 2023, arXiv:2307.08621) and of Mamba-2 (Dao, Gu 2024, arXiv:2405.21060).
//!
//! The recurrent form does that token by token. The chunked form gives the same up to rounding: tokens of a chunk look at
//! each other as attention without a softmax would have them, and at the state as it was before the chunk, which is
//! written once a chunk. Under a delta rule the corrections of a chunk solve a triangular system, by substitution (Yang,
//! Wang, Zhang, Shen, Kim 2024, arXiv:2406.06484). Decays are multiplied up between two tokens and never divided by, so
//! that a strong one, 0 included, costs no accuracy.

mod call;
mod check;
mod chunk;
mod forms;
mod head;
mod product;
mod recurrent;
mod settings;
mod state;

pub use settings::{FeatureMap, Form, Normaliser, Reach, Update};
pub use state::LinearState;

use crate::error::Error;
use crate::layers::Compute;
use crate::threads;
use head::Head;
use sdpa_kernels::{View, ViewMut, vectorized};

/// The tensors that a call reads.
#[derive(Debug, Clone, Copy)]
pub struct LinearInputs<'a> {
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    update: Update<'a>,
}

impl<'a> LinearInputs<'a> {
    /// Queries `[batch, heads, len, head_dim]`, keys `[batch, kv_heads, len, head_dim]` and values `[batch, kv_heads, len,
    /// value_dim]`, any strides; `heads` is a multiple of `kv_heads`, and those of a group share a state.
    pub fn new(q: View<'a>, k: View<'a>, v: View<'a>, update: Update<'a>) -> Self {
        Self { q, k, v, update }
    }
}

/// Linear attention: the settings of a call, no tensors.
///
/// ```
/// use sdpa::layers::{Compute, Form, LinearAttention, LinearInputs, LinearState, Update};
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
    /// Causal, recurrent, scaled by 1/√head_dim; queries and keys as they are, and no normaliser.
    pub fn new() -> Self {
        Self::default()
    }

    /// The factor of the outputs, in place of 1/√head_dim. Any finite value.
    #[must_use]
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// In what order the sums are taken.
    #[must_use]
    pub fn form(self, form: Form) -> Self {
        Self { form, ..self }
    }

    /// What a row sees.
    #[must_use]
    pub fn reach(self, reach: Reach) -> Self {
        Self { reach, ..self }
    }

    /// What is done to queries and keys first.
    #[must_use]
    pub fn feature_map(self, feature_map: FeatureMap) -> Self {
        Self { feature_map, ..self }
    }

    /// What sums are divided by.
    #[must_use]
    pub fn normaliser(self, normaliser: Normaliser) -> Self {
        Self { normaliser, ..self }
    }

    /// Takes the tokens into the state and writes what their queries read, `[batch, heads, len, value_dim]`.
    ///
    /// Key/value heads are shared out over threads, one at a time. With D = head_dim, E = value_dim, time is B·L·D·E for
    /// each key/value head (two passes over the state, three under a delta rule) and each query head, and chunks of C add
    /// C·(D + E)/2 a token and head. Scratch is O(C·(D + E)) a thread (C = 1 if recurrent) and comes from `compute`; a
    /// call that finds it there allocates nothing on one thread.
    ///
    /// Bits depend on the form, not on threads, batch, layout, or grouped against repeated heads; nor, as long as there is
    /// neither a decay nor a feature map, on the instruction set. A token never sees a later one, NaN or not.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Heads`], [`Error::Empty`], [`Error::TooLarge`] for sizes that do not fit together;
    /// [`Error::Number`] for a scale that is not finite; [`Error::Needs`] for settings that do not; [`Error::Memory`] for
    /// scratch. State and output are then as they were.
    pub fn forward(
        &self,
        inputs: LinearInputs<'_>,
        state: &mut LinearState,
        out: ViewMut<'_>,
        compute: &mut Compute,
    ) -> Result<(), Error> {
        let call = self.checked(&inputs, state, out.shape(), compute.exec())?;
        let parts = call.q.shape()[0] * call.kv_heads;
        if parts == 0 || call.kv_len == 0 && call.q.shape()[2] == 0 {
            return Ok(());
        }
        // One thread needs no pool: asking for its size would start it.
        let threads = if compute.exec().threads > 1 { threads::current_threads() } else { 1 };
        let workers = compute.exec().workers(call.flops()).min(threads).min(parts);
        let each = forms::scratch_len(&call);
        let mut scratch = compute.buffer("scratch", [workers, each])?;
        let states = state.data.chunks_exact_mut(call.head_dim * call.width);
        let heads = states.zip(out.into_heads(call.group)).enumerate();
        threads::parts(&mut scratch, each, heads, |scratch, (index, (state, mut out))| {
            let (b, h) = (index / call.kv_heads, index % call.kv_heads);
            vectorized(
                call.isa,
                #[inline(always)]
                || forms::run(&Head::new(&call, b, h), state, &mut out, scratch),
            );
        });
        compute.recycle(scratch);
        Ok(())
    }
}
