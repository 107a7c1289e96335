//! States of blocks of keys that lie in several places, folded in order: the bits of one call.

use crate::support::{Tensor, Tensors, execs};
use sdpa::parts::{BlockStates, RowStates};
use sdpa::{
    Alignment, Attention, Dtype, Error, Exec, Inputs, Int4, Isa, KeyScales, KvCache, KvShape, Outputs, View, ViewMut,
    Window,
};
use std::ops::Range;

/// Two sequences, six query heads that share two key/value heads.
const SIZES: [usize; 4] = [2, 6, 2, 1100];

fn part<'a>(x: &'a View<'_>, keys: Range<usize>) -> View<'a> {
    x.rows(keys).unwrap()
}

type Form = fn(KvCache) -> KvCache;

/// Element types of caches.
const FORMS: [(&str, Form); 5] = [
    ("f32", |cache| cache),
    ("bf16", |cache| cache.dtype(Dtype::Bf16).unwrap()),
    ("f16", |cache| cache.dtype(Dtype::F16).unwrap()),
    ("int8", |cache| cache.int8(KeyScales::PerToken).unwrap()),
    ("int4", |cache| cache.int4(Int4::Centred).unwrap()),
];

/// Caches that hold the keys between these cuts.
fn cut_caches(tensors: &Tensors, form: Form, cuts: &[usize]) -> Vec<(usize, KvCache)> {
    let ([batch, _, kv_heads, _], (k, v)) = (SIZES, (tensors.k.view(), tensors.v.view()));
    let pieces = cuts.windows(2).map(|cut| {
        let mut cache =
            form(KvCache::new(batch, KvShape { kv_heads, head_dim: k.shape()[3], value_dim: v.shape()[3] }).unwrap());
        cache.append(part(&k, cut[0]..cut[1]), part(&v, cut[0]..cut[1])).unwrap();
        (cut[0], cache)
    });
    pieces.collect()
}

/// Output and LSE of one call over all keys.
fn whole(attention: &Attention, inputs: Inputs<'_>, shape: [usize; 4], exec: Exec) -> [Vec<f32>; 2] {
    let [b, h, l, dv] = shape;
    let (mut out, mut lse) = (vec![f32::NAN; b * h * l * dv], vec![f32::NAN; b * h * l]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).unwrap()).lse(ViewMut::bhl(&mut lse, [b, h, l]).unwrap());
    attention.problem(inputs, outputs).unwrap().run_once(exec);
    [out, lse]
}

fn read(states: &RowStates, sinks: Option<&[f32]>, exec: Exec) -> [Vec<f32>; 2] {
    let [b, h, l, dv] = states.shape();
    let (mut out, mut lse) = (vec![f32::NAN; b * h * l * dv], vec![f32::NAN; b * h * l]);
    let outputs =
        Outputs::new(ViewMut::bhld(&mut out, [b, h, l, dv]).unwrap()).lse(ViewMut::bhl(&mut lse, [b, h, l]).unwrap());
    states.write(sinks, outputs, exec).unwrap();
    [out, lse]
}

fn assert_same(what: &str, got: &[f32], expected: &[f32]) {
    let differ = got.iter().zip(expected).position(|(got, expected)| got.to_bits() != expected.to_bits());
    assert_eq!(differ.map(|at| (at, got[at], expected[at])), None, "{what}");
}

#[test]
fn caches_cut_anywhere_have_the_bits_of_one() {
    let slopes: Vec<f32> = (0..SIZES[1]).map(|head| 0.1 * head as f32).collect();
    let sinks: Vec<f32> = (0..SIZES[1]).map(|head| head as f32 - 2.0).collect();
    for (rows, dims) in [(1, [64, 64]), (3, [20, 72]), (7, [32, 16])] {
        let [batch, heads, kv_heads, keys] = SIZES;
        let tensors = Tensors::normal([batch, heads, kv_heads, rows, keys, dims[0], dims[1]], 7);
        let (q, shape) = (tensors.q.view(), [batch, heads, rows, dims[1]]);
        let at_end = Alignment::Offset((keys - rows) as isize);
        let causal = Attention::new().causal().align(at_end);
        let settings = [
            causal,
            causal.softcap(3.0).scale(0.3),
            causal.window(Window::inclusive(Some(300), None)),
            causal.window(Window::inclusive(Some(100), None).keep_first(3)),
        ];
        for (name, form) in FORMS {
            for (attention, (isa, exec)) in
                settings.iter().flat_map(|attention| execs().map(move |exec| (attention, exec)))
            {
                let mut one =
                    form(KvCache::new(batch, KvShape { kv_heads, head_dim: dims[0], value_dim: dims[1] }).unwrap());
                one.append(tensors.k.view(), tensors.v.view()).unwrap();
                let expected = whole(attention, Inputs::cached(q, &one).alibi(&slopes).sinks(&sinks), shape, exec);
                for cuts in [&[0, 1100][..], &[0, 256, 768, 1100], &[0, 512, 512, 1024, 1100]] {
                    let mut states = RowStates::new(shape).unwrap();
                    for (first, cache) in cut_caches(&tensors, form, cuts) {
                        let mut blocks = BlockStates::new();
                        blocks.compute(attention, Inputs::cached(q, &cache).alibi(&slopes), first, exec).unwrap();
                        let mut next = RowStates::new(shape).unwrap();
                        next.as_mut_slice().copy_from_slice(states.as_slice());
                        next.fold(&blocks).unwrap();
                        states = next;
                    }
                    let what = format!("{isa}, {name}, {rows} rows, cuts {cuts:?}, {attention:?}");
                    for (got, expected) in read(&states, Some(&sinks), exec).iter().zip(&expected) {
                        assert_same(&what, got, expected);
                    }
                }
            }
        }
    }
}

