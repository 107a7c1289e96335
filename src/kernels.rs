//! Types and functions of the kernels that are part of this crate's interface, each with an example.
//!
//! The kernels' own comments hold no examples: those would name a crate that users do not import.

/// Alignment of query rows and keys, for [`Attention::align`](crate::Attention::align).
///
/// ```
/// use sdpa::Alignment;
/// // One new row after four cached keys and its own: it stands at the last of five keys.
/// assert_eq!(Alignment::BottomRight.offset(1, 5), 4);
/// assert_eq!(Alignment::TopLeft.offset(1, 5), 0); // as PyTorch's `is_causal`: the row would see one key
/// ```
pub use sdpa_kernels::Alignment;
/// Element of a bfloat16 tensor.
///
/// ```
/// use sdpa::{Bf16, View};
/// let data = [1.0, 0.1].map(Bf16::from_f32);
/// assert_eq!((data[0].0, data[1].to_f32()), (0x3f80, 0.100097656)); // rounded to eight significant bits
/// let view = View::bhld(&data, [1, 1, 1, 2])?;
/// # assert_eq!(view.shape(), [1, 1, 1, 2]);
/// # Ok::<(), sdpa::LayoutError>(())
/// ```
pub use sdpa_kernels::Bf16;
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
/// Table of the pages of each sequence, for [`Pages::new`].
///
/// ```
/// use sdpa::BlockTable;
/// // Two sequences of 3 and 5 keys in pages of 4. They share page 7; the first does not use its second entry.
/// let table = BlockTable { entries: &[7, 0, 7, 2], lens: &[3, 5] };
/// assert_eq!(table.entries.len() % table.lens.len(), 0);
/// ```
pub use sdpa_kernels::BlockTable;
/// Argument of [`MaskMod::fits`].
///
/// ```
/// use sdpa::masks::{MaskError, PrefixLm, Tree};
/// use sdpa::{CallFacts, MaskMod, Position};
/// let windowed = CallFacts::new(1).distance("window"); // one sequence, and a window
/// assert_eq!(Tree::new(100, &[None])?.fits(&windowed), Err(MaskError::Distance { option: "window" }));
/// assert_eq!(PrefixLm::new(100).fits(&windowed), Ok(()));
///
/// /// Shows every sequence so many keys.
/// struct First(Vec<usize>);
/// impl MaskMod for First {
///     fn keep(&self, at: Position) -> bool {
///         at.key < self.0[at.batch]
///     }
///     fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
///         let enough = self.0.len() == call.sequences;
///         enough.then_some(()).ok_or(MaskError::Unfit("not as many numbers of keys as sequences"))
///     }
/// }
/// assert!(First(vec![4, 2]).fits(&windowed).is_err());
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::CallFacts;
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
/// Element type of a tensor or cache.
///
/// ```
/// use sdpa::{Dtype, KvCache};
/// let cache = KvCache::new(1, 8, [128, 128])?.dtype(Dtype::Bf16)?; // one sequence, eight heads, keys and values of 128
/// assert_eq!((Dtype::Bf16.bytes(), Dtype::Bf16.to_string()), (2, "bf16".to_string()));
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Dtype;
/// Element of a binary16 tensor.
///
/// ```
/// use sdpa::F16;
/// assert_eq!(F16::from_f32(0.1).to_f32(), 0.099975586); // rounded to eleven significant bits
/// assert_eq!(F16::from_f32(F16::LEAST_INFINITE).to_f32(), f32::INFINITY);
/// ```
pub use sdpa_kernels::F16;
/// Numbers beside each block of 32 elements of an int4 cache: see [`KvCache::int4`](crate::KvCache::int4).
///
/// ```
/// use sdpa::{Int4, KvCache};
/// let cache = KvCache::new(1, 8, [128, 128])?.int4(Int4::Centred)?;
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Int4;
/// Instruction set to run on: by default the widest available; [`Exec::isa`](crate::Exec::isa) sets another.
///
/// ```
/// use sdpa::Isa;
/// for isa in Isa::available() {
///     assert_eq!(Isa::from_name(isa.name()), Some(isa));
/// }
/// assert_eq!(Isa::detect(), Isa::available().last().unwrap());
/// ```
pub use sdpa_kernels::Isa;
/// Keys and values of a call, wherever they are stored, as [`Inputs::key_values`](crate::Inputs::key_values) gives them.
///
/// ```
/// use sdpa::{Inputs, View};
/// let (q, k, v) = ([0.0f32; 8], [0.0f32; 3 * 8], [0.5f32; 3 * 4]);
/// let (q, k) = (View::bhld(&q, [1, 1, 1, 8])?, View::bhld(&k, [1, 1, 3, 8])?);
/// let kv = Inputs::new(q, k, View::bhld(&v, [1, 1, 3, 4])?).key_values()?;
/// assert_eq!((kv.k_shape(), kv.v_shape()), ([1, 1, 3, 8], [1, 1, 3, 4]));
/// assert_eq!(kv.value([0, 0, 2, 3]), Some(0.5));
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::KeyValues;
/// Reason why a [`View`] or [`ViewMut`] was refused; `?` makes it an [`Error`](crate::Error).
///
/// ```
/// use sdpa::{LayoutError, View};
/// let error = View::bhld(&[0.0; 6], [1, 1, 2, 4]).unwrap_err();
/// assert!(matches!(error, LayoutError::OutOfBounds { reach: (0, 7), len: 6, .. }));
/// assert!(error.to_string().ends_with("takes 8 elements, but the slice has 6"));
/// ```
pub use sdpa_kernels::LayoutError;
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
/// Mask function: a closure, or a type that also classifies whole blocks.
///
/// ```
/// use sdpa::{BlockClass, BlockPosition, MaskMod, Mods, Position};
/// /// Shows the first keys, so many for each sequence.
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
/// assert!(!mods.mask.keep(Position { batch: 1, head: 0, row: 0, key: 20, position: 0 }));
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
/// Placeholder for a function that [`Mods`] does not have.
///
/// ```
/// use sdpa::{Mods, NoMod};
/// let none: Mods<NoMod, NoMod, NoMod> = Mods::new();
/// # let _ = none;
/// ```
pub use sdpa_kernels::NoMod;
/// Reason why a [`BlockTable`] or its pools were refused; `?` makes it an [`Error`](crate::Error).
///
/// ```
/// use sdpa::{BlockTable, PageError, Pages, View};
/// let pool = [0.0f32; 2 * 4]; // two pages of four keys
/// let pool = View::bhld(&pool, [2, 1, 4, 1])?;
/// let error = Pages::new(pool, pool, BlockTable { entries: &[1, 2], lens: &[5] }).unwrap_err();
/// assert_eq!(error, PageError::Page { sequence: 0, entry: 1, page: 2, pages: 2 });
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::PageError;
/// Keys and values in pages of your own pool, for [`Inputs::paged`](crate::Inputs::paged).
///
/// ```
/// use sdpa::{Attention, BlockTable, Inputs, Outputs, Pages, View, ViewMut};
/// // Three pages of two keys, one head; every value is the number of its page.
/// let (keys, values) = ([1.0; 3 * 2 * 2], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
/// let (keys, values) = (View::bhld(&keys, [3, 1, 2, 2])?, View::bhld(&values, [3, 1, 2, 1])?);
/// // One sequence of three keys: page 2, then the first key of page 1.
/// let pages = Pages::new(keys, values, BlockTable { entries: &[2, 1], lens: &[3] })?;
/// let (q, mut out) = ([0.0; 2], [0.0]);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 1])?);
/// sdpa::attention(&Attention::new(), Inputs::paged(View::bhld(&q, [1, 1, 1, 2])?, pages), outputs)?;
/// assert!((out[0] - 5.0 / 3.0).abs() < 1e-6); // the mean of 2, 2 and 1
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::Pages;
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
/// Argument of the functions of [`Mods`]: a row and a key.
///
/// ```
/// use sdpa::Position;
/// // Fourth row of a chunk that stands behind 100 earlier keys: distances are `position − key`.
/// let at = Position { batch: 0, head: 2, row: 3, key: 101, position: 103 };
/// let decay = |score: f32, at: Position| score - 0.5 * (at.position - at.key as isize) as f32;
/// assert_eq!(decay(0.0, at), -1.0);
/// ```
pub use sdpa_kernels::Position;
/// Precision shortcuts, for [`Attention::precision`](crate::Attention::precision).
///
/// ```
/// use sdpa::{Attention, Precision};
/// let fast = Attention::new().precision(Precision::Native); // for bfloat16 keys and values
/// assert_eq!(Attention::new().precision(Precision::Exact), Attention::new());
/// # let _ = fast;
/// ```
pub use sdpa_kernels::Precision;
/// Score function: a closure of a score and a [`Position`].
///
/// ```
/// use sdpa::{Mods, Position, ScoreMod};
/// // A bias by distance, of a table that keys beyond its end share.
/// let table = [0.0, -0.5, -0.8, -1.0];
/// let near = move |score: f32, at: Position| {
///     let distance = at.position.abs_diff(at.key as isize);
///     score + table[distance.min(table.len() - 1)]
/// };
/// let mods = Mods::new().score(near);
/// assert_eq!(mods.score.score(2.0, Position { batch: 0, head: 0, row: 9, key: 8, position: 9 }), 1.5);
///
/// // Chosen at run time: one type for any function.
/// let named = |name: &str| -> Box<dyn ScoreMod> {
///     match name {
///         "near" => Box::new(near),
///         "same" => Box::new(|score: f32, _: Position| score),
///         _ => Box::new(sdpa::NoMod),
///     }
/// };
/// let mods = Mods::new().score(named("near"));
/// # assert_eq!(mods.score.score(2.0, Position { batch: 0, head: 0, row: 9, key: 8, position: 9 }), 1.5);
/// ```
pub use sdpa_kernels::ScoreMod;
/// View of any element type, which calls take; views convert to it.
///
/// ```
/// use sdpa::{Dtype, F16, Tensor, View};
/// let data = [F16::from_f32(0.5); 8];
/// let tensor: Tensor<'_> = View::bhld(&data, [1, 1, 2, 4])?.into();
/// assert_eq!((tensor.dtype(), tensor.shape(), tensor.get([0, 0, 1, 3])), (Dtype::F16, [1, 1, 2, 4], Some(0.5)));
/// # Ok::<(), sdpa::LayoutError>(())
/// ```
pub use sdpa_kernels::Tensor;
/// Writable view of any element type, which calls write to; writable views convert to it.
///
/// ```
/// use sdpa::{Bf16, Dtype, TensorMut, ViewMut};
/// let mut data = [Bf16::default(); 8];
/// let tensor: TensorMut<'_> = ViewMut::bhld(&mut data, [1, 1, 2, 4])?.into();
/// assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::Bf16, [1, 1, 2, 4]));
/// # Ok::<(), sdpa::LayoutError>(())
/// ```
pub use sdpa_kernels::TensorMut;
/// Read-only tensor view of any layout in memory.
///
/// ```
/// use sdpa::View;
/// let data = vec![0.0f32; 2 * 3 * 5 * 8];
/// let view = View::bhld(&data, [2, 3, 5, 8])?; // batch, heads, rows, dim
/// let other = View::blhd(&data, [2, 5, 3, 8])?; // batch, rows, heads, dim
/// assert_eq!(view.shape(), other.shape());
/// # Ok::<(), sdpa::LayoutError>(())
/// ```
///
/// With the feature `ndarray`, arrays of that crate (0.17) convert to views without copies, whatever their strides;
/// writable arrays convert to [`ViewMut`].
///
/// ```
/// use ndarray::{Array4, s};
/// use sdpa::{Attention, Inputs, Outputs, View, ViewMut};
/// let (q, kv) = (Array4::<f32>::zeros([1, 10, 8, 64]), Array4::<f32>::ones([1, 10, 2, 64])); // batch, rows, heads, dim
/// let kv = View::try_from(kv.view().permuted_axes([0, 2, 1, 3]))?;
/// let mut out = Array4::<f32>::zeros([1, 8, 10, 64]);
/// sdpa::attention(
///     &Attention::new(),
///     Inputs::new(View::try_from(q.view().permuted_axes([0, 2, 1, 3]))?, kv, kv),
///     Outputs::new(ViewMut::try_from(&mut out)?),
/// )?;
/// assert_eq!(out[[0, 7, 9, 63]], 1.0);
/// assert_eq!(View::try_from(out.slice(s![.., ..;-1, .., ..;2]))?.strides()[1..], [-640, 64, 2]);
/// assert!(View::try_from(out.index_axis(ndarray::Axis(0), 0)).is_err()); // three dimensions
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::View;
/// Writable tensor view of any layout in memory in which no element occurs twice.
///
/// ```
/// use sdpa::{LayoutError, ViewMut};
/// let mut data = vec![0.0f32; 3 * 5 * 8];
/// let mut view = ViewMut::blhd(&mut data, [1, 5, 3, 8])?; // rows, then heads
/// *view.get_mut([0, 2, 1, 7]).unwrap() = 1.0; // head 2, row 1
/// assert_eq!(data[1 * 3 * 8 + 2 * 8 + 7], 1.0);
/// let rows_on_top_of_each_other = ViewMut::from_strides(&mut data, 0, [1, 1, 5, 8], [0, 0, 0, 1]);
/// assert!(matches!(rows_on_top_of_each_other, Err(LayoutError::Overlap { .. })));
/// # Ok::<(), LayoutError>(())
/// ```
pub use sdpa_kernels::ViewMut;
/// Weight function: a closure of a weight and a [`Position`].
///
/// ```
/// use sdpa::{Mods, Position, WeightMod};
/// // Keeps two weights in three, as dropout does; a hash of the position takes the place of a generator.
/// let keep = |at: Position| (at.key * 2_654_435_761 + at.row * 40_503 + at.head) % 3 > 0;
/// let mods = Mods::new().weight(move |weight: f32, at: Position| if keep(at) { 1.5 * weight } else { 0.0 });
/// assert_eq!(mods.weight.weight(0.5, Position { batch: 0, head: 0, row: 0, key: 0, position: 0 }), 0.0);
/// ```
pub use sdpa_kernels::WeightMod;
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
/// Score function with its derivative, made of two closures: for calls that have a backward pass.
///
/// ```
/// use sdpa::{Mods, Position, ScoreMod, WithDerivative};
/// // A soft limit: s / √(1 + s²).
/// let limit = |s: f32, _: Position| s / (1.0 + s * s).sqrt();
/// let slope = |s: f32, _: Position| (1.0 + s * s).powf(-1.5);
/// let mods = Mods::new().score(WithDerivative::new(limit, slope));
/// let at = Position { batch: 0, head: 0, row: 9, key: 8, position: 9 };
/// assert_eq!((mods.score.score(0.0, at), mods.score.derivative(0.0, at)), (0.0, Some(1.0)));
/// assert_eq!(limit.derivative(0.0, at), None); // a closure alone has none
/// ```
pub use sdpa_kernels::WithDerivative;
/// Returns the ALiBi slopes of `heads` query heads, for [`Inputs::alibi`](crate::Inputs::alibi).
///
/// ```
/// let slopes = sdpa::alibi_slopes(12);
/// assert_eq!(slopes[..8], sdpa::alibi_slopes(8));
/// assert_eq!(slopes[8], 2f32.powf(-0.5));
/// ```
pub use sdpa_kernels::alibi_slopes;
