//! Score, mask and weight functions of the caller.

mod combined;
mod fit;
mod pointers;

pub use combined::{And, Not, Or};
pub use fit::{CallFacts, MaskError};

use core::ops::{Range, RangeInclusive};

/// Position of a score: sequence, query head, row and key within the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Position {
    /// Sequence, counted in the call: its index in the batch, among ragged sequences, or in the list of
    /// `Inputs::sequences`, not its index in a cache.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query row, counted from the first row of its sequence in the call: always 0 when decoding one row at a time.
    pub row: usize,
    /// Key, counted in the sequence.
    pub key: usize,
    /// Position of the row among the keys of its sequence: `row` plus the offset of the call's alignment, or `row` if
    /// no alignment is named; in prefill as in decoding. It says where the row lies, whatever positions rows and keys are given.
    pub position: isize,
    /// Distance from the key to the row, negative for later keys: `position − key`, or the difference of the positions that
    /// `Inputs::row_positions` and `Inputs::key_positions` give.
    pub distance: isize,
}

/// Rows and keys of one head, for [`MaskMod::class`]: each of the rows with each of the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPosition {
    /// Sequence, as [`Position::batch`].
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query rows, as [`Position::row`]; at least one.
    pub rows: Range<usize>,
    /// Keys, counted in the sequence; at least one.
    pub keys: Range<usize>,
    /// Position of the first row, as [`Position::position`]; the next row's is one more.
    pub position: isize,
}

impl BlockPosition {
    /// Returns the first and the last row's [`Position::position`].
    pub fn positions(&self) -> RangeInclusive<isize> {
        self.position..=self.position.saturating_add_unsigned(self.rows.len().saturating_sub(1))
    }

    /// Returns the positions of all pairs of a row and a key of the block, row by row. Distances are by order: a mask that
    /// measures them with given positions must answer [`BlockClass::Mixed`].
    pub fn pairs(&self) -> impl Iterator<Item = Position> + use<> {
        let Self { batch, head, rows, keys, position } = self.clone();
        rows.enumerate().flat_map(move |(n, row)| {
            let position = position.saturating_add_unsigned(n);
            let distance = move |key| position.saturating_sub_unsigned(key);
            keys.clone().map(move |key| Position { batch, head, row, key, position, distance: distance(key) })
        })
    }
}

/// Visibility of a whole block, as a mask function knows it without testing every pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockClass {
    /// Every key is visible to every row: the function is not called.
    All,
    /// No key is visible to any row: the block is skipped.
    None,
    /// The function is called for each pair.
    Mixed,
}

impl FromIterator<bool> for BlockClass {
    /// Classifies a block by a mask function's answers for its pairs; stops at the first answer that differs from the
    /// others.
    fn from_iter<T: IntoIterator<Item = bool>>(pairs: T) -> Self {
        let mut pairs = pairs.into_iter();
        match pairs.next() {
            None => Self::All,
            Some(first) if pairs.any(|keep| keep != first) => Self::Mixed,
            Some(true) => Self::All,
            Some(false) => Self::None,
        }
    }
}

/// Function of score and position, applied after softcap, bias and ALiBi, before keys are hidden. −∞ hides the key.
///
/// Closures `Fn(f32, Position) -> f32` are score functions, and so are `&dyn ScoreMod`, `Box<dyn ScoreMod>` and
/// `Arc<dyn ScoreMod>`, for functions chosen at run time. [`Mods`] says what to mind in a function that makes a call.
pub trait ScoreMod: Send + Sync {
    /// Returns the new score.
    fn score(&self, score: f32, at: Position) -> f32;
    /// Returns the derivative of the new score in `score`, the score before the function. The backward pass multiplies
    /// the score's gradient by it; a gradient of 0 stays 0.
    ///
    /// `None`, the answer of closures, says that the function has no derivative, and so no backward pass. A function
    /// must answer `None` for every score or for none: only one is tested before the pass begins, a score of 0 of the
    /// first pair of the call, hidden or not. [`WithDerivative`] makes a function from two closures.
    fn derivative(&self, score: f32, at: Position) -> Option<f32> {
        let _ = (score, at);
        None
    }
    /// Returns the number of parameters that the function has and that may be learned, such as the entries of a table of biases:
    /// 0 for closures.
    fn parameters(&self) -> usize {
        0
    }
    /// Calls `add(parameter, derivative)` for each parameter that the new score depends on here, any number of times, with the
    /// derivative of the new score in it; `score` is that before the function. Only a backward call with
    /// [`Gradients::parameters`](crate::Gradients::parameters) asks, for pairs of a row and a key with a gradient other than 0:
    /// never for hidden ones.
    ///
    /// # Panics
    /// `add` does, if `parameter` is not less than [`Self::parameters`].
    fn parameter_derivatives(&self, score: f32, at: Position, add: &mut dyn FnMut(usize, f32)) {
        let _ = (score, at, add);
    }
    /// Returns false for `()` alone, which is no function: its pass is not made.
    #[doc(hidden)]
    fn is_given(&self) -> bool {
        true
    }
}

