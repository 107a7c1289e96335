//! Rows that compute listed key blocks alone: the bits of a call over the keys and values of these blocks.

use crate::attention::backward::call::{Gradients, Saved};
use crate::attention::backward::launch::{BackwardLaunch, Stage};
use crate::attention::backward::memory::{BackwardMemory, BackwardScratch};
use crate::attention::backward::parts::Part;
use crate::attention::call::Call;
use crate::attention::call::checked::CheckedCall;
use crate::attention::call::mods::Mods;
use crate::attention::call::options::Options;
use crate::attention::call::outputs::Outputs;
use crate::attention::call::row_mods::AnyMods;
use crate::attention::call::visibility::{Alignment, Visible};
use crate::attention::schedule::launch::Launch;
use crate::attention::schedule::partials::Partials;
use crate::attention::schedule::split_sequences::{SplitRows, Then};
use crate::attention::scratch::{Scratch, Tiling};
use crate::kv::cache::{Cache, NewTokens};
use crate::kv::source::KeyValues;
use crate::simd::isa::Isa;
use crate::tensor::element::{Dtype, Precision};
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;

const BATCH: usize = 2;
const KV_HEADS: usize = 2;
const HEADS: usize = 4;
const DIM: usize = 24;
const VALUE_DIM: usize = 32;
/// Seven key blocks, the last of 40 keys.
const KEYS: usize = 6 * KEY_BLOCK + 40;
/// Lists of blocks; some leave out the first, the last, or the one in the middle.
const LISTS: [&[u32]; 6] = [&[0, 1, 4, 6], &[3], &[2, 5], &[5, 6], &[0, 1, 2, 3], &[0, 1, 2, 3, 4, 5, 6]];

/// Numbers between −2 and 2.
fn numbers(seed: usize, n: usize) -> Vec<f32> {
    let mixed = |i: usize| (i + seed * 0x1_0000).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..n).map(|i| (mixed(i) & 0xffff) as f32 / 16384.0 - 2.0).collect()
}

/// Rows of keys or values, `[BATCH, KV_HEADS, keys, dim]`, that lie in the blocks of a list.
fn gathered(rows: &[f32], dim: usize, list: &[u32]) -> Vec<f32> {
    let heads = rows.chunks_exact(KEYS * dim);
    let of_head = |head: &[f32]| {
        let blocks = list.iter().map(|&block| block as usize * KEY_BLOCK * dim);
        blocks.flat_map(|first| head[first..head.len().min(first + KEY_BLOCK * dim)].to_vec()).collect::<Vec<_>>()
    };
    heads.flat_map(of_head).collect()
}

/// Keys and values of a call, and the blocks that its rows compute, if not all.
#[derive(Clone, Copy)]
struct Source<'a> {
    k: View<'a>,
    v: View<'a>,
    cache: Option<&'a Cache>,
    listed: Option<&'static [u32]>,
}

impl<'a> Source<'a> {
    fn new(k: &'a [f32], v: &'a [f32], listed: Option<&'static [u32]>) -> Self {
        let view =
            |x: &'a [f32], dim| View::bhld(x, [BATCH, KV_HEADS, x.len() / (BATCH * KV_HEADS * dim), dim]).unwrap();
        Self { k: view(k, DIM), v: view(v, VALUE_DIM), cache: None, listed }
    }

    /// Both sequences read the keys and values of the first.
    fn shared(self) -> Self {
        let first = |x: View<'a>| x.batch(0..1).unwrap().broadcast(x.shape()).unwrap();
        Self { k: first(self.k), v: first(self.v), ..self }
    }

    /// Copies the keys and values into a cache.
    fn cached(&self, isa: Isa) -> Cache {
        let mut cache = Cache::new(Dtype::F32, [BATCH, KV_HEADS], [DIM, VALUE_DIM], None).unwrap();
        let tokens = || (0..BATCH).map(|b| NewTokens { sequence: b, b, rows: 0..self.k.shape()[2] });
        let new = cache.try_allocate(tokens()).unwrap();
        cache.append(isa, tokens(), [self.k.into(), self.v.into()], new);
        cache
    }

