//! Inputs of the backward pass beside those of the forward pass, and the gradients that it writes.

use crate::attention::backward::parts::Part;
use crate::attention::call::options::Cover;
use crate::attention::call::{Call, Sequence};
use crate::attention::steps::softmax_backward::is_far;
use crate::simd::quiet;
use crate::tensor::any::{Tensor, TensorMut};
use crate::tensor::misfit::{Fault, Misfit, one_a_row, one_or_two_a_row, same, same_rows};
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;

/// Results of a forward call, and the gradients of the loss in them.
// Fields are set by methods; `sdpa` reads them.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    #[doc(hidden)]
    pub out: Tensor<'a>,
    #[doc(hidden)]
    pub lse: View<'a>,
    #[doc(hidden)]
    pub d_out: Tensor<'a>,
    #[doc(hidden)]
    pub d_lse: Option<View<'a>>,
}

impl<'a> Saved<'a> {
    /// Takes the forward call's output `out`, `[batch, heads, q_len, value_dim]`, and its log-sum-exp `lse`, `[batch,
    /// heads, q_len, 1]`, or with its rounding error in a second column ([`Outputs::lse`](crate::Outputs::lse)), both as
    /// that call wrote them; and `d_out`, the gradient of the loss in the output.
    pub fn new(out: impl Into<Tensor<'a>>, lse: View<'a>, d_out: impl Into<Tensor<'a>>) -> Self {
        Self { out: out.into(), lse, d_out: d_out.into(), d_lse: None }
    }

    /// Adds the gradient of the loss in the log-sum-exp, `[batch, heads, q_len, 1]`: 0 by default.
    #[must_use]
    pub fn d_lse(self, d_lse: View<'a>) -> Self {
        Self { d_lse: Some(d_lse), ..self }
    }

    /// Checks that the results fit the call; its inputs fit together.
    #[doc(hidden)] // its error has no name in `sdpa`
    pub fn fits(&self, call: &Call<'_>) -> Result<(), Misfit> {
        if call.kv.tensors().is_none() {
            return Fault::Needs("keys and values as tensors, not a cache or pages").of("backward");
        }
        if call.options.selected.is_some() {
            return Fault::Needs("a forward call: there are no gradients through a choice of keys").of("selected keys");
        }
        let shapes = [
            ("out", Some(self.out.shape())),
            ("lse", Some(self.lse.shape())),
            ("d_out", Some(self.d_out.shape())),
            ("d_lse", self.d_lse.map(|d_lse| d_lse.shape())),
        ];
        for (argument, shape) in shapes {
            let Some(shape) = shape else { continue };
            same_rows(argument, shape, call.q.shape(), "q")?;
            match argument {
                "lse" => one_or_two_a_row(argument, shape[3])?,
                "d_lse" => one_a_row(argument, shape[3])?,
                _ => same(argument, "value_dim", shape[3], call.kv.v_shape()[3], "v")?,
            }
        }
        Ok(())
    }

    /// Returns true if rows are [far](is_far) from 0, and the rounding errors of their log-sum-exps are not there.
    #[doc(hidden)] // for `sdpa`
    pub fn lacks_rests(&self) -> bool {
        let [batch, heads, rows, columns] = self.lse.shape();
        let heads = (0..if columns == 1 { batch } else { 0 }).flat_map(|b| (0..heads).map(move |h| (b, h)));
        heads
            .flat_map(|(b, h)| (0..rows).map(move |l| [b, h, l, 0]))
            .any(|at| self.lse.get(at).is_some_and(|&x| is_far(x)))
    }
}

/// Gradients that a backward call computes: only those that are added here.
// Fields are set by methods; `sdpa` reads them.
#[derive(Debug, Default)]
pub struct Gradients<'a> {
    #[doc(hidden)]
    pub q: Option<TensorMut<'a>>,
    #[doc(hidden)]
    pub k: Option<TensorMut<'a>>,
    #[doc(hidden)]
    pub v: Option<TensorMut<'a>>,
    #[doc(hidden)]
    pub bias: Option<ViewMut<'a>>,
    #[doc(hidden)]
    pub sinks: Option<&'a mut [f32]>,
    #[doc(hidden)]
    pub slopes: Option<&'a mut [f32]>,
    #[doc(hidden)]
    pub scale: Option<&'a mut f32>,
    #[doc(hidden)]
    pub parameters: Option<&'a mut [f32]>,
}

impl<'a> Gradients<'a> {
    /// Creates a set without gradients.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the gradient in the queries, in the shape of q and of any element type: sums are `f32`, rounded once when
    /// they are written. Queries that see no key get 0.
    #[must_use]
    pub fn q(self, dq: impl Into<TensorMut<'a>>) -> Self {
        Self { q: Some(dq.into()), ..self }
    }