/// Mask function: decides which keys a row may attend to.
///
/// Closures `Fn(Position) -> bool` are mask functions, and so are `&dyn MaskMod`, `Box<dyn MaskMod>` and `Arc<dyn
/// MaskMod>`, for functions chosen at run time; an `Option` of a mask function is one, too, and hides nothing if it is `None`.
/// Implement the trait to classify blocks as well. [`Mods`] says what to mind in a function that makes a call.
pub trait MaskMod: Send + Sync {
    /// Returns true if the row may attend to the key.
    fn keep(&self, at: Position) -> bool;
    /// Classifies a block. [`BlockClass::Mixed`], the answer of closures, is always right.
    ///
    /// A block is at least one row of one query head of the call, and at least one key of the sequence; its keys lie in
    /// one key block: 256 keys from a multiple of 256. Any such block may be asked about, any number of times, by
    /// several threads at once, whether or not [`Self::keep`] is called for its pairs. Other rules may hide some of the
    /// pairs. Blocks of one row and up to 16 keys are common, so an answer should take no longer than a few pairs.
    ///
    /// Classes help if whole panels of 16 keys (from a multiple of 16) are hidden: if more than 16 rows share the keys,
    /// panels are not computed that are hidden from all rows of a tile (six neighbouring rows or fewer), or from one row
    /// if its tile's rows see less than half of the panels that are left. In each pass over the keys, each row's class
    /// is asked once for all keys of a key block that other rules leave visible; if that is `Mixed`, once for each panel;
    /// and if any panel is hidden, once for each four keys of `Mixed` panels. Leave this function out if [`Self::keep`]
    /// of 16 keys takes less time than one class and most panels have a visible key. Without classes, `keep` is called for
    /// every pair that other rules leave visible, and nothing is skipped: time grows with all keys (docs/benchmarks.md, masks).
    ///
    /// An answer other than `Mixed` must agree with `keep` for every pair of the block. If it does not, either may
    /// count for a pair, and the output of these rows may be wrong; nothing else is affected.
    fn class(&self, block: BlockPosition) -> BlockClass {
        let _ = block;
        BlockClass::Mixed
    }
    /// Returns the first key of a block of one row that the row may attend to, or the end of the block's keys if there is
    /// none; `None`, the answer of closures, if that takes about as long as [`Self::keep`] of each key.
    ///
    /// For masks that keep few keys and know where, such as sorted lists. If it answers, each key that the row sees is asked
    /// for after the one before, in place of [`Self::class`] of panels and [`Self::keep`] of keys: time goes with the visible
    /// keys. `class` is still asked first for all keys of a key block, and this only where it is `Mixed`.
    ///
    /// The answer must agree with `keep`. If it does not, either may count for a pair, as with classes.
    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        let _ = block;
        None
    }
    /// Returns an error if the mask does not fit a call, which is then refused. Asked once, before anything is written.
    /// Closures return `Ok`: they fit every call.
    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        let _ = call;
        Ok(())
    }
    /// Returns an error if the mask does not fit the rows of one sequence; the call is then refused. Asked once for each
    /// sequence that has rows, before anything is written, with all its rows and keys; a state asks with its own rows and
    /// no keys. The head is 0. Closures return `Ok`.
    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        let _ = rows;
        Ok(())
    }
    /// Returns the mask that keeps what both masks keep.
    fn and<M: MaskMod>(self, other: M) -> And<Self, M>
    where
        Self: Sized,
    {
        And(self, other)
    }
    /// Returns the mask that keeps what at least one of the masks keeps.
    fn or<M: MaskMod>(self, other: M) -> Or<Self, M>
    where
        Self: Sized,
    {
        Or(self, other)
    }
    /// Returns the mask that keeps what this one hides.
    fn not(self) -> Not<Self>
    where
        Self: Sized,
    {
        Not(self)
    }
    /// Returns false for `()` and `None`, which are no function: the pass is not made.
    #[doc(hidden)]
    fn is_given(&self) -> bool {
        true
    }
}

/// Score function made of two closures: the function, and its derivative in the score.
#[derive(Debug, Clone, Copy)]
pub struct WithDerivative<F, D> {
    score: F,
    derivative: D,
}

impl<F, D> WithDerivative<F, D>
where
    F: Fn(f32, Position) -> f32 + Send + Sync,
    D: Fn(f32, Position) -> f32 + Send + Sync,
{
    /// Joins a score function and its derivative. Both take the score before the function.
    pub fn new(score: F, derivative: D) -> Self {
        Self { score, derivative }
    }
}

