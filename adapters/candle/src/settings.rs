//! Settings and tensors of a call, other than queries, keys and values.

use crate::selected::{ListShape, Selected};
use crate::views;
use candle_core::{DType, Result, Tensor};
use sdpa::{Attention, View};

/// Attention as an operation on candle's CPU tensors: settings, and the tensors that options add.
///
/// Tensors are read where they lie in memory, whatever their strides: transposed, narrowed and broadcast ones are not
/// copied. Masks and biases are `[batch, heads, q_len, kv_len]`; each of the four may be 1 and then stands for all, and
/// dimensions that are missing in front count as 1, as candle broadcasts. With two or three dimensions the first must not be
/// as long as the batch, unless both are 1: such a mask could also be one for each sequence. Reshape it to four dimensions. A
/// tokenizer's mask `[batch, keys]` goes to [`padding`](Self::padding) as it stands.
///
/// A rule of positions (causal, window, ALiBi) needs an alignment if rows and keys differ in number. In a padded batch with as
/// many rows as keys, row i is at key i, whatever the lengths, unless an alignment says otherwise.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use sdpa_candle::{Alignment, Attention, Sdpa};
/// # fn main() -> candle_core::Result<()> {
/// let x = Tensor::randn(0f32, 1.0, (2, 10, 8, 64), &Device::Cpu)?.transpose(1, 2)?; // batch, heads, rows, head_dim
/// let kv = x.narrow(1, 0, 2)?; // two key/value heads for eight query heads
/// let lens = Tensor::new(&[10u32, 7], &Device::Cpu)?;
/// let out = Sdpa::new(Attention::new().causal()).kv_lens(&lens).forward(&x, &kv, &kv)?;
/// assert_eq!(out.dims(), [2, 8, 10, 64]);
/// let last = x.narrow(2, 9, 1)?; // one row: it must be said where it stands
/// let newest = Attention::new().causal().align(Alignment::BottomRight);
/// assert_eq!(Sdpa::new(newest).forward(&last, &kv, &kv)?.dims(), [2, 8, 1, 64]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Sdpa {
    pub(crate) attention: Attention,
    pub(crate) mask: Option<Mask>,
    pub(crate) bias: Option<Tensor>,
    pub(crate) alibi: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
    pub(crate) kv_lens: Option<Tensor>,
    pub(crate) padding: Option<Tensor>,
    pub(crate) selected: Option<Selected>,
}

/// Boolean mask, and the meaning of its nonzero elements.
#[derive(Debug, Clone)]
pub(crate) enum Mask {
    Keep(Tensor),
    Drop(Tensor),
}

impl Mask {
    pub(crate) fn tensor(&self) -> &Tensor {
        match self {
            Self::Keep(tensor) | Self::Drop(tensor) => tensor,
        }
    }

    pub(crate) fn over<'a>(&self, view: View<'a, u8>) -> sdpa::Mask<'a> {
        match self {
            Self::Keep(_) => sdpa::Mask::keep(view),
            Self::Drop(_) => sdpa::Mask::drop(view),
        }
    }
}

impl From<Attention> for Sdpa {
    fn from(attention: Attention) -> Self {
        Self::new(attention)
    }
}

impl Sdpa {
    /// Takes the settings: scale, softcap, causal, window, alignment, precision.
    pub fn new(attention: Attention) -> Self {
        Self { attention, ..Self::default() }
    }

    /// Sets a mask of type `u8`: nonzero elements may be attended to (as in PyTorch and transformers). Replaces
    /// any other mask.
    #[must_use]
    pub fn keep_mask(self, mask: &Tensor) -> Self {
        Self { mask: Some(Mask::Keep(mask.clone())), ..self }
    }

    /// Sets a mask of type `u8`: nonzero elements are hidden. Replaces any other mask.
    #[must_use]
    pub fn drop_mask(self, mask: &Tensor) -> Self {
        Self { mask: Some(Mask::Drop(mask.clone())), ..self }
    }

