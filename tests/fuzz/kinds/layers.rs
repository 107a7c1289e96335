//! Histories of the caches of several layers, changed together: as each alone, or none of them where one refuses; and of a pool
//! that has the tokens of the first layer.

use crate::fuzzer::array::{Array, indices};
use crate::fuzzer::draw::{DTYPES, Home, numbers};
use crate::fuzzer::rng::Rng;
use core::num::NonZeroUsize;
use sdpa::{BlockTable, Dtype, Error, Inputs, KvCache, KvShape, LayerCaches, PagePool, View};

const SEQUENCES: usize = 2;
/// Longest sequence.
const MOST: usize = 700;

/// A pool, and the pages of each sequence; no page is another's.
struct Paged {
    pool: PagePool,
    entries: Vec<u32>,
    lens: Vec<usize>,
}

impl Paged {
    fn new(rng: &mut Rng, like: &KvCache) -> Self {
        let page = rng.pick(&[16, 48, 256]);
        let pages = SEQUENCES * MOST.div_ceil(page);
        let pool = PagePool::new(pages + rng.below(3), page, like.shape(), like.format()).expect("good sizes");
        let entries = rng.shuffled(pages).into_iter().map(|page| page as u32).collect();
        Self { pool, entries, lens: vec![0; SEQUENCES] }
    }

    /// Pages of one sequence.
    fn of(&self, b: usize) -> Vec<u32> {
        let width = self.entries.len() / SEQUENCES;
        self.entries[b * width..][..width].to_vec()
    }

    /// Goes on with what was saved, in other pages, and with less memory.
    fn save_and_load(&mut self, rng: &mut Rng) {
        let file = self.pool.export(BlockTable { entries: &self.entries, lens: &self.lens }).expect("a file");
        self.entries = rng.shuffled(self.entries.len()).into_iter().map(|page| page as u32).collect();
        let table = BlockTable { entries: &self.entries, lens: &self.lens };
        self.pool.import(table, &file).expect("its own file");
        self.pool.shrink(self.entries.len()).expect("fewer pages");
        let i = rng.below(file.len());
        let cut = self.pool.import(table, &file[..i]).expect_err("it is cut off");
        assert!(matches!(cut, Error::File { .. }), "{cut}");
    }

    fn same(&self, cache: &KvCache, said: &str) {
        let q = View::<f32>::bhld(&[], [SEQUENCES, 0, 0, 1]).expect("nothing");
        let table = BlockTable { entries: &self.entries, lens: &self.lens };
        assert_eq!(cache.lens(), self.lens, "{said}");
        let pages = Inputs::paged(q, self.pool.pages(table).expect("a good table"));
        same_tokens(&pages, &Inputs::cached(q, cache), cache, said);
    }
}

/// Panics unless both have the same keys and values, bit for bit.
fn same_tokens(got: &Inputs<'_>, expected: &Inputs<'_>, cache: &KvCache, said: &str) {
    let [got, expected] = [got, expected].map(|inputs| inputs.key_values().expect("a value for each key"));
    let KvShape { kv_heads, head_dim, value_dim } = cache.shape();
    let longest = cache.lens().iter().copied().max().unwrap_or(0);
    for at in indices([cache.sequences(), kv_heads, longest, head_dim.max(value_dim)]) {
        let bits = [got, expected].map(|held| [held.key(at), held.value(at)].map(|x| x.map(f32::to_bits)));
        assert_eq!(bits[0], bits[1], "{said}: {at:?}");
    }
}

/// An empty cache of a layer; any layer but the first may slide.
fn empty(rng: &mut Rng, home: Home, layer: usize) -> KvCache {
    let shape = KvShape { kv_heads: rng.up_to(2), head_dim: 1 + rng.below(20), value_dim: 1 + rng.below(20) };
    let cache = match layer > 0 && rng.one_in(3) {
        true => KvCache::sliding(SEQUENCES, shape, NonZeroUsize::new(1 + rng.below(300)).expect("some"), rng.below(20)),
        false => KvCache::new(SEQUENCES, shape),
    };
    let cache = cache.expect("good sizes");
    match home {
        Home::Bits(kind) => cache.int4(kind),
        Home::Cache(dtype) => cache.dtype(dtype),
        _ => cache.int8(sdpa::KeyScales::PerToken),
    }
    .expect("it is empty")
}

