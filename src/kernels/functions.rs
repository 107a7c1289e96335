//! Functions of scores, positions and weights, and what they are told.

/// Answer of [`MaskMod::class`].
///
/// ```
/// use sdpa::{BlockClass, BlockPosition};
/// // Keys from 100 on are visible, those before are not.
/// let class = |block: BlockPosition| match block.keys {
///     keys if keys.start >= 100 => BlockClass::All,
///     keys if keys.end <= 100 => BlockClass::None,
///     _ => BlockClass::Mixed,
/// };
/// let block = BlockPosition { batch: 0, head: 0, rows: 0..6, keys: 96..112, position: 90 };
/// assert_eq!(class(block), BlockClass::Mixed);
/// ```
pub use sdpa_kernels::BlockClass;
/// Argument of [`MaskMod::class`].
///
/// ```
/// use sdpa::BlockPosition;
/// // Rows 0, 1 and 2 of a chunk that stands behind 90 keys, and keys 96 and 97.
/// let block = BlockPosition { batch: 0, head: 0, rows: 0..3, keys: 96..98, position: 90 };
/// assert!(block.pairs().all(|at| at.position < at.key as isize)); // a causal function hides the whole block
/// assert_eq!(block.pairs().count(), 6);
/// ```
pub use sdpa_kernels::BlockPosition;
/// Argument of [`MaskMod::fits`]. [`MaskMod::fits_rows`] is told where the rows of each sequence lie.
///
/// ```
/// use sdpa::masks::{MaskError, PrefixLm, Tree};
/// use sdpa::{BlockPosition, CallFacts, MaskMod, Position};
/// let windowed = CallFacts::new(1).distance("window"); // one sequence, and a window
/// assert_eq!(Tree::new(100, &[None])?.fits(&windowed), Err(MaskError::Distance { option: "window" }));
/// assert_eq!(PrefixLm::new(100).fits(&windowed), Ok(()));
/// // Three rows, behind 98 keys: the last one lies behind the draft, of one token.
/// let rows = BlockPosition { batch: 0, head: 0, rows: 0..3, keys: 0..101, position: 99 };
/// let behind = MaskError::Behind { sequence: 0, position: 101, end: 101 };
/// assert_eq!(Tree::new(100, &[None])?.fits_rows(&rows), Err(behind));
///
/// /// Shows sequence `b` its first `self.0[b]` keys.
/// struct First(Vec<usize>);
/// impl MaskMod for First {
///     fn keep(&self, at: Position) -> bool {
///         at.key < self.0[at.batch]
///     }
///     fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
///         let enough = self.0.len() == call.sequences;
///         enough.then_some(()).ok_or(MaskError::Unfit("a number of keys for each sequence is needed"))
///     }
/// }
/// assert!(First(vec![4, 2]).fits(&windowed).is_err());
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::CallFacts;
/// Mask function: a closure, or a type that also classifies whole blocks.
///
/// ```
/// use sdpa::{BlockClass, BlockPosition, MaskMod, Mods, Position};
/// /// Shows sequence `b` its first `self.0[b]` keys.
/// struct First(Vec<usize>);
/// impl MaskMod for First {
///     fn keep(&self, at: Position) -> bool {
///         at.key < self.0[at.batch]
///     }
///     fn class(&self, block: BlockPosition) -> BlockClass {
///         match self.0[block.batch] {
///             n if block.keys.end <= n => BlockClass::All,
///             n if block.keys.start >= n => BlockClass::None,
///             _ => BlockClass::Mixed,
///         }
///     }
/// }
/// let mods = Mods::new().mask(First(vec![300, 20]));
/// assert!(!mods.mask.keep(Position { batch: 1, head: 0, row: 0, key: 20, position: 0, distance: -20 }));
/// ```
pub use sdpa_kernels::MaskMod;
/// Your functions of scores, positions and weights, for [`attention_with`](crate::attention_with) and
/// [`Problem::run_with`](crate::Problem::run_with). `cargo run --release --example functions` shows some at work.
///
/// ```
/// use sdpa::{Attention, Inputs, Mods, Outputs, Position, Run, View, ViewMut};
/// let (q, k, v) = ([0.0; 2], [1.0; 4 * 2], [0.0, 1.0, 2.0, 3.0]); // one row, four keys
/// let (q, k) = (View::bhld(&q, [1, 1, 1, 2])?, View::bhld(&k, [1, 1, 4, 2])?);
/// let inputs = Inputs::new(q, k, View::bhld(&v, [1, 1, 4, 1])?);
/// let mut out = [0.0];
/// let mods = Mods::new().mask(|at: Position| at.key % 2 == 1).weight(|weight: f32, _: Position| 10.0 * weight);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?);
/// sdpa::attention_with(&Attention::new(), inputs, outputs, Run::new().mods(&mods))?;
/// assert_eq!(out, [20.0]); // ten times the mean of 1 and 3
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Mods;
/// Argument of the functions of [`Mods`]: a row and a key.
///
/// ```
/// use sdpa::Position;
/// // Fourth row of a chunk that stands behind 100 earlier keys.
/// let at = Position { batch: 0, head: 2, row: 3, key: 101, position: 103, distance: 2 };
/// let decay = |score: f32, at: Position| score - 0.5 * at.distance as f32;
/// assert_eq!(decay(0.0, at), -1.0);
/// ```
pub use sdpa_kernels::Position;
/// Score function: a closure of a score and a [`Position`].
///
/// ```
/// use sdpa::{Mods, Position, ScoreMod};
/// // A bias by distance, of a table that keys beyond its end share.
/// let table = [0.0, -0.5, -0.8, -1.0];
/// let near = move |score: f32, at: Position| {
///     let distance = at.distance.unsigned_abs();
///     score + table[distance.min(table.len() - 1)]
/// };
/// let mods = Mods::new().score(near);
/// assert_eq!(mods.score.score(2.0, Position { batch: 0, head: 0, row: 9, key: 8, position: 9, distance: 1 }), 1.5);
///
/// // Chosen at run time: one type for any function.
/// let named = |name: &str| -> Box<dyn ScoreMod> {
///     match name {
///         "near" => Box::new(near),
///         "same" => Box::new(|score: f32, _: Position| score),
///         _ => Box::new(()), // no function
///     }
/// };
/// let mods = Mods::new().score(named("near"));
/// # assert_eq!(mods.score.score(2.0, Position { batch: 0, head: 0, row: 9, key: 8, position: 9, distance: 1 }), 1.5);
/// ```
pub use sdpa_kernels::ScoreMod;
/// Weight function: a closure of a weight and a [`Position`].
///
/// ```
/// use sdpa::{Mods, Position, WeightMod};
/// // Keeps two weights in three, as dropout does; a hash of the position takes the place of a generator.
/// let keep = |at: Position| (at.key * 2_654_435_761 + at.row * 40_503 + at.head) % 3 > 0;
/// let mods = Mods::new().weight(move |weight: f32, at: Position| if keep(at) { 1.5 * weight } else { 0.0 });
/// assert_eq!(mods.weight.weight(0.5, Position { batch: 0, head: 0, row: 0, key: 0, position: 0, distance: 0 }), 0.0);
/// ```
pub use sdpa_kernels::WeightMod;
/// Score function with its derivative, made of two closures: for calls that have a backward pass.
///
/// ```
/// use sdpa::{Mods, Position, ScoreMod, WithDerivative};
/// // A soft limit: s / √(1 + s²).
/// let limit = |s: f32, _: Position| s / (1.0 + s * s).sqrt();
/// let slope = |s: f32, _: Position| (1.0 + s * s).powf(-1.5);
/// let mods = Mods::new().score(WithDerivative::new(limit, slope));
/// let at = Position { batch: 0, head: 0, row: 9, key: 8, position: 9, distance: 1 };
/// assert_eq!((mods.score.score(0.0, at), mods.score.derivative(0.0, at)), (0.0, Some(1.0)));
/// assert_eq!(limit.derivative(0.0, at), None); // a closure alone has none
/// ```
pub use sdpa_kernels::WithDerivative;