    /// Adds a bias of type `f32`, `bf16`, `f16` or `f64` to the scores, after softcap: also an additive mask, such as
    /// `[batch, 1, 1, keys]`, as it stands. Elements of `f64` are rounded to `f32` in a copy.
    ///
    /// −∞ hides the key, and so does `f64::MIN`, which `f32` cannot hold. `f32::MIN` or −10⁹ is a number: the key has no weight
    /// beside others. The two differ in rows with no other key: rows that see nothing are 0; if all the scores of a row are
    /// `f32::MIN`, all its weights are equal, as in candle's softmax.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use sdpa_candle::Sdpa;
    /// # fn main() -> candle_core::Result<()> {
    /// let x = Tensor::zeros((2, 1, 3, 1), candle_core::DType::F32, &Device::Cpu)?;
    /// let v = Tensor::new(&[1f32, 2.0, 60.0, /**/ 4.0, 50.0, 60.0], &Device::Cpu)?.reshape((2, 1, 3, 1))?;
    /// let hide = f32::MIN;
    /// let mask = Tensor::new(&[[0.0, 0.0, hide], [0.0, hide, hide]], &Device::Cpu)?.reshape((2, 1, 1, 3))?;
    /// let out = Sdpa::default().bias(&mask).forward(&x, &x, &v)?;
    /// assert_eq!(out.flatten_all()?.to_vec1::<f32>()?, [1.5, 1.5, 1.5, 4.0, 4.0, 4.0]);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn bias(self, bias: &Tensor) -> Self {
        Self { bias: Some(bias.clone()), ..self }
    }

    /// Sets ALiBi slopes, `[heads]`, of any float type: see [`sdpa::alibi_slopes`].
    #[must_use]
    pub fn alibi(self, slopes: &Tensor) -> Self {
        Self { alibi: Some(slopes.clone()), ..self }
    }

    /// Sets attention sinks, one logit for each query head, `[heads]`, of any float type.
    #[must_use]
    pub fn sinks(self, logits: &Tensor) -> Self {
        Self { sinks: Some(logits.clone()), ..self }
    }

    /// Sets the number of keys of each sequence, `[batch]`, of any integer type. Keys beyond it are never seen, and
    /// what is in their memory does not matter.
    ///
    /// With as many rows as keys, row i is at key i in every sequence, unless an alignment is set.
    /// [`Alignment::BottomRight`](crate::Alignment::BottomRight) goes by the lengths: the last row is at the last key of its
    /// sequence.
    #[must_use]
    pub fn kv_lens(self, lens: &Tensor) -> Self {
        Self { kv_lens: Some(lens.clone()), ..self }
    }

    /// Sets a tokenizer's mask, `[batch, keys]`, of any integer type: nonzero elements are tokens, the others padding. No row
    /// sees the keys of padding, and what is in their memory does not matter. Never read as `[rows, keys]`.
    ///
    /// Padding may be on either side, or between. Rows and keys stand where they lie: of as many rows as keys, row i is at key
    /// i; with [`Alignment::BottomRight`](crate::Alignment::BottomRight) the last row is at the last column, even if that is
    /// padding. Rows of padding are computed like others. A row that sees no token is 0.
    ///
    /// The mask is read in each call. It becomes lengths where padding follows the tokens; otherwise, over a cache, or without
    /// an alignment where rows and keys differ in number, it becomes a mask. Beside a [`keep_mask`](Self::keep_mask) or
    /// [`drop_mask`](Self::drop_mask), that is one of both, as large as the two broadcast.
    ///
    /// An additive mask, of floats, goes to [`bias`](Self::bias).
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use sdpa_candle::Sdpa;
    /// # fn main() -> candle_core::Result<()> {
    /// let x = Tensor::zeros((2, 1, 3, 1), candle_core::DType::F32, &Device::Cpu)?;
    /// let v = Tensor::new(&[1f32, 2.0, 60.0, /**/ 4.0, 50.0, 60.0], &Device::Cpu)?.reshape((2, 1, 3, 1))?;
    /// let attention_mask = Tensor::new(&[[1u32, 1, 0], [1, 0, 0]], &Device::Cpu)?;
    /// let out = Sdpa::default().padding(&attention_mask).forward(&x, &x, &v)?;
    /// assert_eq!(out.flatten_all()?.to_vec1::<f32>()?, [1.5, 1.5, 1.5, 4.0, 4.0, 4.0]);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn padding(self, attention_mask: &Tensor) -> Self {
        Self { padding: Some(attention_mask.clone()), ..self }
    }

    /// Sets the keys that rows select, of type `u32`, `i32` or `i64`, `[batch, heads, groups, places]`: in each place the number of a
    /// unit of keys, or −1 for none, in any order. `heads` is that of the queries, that of the keys, or 1 for lists that all heads
    /// share; `groups` are `q_len / rows`, rounded up. Rows see the keys of their list as far as other options show them, and no
    /// others: see [`sdpa::Inputs::selected`].
    ///
    /// The numbers are copied, checked and sorted in each call: n log n for each list of n places. A number that a list has twice is
    /// an error, and so is one beyond the keys. There are no gradients through a choice of keys: `backward` is then an error.
    ///
    /// ```
    /// use candle_core::{DType::F32, Device, Tensor};
    /// use sdpa_candle::{ListShape, Sdpa};
    /// # fn main() -> candle_core::Result<()> {
    /// let (q, k) = (Tensor::randn(0f32, 1.0, (1, 1, 2, 4), &Device::Cpu)?, Tensor::ones((1, 1, 5, 4), F32, &Device::Cpu)?);
    /// let v = Tensor::new(&[1f32, 2.0, 4.0, 8.0, 16.0], &Device::Cpu)?.reshape((1, 1, 5, 1))?;
    /// let numbers = Tensor::new(&[[3i64, 0], [4, -1]], &Device::Cpu)?.reshape((1, 1, 2, 2))?; // a list for each row
    /// let out = Sdpa::default().selected(&numbers, ListShape::default()).forward(&q, &k, &v)?;
    /// assert_eq!(out.flatten_all()?.to_vec1::<f32>()?, [4.5, 16.0]);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn selected(self, numbers: &Tensor, shape: ListShape) -> Self {
        Self { selected: Some(Selected { numbers: numbers.clone(), shape }), ..self }
    }

    /// Returns the call with a bias of `f64` in `f32`.
    pub(crate) fn narrowed(&self) -> Result<Self> {
        let bias = self.bias.as_ref().map(views::narrowed).transpose()?;
        Ok(Self { bias, ..self.clone() })
    }

    /// Returns bias, slopes and sinks, each if candle tracks it.
    pub(crate) fn learned(&self) -> [Option<&Tensor>; 3] {
        [&self.bias, &self.alibi, &self.sinks].map(|option| option.as_ref().filter(|option| option.track_op()))
    }
}

/// Lays the elements of the values and of options end to end, in `f32`, by operations that candle tracks.
pub(crate) fn pack(v: &Tensor, options: &[&Tensor]) -> Result<Tensor> {
    let flat = |x: &Tensor| x.flatten_all()?.to_dtype(DType::F32);
    Tensor::cat(&[&[v], options].concat().into_iter().map(flat).collect::<Result<Vec<_>>>()?, 0)
}
