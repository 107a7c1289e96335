//! Arrays of the crate ndarray as tensors: any strides, with the bits of dense copies, and nothing but their elements.

use crate::support::{Answer, Rng, Sizes, Tensor, Tensors, execs, run, run_inputs};
use half::{bf16, f16};
use ndarray::{Array, Array3, Array4, ArrayView4, ArrayViewMut4, Axis, CowArray, Slice, arr0, s};
use sdpa::{Alignment, Attention, Bf16, Error, Exec, F16, Inputs, LayoutError, Mask, Outputs, View, ViewMut};

const SIZES: Sizes = [2, 4, 2, 19, 37, 20, 24];

/// Lies between elements and is another's: neither read nor written.
const FOREIGN: u32 = 0x7fc0_1234;

/// An array and its memory: stored in the order of `axes`, each axis with steps.
struct Laid {
    memory: Array4<f32>,
    axes: [usize; 4],
    steps: [isize; 4],
}

impl Laid {
    fn new(shape: [usize; 4], axes: [usize; 4], steps: [isize; 4]) -> Self {
        let stored = axes.map(|axis| shape[axis] * steps[axis].unsigned_abs());
        Self { memory: Array::from_elem(stored, f32::from_bits(FOREIGN)), axes, steps }
    }

    fn of(tensor: &Tensor, axes: [usize; 4], steps: [isize; 4]) -> Self {
        let mut laid = Self::new(tensor.shape, axes, steps);
        laid.view_mut().assign(&array(tensor));
        laid
    }

    fn view(&self) -> ArrayView4<'_, f32> {
        let mut view = self.memory.view().permuted_axes(order(self.axes));
        view.slice_each_axis_inplace(|axis| Slice::new(0, None, self.steps[axis.axis.index()]));
        view
    }

    fn view_mut(&mut self) -> ArrayViewMut4<'_, f32> {
        let mut view = self.memory.view_mut().permuted_axes(order(self.axes));
        view.slice_each_axis_inplace(|axis| Slice::new(0, None, self.steps[axis.axis.index()]));
        view
    }
}

/// The places of the four axes in `axes`.
fn order(axes: [usize; 4]) -> [usize; 4] {
    core::array::from_fn(|axis| axes.iter().position(|&a| a == axis).expect("all four"))
}

/// Every order of four axes.
fn orders() -> impl Iterator<Item = [usize; 4]> {
    let all = (0..256).map(|n| [n / 64, n / 16 % 4, n / 4 % 4, n % 4]);
    all.filter(|axes| (0..4).all(|axis| axes.contains(&axis)))
}

fn array(tensor: &Tensor) -> Array4<f32> {
    Array4::from_shape_vec(tensor.shape, tensor.data.clone()).expect("dense")
}

fn view<'a>(array: &'a Array4<f32>) -> View<'a> {
    View::try_from(array).expect("four dimensions")
}

fn bits<'a>(numbers: impl IntoIterator<Item = &'a f32>) -> Vec<u32> {
    numbers.into_iter().map(|x| x.to_bits()).collect()
}

fn causal() -> Attention {
    Attention::new().causal().align(Alignment::BottomRight)
}

#[track_caller]
fn assert_same(what: &str, out: ArrayView4<'_, f32>, expected: &Answer) {
    assert!(bits(out) == bits(&expected.out.data), "{what}");
}

#[test]
fn any_order_and_any_steps() {
    let (tensors, mut rng) = (Tensors::normal(SIZES, 1), Rng::new(2));
    for (isa, exec) in execs() {
        let expected = run(&causal(), &tensors, exec);
        for axes in orders() {
            let mut steps = || [0; 4].map(|_| rng.pick(&[1, 1, -1, 2, -3]));
            let mut reversed = axes;
            reversed.reverse();
            let q = Laid::of(&tensors.q, axes, steps());
            let (k, v) = (Laid::of(&tensors.k, reversed, steps()), Laid::of(&tensors.v, axes, steps()));
            let mut out = Laid::new(expected.out.shape, reversed, steps());
            let inputs = Inputs::new(
                View::try_from(q.view()).unwrap(),
                View::try_from(k.view()).unwrap(),
                View::try_from(v.view()).unwrap(),
            );
            let outputs = Outputs::new(ViewMut::try_from(out.view_mut()).unwrap());
            causal().problem(inputs, outputs).unwrap().run_once(exec);
            let what = format!("{isa} {axes:?} {:?} {:?} {:?} {:?}", q.steps, k.steps, v.steps, out.steps);
            assert_same(&what, out.view(), &expected);
            let foreign = out.memory.iter().filter(|x| x.to_bits() == FOREIGN).count();
            assert_eq!(foreign, out.memory.len() - expected.out.data.len(), "{what}: an element between was written");
        }
    }
}