impl<F, D> ScoreMod for WithDerivative<F, D>
where
    F: Fn(f32, Position) -> f32 + Send + Sync,
    D: Fn(f32, Position) -> f32 + Send + Sync,
{
    #[inline(always)]
    fn score(&self, score: f32, at: Position) -> f32 {
        (self.score)(score, at)
    }

    #[inline(always)]
    fn derivative(&self, score: f32, at: Position) -> Option<f32> {
        Some((self.derivative)(score, at))
    }
}

/// Function of the finished weight and its position, applied to visible keys. Costs a second pass over the keys.
///
/// Closures `Fn(f32, Position) -> f32` are weight functions, and so are `&dyn WeightMod`, `Box<dyn WeightMod>` and
/// `Arc<dyn WeightMod>`, for functions chosen at run time. [`Mods`] says what to mind in a function that makes a call.
pub trait WeightMod: Send + Sync {
    /// Returns the new weight.
    fn weight(&self, weight: f32, at: Position) -> f32;
    /// Returns false for `()` alone, which is no function: its pass is not made.
    #[doc(hidden)]
    fn is_given(&self) -> bool {
        true
    }
}

impl<F: Fn(f32, Position) -> f32 + Send + Sync> ScoreMod for F {
    #[inline(always)]
    fn score(&self, score: f32, at: Position) -> f32 {
        self(score, at)
    }
}

impl<F: Fn(Position) -> bool + Send + Sync> MaskMod for F {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        self(at)
    }
}

impl<F: Fn(f32, Position) -> f32 + Send + Sync> WeightMod for F {
    #[inline(always)]
    fn weight(&self, weight: f32, at: Position) -> f32 {
        self(weight, at)
    }
}

/// No function: leaves scores unchanged.
impl ScoreMod for () {
    fn score(&self, score: f32, at: Position) -> f32 {
        let _ = at;
        score
    }
    fn is_given(&self) -> bool {
        false
    }
}

/// No function: leaves visibility unchanged.
impl MaskMod for () {
    fn keep(&self, at: Position) -> bool {
        let _ = at;
        true
    }
    fn class(&self, block: BlockPosition) -> BlockClass {
        let _ = block;
        BlockClass::All
    }
    fn is_given(&self) -> bool {
        false
    }
}

/// A mask that may be missing: `None` leaves visibility unchanged, as `()` does.
impl<M: MaskMod> MaskMod for Option<M> {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        self.as_ref().is_none_or(|mask| mask.keep(at))
    }
    fn class(&self, block: BlockPosition) -> BlockClass {
        self.as_ref().map_or(BlockClass::All, |mask| mask.class(block))
    }
    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        self.as_ref().map_or(Some(block.keys.start), |mask| mask.next_kept(block))
    }
    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        self.as_ref().map_or(Ok(()), |mask| mask.fits(call))
    }
    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        self.as_ref().map_or(Ok(()), |mask| mask.fits_rows(rows))
    }
    fn is_given(&self) -> bool {
        self.as_ref().is_some_and(M::is_given)
    }
}

/// No function: leaves weights unchanged.
impl WeightMod for () {
    fn weight(&self, weight: f32, at: Position) -> f32 {
        let _ = at;
        weight
    }
    fn is_given(&self) -> bool {
        false
    }
}

/// Functions of scores, positions and weights, or `()` where there is none. The fused pass calls them for a row and several
/// neighbouring keys at a time, on the threads of the call.
///
/// A function that makes a call on rayon's pool while it holds a lock or fills a `OnceLock` may wait for itself: rayon gives a
/// thread that waits another task of the outer call, and that runs the function again. Fill the cell before the call, or name
/// `Exec::serial()` or a `ThreadPool` for the inner call; another rayon pool does not help.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mods<S = (), M = (), P = ()> {
    /// Score function.
    pub score: S,
    /// Mask function.
    pub mask: M,
    /// Weight function.
    pub weight: P,
}

impl Mods {
    /// Creates a set without functions.
    pub const fn new() -> Self {
        Self { score: (), mask: (), weight: () }
    }
}

impl<S, M, P> Mods<S, M, P> {
    /// Sets the score function.
    pub fn score<T: ScoreMod>(self, score: T) -> Mods<T, M, P> {
        Mods { score, mask: self.mask, weight: self.weight }
    }

    /// Sets the mask function.
    pub fn mask<T: MaskMod>(self, mask: T) -> Mods<S, T, P> {
        Mods { score: self.score, mask, weight: self.weight }
    }

    /// Sets the weight function.
    pub fn weight<T: WeightMod>(self, weight: T) -> Mods<S, M, T> {
        Mods { score: self.score, mask: self.mask, weight }
    }
}