pub(super) fn check(rng: &mut Rng) {
    let homes: Vec<Home> = (0..1 + rng.below(3))
        .map(|_| if rng.one_in(2) { Home::integers(rng) } else { Home::Cache(rng.pick(&DTYPES)) })
        .collect();
    let mut alone: Vec<KvCache> = homes.iter().enumerate().map(|(layer, &home)| empty(rng, home, layer)).collect();
    let mut caches = LayerCaches::new(alone.clone()).expect("the same sequences");
    let (mut paged, mut said) = (Paged::new(rng, &alone[0]), format!("{homes:?}:"));
    for _ in 0..1 + rng.below(15) {
        let b = rng.below(SEQUENCES);
        let len = alone[0].lens()[b];
        match rng.below(9) {
            0 if alone.iter().all(|cache| cache.shape().kv_heads > 0) => {
                caches = LayerCaches::import(&caches.export().expect("they have heads")).expect("its own file");
                paged.save_and_load(rng);
            }
            1 => caches.shrink(),
            2 => {
                // A step that only some layers take.
                let reached = rng.below(homes.len());
                for layer in 0..reached {
                    append(rng, &homes, layer, caches.layer_mut(layer).expect("a layer"), b, 5);
                }
                caches.roll_back().expect("of the last append");
                for (layer, cache) in alone.iter_mut().enumerate().take(reached) {
                    // A sliding one has evicted for the step.
                    *cache = caches.layers()[layer].clone();
                }
            }
            3 | 4 => {
                let from = rng.below(len + 2);
                let accepted: Vec<usize> = (0..len.saturating_sub(from)).filter(|_| rng.one_in(3)).collect();
                said.push_str(&format!(" keep {from} and {} of {len} in {b}", accepted.len()));
                let done = together(&mut alone, &|cache| cache.keep(b, from, &accepted));
                assert_eq!(caches.keep(b, from, &accepted).is_ok(), done, "{said}");
                if done {
                    let (entries, lens) = (paged.of(b), [paged.lens[b]]);
                    let table = BlockTable { entries: &entries, lens: &lens };
                    paged.pool.keep(table, 0, from, &accepted).expect("a cache does");
                    paged.lens[b] = from + accepted.len();
                }
            }
            5 => {
                let to = rng.below(len + 2);
                said.push_str(&format!(" truncate {b} to {to}"));
                let done = together(&mut alone, &|cache| cache.truncate(b, to));
                assert_eq!(caches.truncate(b, to).is_ok(), done, "{said}");
                paged.lens[b] = if done { to } else { paged.lens[b] };
            }
            _ => {
                let n = rng.pick(&[0, 1, 1, 15, 16, 17, 100, 256, 300]).min(MOST - len);
                said.push_str(&format!(" append {n} to {b}"));
                for (layer, alone) in alone.iter_mut().enumerate() {
                    let [k, v] = append(rng, &homes, layer, alone, b, n);
                    let (k, v) = (view(&k), view(&v));
                    caches.layer_mut(layer).expect("a layer").append_to(b, k, v).expect("they fit");
                    if layer == 0 {
                        paged.lens[b] += n;
                        let (entries, lens) = (paged.of(b), [paged.lens[b]]);
                        paged.pool.append(BlockTable { entries: &entries, lens: &lens }, k, v).expect("they fit");
                    }
                }
            }
        }
        assert_eq!(caches.len(b).ok(), alone.iter().map(|cache| cache.lens()[b]).min(), "{said}");
    }
    for (got, expected) in caches.layers().iter().zip(&alone) {
        assert_eq!(got.lens(), expected.lens(), "{said}");
        let q = View::<f32>::bhld(&[], [SEQUENCES, 0, 0, 1]).expect("nothing");
        same_tokens(&Inputs::cached(q, got), &Inputs::cached(q, expected), expected, &said);
    }
    paged.same(&alone[0], &said);
}

fn view(x: &Array) -> View<'_> {
    View::bhld(&x.data, x.shape).expect("dense")
}

/// Changes all caches, or none if one refuses.
fn together(caches: &mut [KvCache], change: &dyn Fn(&mut KvCache) -> Result<(), Error>) -> bool {
    let mut changed = caches.to_vec();
    let done = changed.iter_mut().all(|cache| change(cache).is_ok());
    if done {
        caches.clone_from_slice(&changed);
    }
    done
}

/// Appends tokens to a sequence of a layer, and returns them.
fn append(rng: &mut Rng, homes: &[Home], layer: usize, cache: &mut KvCache, b: usize, n: usize) -> [Array; 2] {
    let KvShape { kv_heads, head_dim, value_dim } = cache.shape();
    let dtype = if let Home::Cache(dtype) = homes[layer] { dtype } else { Dtype::F32 };
    let tokens = [head_dim, value_dim].map(|dim| {
        let mut x = numbers(rng, [1, kv_heads, n, dim], dtype);
        homes[layer].tame(&mut x.data);
        x
    });
    cache.append_to(b, view(&tokens[0]), view(&tokens[1])).expect("they fit");
    tokens
}