#[test]
fn shapes_and_strides_are_the_arrays_own() {
    let mut counted = Array4::from_shape_fn([3, 4, 5, 6], |(b, h, l, d)| 1000 * b + 100 * h + 10 * l + d);
    let sliced = counted.slice(s![1.., ..;-1, 1..4;-2, ..;3]).permuted_axes([2, 0, 3, 1]);
    let view = View::try_from(sliced).unwrap();
    assert_eq!((view.shape(), view.strides()), ([2, 2, 2, 4], [-12, 120, 3, -30]));
    assert_eq!(view.get([1, 0, 1, 3]), Some(&1013));
    assert_eq!(view.get([2, 0, 0, 0]), None);
    let mut view = ViewMut::try_from(counted.slice_mut(s![1.., ..;-1, 1..4;-2, ..;3])).unwrap();
    *view.get_mut([1, 3, 1, 1]).unwrap() = 7;
    assert_eq!(view.as_view().get([1, 3, 1, 1]), Some(&7));
    assert_eq!(counted[[2, 0, 1, 3]], 7);
}

/// Owned, shared, copied on write: whatever derefs to data.
#[test]
fn owned_arrays() {
    let owned = array(&Tensors::normal(SIZES, 1).q);
    let (shared, cow) = (owned.to_shared(), CowArray::from(owned.view()));
    for view in [View::try_from(&owned), View::try_from(&shared), View::try_from(&cow)] {
        assert_eq!(view.unwrap().get([1, 2, 3, 4]), Some(&owned[[1, 2, 3, 4]]));
    }
    let mut shared = shared;
    *ViewMut::try_from(&mut shared).unwrap().get_mut([0; 4]).unwrap() = 5.0;
    assert!(shared[[0; 4]] == 5.0 && owned[[0; 4]] != 5.0);
}

#[test]
fn repeated_masks_biases_and_heads() {
    let [batch, heads, _, rows, keys, dim, _] = SIZES;
    let mut rng = Rng::new(3);
    let q = array(&Tensor::normal([batch, heads, rows, dim], &mut rng));
    let kv = array(&Tensor::normal([batch, 1, keys, dim], &mut rng));
    let bias = array(&Tensor::normal([1, heads, 1, keys], &mut rng));
    let mask = Array::from_shape_simple_fn([batch, 1, rows, keys], || rng.below(3) > 0);
    let all = [batch, heads, rows, keys];
    let repeated = {
        let (kv, bias) = (kv.broadcast([batch, 2, keys, dim]).unwrap(), bias.broadcast(all).unwrap());
        assert!(kv.strides()[1] == 0 && bias.strides()[0] == 0 && bias.strides()[2] == 0);
        let kv = View::try_from(kv).unwrap();
        let mask = Mask::keep(View::try_from(mask.broadcast(all).unwrap()).unwrap());
        let inputs = Inputs::new(view(&q), kv, kv).bias(View::try_from(bias).unwrap()).mask(mask);
        run_inputs(&causal(), inputs, Exec::default())
    };
    let (kv, bias) = (kv.broadcast([batch, 2, keys, dim]).unwrap().to_owned(), bias.broadcast(all).unwrap().to_owned());
    let mask = mask.broadcast(all).unwrap().mapv(u8::from);
    let inputs = Inputs::new(view(&q), view(&kv), view(&kv)).bias(view(&bias));
    let expected = run_inputs(&causal(), inputs.mask(Mask::keep(View::try_from(&mask).unwrap())), Exec::default());
    assert_eq!(bits(&repeated.out.data), bits(&expected.out.data));
}

