//! Histories of latent caches of integers: the first columns of what whole keys give that are stored as values, too.

use crate::fuzzer::array::Array;
use crate::fuzzer::case::Case;
use crate::fuzzer::draw::{Home, numbers, settings};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::selection::Selection;
use sdpa::{
    Alignment, Attention, Dtype, Error, Exec, Inputs, Int4, Isa, KeyScales, KvCache, KvShape, Outputs, SelectedKeys,
    View, ViewMut,
};

pub(super) fn check(rng: &mut Rng) {
    check_of(rng, false);
}

/// A history at the end of which rows select keys.
pub(super) fn check_selected(rng: &mut Rng) {
    check_of(rng, true);
}

fn check_of(rng: &mut Rng, select: bool) {
    let (latent, whole, said) = history(rng);
    let ([kv_heads, head_dim, value_dim], rows) = (sizes(&latent), rng.pick(&[0, 1, 1, 2, 30]));
    let heads = kv_heads * rng.pick(&[1, 2, 5]);
    let heads = rng.or_zero(heads);
    let q = numbers(rng, [2, heads, rows, head_dim], Dtype::F32);
    let isas: Vec<Isa> = Isa::available().collect();
    let exec = Exec::serial().isa(rng.pick(&isas));
    let selected = select.then(|| lists(rng, &q, &latent));
    let [got, expected] = [&latent, &whole].map(|cache| attend(&q, cache, selected.as_ref(), exec));
    for (got, expected) in got.chunks_exact(value_dim).zip(expected.chunks_exact(head_dim)) {
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(got), bits(&expected[..value_dim]), "{said}");
    }
}

/// Number of key/value heads, and the lengths of a key and a value.
fn sizes(cache: &KvCache) -> [usize; 3] {
    let KvShape { kv_heads, head_dim, value_dim } = cache.shape();
    [kv_heads, head_dim, value_dim]
}

/// A latent cache, one with whole keys as values, and what happened to both.
fn history(rng: &mut Rng) -> (KvCache, KvCache, String) {
    let (kv_heads, head_dim) = (rng.up_to(2), rng.pick(&[1, 5, 16, 17, 33, 80, 300]));
    let value_dim = 1 + rng.below(head_dim);
    let home = rng.pick(&[Home::Bytes { channels: None }, Home::Bits(Int4::Symmetric), Home::Bits(Int4::Centred)]);
    let new = |value_dim| {
        let cache = KvCache::new(2, KvShape { kv_heads, head_dim, value_dim }).expect("good sizes");
        match home {
            Home::Bits(kind) => cache.int4(kind),
            _ => cache.int8(KeyScales::PerToken),
        }
    };
    let mut latent = new(value_dim).and_then(KvCache::latent).expect("it is empty");
    let (mut whole, mut said) = (new(head_dim).expect("it is empty"), format!("{home:?}, {head_dim}, {value_dim}:"));
    for _ in 0..1 + rng.below(12) {
        let b = rng.below(2);
        let len = latent.lens()[b];
        let mut both = |change: &dyn Fn(&mut KvCache) -> Result<(), Error>| {
            [&mut latent, &mut whole].into_iter().for_each(|cache| change(cache).expect("a good change"));
        };
        match rng.below(8) {
            0 => both(&|cache| cache.fork(b, 1 - b)),
            1 => {
                let to = rng.below(len + 1);
                both(&|cache| cache.truncate(b, to));
            }
            2 => {
                let from = rng.below(len + 1);
                let accepted: Vec<usize> = (0..len - from).filter(|_| rng.one_in(3)).collect();
                both(&|cache| cache.keep(b, from, &accepted));
            }
            3 if kv_heads > 0 => latent = KvCache::import(&latent.export().expect("it has heads")).expect("its file"),
            4 => both(&|cache| {
                cache.shrink();
                Ok(())
            }),
            _ => {
                let n = rng.pick(&[0, 1, 1, 15, 16, 17, 100, 256, 300]).min(800 - len.min(800));
                said.push_str(&format!(" append {n} to {b}"));
                let mut k = numbers(rng, [1, kv_heads, n, head_dim], Dtype::F32);
                home.tame(&mut k.data);
                let k = View::bhld(&k.data, k.shape).expect("dense");
                latent.append_to(b, k, k.columns(0..value_dim).expect("it has these")).expect("they fit");
                whole.append_to(b, k, k).expect("they fit");
            }
        }
        assert_eq!(latent.lens(), whole.lens(), "{said}");
    }
    (latent, whole, said)
}

/// Lists of keys for queries over a cache.
fn lists(rng: &mut Rng, q: &Array, cache: &KvCache) -> SelectedKeys {
    let keys = cache.lens().iter().copied().max().unwrap_or(0);
    let none = Array::from_fn([2, sizes(cache)[0], keys, 1], |_| 0.0);
    let settings = settings(rng, q.shape[2], keys);
    let case = Case::new([q.clone(), none.clone(), none], [Dtype::F32; 3], settings);
    let case = Case { kv_lens: Some(cache.lens().to_vec()), ..case };
    Selection::draw(rng, &case).made(rng, cache.lens())
}

/// Output of rows at the end of every sequence.
fn attend(q: &Array, cache: &KvCache, selected: Option<&SelectedKeys>, exec: Exec<'_>) -> Vec<f32> {
    let ([batch, heads, rows, _], [_, _, value_dim]) = (q.shape, sizes(cache));
    let mut out = vec![0.0; batch * heads * rows * value_dim];
    let inputs = Inputs::cached(View::bhld(&q.data, q.shape).expect("dense"), cache);
    let inputs = selected.map_or(inputs, |selected| inputs.selected(selected));
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [batch, heads, rows, value_dim]).expect("dense"));
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    attention.problem(inputs, outputs).expect("a good call").run_once(exec);
    out
}