/// Positions among all keys, in any order; each place has those of its keys.
#[test]
fn positions_cut_anywhere_have_the_bits_of_one_call() {
    let [batch, heads, kv_heads, keys] = SIZES;
    let tensors = Tensors::normal([batch, heads, kv_heads, 3, keys, 32, 16], 9);
    let (q, k, v, shape) = (tensors.q.view(), tensors.k.view(), tensors.v.view(), [batch, heads, 3, 16]);
    let at = |b: usize| (0..keys).map(|j| ((7 * j + b) % 900) as i32).collect::<Vec<_>>();
    let (at, rows): (_, [&[i32]; 2]) = ([at(0), at(1)], [&[500, 20, 899], &[0, 1, 450]]);
    let causal = Attention::new().causal();
    for attention in [causal, causal.window(Window::inclusive(Some(100), None).keep_first(3))] {
        for (isa, exec) in execs() {
            let all = at.each_ref().map(|list| &list[..]);
            let inputs = Inputs::new(q, k, v).row_positions(&rows).key_positions(&all);
            let (expected, mut states) = (whole(&attention, inputs, shape, exec), RowStates::new(shape).unwrap());
            for some in [0..256, 256..768, 768..keys] {
                let (lists, mut blocks) = (at.each_ref().map(|list| &list[some.clone()]), BlockStates::new());
                let inputs = Inputs::new(q, part(&k, some.clone()), part(&v, some.clone())).row_positions(&rows);
                blocks.compute(&attention, inputs.key_positions(&lists), some.start, exec).unwrap();
                states.fold(&blocks).unwrap();
            }
            for (got, expected) in read(&states, None, exec).iter().zip(&expected) {
                assert_same(&format!("{isa}, {attention:?}"), got, expected);
            }
        }
    }
}

/// Tensors too, with numbers that are not finite, hidden and visible ones.
#[test]
fn values_that_are_not_finite_have_the_bits_of_one_call() {
    let [batch, heads, kv_heads, keys] = SIZES;
    let mut tensors = Tensors::normal([batch, heads, kv_heads, 2, keys, 16, 32], 9);
    let all = tensors.v.data.len();
    for (n, x) in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN].into_iter().enumerate() {
        tensors.v.data[all / 5 * (n + 1)] = x;
    }
    let shape = [batch, heads, 2, 32];
    let attention = Attention::new().causal().align(Alignment::Offset(700));
    for (isa, exec) in execs() {
        let expected = whole(&attention, tensors.inputs(), shape, exec);
        let (q, k, v) = (tensors.q.view(), tensors.k.view(), tensors.v.view());
        let mut states = RowStates::new(shape).unwrap();
        let mut blocks = BlockStates::new();
        for cut in [0..256, 256..1024, 1024..1100] {
            let inputs = Inputs::new(q, part(&k, cut.clone()), part(&v, cut.clone()));
            blocks.compute(&attention, inputs, cut.start, exec).unwrap();
            states.fold(&blocks).unwrap();
        }
        for (got, expected) in read(&states, None, exec).iter().zip(&expected) {
            assert_same(&isa.to_string(), got, expected);
        }
    }
}