    /// Adds the gradient in the keys, in the shape of k and of any element type, summed over the query heads that share
    /// a key/value head. Keys that no row sees get 0.
    #[must_use]
    pub fn k(self, dk: impl Into<TensorMut<'a>>) -> Self {
        Self { k: Some(dk.into()), ..self }
    }

    /// Adds the gradient in the values, in the shape of v and of any element type, summed as for [`Self::k`].
    #[must_use]
    pub fn v(self, dv: impl Into<TensorMut<'a>>) -> Self {
        Self { v: Some(dv.into()), ..self }
    }

    /// Adds the gradient in the bias, in the shape of the bias: summed over all that use an element. If
    /// sequences that differ in length share a bias of their last keys, one worker at a time computes.
    #[must_use]
    pub fn bias(self, dbias: ViewMut<'a>) -> Self {
        Self { bias: Some(dbias), ..self }
    }

    /// Adds the gradients in the sinks, `[heads]`, one per query head.
    #[must_use]
    pub fn sinks(self, dsinks: &'a mut [f32]) -> Self {
        Self { sinks: Some(dsinks), ..self }
    }

    /// Adds the gradients in the ALiBi slopes, `[heads]`, one per query head.
    #[must_use]
    pub fn alibi(self, dslopes: &'a mut [f32]) -> Self {
        Self { slopes: Some(dslopes), ..self }
    }

    /// Adds the gradient in the scale.
    #[must_use]
    pub fn scale(self, dscale: &'a mut f32) -> Self {
        Self { scale: Some(dscale), ..self }
    }

    /// Adds the gradients in the parameters of the score function ([`ScoreMod::parameters`](crate::ScoreMod::parameters) of them):
    /// sums over all rows and keys, in `f64`, in one order. They take 8 bytes a parameter for each worker and for each key/value
    /// head of each sequence.
    #[must_use]
    pub fn parameters(self, dparameters: &'a mut [f32]) -> Self {
        Self { parameters: Some(dparameters), ..self }
    }

    /// Returns the number of parameters with gradients that are wanted.
    #[doc(hidden)] // for `sdpa`
    pub fn parameter_count(&self) -> usize {
        self.parameters.as_ref().map_or(0, |gradient| gradient.len())
    }

    /// Checks that the gradients fit the call; its inputs fit together. Its bias is the one that was given, not yet broadcast.
    #[doc(hidden)] // its error has no name in `sdpa`
    pub fn fits(&self, call: &Call<'_>) -> Result<(), Misfit> {
        let tensors = [
            ("dq", &self.q, "q", call.q.shape()),
            ("dk", &self.k, "k", call.kv.k_shape()),
            ("dv", &self.v, "v", call.kv.v_shape()),
        ];
        for (argument, gradient, of, expected) in tensors {
            gradient.as_ref().map_or(Ok(()), |gradient| has_shape(argument, gradient.shape(), expected, of))?;
        }
        if let Some(gradient) = &self.bias {
            let needs = "a bias, which the call does not have";
            let bias = call.options.bias.map_or_else(|| Fault::Needs(needs).of("dbias"), Ok)?;
            has_shape("dbias", gradient.shape(), bias.of.shape(), "bias")?;
        }
        let lists = [
            ("dsinks", &self.sinks, call.options.sinks, "sinks, which the call does not have"),
            ("dslopes", &self.slopes, call.options.alibi, "ALiBi slopes, which the call does not have"),
        ];
        for (argument, gradient, option, needs) in lists {
            let Some(gradient) = gradient else { continue };
            option.map_or_else(|| Fault::Needs(needs).of(argument), |_| Ok(()))?;
            same(argument, "length", gradient.len(), call.q.shape()[1], "q (heads)")?;
        }
        Ok(())
    }
}

/// Checks that a gradient has the shape of what it is a gradient in.
fn has_shape(argument: &'static str, got: [usize; 4], expected: [usize; 4], of: &'static str) -> Result<(), Misfit> {
    same_rows(argument, got, expected, of)?;
    same(argument, "last dimension", got[3], expected[3], of)
}

/// Gradients that workers write, each to its own rows.
pub(crate) struct SharedGradients<'a> {
    pub(crate) q: Option<TensorMut<'a>>,
    pub(crate) k: Option<TensorMut<'a>>,
    pub(crate) v: Option<TensorMut<'a>>,
    pub(crate) bias: Option<BiasGradient<'a>>,
}

/// Gradient in the bias, and how the bias was broadcast.
pub(crate) struct BiasGradient<'a> {
    pub(crate) view: ViewMut<'a>,
    cover: Cover,
    /// Number of query heads that share each of its heads.
    sharing_head: usize,
    /// Sequences or heads, of different key/value heads, that share elements.
    pub(crate) sharing: BiasSharing,
    /// Elements that a row's keys add to.
    pub(crate) columns: BiasColumns,
}

