//! Tensors, their elements and layouts, caches' formats and pages, instruction set and threads.

/// Basis of the elements of integer keys or values: see [`KvCache::with_format`](crate::KvCache::with_format).
///
/// ```
/// use sdpa::{Basis, CacheFormat, Int4, KvFormat};
/// let format = KvFormat::from(CacheFormat::Int4(Int4::Symmetric));
/// assert_eq!(format.key_basis, Basis::Channels);
/// assert_eq!(format.key_basis(Basis::Hadamard).value_basis, Basis::Channels);
/// ```
pub use sdpa_kernels::Basis;
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
/// Table of the pages of each sequence, for [`Pages::new`].
///
/// ```
/// use sdpa::BlockTable;
/// // Two sequences of 3 and 5 keys in pages of 4. They share page 7; the first does not use its second entry.
/// let table = BlockTable { entries: &[7, 0, 7, 2], lens: &[3, 5] };
/// assert_eq!(table.entries.len() % table.lens.len(), 0);
/// ```
pub use sdpa_kernels::BlockTable;
/// Format of the keys or of the values of a [`KvCache`](crate::KvCache) or a [`PagePool`](crate::PagePool).
///
/// ```
/// use sdpa::{CacheFormat, Dtype, KeyScales, KvCache, KvShape};
/// let cache = KvCache::new(1, KvShape { kv_heads: 8, head_dim: 64, value_dim: 64 })?;
/// assert_eq!(cache.clone().dtype(Dtype::F16)?.format(), CacheFormat::Elements(Dtype::F16));
/// assert_eq!(cache.clone().int8(KeyScales::PerToken)?.format(), CacheFormat::Int8PerToken);
/// let scales = [0.25; 8]; // of a layer of vLLM, for each head
/// assert!(cache.with_format(CacheFormat::E4m3PerHead(&scales)).is_ok());
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::CacheFormat;
/// Element type of a tensor or cache.
///
/// ```
/// use sdpa::{Dtype, KvCache, KvShape};
/// let shape = KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 };
/// let cache = KvCache::new(1, shape)?.dtype(Dtype::Bf16)?; // one sequence
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
/// Kind of int4: which numbers are stored beside each block of 32 elements. See [`KvCache::int4`](crate::KvCache::int4).
///
/// ```
/// use sdpa::{Int4, KvCache, KvShape};
/// let cache = KvCache::new(1, KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 })?.int4(Int4::Centred)?;
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
/// Formats of the keys and of the values of a [`KvCache`](crate::KvCache) or a [`PagePool`](crate::PagePool), and their
/// [bases](Basis).
///
/// ```
/// use sdpa::{CacheFormat, Dtype, Int4, KvFormat, KvShape, PagePool};
/// let format = KvFormat::new(CacheFormat::Elements(Dtype::Bf16), CacheFormat::Int4(Int4::Symmetric));
/// let pool = PagePool::new(100, 16, KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 }, format)?;
/// assert_eq!(pool.format(), format);
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::KvFormat;
/// Reason why a [`View`] or [`ViewMut`] was refused; `?` makes it an [`Error`](crate::Error).
///
/// ```
/// use sdpa::{LayoutError, View};
/// let error = View::bhld(&[0.0; 6], [1, 1, 2, 4]).unwrap_err();
/// assert!(matches!(error, LayoutError::OutOfBounds { reach: (0, 7), len: 6, .. }));
/// assert!(error.to_string().ends_with("takes 8 elements, but the slice has 6"));
/// ```
pub use sdpa_kernels::LayoutError;
/// Reason why a machine's matrix unit is not used: [`Isa::matrix_unit`].
///
/// ```
/// use sdpa::{Isa, NoMatrixUnit};
/// match Isa::detect().matrix_unit() {
///     Ok(()) => assert_eq!(Isa::detect().name(), "amx"),
///     Err(NoMatrixUnit::Refused) => println!("it is there, but a container or the system forbids it"),
///     Err(_) => {}
/// }
/// ```
pub use sdpa_kernels::NoMatrixUnit;
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
/// Slots of a sequence in the pages of a pool, for lists of keys that name slots.
///
/// ```
/// use sdpa::{BlockTable, PageError, SlotIndex};
/// // Pages of four keys. Sequence 1 has six keys: page 7, then half of page 2.
/// let table = BlockTable { entries: &[7, 0, 7, 2], lens: &[3, 6] };
/// let mut index = SlotIndex::new();
/// index.fill(table, 4, 1)?;
/// let (mut slots, mut positions) = ([0; 4], [0; 4]);
/// index.slots(&[5, 0, -1, 3], &mut slots)?;
/// assert_eq!(slots, [2 * 4 + 1, 7 * 4, -1, 7 * 4 + 3]);
/// index.positions(&slots, &mut positions)?; // for a Rectangle, which sorts them
/// assert_eq!(positions, [5, 0, -1, 3]);
/// let error = index.positions(&[0], &mut [0]).unwrap_err();
/// assert_eq!(error, PageError::Slot { sequence: 1, place: 0, got: 0 }); // page 0 is not used
/// # Ok::<(), PageError>(())
/// ```
pub use sdpa_kernels::SlotIndex;
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
/// Pool of threads of the standard library, to run calls on: [`Exec::on`](crate::Exec::on),
/// [`Run::executor`](crate::Run::executor).
///
/// For programs that do not use rayon, and for short steps from a thread of your own: the calling thread works too,
/// where a caller outside rayon's pool would hand the work over and sleep.
///
/// ```
/// use sdpa::{Attention, Exec, Inputs, Outputs, ThreadPool, View, ViewMut};
/// let pool = ThreadPool::new(2).expect("two threads"); // the calling thread and one more
/// let (x, mut out) = (vec![0.5; 8 * 300 * 32], vec![0.0; 8 * 300 * 32]);
/// let shape = [1, 8, 300, 32];
/// let x = View::bhld(&x, shape)?;
/// let problem = Attention::new().problem(Inputs::new(x, x, x), Outputs::new(ViewMut::bhld(&mut out, shape)?))?;
/// problem.run_once(Exec::on(&pool));
/// assert!(out.iter().all(|&x| x == 0.5));
/// # Ok::<(), sdpa::Error>(())
/// ```
pub use sdpa_kernels::ThreadPool;
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
/// assert_eq!(View::try_from(out.index_axis(ndarray::Axis(0), 0))?.shape(), [8, 1, 10, 64]); // three dimensions: one head
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