/// The elements of two outputs alternate in memory, as do those of two keys: neither call touches the other's.
#[test]
fn calls_on_interleaved_parts_at_the_same_time() {
    let [left, right] = [4, 5].map(|seed| Tensors::normal([1, 2, 2, 150, 150, 16, 16], seed));
    let expected = [&left, &right].map(|tensors| run(&causal(), tensors, Exec::serial()));
    let all = |part: fn(&Tensors) -> &Tensor| {
        ndarray::concatenate(Axis(3), &[array(part(&left)).view(), array(part(&right)).view()]).unwrap()
    };
    let (q, k, v) = (all(|t| &t.q), all(|t| &t.k), all(|t| &t.v));
    let mut out = Array4::zeros([1, 2, 150, 32]);
    let (one, other) = out.view_mut().split_at(Axis(3), 16);
    std::thread::scope(|scope| {
        for (out, columns) in [(one, 0..16), (other, 16..32)] {
            let [q, k, v] = [&q, &k, &v].map(|array| array.slice(s![.., .., .., columns.clone()]));
            scope.spawn(move || {
                let inputs =
                    Inputs::new(View::try_from(q).unwrap(), View::try_from(k).unwrap(), View::try_from(v).unwrap());
                sdpa::attention(&causal(), inputs, Outputs::new(ViewMut::try_from(out).unwrap())).unwrap();
            });
        }
    });
    let (one, other) = out.view().split_at(Axis(3), 16);
    assert_same("left", one, &expected[0]);
    assert_same("right", other, &expected[1]);
}

#[test]
fn arrays_of_16_bits() {
    let [batch, heads, kv_heads, rows, keys, dim, value_dim] = SIZES;
    let mut rng = Rng::new(6);
    let q = array(&Tensor::normal([batch, heads, rows, dim], &mut rng)).mapv(bf16::from_f32);
    let k = array(&Tensor::normal([batch, kv_heads, keys, dim], &mut rng)).mapv(f16::from_f32);
    let v = array(&Tensor::normal([batch, kv_heads, keys, value_dim], &mut rng)).mapv(f16::from_f32);
    let mut out = Array4::from_elem([batch, heads, rows, value_dim], bf16::NAN);
    let inputs = Inputs::new(View::try_from(&q).unwrap(), View::try_from(&k).unwrap(), View::try_from(&v).unwrap());
    sdpa::attention(&causal(), inputs, Outputs::new(ViewMut::try_from(&mut out).unwrap())).unwrap();
    let of_bits = (q.mapv(|x| Bf16(x.to_bits())), k.mapv(|x| F16(x.to_bits())), v.mapv(f16::to_f32));
    let inputs = Inputs::new(
        View::try_from(&of_bits.0).unwrap(),
        View::try_from(&of_bits.1).unwrap(),
        View::try_from(&of_bits.2).unwrap(),
    );
    let mut wide = Array4::<f32>::zeros(out.dim());
    sdpa::attention(&causal(), inputs, Outputs::new(ViewMut::try_from(&mut wide).unwrap())).unwrap();
    assert_eq!(out, wide.mapv(bf16::from_f32));
}

#[test]
fn arrays_without_elements() {
    let (q, k) = (Array4::<f32>::zeros([2, 4, 0, 8]), Array4::<f32>::zeros([2, 4, 5, 8]));
    let mut out = Array4::<f32>::zeros([2, 4, 0, 8]);
    let outputs = Outputs::new(ViewMut::try_from(&mut out).unwrap());
    sdpa::attention(&Attention::new(), Inputs::new(view(&q), view(&k), view(&k)), outputs).unwrap();
    let backwards = k.slice(s![.., .., 3..3;-1, ..;-1]);
    let none = View::try_from(backwards).unwrap();
    assert_eq!((none.shape(), none.get([0; 4])), ([2, 4, 0, 8], None));
    let mut out = Array4::<f32>::ones([2, 4, 5, 8]);
    let outputs = Outputs::new(ViewMut::try_from(out.view_mut()).unwrap());
    sdpa::attention(&Attention::new(), Inputs::new(view(&k), none, none), outputs).unwrap();
    assert!(out.iter().all(|&x| x == 0.0), "rows that see nothing");
}

