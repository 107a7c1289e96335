//! The safe functions of the crate, called as nobody should: a result, or a panic that says what is wrong; nothing outside
//! a slice is read or written.

use sdpa_kernels::gemm::{Matrix, sgemm};
use sdpa_kernels::{
    Activation, Alignment, BlockTable, Cache, Call, Center, CheckedCall, Cover, Covered, Dtype, F16, Isa, KeyValues,
    Launch, Norm, Options, Outputs, Packed, Pages, Partials, Precision, Product, Ragged, Sliding, SplitRows, Then,
    Tiling, View, ViewMut, Visible,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

const HUGE: [usize; 6] = [1 << 40, 1 << 61, 1 << 62, isize::MAX as usize, usize::MAX - 15, usize::MAX];

/// Whether `f` panics, without the noise.
fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

#[test]
fn sgemm_takes_what_fits_and_nothing_else() {
    let (x, mut c) = ([1.0f32; 6], [7.0f32; 6]);
    let matrix = |strides| Matrix { data: &x, strides };
    sgemm([2, 3, 2], 1.0, matrix((3, 1)), matrix((2, 1)), &mut c);
    assert_eq!(c, [3.0, 3.0, 3.0, 3.0, 7.0, 7.0]);
    // Nothing to add up: zeros. Nothing to write: nothing, whatever else the sizes are.
    sgemm([2, 0, 2], 1.0, matrix((9, 9)), matrix((usize::MAX, usize::MAX)), &mut c);
    assert_eq!(c, [0.0, 0.0, 0.0, 0.0, 7.0, 7.0]);
    for huge in HUGE {
        for sizes in [[huge, 0, 0], [0, 0, huge], [huge, 3, 0], [0, 3, huge], [huge, huge, 0], [0, huge, huge]] {
            sgemm(sizes, 1.0, matrix((0, 0)), matrix((0, 0)), &mut c);
        }
        for (sizes, a, b) in [
            ([huge, 1, 2], (0, 0), (0, 0)),
            ([2, 1, huge], (0, 0), (0, 0)),
            ([huge, 1, huge], (0, 0), (0, 0)),
            ([2, 3, 2], (huge, 1), (2, 1)),
            ([2, 3, 2], (3, huge), (2, 1)),
            ([2, 3, 2], (3, 1), (huge, huge)),
            ([2, huge, 2], (1, 1), (0, 1)),
            ([1, 1, 1], (usize::MAX, 0), (0, 0)),
        ] {
            assert!(panics(|| sgemm(sizes, 1.0, matrix(a), matrix(b), &mut [0.0; 6])), "{sizes:?} {a:?} {b:?}");
        }
    }
    assert!(panics(|| sgemm([2, 3, 2], 1.0, matrix((3, 1)), matrix((2, 1)), &mut [0.0; 3])));
    assert!(panics(|| sgemm([2, 4, 2], 1.0, matrix((3, 1)), matrix((2, 1)), &mut [0.0; 4])));
    assert_eq!(c, [0.0, 0.0, 0.0, 0.0, 7.0, 7.0]);
}

#[test]
fn weights_that_do_not_lie_in_their_slice_are_refused() {
    let w = [1.0f32; 6];
    let packed = |shape, strides, bias| panics(|| drop(Packed::new(&w, shape, strides, bias)));
    assert!(!packed([2, 3], (3, 1), Some(&w)) && !packed([3, 2], (0, 5), None) && !packed([0, 3], (9, 9), None));
    for (shape, strides) in [([2, 4], (3, 1)), ([3, 3], (3, 1)), ([2, 0], (3, 1)), ([7, 1], (1, 0))] {
        assert!(packed(shape, strides, None), "{shape:?} {strides:?}");
    }
    assert!(packed([2, 3], (3, 1), Some(&w[..1])), "a bias for each output");
    for huge in HUGE {
        for (shape, strides) in [([2, 3], (huge, 1)), ([2, 3], (3, huge)), ([huge, huge], (1, 1)), ([huge, 2], (1, 1))]
        {
            assert!(packed(shape, strides, None), "{shape:?} {strides:?}");
        }
    }
    assert!(packed([usize::MAX, 1], (0, 0), None) && packed([1 << 32, 1 << 32], (0, 0), None));
}

/// As many workers as are asked for, or all there are: the same sums.
#[test]
fn any_number_of_workers_will_do() {
    let (x, w): (Vec<f32>, Vec<f32>) =
        ((0..97 * 5).map(|i| i as f32).collect(), (0..70 * 5).map(|i| i as f32).collect());
    let weights = Packed::new(&w, [70, 5], (5, 1), None);
    let run = |workers| {
        let mut out = vec![f32::NAN; 97 * 70];
        Product::new(&x, &weights, &mut out, workers).work(Isa::detect());
        out
    };
    let one = run(1);
    for workers in [0, 2, 3].into_iter().chain(HUGE) {
        assert!(run(workers) == one, "{workers}");
    }
}

#[test]
fn rows_that_do_not_fit_the_weights_are_refused() {
    let weights = Packed::new(&[1.0; 6], [2, 3], (3, 1), None);
    for (x, out) in [(7, 4), (6, 3), (6, 5), (0, 2)] {
        let (x, mut out) = (vec![0.0; x], vec![0.0; out]);
        assert!(panics(|| _ = Product::new(&x, &weights, &mut out, 1)));
    }
    // Rows beyond all size, and none of them.
    let none = Packed::new(&[], [0, usize::MAX], (0, 0), None);
    Product::new(&[], &none, &mut [], usize::MAX).work(Isa::detect());
    assert!(panics(|| _ = Product::new(&[1.0], &none, &mut [], 1)));
}

#[test]
fn norms_made_by_hand_are_checked() {
    let (x, gain) = ([1.0f32, 2.0, 3.0, 4.0], [1.0f32; 2]);
    let norm = Norm { center: Center::Mean, gain: &gain, bias: None, eps: 0.0 };
    for isa in Isa::available() {
        let run = |norm: Norm<'_>, x: &[f32], out: usize| panics(|| norm.apply(isa, x, &mut vec![0.0; out]));
        let add = |x: &[f32], add: &[f32], out: usize| {
            panics(|| norm.add_and_apply(isa, &mut x.to_vec(), add, &mut vec![0.0; out]))
        };
        assert!(!run(norm, &x, 4) && !run(norm, &[], 0) && !add(&x, &x, 4));
        assert!(run(norm, &x, 2) && run(norm, &x[..3], 3) && add(&x, &x[..2], 4) && add(&x, &x, 6));
        assert!(run(Norm { gain: &[], ..norm }, &x, 4) && run(Norm { gain: &[], ..norm }, &[], 0));
        for bias in [&gain[..1], &[1.0; 3], &[]] {
            assert!(run(Norm { bias: Some(bias), ..norm }, &x, 4));
        }
        // Numbers that make no norm make NaN.
        for eps in [f32::NAN, -9.0] {
            let mut out = [0.0; 4];
            Norm { eps, ..norm }.apply(isa, &x, &mut out);
            assert!(out.iter().all(|x| x.is_nan()));
        }
    }
}

#[test]
fn gates_and_heads_of_other_sizes_are_refused() {
    for isa in Isa::available() {
        for activation in [Activation::Identity, Activation::Relu, Activation::Silu] {
            assert!(panics(|| activation.gate(isa, &mut [1.0; 17], &[1.0; 16])));
            activation.gate(isa, &mut [], &[]);
            activation.apply(isa, &mut []);
        }
    }
    let mut data = [0.0f32; 12];
    let mut view = ViewMut::bhld(&mut data, [1, 2, 3, 2]).unwrap();
    assert!(panics(|| drop(view.reborrow().into_heads(0))) && panics(|| drop(view.reborrow().into_heads(3))));
    let mut head = view.into_heads(1).nth(1).unwrap();
    for (at, row, len) in [(1, 0, 2), (0, 3, 2), (0, usize::MAX, 2), (usize::MAX, 0, 2), (0, 0, 1), (0, 0, 3)] {
        assert!(panics(|| head.write(at, row, &[1.0; 3][..len])), "{at} {row} {len}");
    }
    head.write(0, 2, &[1.0; 2]);
    assert_eq!(data, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]);
    // Heads without end, of nothing: handed out one by one.
    let many = ViewMut::bhld(&mut data[..0], [1 << 30, 1 << 30, 0, 2]).unwrap();
    assert_eq!(many.into_heads(1 << 30).take(5).count(), 5);
}

