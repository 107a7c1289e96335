//! Stock mask functions and their combinations, for [`Mods::mask`](crate::Mods::mask).
//!
//! | mask | a row sees |
//! |---|---|
//! | [`Documents`] | the keys of its document; a sequence packs several documents |
//! | [`PrefixLm`] | the first keys, and all up to its own position |
//! | [`Tree`] | the committed keys, and its ancestors in a tree of drafted tokens |
//! | [`PerSequence`] | what the mask of its sequence keeps: one mask for each sequence of the batch, or `None` |
//! | `a.and(b)`, `a.or(b)`, `a.not()` | what both masks keep, what either keeps, what `a` hides; any masks, yours included |
//!
//! They classify blocks ([`MaskMod::class`](crate::MaskMod::class)), so that hidden blocks are not computed. Rules of
//! the call, such as [`Attention::causal`](crate::Attention::causal), hold in addition.

/// Mask that keeps what two masks both keep, as [`MaskMod::and`](crate::MaskMod::and) makes it.
///
/// ```
/// use sdpa::{MaskMod, Position, masks::Documents};
/// // Two documents, and of each the last keys alone.
/// let near = |at: Position| at.distance.abs() < 2;
/// let mask = Documents::by_ends(&[3, 6])?.and(near);
/// let sees = |row: usize, key: usize| {
///     let position = row as isize;
///     mask.keep(Position { batch: 0, head: 0, row, key, position, distance: position - key as isize })
/// };
/// assert!(sees(4, 3) && !sees(3, 2) && !sees(5, 3));
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::And;
/// Documents packed into one sequence; each sees only itself.
///
/// ```
/// use sdpa::{Attention, Inputs, Mods, Outputs, Run, View, ViewMut, masks::Documents};
/// let (x, v) = ([0.0; 5], [1.0, 2.0, 3.0, /**/ 10.0, 20.0]); // a text of three tokens and one of two
/// let (x, v) = (View::bhld(&x, [1, 1, 5, 1])?, View::bhld(&v, [1, 1, 5, 1])?);
/// let mut out = [0.0; 5];
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 5, 1])?);
/// let mods = Mods::new().mask(Documents::by_ends(&[3, 5])?);
/// sdpa::attention_with(&Attention::new().causal(), Inputs::new(x, x, v), outputs, Run::new().mods(&mods))?;
/// assert_eq!(out, [1.0, 1.5, 2.0, 10.0, 15.0]);
/// assert_eq!(Documents::by_ids(&["a", "a", "a", "b", "b"]), Documents::by_ends(&[3, 5])?);
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Documents;
/// Reason why a mask was refused; `?` makes it an [`Error`](crate::Error).
///
/// ```
/// use sdpa::masks::{MaskError, Tree};
/// assert_eq!(Tree::new(100, &[None, Some(2)]), Err(MaskError::Parent { token: 1, parent: 2 }));
/// ```
pub use sdpa_kernels::MaskError;
/// Mask that keeps what another hides, as [`MaskMod::not`](crate::MaskMod::not) makes it.
///
/// ```
/// use sdpa::{MaskMod, Position, masks::Documents};
/// let others = Documents::by_ends(&[3, 6])?.not(); // what is in other documents
/// assert!(others.keep(Position { batch: 0, head: 0, row: 4, key: 0, position: 4, distance: 4 }));
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Not;
/// Mask that keeps what at least one of two masks keeps, as [`MaskMod::or`](crate::MaskMod::or) makes it.
///
/// ```
/// use sdpa::{MaskMod, Position, masks::Documents};
/// // Two documents that also see the first key, of the system prompt.
/// let mask = Documents::by_ends(&[1, 4, 6])?.or(|at: Position| at.key == 0);
/// let sees = |row: usize, key: usize| {
///     let position = row as isize;
///     mask.keep(Position { batch: 0, head: 0, row, key, position, distance: position - key as isize })
/// };
/// assert!(sees(5, 0) && sees(5, 4) && !sees(5, 1));
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Or;
/// One mask for each sequence of a batch.
///
/// `None` hides nothing, not even later keys. So a call with trees beside chunks of prompts also sets
/// [`Attention::causal`](crate::Attention::causal), which changes nothing in a tree.
///
/// ```
/// use sdpa::{MaskMod, Position, masks::{PerSequence, PrefixLm}};
/// let mask = PerSequence::new([4, 1].map(PrefixLm::new)); // prefixes of four keys and of one
/// let at = |batch, key| Position { batch, head: 0, row: 0, key, position: 0, distance: -(key as isize) };
/// let sees = |batch, key| mask.keep(at(batch, key));
/// assert!(sees(0, 3) && !sees(1, 3));
/// // A sequence without a mask beside one with it.
/// let mask = PerSequence::new([None, Some(PrefixLm::new(1))]);
/// assert!(mask.keep(at(0, 3)) && !mask.keep(at(1, 3)));
/// ```
pub use sdpa_kernels::PerSequence;
/// Prefix that every row sees, then causal.
///
/// ```
/// use sdpa::{Attention, Inputs, Mods, Outputs, Run, View, ViewMut, masks::PrefixLm};
/// let (x, v) = ([0.0; 4], [2.0, 4.0, 9.0, 5.0]);
/// let (x, v) = (View::bhld(&x, [1, 1, 4, 1])?, View::bhld(&v, [1, 1, 4, 1])?);
/// let mut out = [0.0; 4];
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 4, 1])?);
/// let mods = Mods::new().mask(PrefixLm::new(2));
/// sdpa::attention_with(&Attention::new(), Inputs::new(x, x, v), outputs, Run::new().mods(&mods))?;
/// assert_eq!(out, [3.0, 3.0, 5.0, 5.0]); // the first two see each other
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::PrefixLm;
/// Tree of drafted tokens. Each token sees the committed keys, its ancestors and itself.
///
/// ```
/// use sdpa::{Alignment, Attention, Inputs, Mods, Outputs, Run, View, ViewMut, masks::Tree};
/// // Two committed tokens; then drafted ones: 0 and, after it, either 1 or 2.
/// let tree = Tree::new(2, &[None, Some(0), Some(0)])?;
/// let (q, k, v) = ([0.0; 3], [0.0; 5], [1.0, 3.0, /**/ 5.0, 7.0, 15.0]);
/// let (q, k) = (View::bhld(&q, [1, 1, 3, 1])?, View::bhld(&k, [1, 1, 5, 1])?);
/// let mut out = [0.0; 3];
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 1])?);
/// let attention = Attention::new().align(Alignment::BottomRight); // the three rows are the last three tokens
/// let inputs = Inputs::new(q, k, View::bhld(&v, [1, 1, 5, 1])?);
/// sdpa::attention_with(&attention, inputs, outputs, Run::new().mods(&Mods::new().mask(tree)))?;
/// assert_eq!(out, [3.0, 4.0, 6.0]); // means of 1 3 5, of 1 3 5 7, and of 1 3 5 15
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Tree;