/// Elements of a bias that several key/value heads add to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BiasSharing {
    /// None: each element belongs to one sequence, and to one key/value head or query head.
    None,
    /// Some: a key block waits for that of the sequence or head before it.
    Heads,
    /// Some, by keys of different blocks, since sequences differ in length: a key block waits for the one before it in the order
    /// in which they are taken, so one worker at a time adds.
    Blocks,
}

/// Elements of a bias that a row's keys add to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BiasColumns {
    /// One for each key; keys beyond the last are hidden.
    ByKey,
    /// A single one for all keys: its sum is taken row by row.
    One,
}

impl BiasGradient<'_> {
    /// Sets every element to 0. No worker has begun.
    pub(crate) fn clear(&self) {
        let [batch, heads, rows, columns] = self.view.shape();
        for row in 0..if columns == 0 { 0 } else { batch * heads * rows } {
            // SAFETY: the row is inside the view, which is borrowed exclusively and not handed out yet.
            unsafe {
                let (at, element) = self.view.row(row / rows / heads, row / rows % heads, row % rows);
                (0..columns).for_each(|column| *at.offset(column as isize * element) = 0.0);
            }
        }
    }

    /// Adds the gradients of the scores of a row of a sequence, from key `key` on, to the elements of [`BiasColumns::ByKey`].
    ///
    /// # Safety
    /// The elements are this worker's.
    pub(crate) unsafe fn add(&self, row: [usize; 3], seq: &Sequence, key: usize, gradients: &[f32]) {
        let ([.., columns], [b, h, l]) = (self.view.shape(), self.row(row));
        let first_key = self.cover.first_key(columns, seq.kv_len);
        let first = key.saturating_add_signed(first_key.saturating_neg());
        let before = usize::try_from(first_key).unwrap_or(0).saturating_sub(key).min(gradients.len());
        let gradients = &gradients[before..];
        if columns <= first {
            return;
        }
        // SAFETY: the row is one of the bias's, and each key one of its columns, side by side where the step between them is
        // 1; the caller guarantees the elements.
        unsafe {
            let (at, element) = self.view.row(b, h, l);
            if element == 1 {
                let n = gradients.len().min(columns - first);
                let sums = core::slice::from_raw_parts_mut(at.add(first), n);
                sums.iter_mut().zip(gradients).for_each(|(sum, &gradient)| *sum = quiet(*sum + gradient));
                return;
            }
            for (key, &gradient) in (first..columns).zip(gradients) {
                let sum = at.offset(key as isize * element);
                *sum = quiet(*sum + gradient);
            }
        }
    }

    /// Returns the index of the bias row of a sequence, head and row.
    pub(crate) fn row(&self, at: [usize; 3]) -> [usize; 3] {
        let [batch, heads, rows, _] = self.view.shape();
        let b = if at[0] < batch { at[0] } else { at[0] % batch };
        [b, (at[1] / self.sharing_head).min(heads - 1), at[2].min(rows - 1)]
    }
}

/// Parts of [`Gradients`] that are sums over all rows, taken when the workers are done.
pub(crate) struct Reduced<'a> {
    pub(crate) sinks: Option<&'a mut [f32]>,
    pub(crate) slopes: Option<&'a mut [f32]>,
    pub(crate) scale: Option<&'a mut f32>,
    pub(crate) parameters: Option<&'a mut [f32]>,
}

impl<'a> Gradients<'a> {
    /// Splits the gradients into those that workers write and those that are sums over all rows. In a part of a pass, a bias has
    /// columns for keys, if but for one key.
    pub(crate) fn split(self, call: &Call<'_>, part: &Part<'_>) -> (SharedGradients<'a>, Reduced<'a>) {
        let Self { q, k, v, bias, sinks, slopes, scale, parameters } = self;
        let bias = bias.map(|view| {
            let ([batch, heads, _, columns], sequences, kv_heads) =
                (view.shape(), call.sequence_count(), call.kv.kv_heads());
            let cover = call.options.bias.map_or(Cover::AllKeys, |bias| bias.cover);
            let one_sequence = batch == sequences || sequences == 1;
            let lengths_differ = || (1..sequences).any(|n| call.sequence(n).kv_len != call.sequence(0).kv_len);
            let sharing = match cover {
                _ if one_sequence && heads >= kv_heads => BiasSharing::None,
                Cover::LastKeys if !one_sequence && lengths_differ() => BiasSharing::Blocks,
                _ => BiasSharing::Heads,
            };
            let one = columns == 1 && call.longest().1 != 1 && cover != Cover::LastKeys && matches!(part, Part::Whole);
            BiasGradient {
                view,
                cover,
                sharing_head: if heads == kv_heads { call.group_size() } else { 1 },
                sharing,
                columns: if one { BiasColumns::One } else { BiasColumns::ByKey },
            }
        });
        (SharedGradients { q, k, v, bias }, Reduced { sinks, slopes, scale, parameters })
    }
}