#[test]
fn what_cannot_be_cut_is_refused() {
    let tensors = Tensors::normal([1, 2, 1, 1, 300, 8, 8], 3);
    let mut blocks = BlockStates::new();
    let mut compute = |attention: Attention, first| {
        let error = blocks.compute(&attention, tensors.inputs(), first, Exec::serial()).unwrap_err();
        let mut states = RowStates::new([1, 2, 1, 8]).unwrap();
        assert!(matches!(states.fold(&blocks), Err(Error::Needs { .. })), "no states after an error");
        error.to_string()
    };
    let messages = [
        compute(Attention::new(), 100),
        compute(Attention::new().dropout(0.5, 1, 2), 0),
        compute(Attention::new().causal().align(Alignment::BottomRight), 0),
        compute(Attention::new().causal(), 256),
    ];
    for (message, word) in messages.iter().zip(["256", "dropout", "bottom-right", "causal"]) {
        assert!(message.contains(word), "{message}");
    }
    let suffix = [0.0f32; 2];
    let inputs = tensors.inputs().bias_suffix(View::bhld(&suffix, [1, 1, 1, 2]).unwrap());
    let error = BlockStates::new().compute(&Attention::new(), inputs, 0, Exec::serial()).unwrap_err();
    assert_eq!(error.to_string(), "bias suffix: needs a call over all keys");
    for (isa, rows) in Isa::available().flat_map(|isa| [128, 129, 132].map(|rows| (isa, rows))) {
        let many = Tensors::normal([1, 1, 1, rows, 300, 8, 8], 3);
        let done = BlockStates::new().compute(&Attention::new(), many.inputs(), 0, Exec::serial().isa(isa));
        let is_refused = matches!(done, Err(Error::Range { got, limit: 128, .. }) if got == rows);
        assert_eq!(is_refused, rows > 128, "{isa}, {rows} rows: {done:?}");
    }
    let mut blocks = BlockStates::new();
    blocks.compute(&Attention::new(), tensors.inputs(), 0, Exec::serial()).unwrap();
    let error = RowStates::new([1, 3, 1, 8]).unwrap().fold(&blocks).unwrap_err();
    assert!(matches!(error, Error::Mismatch { got: 2, expected: 3, .. }), "{error}");
}

/// Two sequences laid end to end; each place has some keys.
#[test]
fn ragged_sequences_cut_anywhere_have_the_bits_of_one_call() {
    let (rows, shape) = ([0, 2, 5], [1, 4, 5, 16]);
    let tensors = Tensors::normal([1, 4, 2, 5, 1200, 32, 16], 11);
    let q = tensors.q.view();
    for (isa, exec) in execs() {
        let inputs = Inputs::new(q, tensors.k.view(), tensors.v.view()).ragged(&rows, &[0, 700, 1200]);
        let (expected, mut states) = (whole(&Attention::new(), inputs, shape, exec), RowStates::new(shape).unwrap());
        for cut in [0..256, 256..700] {
            // The second sequence has 500 keys; the first is key 700 of all.
            let keys: Vec<usize> = cut.clone().chain(700 + cut.start..700 + cut.end.min(500)).collect();
            let [k, v] = [&tensors.k, &tensors.v].map(|x| {
                let [_, heads, _, dim] = x.shape;
                Tensor::from_fn([1, heads, keys.len(), dim], |[b, h, j, d]| x.get([b, h, keys[j], d]))
            });
            let (ends, mut blocks) = ([0, cut.len(), keys.len()], BlockStates::new());
            let inputs = Inputs::new(q, k.view(), v.view()).ragged(&rows, &ends);
            blocks.compute(&Attention::new(), inputs, cut.start, exec).unwrap();
            states.fold(&blocks).unwrap();
        }
        for (got, expected) in read(&states, None, exec).iter().zip(&expected) {
            assert_same(&isa.to_string(), got, expected);
        }
    }
}

/// Without sequences, heads or rows, the other sizes may be any numbers: nothing is written.
#[test]
fn states_of_nothing_may_have_any_other_sizes() {
    let most = usize::MAX / 2;
    for shape in [[0, 1 << 40, 1 << 40, 8], [0, most, 1, 8], [1, 0, most, 8], [most, 0, 1, 8], [1, most, 0, 8]] {
        let Ok(mut states) = RowStates::new(shape) else { continue };
        let mut out = [0.0f32; 0];
        let Ok(view) = ViewMut::bhld(&mut out, shape) else { continue };
        states.merge(&states.clone(), Exec::serial()).unwrap();
        states.write(None, Outputs::new(view), Exec::serial()).unwrap();
    }
}

/// Blocks between the first keys that a window keeps and the window have no states.
#[test]
fn blocks_that_no_row_sees_take_no_memory() {
    let tensors = Tensors::normal([2, 4, 2, 2, 20 * 256, 16, 32], 5);
    let (q, k, v) = (tensors.q.view(), tensors.k.view(), tensors.v.view());
    let bytes = |attention: &Attention, keys: usize| {
        let (attention, mut blocks) = (attention.align(Alignment::Offset(keys as isize - 2)), BlockStates::new());
        blocks.compute(&attention, Inputs::new(q, part(&k, 0..keys), part(&v, 0..keys)), 0, Exec::serial()).unwrap();
        blocks.bytes()
    };
    let window = |left| Attention::new().causal().window(Window::inclusive(Some(left), None).keep_first(3));
    for (left, blocks) in [(100, 2), (254, 2), (255, 3), (600, 4)] {
        assert_eq!(bytes(&window(left), 20 * 256), bytes(&Attention::new(), blocks * 256), "{left} keys and 3 first");
    }
}
