//! Settings and tensors that change scores between Q·Kᵀ and the softmax. The order is fixed: softcap, bias, ALiBi,
//! the caller's score function; then everything that hides keys.

use crate::attention::call::dropout::Dropout;
use crate::attention::call::selection::SelectedKeys;
use crate::elementary::exp2;
use crate::tensor::any::Tensor;
use crate::tensor::view::View;

/// Boolean mask: which keys each row may attend to. The variant names the polarity: projects disagree, so there is no
/// default.
///
/// Shape `[batch, heads, q_len, kv_len]`; each of the four may be 1 and is then broadcast, and heads may be those of keys and
/// values. For a mask over the first or last keys only, see `Inputs::mask_prefix` and `Inputs::mask_suffix`.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Mask<'a> {
    /// Nonzero: may attend (PyTorch, ONNX, JAX).
    Keep(View<'a, u8>),
    /// Nonzero: hidden (burn, PyTorch's `key_padding_mask`).
    Drop(View<'a, u8>),
}

impl<'a> Mask<'a> {
    /// Creates a mask: true or nonzero elements mark visible keys.
    pub fn keep(view: impl Into<View<'a, u8>>) -> Self {
        Self::Keep(view.into())
    }

    /// Creates a mask: true or nonzero elements mark hidden keys.
    pub fn drop(view: impl Into<View<'a, u8>>) -> Self {
        Self::Drop(view.into())
    }

    /// Returns the view of the mask's bytes.
    pub fn view(&self) -> View<'a, u8> {
        match *self {
            Self::Keep(view) | Self::Drop(view) => view,
        }
    }

    /// Returns a mask of the same polarity over another view of the bytes.
    #[must_use]
    pub fn with_view(&self, view: View<'a, u8>) -> Self {
        match self {
            Self::Keep(_) => Self::Keep(view),
            Self::Drop(_) => Self::Drop(view),
        }
    }
}

/// Sequences of different lengths laid end to end: sequence `s` has rows `q[s]..q[s + 1]` of the queries and
/// `k[s]..k[s + 1]` of keys and values.
#[derive(Debug, Clone, Copy)]
pub struct Ragged<'a> {
    /// Cumulative query lengths, from 0, never decreasing: one entry more than there are sequences.
    pub q: &'a [usize],
    /// Cumulative key lengths, from 0, never decreasing: one entry more than there are sequences. `None` for a
    /// cache or pages: their sequences have lengths.
    pub k: Option<&'a [usize]>,
}

/// Bias or mask, and the keys for which it has columns. Batch, heads and rows of 1 are broadcast. With a head for each key/value
/// head, the query heads that share one use its head.
#[derive(Debug, Clone, Copy)]
pub struct Covered<T> {
    /// Bias or mask.
    pub of: T,
    /// Keys for which it has columns.
    pub cover: Cover,
}

/// Keys that a bias or mask has columns for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cover {
    /// Every key; a single column is broadcast to all.
    AllKeys,
    /// The first keys; the others are hidden.
    FirstKeys,
    /// The last keys of each sequence; those before are as without it.
    LastKeys,
}

impl Cover {
    /// Returns the key, in a sequence of `kv_len` keys, of the first of `columns` columns; below 0 if the sequence has fewer
    /// keys.
    #[inline(always)]
    pub(crate) fn first_key(self, columns: usize, kv_len: usize) -> isize {
        if self == Self::LastKeys { kv_len as isize - columns as isize } else { 0 }
    }
}

/// Settings and tensors that change scores. All off by default.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// Softcap `c`: scores become c·tanh(score / c). Positive and finite.
    pub softcap: Option<f32>,
    /// Bias added to the scores; −∞ hides. `[batch, heads, rows, columns]`, of any element type.
    pub bias: Option<Covered<Tensor<'a>>>,
    /// Period: sequence `b` uses entry `b % period` of bias and mask.
    pub period: Option<usize>,
    /// ALiBi slopes, one per query head: −slope·|p − j| is added.
    pub alibi: Option<&'a [f32]>,
    /// Keys that rows may attend to, `[batch, heads, rows, columns]`.
    pub mask: Option<Covered<Mask<'a>>>,
    /// Attention sinks, one logit per query head: each counts in the denominator, with a value of 0.
    pub sinks: Option<&'a [f32]>,
    /// Number of keys of each sequence, counted from the first.
    pub kv_lens: Option<&'a [usize]>,
    /// Sequences laid end to end, in place of a batch.
    pub ragged: Option<Ragged<'a>>,
    /// Sequences of the cache or pages that the queries belong to, in the order of the queries; by default all of them,
    /// in their own order.
    pub sources: Option<&'a [usize]>,
    /// Positions of the rows of each sequence, in place of those that the alignment gives.
    pub row_positions: Option<&'a [&'a [i32]]>,
    /// Positions of the keys of each sequence, in place of their order.
    pub key_positions: Option<&'a [&'a [i32]]>,
    /// Dropout of weights, after the softmax.
    pub dropout: Option<Dropout>,
    /// Row and key, of a call that is cut into parts, that dropout counts this call's first row and key as; the key is a multiple
    /// of 256.
    pub dropout_from: [usize; 2],
    /// Keys that rows select; they see no others.
    pub selected: Option<&'a SelectedKeys>,
    /// Number of neighbouring rows whose heads follow one another in the order of rows (`row_order.rs`), if
    /// rows select no keys; by default all.
    pub together: Option<usize>,
}

impl Options<'_> {
    /// Name of the given positions of rows or keys, if there are any.
    #[inline]
    pub fn own_positions(&self) -> Option<&'static str> {
        self.row_positions.map(|_| "row positions").or(self.key_positions.map(|_| "key positions"))
    }

    /// Sets dropout of weights, unless its probability is so small that none would be dropped.
    #[must_use]
    pub fn dropout(self, dropout: Option<Dropout>) -> Self {
        Self { dropout: dropout.filter(|dropout| dropout.threshold() > 0), ..self }
    }
}

/// Returns the ALiBi slopes for `heads` heads as in the paper (Press, Smith and Lewis 2022, arXiv:2108.12409): for a
/// power of two, 2^(−8·i/heads), i = 1 ..= heads; otherwise the slopes of the next lower power of two, then every other
/// slope of the next higher one.
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    if heads == 0 {
        return Vec::new();
    }
    let floor = 1usize << heads.ilog2();
    let slope = |i: usize, of: usize| exp2(-8.0 * i as f64 / of as f64) as f32;
    let first = (1..=floor).map(|i| slope(i, floor));
    first.chain((1..).step_by(2).map(|i| slope(i, 2 * floor))).take(heads).collect()
}
