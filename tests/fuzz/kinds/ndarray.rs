//! Arrays of the crate ndarray: their axes in any order, sliced with steps either way, broadcast. They are what dense
//! tensors are, and what lies between their elements is not touched.

use crate::fuzzer::array::{Array, At, indices};
use crate::fuzzer::compare::Written;
use crate::fuzzer::draw::{Home, draw_at};
use crate::fuzzer::functions::Functions;
use crate::fuzzer::memory::Memory;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::{Stage, list};
use ndarray::{ArrayView4, ArrayViewMut4, Slice};
use sdpa::{Dtype, Exec, Inputs, Outputs, View, ViewMut};

/// An array's memory: stored in the order of `axes`, each with a step.
struct Laid {
    memory: Memory<f32>,
    stored: At,
    axes: [usize; 4],
    steps: [isize; 4],
}

impl Laid {
    fn blank(rng: &mut Rng, shape: At) -> Self {
        let order = rng.shuffled(4);
        let axes = if rng.one_in(3) { [0, 1, 2, 3] } else { core::array::from_fn(|i| order[i]) };
        let steps: [isize; 4] = [(); 4].map(|()| rng.pick(&[1, 1, 1, 2, 3, -1, -2]));
        let stored = axes.map(|axis: usize| shape[axis] * steps[axis].unsigned_abs());
        let blank = vec![f32::from_bits(u32::MAX); stored.iter().product()];
        Self { memory: list(rng, &blank), stored, axes, steps }
    }

    fn of(rng: &mut Rng, x: &Array) -> Self {
        let mut laid = Self::blank(rng, x.shape);
        laid.view_mut().indexed_iter_mut().for_each(|((b, h, l, d), to)| *to = x.get([b, h, l, d]));
        laid
    }

    fn view(&self) -> ArrayView4<'_, f32> {
        let view = ArrayView4::from_shape(self.stored, self.memory.slice()).expect("dense");
        let mut view = view.permuted_axes(places(self.axes));
        let steps = self.steps;
        view.slice_each_axis_inplace(|axis| Slice::new(0, None, steps[axis.axis.index()]));
        view
    }

    fn view_mut(&mut self) -> ArrayViewMut4<'_, f32> {
        let view = ArrayViewMut4::from_shape(self.stored, self.memory.slice_mut()).expect("dense");
        let mut view = view.permuted_axes(places(self.axes));
        let steps = self.steps;
        view.slice_each_axis_inplace(|axis| Slice::new(0, None, steps[axis.axis.index()]));
        view
    }
}

/// Where each of the four axes is in `axes`.
fn places(axes: [usize; 4]) -> [usize; 4] {
    core::array::from_fn(|axis| axes.iter().position(|&a| a == axis).expect("all four"))
}

pub(super) fn check(rng: &mut Rng) {
    let mut case = draw_at(rng, Home::Tensors);
    // Arrays here are of `f32`; all other options are as they come.
    case.dtypes = [Dtype::F32; 3];
    case.functions = Functions::default();
    (case.bias, case.mask) = (None, None);
    let stage = Stage::new(rng, &case, Home::Tensors);
    let wanted = Wanted { points: [false; 4], mass: false, out: Dtype::F32, lse: true };
    let expected = stage.run("dense", &mut Outs::blank(rng, &case, wanted), Exec::serial());
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| Laid::of(rng, x));
    for (laid, x) in [(&q, &case.q), (&k, &case.k), (&v, &case.v)] {
        same_elements(laid, x);
    }
    broadcast(rng, &case.q);
    let mut inputs = Inputs::new(
        View::try_from(q.view()).expect("four axes"),
        View::try_from(k.view()).expect("four axes"),
        View::try_from(v.view()).expect("four axes"),
    );
    inputs = case.kv_lens.as_ref().map_or(inputs, |lens| inputs.kv_lens(lens));
    inputs = case.ragged.as_ref().map_or(inputs, |[q, k]| inputs.ragged(q, k));
    inputs = case.alibi.as_ref().map_or(inputs, |slopes| inputs.alibi(slopes));
    inputs = case.sinks.as_ref().map_or(inputs, |sinks| inputs.sinks(sinks));
    let lse = expected.lse.as_ref().expect("it was asked for");
    let [mut out, mut sums] = [expected.out.bits.shape, lse.bits.shape].map(|shape| Laid::blank(rng, shape));
    let (mut out_view, mut lse_view) = (out.view_mut(), sums.view_mut());
    let outputs = Outputs::new(ViewMut::try_from(&mut out_view).expect("four axes"))
        .lse(ViewMut::try_from(&mut lse_view).expect("four axes"));
    case.attention().problem(inputs, outputs).expect("a good call").run_once(Exec::serial());
    written(&case.describe(), &mut out, &expected.out);
    written(&case.describe(), &mut sums, lse);
}

/// A view of an array has its elements, and no others.
fn same_elements(laid: &Laid, x: &Array) {
    let array = laid.view();
    let view = View::try_from(array).expect("four axes");
    assert_eq!(view.shape(), x.shape);
    for at in indices(x.shape) {
        let got = view.get(at).map(|x| x.to_bits());
        assert_eq!(got, Some(x.get(at).to_bits()), "{at:?}: axes {:?}, steps {:?}", laid.axes, laid.steps);
    }
}

/// An array that is broadcast has the same elements again and again.
fn broadcast(rng: &mut Rng, x: &Array) {
    let [b, h, l, d] = x.shape;
    if x.data.is_empty() {
        return;
    }
    let one = Array::from_fn([1, h, 1, d], |[_, h, _, d]| x.get([0, h, 0, d]));
    let laid = Laid::of(rng, &one);
    let array = laid.view();
    let whole = array.broadcast((b, h, l, d)).expect("two axes of one");
    let view = View::try_from(whole).expect("four axes");
    for at in indices(x.shape) {
        assert_eq!(view.get(at).map(|x| x.to_bits()), Some(one.repeated(at).to_bits()), "{at:?}");
    }
}

/// Panics unless the array is what was expected, and nothing beside its elements was written.
fn written(what: &str, laid: &mut Laid, expected: &Written) {
    let (axes, steps) = (laid.axes, laid.steps);
    for ((b, h, l, d), x) in laid.view_mut().indexed_iter_mut() {
        let expected = expected.bits.get([b, h, l, d]);
        assert_eq!(x.to_bits(), expected, "{what}: {:?}, axes {axes:?}, steps {steps:?}", [b, h, l, d]);
        *x = f32::from_bits(u32::MAX);
    }
    assert!(laid.memory.is_blank(), "{what}: memory between elements was written, axes {axes:?}, steps {steps:?}");
}
