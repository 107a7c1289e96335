//! Settings of calls, and tensors that they read and write.

/// Alignment of query rows and keys, for [`Attention::align`](crate::Attention::align).
///
/// ```
/// use sdpa::Alignment;
/// // One new row after four cached keys and its own: it stands at the last of five keys.
/// assert_eq!(Alignment::BottomRight.offset(1, 5), 4);
/// assert_eq!(Alignment::TopLeft.offset(1, 5), 0); // as PyTorch's `is_causal`: the row would see one key
/// ```
pub use sdpa_kernels::Alignment;
/// Kind of bound that an argument breaks, in an [`Error`](crate::Error).
///
/// ```
/// use sdpa::{Attention, Bound, Error, Inputs, Outputs, View, ViewMut};
/// let (x, mut out) = ([0.0; 3 * 4], [0.0; 3 * 4]);
/// let x = View::bhld(&x, [1, 1, 3, 4])?;
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 4])?);
/// let error = sdpa::attention(&Attention::new(), Inputs::new(x, x, x).kv_lens(&[7]), outputs).unwrap_err();
/// assert!(matches!(error, Error::Entry { got: 7, bound: Bound::AtMost, limit: 3, .. }));
/// # Ok::<(), Error>(())
/// ```
pub use sdpa_kernels::Bound;
/// Choice of a causal rule, for settings of your own; calls take it as [`Attention::causal`](crate::Attention::causal).
///
/// ```
/// use sdpa::{Attention, Causality};
/// let attention = |rule| match rule {
///     Causality::Causal => Attention::new().causal(),
///     Causality::Full => Attention::new(),
/// };
/// assert_eq!(attention(Causality::default()), Attention::new());
/// ```
pub use sdpa_kernels::Causality;
/// Settings of dropout, for code of yours that needs to know which weights
/// [`Attention::dropout`](crate::Attention::dropout) drops.
///
/// ```
/// use sdpa::{Dropout, Position};
/// let dropout = Dropout { p: 0.25, seed: 1, offset: 0 };
/// let at = |key: usize| Position { batch: 0, head: 0, row: 0, key, position: 0, distance: -(key as isize) };
/// let kept = (0..10_000).filter(|&key| dropout.keeps(at(key), 1)).count();
/// assert!((7_300..7_700).contains(&kept));
/// ```
pub use sdpa_kernels::Dropout;
/// Set of gradients, for [`attention_backward`](crate::attention_backward()).
///
/// ```
/// use sdpa::{Gradients, ViewMut};
/// let (mut dq, mut dk, mut dv) = ([0.0f32; 4 * 8], [0.0f32; 6 * 8], [0.0f32; 6 * 8]);
/// let gradients = Gradients::new()
///     .q(ViewMut::bhld(&mut dq, [1, 1, 4, 8])?)
///     .k(ViewMut::bhld(&mut dk, [1, 1, 6, 8])?)
///     .v(ViewMut::bhld(&mut dv, [1, 1, 6, 8])?);
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Gradients;
/// Place of a list of keys, in a [`SelectionError`].
///
/// ```
/// use sdpa::{ListPlace, SelectedKeys, SelectionError, SelectionShape};
/// let shape = SelectionShape { q_lens: &[3], heads: 1, rows: 2, unit: 1 };
/// let error = SelectedKeys::new().fill(shape, &[0, 1, 3], &[5, 7, 7], None).unwrap_err();
/// let list = ListPlace { sequence: 0, head: 0, row: 2 };
/// assert_eq!(error, SelectionError::Repeated { list, places: [0, 1], got: 7 });
/// ```
pub use sdpa_kernels::ListPlace;
/// Mask given as a tensor, for [`Inputs::mask`](crate::Inputs::mask).
///
/// ```
/// use sdpa::{Attention, Inputs, Mask, Outputs, View, ViewMut};
/// let (q, k, v) = ([0.0; 2], [1.0; 3 * 2], [1.0, 2.0, 30.0]);
/// let (q, k) = (View::bhld(&q, [1, 1, 1, 2])?, View::bhld(&k, [1, 1, 3, 2])?);
/// let inputs = Inputs::new(q, k, View::bhld(&v, [1, 1, 3, 1])?);
/// let padding = [false, false, true]; // true: padding
/// let inputs = inputs.mask(Mask::drop(View::bhld(&padding, [1, 1, 1, 3])?));
/// let mut out = [0.0];
/// sdpa::attention(&Attention::new(), inputs, Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?))?;
/// assert_eq!(out, [1.5]); // the mean of 1 and 2
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Mask;
/// Output of a call, and further tensors that it writes, for [`attention()`](crate::attention()).
///
/// ```
/// use sdpa::{Attention, Inputs, Outputs, View, ViewMut};
/// let x = [0.0; 2 * 4];
/// let x = View::bhld(&x, [1, 1, 2, 4])?;
/// let (mut out, mut lse, mut weights) = ([0.0; 2 * 4], [0.0; 2], [0.0; 2 * 2]);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 4])?)
///     .lse(ViewMut::bhl(&mut lse, [1, 1, 2])?)
///     .weights(ViewMut::bhld(&mut weights, [1, 1, 2, 2])?);
/// sdpa::attention(&Attention::new().causal(), Inputs::new(x, x, x), outputs)?;
/// assert_eq!(weights, [1.0, 0.0, 0.5, 0.5]);
/// assert!(lse[0] == 0.0 && (lse[1] - 2f32.ln()).abs() < 1e-6);
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Outputs;
/// Point of the computation at which [`Outputs::scores`](crate::Outputs::scores) writes scores.
///
/// ```
/// use sdpa::{Attention, Inputs, Outputs, Point, View, ViewMut};
/// let x = [1.0, 2.0];
/// let x = View::bhld(&x, [1, 1, 2, 1])?; // two rows of one number
/// let (mut out, mut scores) = ([0.0; 2], [0.0; 4]);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 1])?)
///     .scores(Point::Masked, ViewMut::bhld(&mut scores, [1, 1, 2, 2])?);
/// sdpa::attention(&Attention::new().causal(), Inputs::new(x, x, x), outputs)?;
/// assert_eq!(scores, [1.0, f32::NEG_INFINITY, 2.0, 4.0]);
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Point;
/// Precision shortcuts, for [`Attention::precision`](crate::Attention::precision).
///
/// ```
/// use sdpa::{Attention, Precision};
/// let fast = Attention::new().precision(Precision::Native); // for bfloat16 keys and values
/// assert_eq!(Attention::new().precision(Precision::Exact), Attention::new());
/// # let _ = fast;
/// ```
pub use sdpa_kernels::Precision;
/// Numbers of selected keys as other programs hand them over, for [`SelectedKeys::fill_padded`].
///
/// ```
/// use sdpa::{Rectangle, SelectedKeys, SelectionShape, View};
/// let numbers = [9, 2, -1, 4, 0, 7]; // two rows of three places, by falling scores
/// let rectangle = Rectangle::new(View::bhld(&numbers, [1, 1, 2, 3])?).lens(&[3, 2]);
/// let mut selected = SelectedKeys::new();
/// selected.fill_padded(SelectionShape { q_lens: &[2], heads: 1, rows: 1, unit: 1 }, &[10], rectangle, None)?;
/// let list = |row| selected.numbers(0, 0, row).into_iter().flatten().collect::<Vec<_>>();
/// assert_eq!((list(0), list(1)), (vec![2, 9], vec![0, 4]));
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Rectangle;
/// Saved results, for [`attention_backward`](crate::attention_backward()).
///
/// ```
/// use sdpa::{Saved, View};
/// let (out, lse, d_out) = ([0.5f32; 3 * 8], [1.0; 3], [1.0f32; 3 * 8]);
/// let shape = [1, 1, 3, 8]; // batch, heads, rows, value_dim
/// let rows = |x| View::bhld(x, shape);
/// let saved = Saved::new(rows(&out)?, View::bhl(&lse, [1, 1, 3])?, rows(&d_out)?);
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Saved;
/// Lists of the keys that rows select, for [`Inputs::selected`](crate::Inputs::selected).
///
/// ```
/// use sdpa::{SelectedKeys, SelectionShape};
/// // Units of 64 keys for 128 rows, each head its own: two sequences, of 200 rows and of 1 row; two heads.
/// let shape = SelectionShape { q_lens: &[200, 1], heads: 2, rows: 128, unit: 64 };
/// let mut selected = SelectedKeys::new();
/// selected.fill(shape, &[0, 2, 3, 5, 5, 6, 8], &[0, 3, 2, 1, 4, 7, 0, 9], None)?;
/// assert!(selected.names(0, 1, 100, 4 * 64 + 63) && !selected.names(0, 1, 128, 4 * 64 + 63));
/// assert_eq!(selected.numbers(1, 1, 0).map(|numbers| numbers.collect()), Some(vec![0, 9]));
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::SelectedKeys;
/// Error in lists of selected keys.
///
/// ```
/// use sdpa::{SelectedKeys, SelectionError, SelectionShape};
/// let shape = SelectionShape { q_lens: &[1], heads: 1, rows: 1, unit: 1 };
/// let error = SelectedKeys::new().fill(shape, &[0, 2], &[8, 3], None).unwrap_err();
/// assert!(matches!(error, SelectionError::Order { place: 1, got: 3, before: 8, .. }));
/// ```
pub use sdpa_kernels::SelectionError;
/// Which rows and heads have lists of selected keys of their own, for [`SelectedKeys`].
///
/// ```
/// use sdpa::SelectionShape;
/// // A list of single keys for each row, for all heads: 4 sequences of one row.
/// let shape = SelectionShape { q_lens: &[1; 4], heads: 1, rows: 1, unit: 1 };
/// # let _ = shape;
/// ```
pub use sdpa_kernels::SelectionShape;
/// Rule by which rows choose keys, for [`Indexer::select`](crate::Indexer::select) and [`top_k`](crate::top_k()).
///
/// ```
/// use sdpa::TopK;
/// let tokens = TopK::new(2048); // as in DeepSeek V3.2
/// // Scores of pooled keys, one for 128: 16 blocks for 128 rows, the first, the last that these rows see, and the best others.
/// let blocks = TopK { first: 1, last: 1, rows: 128, unit: 128, ..TopK::new(16) };
/// let by_mass = TopK { share: Some(0.95), ..tokens };
/// # let _ = (blocks, by_mass);
/// ```
pub use sdpa_kernels::TopK;
/// Sliding window, for [`Attention::window`](crate::Attention::window).
///
/// ```
/// use sdpa::{Attention, Window};
/// use std::num::NonZeroUsize;
/// let mistral = Window::last_tokens(NonZeroUsize::new(4096).unwrap()); // `sliding_window` of a model's configuration
/// assert_eq!(mistral, Window::inclusive(Some(4095), Some(0)));
/// let streaming = Attention::new().causal().window(mistral.keep_first(4)); // and four keys that always stay
/// # let _ = streaming;
/// ```
pub use sdpa_kernels::Window;
/// Returns the ALiBi slopes of `heads` query heads, for [`Inputs::alibi`](crate::Inputs::alibi).
///
/// ```
/// let slopes = sdpa::alibi_slopes(12);
/// assert_eq!(slopes[..8], sdpa::alibi_slopes(8));
/// assert_eq!(slopes[8], 2f32.powf(-0.5));
/// ```
pub use sdpa_kernels::alibi_slopes;
