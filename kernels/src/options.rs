//! What may happen to scores between Q·Kᵀ and the softmax, as settings and tensors. The order is fixed:
//! softcap, bias, ALiBi, the caller's score function; then whatever hides keys.

use crate::view::View;

/// Which keys a row may attend to, key by key. Polarity is in the name: projects disagree, so there is no default.
///
/// Shapes broadcast: each of batch, heads, rows and columns may be 1. A mask over the first keys alone is asked for by name
/// (`Inputs::mask_prefix`).
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Mask<'a> {
    /// Nonzero: may attend (PyTorch, ONNX, JAX).
    Keep(View<'a, u8>),
    /// Nonzero: hidden (burn, PyTorch's `key_padding_mask`).
    Drop(View<'a, u8>),
}

impl<'a> Mask<'a> {
    /// True, or nonzero: may attend.
    pub fn keep(view: impl Into<View<'a, u8>>) -> Self {
        Self::Keep(view.into())
    }

    /// True, or nonzero: hidden.
    pub fn drop(view: impl Into<View<'a, u8>>) -> Self {
        Self::Drop(view.into())
    }

    /// The bytes.
    pub fn view(&self) -> View<'a, u8> {
        match *self {
            Self::Keep(view) | Self::Drop(view) => view,
        }
    }

    /// The same rule over another view of the bytes.
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
    /// Cumulative query lengths: 0 first, never falling, one more than there are sequences.
    pub q: &'a [usize],
    /// Cumulative key lengths, likewise.
    pub k: &'a [usize],
}

/// The settings and tensors that change scores. All off by default.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// `c`: scores become c·tanh(score / c). Positive and finite.
    pub softcap: Option<f32>,
    /// Added to the scores; −∞ hides. `[batch, heads, rows, columns]`; keys beyond its columns are hidden.
    pub bias: Option<View<'a>>,
    /// ALiBi slopes, one per query head: −slope·|p − j| is added.
    pub alibi: Option<&'a [f32]>,
    /// Keys that rows may attend to, `[batch, heads, rows, columns]`; those beyond its columns are hidden.
    pub mask: Option<Mask<'a>>,
    /// Attention sinks, one logit per query head: joins the denominator with value 0.
    pub sinks: Option<&'a [f32]>,
    /// Keys of each sequence that exist, from the first on.
    pub kv_lens: Option<&'a [usize]>,
    /// Sequences laid end to end, in place of a batch.
    pub ragged: Option<Ragged<'a>>,
}

/// Where a score is: sequence, query head, row and key within the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Position {
    /// Sequence of the batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query row, counted in the call: decoding one row at a time, always 0.
    pub row: usize,
    /// Key, counted in the sequence.
    pub key: usize,
    /// Where the row stands among the keys of its sequence: `row` plus the offset of the call's alignment, `row` itself if
    /// none is named. Distances to keys are `position − key`, in prefill and decoding alike.
    pub position: isize,
}

/// Rows and keys of one head, for [`MaskMod::class`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPosition {
    /// Sequence of the batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query rows.
    pub rows: core::ops::Range<usize>,
    /// Keys.
    pub keys: core::ops::Range<usize>,
}

/// What a mask function knows of a block without looking at every pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockClass {
    /// Every row sees every key: the function is not asked.
    All,
    /// No row sees any key: the block is skipped.
    None,
    /// Ask for each pair.
    Mixed,
}

/// A function of score and position, applied after softcap, bias and ALiBi and before keys are hidden. −∞ hides.
///
/// Closures `Fn(f32, Position) -> f32` are score functions.
pub trait ScoreMod: Sync {
    /// False for [`NoMod`], so that its pass is never compiled.
    #[doc(hidden)]
    const ACTIVE: bool = true;
    /// The new score.
    fn score(&self, score: f32, at: Position) -> f32;
}

/// Says which pairs may attend.
///
/// Closures `Fn(Position) -> bool` are mask functions; implement the trait to give the block hint as well.
pub trait MaskMod: Sync {
    /// False for [`NoMod`].
    #[doc(hidden)]
    const ACTIVE: bool = true;
    /// True if the row may attend to the key.
    fn keep(&self, at: Position) -> bool;
    /// What is known of a whole block; must agree with [`Self::keep`].
    fn class(&self, block: BlockPosition) -> BlockClass {
        let _ = block;
        BlockClass::Mixed
    }
}

/// A function of the finished weight and its position, applied to visible keys. Costs a second pass over the keys.
///
/// Closures `Fn(f32, Position) -> f32` are weight functions.
pub trait ProbMod: Sync {
    /// False for [`NoMod`].
    #[doc(hidden)]
    const ACTIVE: bool = true;
    /// The new weight.
    fn weight(&self, weight: f32, at: Position) -> f32;
}

impl<F: Fn(f32, Position) -> f32 + Sync> ScoreMod for F {
    #[inline(always)]
    fn score(&self, score: f32, at: Position) -> f32 {
        self(score, at)
    }
}

impl<F: Fn(Position) -> bool + Sync> MaskMod for F {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        self(at)
    }
}

impl<F: Fn(f32, Position) -> f32 + Sync> ProbMod for F {
    #[inline(always)]
    fn weight(&self, weight: f32, at: Position) -> f32 {
        self(weight, at)
    }
}

/// No function: scores, masks and weights stay as they are.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoMod;

impl ScoreMod for NoMod {
    const ACTIVE: bool = false;
    fn score(&self, score: f32, at: Position) -> f32 {
        let _ = at;
        score
    }
}

impl MaskMod for NoMod {
    const ACTIVE: bool = false;
    fn keep(&self, at: Position) -> bool {
        let _ = at;
        true
    }
    fn class(&self, block: BlockPosition) -> BlockClass {
        let _ = block;
        BlockClass::All
    }
}

impl ProbMod for NoMod {
    const ACTIVE: bool = false;
    fn weight(&self, weight: f32, at: Position) -> f32 {
        let _ = at;
        weight
    }
}

/// The caller's functions, each compiled into the fused pass.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mods<S = NoMod, M = NoMod, P = NoMod> {
    /// Score function.
    pub score: S,
    /// Mask function.
    pub mask: M,
    /// Weight function.
    pub prob: P,
}

impl Mods {
    /// No functions.
    pub const fn new() -> Self {
        Self { score: NoMod, mask: NoMod, prob: NoMod }
    }
}

impl<S, M, P> Mods<S, M, P> {
    /// With this score function.
    pub fn score<T: ScoreMod>(self, score: T) -> Mods<T, M, P> {
        Mods { score, mask: self.mask, prob: self.prob }
    }

    /// With this mask function.
    pub fn mask<T: MaskMod>(self, mask: T) -> Mods<S, T, P> {
        Mods { score: self.score, mask, prob: self.prob }
    }

    /// With this weight function.
    pub fn prob<T: ProbMod>(self, prob: T) -> Mods<S, M, T> {
        Mods { score: self.score, mask: self.mask, prob }
    }
}

/// ALiBi slopes for `heads` heads by the paper (Press, Smith and Lewis 2022, arXiv:2108.12409): for a power of two,
/// 2^(−8·i/heads), i = 1 ..= heads; otherwise those of the largest power of two below, then every other one of the next.
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    if heads == 0 {
        return Vec::new();
    }
    let floor = 1usize << heads.ilog2();
    let slope = |i: usize, of: usize| (-8.0 * i as f64 / of as f64).exp2() as f32;
    let first = (1..=floor).map(|i| slope(i, floor));
    first.chain((1..).step_by(2).map(|i| slope(i, 2 * floor))).take(heads).collect()
}