    fn call(&self, q: View<'a>) -> Call<'a> {
        Call {
            q: q.into(),
            kv: self.cache.map_or_else(|| KeyValues::of_tensors(self.k, self.v).unwrap(), KeyValues::from),
            scale: 0.3,
            visible: Visible::default(),
            alignment: Alignment::TopLeft,
            options: Options { listed: self.listed, ..Options::default() },
            precision: Precision::Exact,
        }
    }
}

/// Computes a call whose key blocks are divided as `split` says, or whose rows are. Returns outputs and log-sum-exps.
fn forward(isa: Isa, call: Call<'_>, split: Option<usize>) -> [Vec<f32>; 2] {
    let [_, _, rows, _] = call.q.shape();
    let mut out = vec![f32::NAN; BATCH * HEADS * rows * VALUE_DIM];
    let mut lse = vec![f32::NAN; BATCH * HEADS * rows];
    let mut outputs = Outputs::new(ViewMut::bhld(&mut out, [BATCH, HEADS, rows, VALUE_DIM]).unwrap())
        .lse(ViewMut::bhl(&mut lse, [BATCH, HEADS, rows]).unwrap());
    let most_rows = HEADS / KV_HEADS * rows;
    let tiling = Tiling::for_split(DIM, VALUE_DIM, most_rows, isa.tile().0);
    let mut partials = Partials::new();
    let checked = CheckedCall::new(call).and_then(|checked| checked.writing(&mut outputs)).unwrap();
    let split = split.map(|runs| SplitRows { most_rows, runs, few_bytes: None, then: Then::Merge });
    let launch = Launch::new(checked, tiling, split, &mut partials);
    launch.work(isa, &mut Scratch::new(), AnyMods::of(&Mods::new()));
    [out, lse]
}

/// Computes the gradients of q, k and v on several threads.
fn backward(isa: Isa, call: Call<'_>, [out, lse]: &[Vec<f32>; 2]) -> [Vec<f32>; 3] {
    let ([_, _, rows, _], [k_shape, v_shape]) = (call.q.shape(), [call.kv.k_shape(), call.kv.v_shape()]);
    let out_shape = [BATCH, HEADS, rows, VALUE_DIM];
    let d_out = numbers(4, out.len());
    let saved = Saved::new(
        View::bhld(out, out_shape).unwrap(),
        View::bhl(lse, [BATCH, HEADS, rows]).unwrap(),
        View::bhld(&d_out, out_shape).unwrap(),
    );
    let shapes = [call.q.shape(), k_shape, v_shape];
    let mut gradients = shapes.map(|shape| vec![f32::NAN; shape.iter().product()]);
    let [dq, dk, dv] = &mut gradients;
    let wanted = Gradients::new()
        .q(ViewMut::bhld(dq, shapes[0]).unwrap())
        .k(ViewMut::bhld(dk, shapes[1]).unwrap())
        .v(ViewMut::bhld(dv, shapes[2]).unwrap());
    let tiling = Tiling::for_backward(DIM, VALUE_DIM, isa.tile().0);
    let mut memory = BackwardMemory::new();
    let launch =
        BackwardLaunch::new(CheckedCall::new(call).unwrap(), saved, wanted, Part::Whole, tiling, &mut memory).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| launch.work(Stage::Keys, isa, &mut BackwardScratch::new(), AnyMods::of(&Mods::new())));
        }
    });
    launch.finish();
    gradients
}

/// Asserts that numbers have the same bits.
fn assert_same(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let differ = got.iter().zip(expected).position(|(got, expected)| got.to_bits() != expected.to_bits());
    assert_eq!(differ.map(|at| (at, got[at], expected[at])), None, "{what}");
}

#[test]
fn listed_blocks_have_the_bits_of_their_keys_alone() {
    let (k, v) = (numbers(1, BATCH * KV_HEADS * KEYS * DIM), numbers(2, BATCH * KV_HEADS * KEYS * VALUE_DIM));
    for (list, rows) in LISTS.into_iter().flat_map(|list| [1, 5, 50].map(|rows| (list, rows))) {
        let q = numbers(3, BATCH * HEADS * rows * DIM);
        let q = View::bhld(&q, [BATCH, HEADS, rows, DIM]).unwrap();
        let (few_k, few_v) = (gathered(&k, DIM, list), gathered(&v, VALUE_DIM, list));
        let sources = [Source::new(&k, &v, Some(list)), Source::new(&few_k, &few_v, None)];
        for (isa, sources) in Isa::available().flat_map(|isa| [(isa, sources), (isa, sources.map(Source::shared))]) {
            let caches = sources.map(|source| source.cached(isa));
            let [listed, alone] = sources;
            let expected = forward(isa, alone.call(q), None);
            for cache in [None, Some(&caches)] {
                let listed = Source { cache: cache.map(|[cache, _]| cache), ..listed };
                for split in [None, Some(1), Some(3)] {
                    let what = format!("{isa}, {rows} rows, {list:?}, cached: {}, {split:?}", cache.is_some());
                    let got = forward(isa, listed.call(q), split);
                    got.iter().zip(&expected).for_each(|(got, expected)| assert_same(&what, got, expected));
                }
            }
        }
    }
}

#[test]
fn gradients_over_listed_blocks_have_the_bits_of_their_keys_alone() {
    let (k, v) = (numbers(1, BATCH * KV_HEADS * KEYS * DIM), numbers(2, BATCH * KV_HEADS * KEYS * VALUE_DIM));
    for (list, rows) in LISTS.into_iter().flat_map(|list| [5, 200].map(|rows| (list, rows))) {
        let q = numbers(3, BATCH * HEADS * rows * DIM);
        let q = View::bhld(&q, [BATCH, HEADS, rows, DIM]).unwrap();
        let (few_k, few_v) = (gathered(&k, DIM, list), gathered(&v, VALUE_DIM, list));
        for isa in Isa::available() {
            let [listed, alone] =
                [Source::new(&k, &v, Some(list)), Source::new(&few_k, &few_v, None)].map(|source| source.call(q));
            let saved = forward(isa, alone, None);
            let [dq, dk, dv] = backward(isa, listed, &saved);
            let expected = backward(isa, alone, &saved);
            let what = format!("{isa}, {rows} rows, {list:?}");
            let got = [dq, gathered(&dk, DIM, list), gathered(&dv, VALUE_DIM, list)];
            got.iter().zip(&expected).for_each(|(got, expected)| assert_same(&what, got, expected));
            // Keys of other blocks have no part in it.
            let none: Vec<u32> = (0..7).filter(|block| !list.contains(block)).collect();
            let others = [gathered(&dk, DIM, &none), gathered(&dv, VALUE_DIM, &none)];
            assert!(others.iter().flatten().all(|x| x.to_bits() == 0), "{what}: other keys");
        }
    }
}
