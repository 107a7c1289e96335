//! Score, mask and weight functions supplied by the caller.

/// Position of a score: sequence, query head, row and key within the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Position {
    /// Sequence of the batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query row, counted in the call: always 0 when decoding one row at a time.
    pub row: usize,
    /// Key, counted in the sequence.
    pub key: usize,
    /// Position of the row among the keys of its sequence: `row` plus the offset of the call's alignment, or `row` if
    /// no alignment is named. Distances to keys are `position − key`, in prefill and in decoding.
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

/// Visibility of a whole block, as far as a mask function knows it without testing every pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockClass {
    /// Every key is visible to every row: the function is not called.
    All,
    /// No key is visible to any row: the block is skipped.
    None,
    /// The function is called for each pair.
    Mixed,
}

/// Function of score and position, applied after softcap, bias and ALiBi and before keys are hidden. −∞ hides.
///
/// Closures `Fn(f32, Position) -> f32` are score functions.
pub trait ScoreMod: Sync {
    /// False for [`NoMod`], so that its pass is never compiled.
    #[doc(hidden)]
    const ACTIVE: bool = true;
    /// Returns the new score.
    fn score(&self, score: f32, at: Position) -> f32;
}

/// Mask function: decides which keys a row may attend to.
///
/// Closures `Fn(Position) -> bool` are mask functions; implement the trait to give the block hint as well.
pub trait MaskMod: Sync {
    /// False for [`NoMod`].
    #[doc(hidden)]
    const ACTIVE: bool = true;
    /// Returns true if the row may attend to the key.
    fn keep(&self, at: Position) -> bool;
    /// Classifies a whole block; must agree with [`Self::keep`].
    fn class(&self, block: BlockPosition) -> BlockClass {
        let _ = block;
        BlockClass::Mixed
    }
}

/// Function of the finished weight and its position, applied to visible keys. Costs a second pass over the keys.
///
/// Closures `Fn(f32, Position) -> f32` are weight functions.
pub trait ProbMod: Sync {
    /// False for [`NoMod`].
    #[doc(hidden)]
    const ACTIVE: bool = true;
    /// Returns the new weight.
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

/// Placeholder for no function: scores, masks and weights are left unchanged.
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

/// Caller's functions of scores, positions and weights. The fused pass calls them for a row and a run of keys at a time.
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
    /// Creates a set without functions.
    pub const fn new() -> Self {
        Self { score: NoMod, mask: NoMod, prob: NoMod }
    }
}

impl<S, M, P> Mods<S, M, P> {
    /// Sets the score function.
    pub fn score<T: ScoreMod>(self, score: T) -> Mods<T, M, P> {
        Mods { score, mask: self.mask, prob: self.prob }
    }

    /// Sets the mask function.
    pub fn mask<T: MaskMod>(self, mask: T) -> Mods<S, T, P> {
        Mods { score: self.score, mask, prob: self.prob }
    }

    /// Sets the weight function.
    pub fn prob<T: ProbMod>(self, prob: T) -> Mods<S, M, T> {
        Mods { score: self.score, mask: self.mask, prob }
    }
}