/// Whether a call is refused: of two sequences, four heads on two, three rows and five keys of six elements, values of seven, with
/// an output for it, both changed. Outputs that are refused stay where they are. A launch of one that is not begins.
fn is_refused(change: impl Fn(&mut Call<'_>), add: impl for<'o> Fn(Outputs<'o>) -> Outputs<'o>) -> bool {
    let (numbers, mut out) = ([0.5f32; 2 * 4 * 5 * 7], [0.0f32; 2 * 4 * 3 * 7]);
    let tensor = |shape| View::bhld(&numbers, shape).unwrap();
    let mut call = Call {
        q: tensor([2, 4, 3, 6]).into(),
        kv: KeyValues::of_tensors(tensor([2, 2, 5, 6]), tensor([2, 2, 5, 7])).unwrap(),
        scale: 1.0,
        visible: Visible::default(),
        alignment: Alignment::TopLeft,
        options: Options::default(),
        precision: Precision::Exact,
    };
    change(&mut call);
    let mut outputs = add(Outputs::new(ViewMut::bhld(&mut out, [2, 4, 3, 7]).unwrap()));
    let given =
        |outputs: &Outputs<'_>| [outputs.out.as_ref().map(|x| x.shape()), outputs.lse.as_ref().map(|x| x.shape())];
    let before = given(&outputs);
    let Ok(checked) = CheckedCall::new(call) else { return true };
    match checked.writing(&mut outputs) {
        Ok(checked) => {
            assert_eq!(given(checked.outputs()), before);
            Launch::new(checked, Tiling::new(6, 7, 3, 1), None, &mut Partials::new());
            false
        }
        Err(_) => {
            assert_eq!(given(&outputs), before);
            true
        }
    }
}

#[test]
fn launches_with_a_tiling_for_other_sizes_are_refused() {
    let x = [0.5f32; 2 * 300 * 7];
    let tensor = |rows, dim| View::bhld(&x, [1, 1, rows, dim]).unwrap();
    for (keys, tiling, refused) in [
        (255, Tiling::new(6, 7, 3, 1), false),
        (255, Tiling::new(7, 6, 3, 1), true),
        (16, Tiling::new(6, 7, 3, 1).shrink_to(16), false),
        (17, Tiling::new(6, 7, 3, 1).shrink_to(16), true),
    ] {
        let call = Call {
            q: tensor(3, 6).into(),
            kv: KeyValues::of_tensors(tensor(keys, 6), tensor(keys, 7)).unwrap(),
            scale: 1.0,
            visible: Visible::default(),
            alignment: Alignment::TopLeft,
            options: Options::default(),
            precision: Precision::Exact,
        };
        let checked = CheckedCall::new(call).unwrap();
        let launch = || {
            Launch::new(checked, tiling, None, &mut Partials::new());
        };
        assert_eq!(panics(launch), refused, "{keys} {tiling:?}");
    }
}

#[test]
fn calls_that_do_not_fit_together_are_refused() {
    static NUMBERS: [f32; 1000] = [0.0; 1000];
    let tensor = |shape| View::bhld(&NUMBERS, shape).unwrap();
    let refused = |change: &dyn Fn(&mut Call<'_>)| is_refused(change, |outputs| outputs);
    assert!(!refused(&|_| ()));
    for shape in [[1, 4, 3, 6], [2, 3, 3, 6], [2, 4, 2, 6], [2, 4, 3, 5], [2, 4, 3, 0], [2, 0, 3, 6]] {
        assert!(refused(&|call| call.q = tensor(shape).into()), "{shape:?}");
    }
    for [k, v] in [[[1, 2, 5, 6], [1, 2, 5, 7]], [[2, 3, 5, 6], [2, 3, 5, 7]], [[2, 2, 5, 6], [2, 2, 5, 0]]] {
        assert!(refused(&|call| call.kv = KeyValues::of_tensors(tensor(k), tensor(v)).unwrap()), "{k:?} {v:?}");
    }
    assert!(KeyValues::of_tensors(tensor([2, 2, 5, 6]), tensor([2, 2, 4, 7])).is_none());
    let refused_with = |options: Options<'static>| refused(&|call| call.options = options);
    let none = Options::default();
    assert!(!refused_with(Options { kv_lens: Some(&[5, 0]), alibi: Some(&[1.0; 4]), sinks: Some(&[0.0; 4]), ..none }));
    assert!(
        refused_with(Options { kv_lens: Some(&[5, 6]), ..none })
            && refused_with(Options { kv_lens: Some(&[5]), ..none })
    );
    assert!(
        refused_with(Options { alibi: Some(&[1.0; 2]), ..none }) && refused_with(Options { sinks: Some(&[]), ..none })
    );
    assert!(refused_with(Options { sources: Some(&[0, 1]), ..none }));
    let positions: [&'static [&'static [i32]]; 4] =
        [&[&[0; 3], &[0; 3]], &[&[0; 2], &[0; 3]], &[&[0; 3], &[0; 4]], &[&[0; 3]]];
    let refused_rows = positions.map(|positions| refused_with(Options { row_positions: Some(positions), ..none }));
    assert_eq!(refused_rows, [false, true, true, true]);
    for (q, k) in
        [(&[0, 3][..], None), (&[0, 3], Some(&[0, 5][..])), (&[0, 2, 1, 3], Some(&[0, 1, 2, 5])), (&[], Some(&[]))]
    {
        assert!(refused_with(Options { ragged: Some(Ragged { q, k }), ..none }), "{q:?} {k:?}");
    }
    for cover in [Cover::AllKeys, Cover::FirstKeys, Cover::LastKeys] {
        let bias = |shape| Some(Covered { of: tensor(shape).into(), cover });
        assert!(!refused_with(Options { bias: bias([1, 4, 1, 5]), ..none }));
        assert!(!refused_with(Options { bias: bias([3, 2, 1, 5]), period: Some(3), ..none }));
        assert!(refused_with(Options { bias: bias([0, 2, 1, 5]), period: Some(0), ..none }));
        assert_eq!(refused_with(Options { bias: bias([1, 4, 1, 4]), ..none }), cover == Cover::AllKeys);
        for shape in [[3, 4, 3, 5], [2, 3, 3, 5], [2, 4, 2, 5], [2, 4, 3, 6], [0, 4, 3, 5]] {
            assert!(refused_with(Options { bias: bias(shape), ..none }), "{shape:?}");
        }
    }
}

/// Returns a view of memory that is never freed, and is reached from here: leaks are looked for too.
fn view<'o>(shape: [usize; 4]) -> ViewMut<'o> {
    static ALL: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    let memory = vec![0.0f32; shape.iter().product()].leak();
    ALL.lock().unwrap().push(memory.as_ptr().expose_provenance());
    ViewMut::bhld(memory, shape).unwrap()
}

#[test]
fn outputs_that_do_not_fit_the_call_are_refused() {
    let refused = |add: &dyn for<'o> Fn(Outputs<'o>) -> Outputs<'o>| is_refused(|_| (), add);
    assert!(!refused(&|outputs| with_all(outputs)));
    assert!(refused(&|outputs| with_all(with_all(outputs))), "given twice");
    assert!(refused(&|_| Outputs::NONE) && refused(&|_| Outputs::NONE.lse(view([2, 4, 3, 1]))));
    for shape in [[1, 4, 3, 7], [2, 2, 3, 7], [2, 4, 2, 7], [2, 4, 3, 6], [2, 4, 3, 8]] {
        assert!(refused(&|_| Outputs::new(view(shape))), "{shape:?}");
    }
    for shape in [[2, 2, 3, 1], [2, 4, 3, 3], [2, 4, 2, 1], [2, 4, 3, 4], [2, 4, 2, 5], [1, 4, 3, 5]] {
        let one: [&dyn for<'o> Fn(Outputs<'o>) -> Outputs<'o>; 3] =
            [&|outputs| outputs.lse(view(shape)), &|outputs| outputs.weights(view(shape)), &|outputs| {
                outputs.key_weight_sums(view(shape))
            }];
        assert!(one.into_iter().all(refused), "{shape:?}");
    }
}

/// Adds the log-sum-exp, weights and key weight sums of a good call.
fn with_all(outputs: Outputs<'_>) -> Outputs<'_> {
    outputs.lse(view([2, 4, 3, 1])).weights(view([2, 4, 3, 5])).key_weight_sums(view([2, 2, 5, 1]))
}

/// Pages that stand for 2⁴⁸ keys on 2²⁴ heads: 2⁶⁴ key blocks, which no memory holds. The launch goes on without them.
#[test]
fn more_units_than_can_be_counted_are_refused() {
    const HEADS: usize = 1 << 24;
    let zero = [0.0f32];
    let tensor = |shape| View::from_strides(&zero, 0, shape, [0; 4]).unwrap();
    let pool = tensor([1, HEADS, 1 << 38, 1]);
    let (entries, lens) = ([0; 1 << 10], [1 << 48]);
    let pages = Pages::new(pool, pool, BlockTable { entries: &entries, lens: &lens }).unwrap();
    let call = Call {
        q: tensor([1, HEADS, 1, 1]).into(),
        kv: pages.into(),
        scale: 1.0,
        visible: Visible::default(),
        alignment: Alignment::TopLeft,
        options: Options::default(),
        precision: Precision::Exact,
    };
    let mut out = vec![F16::default(); HEADS];
    let out = ViewMut::bhld(&mut out, [1, HEADS, 1, 1]).unwrap();
    let mut partials = Partials::new();
    let checked = CheckedCall::new(call).unwrap().writing(&mut Outputs::new(out)).unwrap();
    let split = SplitRows { most_rows: 1, runs: 1, few_bytes: None, then: Then::Merge };
    let launch = Launch::new(checked, Tiling::new(1, 1, 1, 1), Some(split), &mut partials);
    assert!(format!("{launch:?}").contains(&format!("tasks: {HEADS}")), "rows are shared out");
}

/// The next row sees itself, at least.
#[test]
fn windows_without_keys_are_refused() {
    let made =
        |last| !panics(|| drop(Cache::new(Dtype::F32, [1, 1], [1, 1], Some(Sliding { last, first: 0, rollback: 0 }))));
    assert_eq!([made(0), made(1)], [false, true]);
}