#[test]
fn other_numbers_of_dimensions() {
    let array = Array3::<f32>::zeros([2, 3, 4]);
    let refused = View::try_from(array.index_axis(Axis(0), 0)).unwrap_err();
    assert_eq!(refused, LayoutError::Dimensions { got: 2 });
    assert_eq!(
        Error::from(refused).to_string(),
        "a view has 4 dimensions, [batch, heads, rows, dim], or 3 without heads, but the array has 2"
    );
    assert_eq!(View::try_from(&array).unwrap().shape(), [2, 1, 3, 4]);
    assert_eq!(ViewMut::try_from(&mut arr0(1.0f32)).unwrap_err(), LayoutError::Dimensions { got: 0 });
    let dynamic = Array::<f32, _>::zeros(vec![1, 2, 3, 4, 5]);
    assert_eq!(View::try_from(dynamic.view()).unwrap_err(), LayoutError::Dimensions { got: 5 });
    let four = dynamic.index_axis(Axis(0), 0);
    assert_eq!(View::try_from(four).unwrap().shape(), [2, 3, 4, 5]);
    assert_eq!(View::try_from(array.insert_axis(Axis(0)).view()).unwrap().shape(), [1, 2, 3, 4]);
}

/// The unfused path takes heads as slices; where others' elements lie between, it copies.
#[test]
fn heads_with_others_between() {
    let tensors = Tensors::normal(SIZES, 7);
    let mut expected = Array4::<f32>::zeros([2, 4, 19, 24]);
    let outputs = Outputs::new(ViewMut::try_from(&mut expected).unwrap());
    sdpa_unfused::attention(&causal(), tensors.inputs(), outputs, Exec::serial()).unwrap();
    for steps in [[1, 1, 1, 1], [1, 1, 2, 1], [1, 1, 1, 3], [-1, 2, -1, -1]] {
        let [q, k, v] = [&tensors.q, &tensors.k, &tensors.v].map(|tensor| Laid::of(tensor, [0, 2, 1, 3], steps));
        let mut out = Laid::new([2, 4, 19, 24], [0, 2, 1, 3], steps);
        let inputs = Inputs::new(
            View::try_from(q.view()).unwrap(),
            View::try_from(k.view()).unwrap(),
            View::try_from(v.view()).unwrap(),
        );
        let outputs = Outputs::new(ViewMut::try_from(out.view_mut()).unwrap());
        sdpa_unfused::attention(&causal(), inputs, outputs, Exec::serial()).unwrap();
        assert!(bits(out.view()) == bits(&expected), "{steps:?}");
    }
}

/// A slice of what a projection left, with rows apart: ndarray alone cannot reshape it without a copy.
#[test]
fn heads_of_rows_with_several() {
    let all = Array::from_shape_fn([2, 5, 30], |(b, l, c)| (100 * b + 10 * l) as f32 + c as f32 / 100.0);
    let rows = all.slice(s![.., ..;-1, 4..28]);
    let heads = View::try_from(rows).unwrap().split_heads(3).unwrap();
    assert_eq!(heads.shape(), [2, 3, 5, 8]);
    for [b, h, l, d] in crate::support::indices(heads.shape()) {
        assert_eq!(heads.get([b, h, l, d]), Some(&rows[[b, l, 8 * h + d]]));
    }
    let mut written = Array3::<f32>::zeros([2, 5, 30]);
    let mut view = ViewMut::try_from(written.slice_mut(s![.., ..;2, ..24])).unwrap().split_heads(4).unwrap();
    *view.get_mut([1, 3, 2, 5]).unwrap() = 1.0;
    assert_eq!((view.shape(), written[[1, 4, 23]]), ([2, 4, 3, 6], 1.0));
    let refused = |heads| View::try_from(rows).unwrap().split_heads(heads).unwrap_err().to_string();
    assert_eq!(refused(5), "rows of 24 elements are no 5 heads");
    assert_eq!(refused(0), "rows of 24 elements are no 0 heads");
    assert_eq!(heads.split_heads(2).unwrap_err().to_string(), "rows of 3 heads cannot be divided into heads once more");
    let none = View::<f32>::bhld(&[], [0, 1, usize::MAX / 8, 4]).unwrap().split_heads(4).unwrap();
    assert_eq!(none.shape(), [0, 4, usize::MAX / 8, 1]);
}
