//! Histories of caches, held against plain lists of tokens.

mod attend;
mod changes;

use crate::fuzzer::array::Array;
use crate::fuzzer::bits::Recorder;
use crate::fuzzer::draw::{DTYPES, Home, numbers, tame_one};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::sources::{Tokens, append, channel_scales};
use core::num::NonZeroUsize;
use sdpa::{Dtype, Error, KeyScales, KvCache, KvShape, View};

const MOST_KEYS: usize = 1500;
const MOST_SEQUENCES: usize = 4;

/// Keys and values of a sequence: `[1, kv_heads, n, dim]` each.
#[derive(Debug, Clone)]
struct Sequence {
    kv: [Array; 2],
    /// Rows at the end with windows that are there for certain.
    fresh: usize,
    /// Keys before this one may have been evicted.
    gone: usize,
    /// Whether its place is free.
    removed: bool,
}

/// A cache, and what should be in it.
#[derive(Debug, Clone)]
struct Pair {
    cache: KvCache,
    model: Vec<Sequence>,
    home: Home,
    /// If keys are evicted: how many of the last and of the first stay, and for how many rolled back there is room.
    keep: Option<[usize; 3]>,
    kv_heads: usize,
    dims: [usize; 2],
    /// Whether tokens have no extreme numbers.
    tame: bool,
}

/// One random history.
pub(super) fn check(rng: &mut Rng) {
    let steps = 1 + rng.below(14);
    steps_of(rng, steps);
}

/// A history of this number of steps.
pub(super) fn steps_of(rng: &mut Rng, steps: usize) {
    let mut pair = Pair::new(rng);
    let mut others = Vec::new();
    let mut history = String::new();
    for _ in 0..steps {
        let copy = pair.step(rng, &mut history);
        others.extend(copy);
        pair.check_lengths(&history);
        if rng.one_in(4) {
            pair.attend(rng, &history);
        }
    }
    for pair in others.iter_mut().chain([&mut pair]) {
        pair.attend(rng, &history);
    }
}

/// Calls over a cache on its way.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let (mut pair, mut history) = (Pair { tame: !rng.one_in(4), ..Pair::new(rng) }, String::new());
    for _ in 0..6 + rng.below(9) {
        pair.step(rng, &mut history);
        if rng.one_in(4) {
            pair.record(rng, recorder);
        }
    }
    recorder.say(format!("{:?}, dims {:?}, keep {:?}:{history}", pair.home, pair.dims, pair.keep));
    pair.record(rng, recorder);
}

/// The file of a cache after some steps.
pub(super) fn exported(rng: &mut Rng) -> Vec<u8> {
    let (mut pair, mut history) = (Pair::new(rng), String::new());
    for _ in 0..1 + rng.below(8) {
        pair.step(rng, &mut history);
    }
    if pair.kv_heads == 0 {
        return exported(rng);
    }
    pair.cache.export().expect("it has heads")
}

impl Pair {
    fn new(rng: &mut Rng) -> Self {
        let home = if rng.one_in(4) { Home::integers(rng) } else { Home::Cache(rng.pick(&DTYPES)) };
        let keep = rng.one_in(2).then(|| {
            let [last, first] = [rng.pick(&[1, 2, 16, 255, 256, 257, 300]), rng.pick(&[0, 0, 1, 4, 256, 300])];
            [last, first, rng.pick(&[0, 0, 1, 20, 256])]
        });
        let (sequences, kv_heads) = (rng.pick(&[0, 1, 1, 1, 2]), rng.up_to(2));
        let dims = [rng.pick(&[1, 5, 16, 17, 33]), rng.pick(&[1, 4, 16, 20, 65])];
        let cache = match keep {
            Some([last, first, rollback]) => {
                let last = NonZeroUsize::new(last).expect("at least one");
                KvCache::sliding(sequences, KvShape { kv_heads, head_dim: dims[0], value_dim: dims[1] }, last, first)
                    .and_then(|cache| cache.rollback_room(rollback))
            }
            None => KvCache::new(sequences, KvShape { kv_heads, head_dim: dims[0], value_dim: dims[1] }),
        };
        let cache = cache.expect("good sizes");
        let cache = match home {
            Home::Cache(dtype) => cache.dtype(dtype),
            Home::Bits(numbers) => cache.int4(numbers),
            Home::Bytes { channels: Some(most) } => {
                cache.int8(KeyScales::PerChannel(channel_scales(kv_heads * dims[0], most)))
            }
            _ => cache.int8(KeyScales::PerToken),
        };
        let cache = match home {
            Home::Cache(_) if dims[1] <= dims[0] && rng.one_in(2) => cache.and_then(KvCache::latent),
            _ => cache,
        };
        let mut pair =
            Self { cache: cache.expect("it is empty"), model: Vec::new(), home, keep, kv_heads, dims, tame: false };
        pair.model = vec![pair.blank(); sequences];
        pair
    }

    fn dtype(&self) -> Dtype {
        if let Home::Cache(dtype) = self.home { dtype } else { Dtype::F32 }
    }

    fn len(&self, b: usize) -> usize {
        self.model[b].kv[0].shape[2]
    }

    /// So many tokens of a sequence.
    fn tokens(&self, rng: &mut Rng, n: usize) -> [Array; 2] {
        let [k, v] = self.dims.map(|dim| {
            let mut x = numbers(rng, [1, self.kv_heads, n, dim], self.dtype());
            self.home.tame(&mut x.data);
            if self.tame {
                x.data.iter_mut().for_each(tame_one);
            }
            x
        });
        let v = if self.cache.is_latent() { Array::from_fn(v.shape, |at| k.get(at)) } else { v };
        [k, v]
    }

    /// Tokens where they can be appended from.
    fn placed(&self, rng: &mut Rng, tokens: &[Array; 2]) -> Tokens {
        Tokens::of(rng, &self.cache, tokens, [self.dtype(); 2])
    }

    /// Something that may happen to a cache; a copy, if that was it.
    fn step(&mut self, rng: &mut Rng, history: &mut String) -> Option<Self> {
        let n = self.model.len();
        let (b, to) = (rng.below(n), rng.below(n));
        let is_free = self.model.iter().any(|sequence| sequence.removed);
        match rng.below(24) {
            0 | 16 if n < MOST_SEQUENCES || is_free => self.add(history),
            1 => {
                history.push_str(" (copied)");
                return Some(self.clone());
            }
            2 => self.refusals(rng, history),
            _ if n == 0 => {}
            17 => self.export(rng, history),
            18 | 19 => self.append_ragged(rng, history),
            _ if self.model[b].removed => self.name_removed(rng, b, history),
            20 => self.remove(b, history),
            21..24 => {
                if rng.one_in(2) {
                    self.append_to(rng, b, history);
                }
                self.keep_some(rng, b, history);
            }
            3..8 => self.append_to(rng, b, history),
            8 | 9 => self.append_to_all(rng, history),
            10 | 11 => {
                let len = rng.below(self.len(b) + 1);
                let len = if rng.one_in(3) { len / 256 * 256 } else { len };
                self.truncate(b, len, history);
            }
            12 => {
                // Drafts that are not taken up.
                let len = self.len(b);
                self.append_to(rng, b, history);
                self.truncate(b, len, history);
            }
            13 => {
                history.push_str(&format!(" clear {b}"));
                self.cache.clear(b).expect("a sequence");
                self.cut(b, 0);
            }
            _ if self.model[to].removed => {
                assert!(matches!(self.cache.fork(b, to), Err(Error::Removed { .. })), "{history}: fork {b} {to}");
            }
            _ => {
                history.push_str(&format!(" fork {b} {to}"));
                self.cache.fork(b, to).expect("two sequences");
                self.model[to] = self.model[b].clone();
            }
        }
        None
    }

    fn some(&self, rng: &mut Rng, b: usize) -> usize {
        let n = rng.pick(&[0, 1, 1, 2, 15, 16, 17, 40, 255, 256, 257, 400, 700]);
        n.min(MOST_KEYS - self.len(b))
    }

    fn extend(&mut self, b: usize, tokens: &[Array; 2]) {
        let (len, n) = (self.len(b), tokens[0].shape[2]);
        let sequence = &mut self.model[b];
        for (all, new) in sequence.kv.iter_mut().zip(tokens) {
            let [_, h, _, dim] = all.shape;
            *all = Array::from_fn([1, h, len + n, dim], |[_, h, j, c]| {
                if j < len { all.get([0, h, j, c]) } else { new.get([0, h, j - len, c]) }
            });
        }
        if n == 0 {
            return;
        }
        // What no row to come sees is evicted before anything is appended.
        if let Some([last, _, rollback]) = self.keep {
            sequence.gone = sequence.gone.max((len + 1).saturating_sub(last + rollback));
        }
        sequence.fresh = n;
    }

    fn append_to(&mut self, rng: &mut Rng, b: usize, history: &mut String) {
        let n = self.some(rng, b);
        history.push_str(&format!(" append {n} to {b}"));
        let tokens = self.tokens(rng, n);
        let dtype = self.dtype();
        append(rng, &mut self.cache, b, tokens.clone(), dtype);
        self.extend(b, &tokens);
    }

    fn append_to_all(&mut self, rng: &mut Rng, history: &mut String) {
        let n = (0..self.model.len()).map(|b| self.some(rng, b)).min().unwrap_or(0);
        history.push_str(&format!(" append {n} to all"));
        let tokens: Vec<[Array; 2]> = (0..self.model.len()).map(|_| self.tokens(rng, n)).collect();
        let all = [0, 1].map(|of| {
            let shape = [tokens.len(), self.kv_heads, n, self.dims[of]];
            Array::from_fn(shape, |[b, h, j, c]| tokens[b][of].get([0, h, j, c]))
        });
        let all = self.placed(rng, &all);
        let result = self.cache.append(all.k(), all.v());
        if self.model.iter().any(|sequence| sequence.removed) {
            assert!(matches!(result, Err(Error::Removed { .. })), "{history}: {result:?}");
            return history.push_str(" refused");
        }
        result.expect("they fit");
        (0..tokens.len()).for_each(|b| self.extend(b, &tokens[b]));
    }

    fn cut(&mut self, b: usize, len: usize) {
        let had = self.len(b);
        let sequence = &mut self.model[b];
        sequence.kv = [0, 1].map(|of| sequence.kv[of].part(0, 0..len));
        sequence.fresh = sequence.fresh.saturating_sub(had - len);
        sequence.gone = if len == 0 { 0 } else { sequence.gone };
    }

    /// Rolls back. A sliding cache may refuse to, where keys that the next row would see were evicted.
    fn truncate(&mut self, b: usize, len: usize, history: &mut String) {
        let gone = self.model[b].gone;
        match self.cache.truncate(b, len) {
            Ok(()) => {
                history.push_str(&format!(" truncate {b} to {len}"));
                self.cut(b, len);
            }
            Err(e) => {
                history.push_str(&format!(" truncate {b} to {len} refused"));
                let first = self.keep.map_or(len, |[last, ..]| (len + 1).saturating_sub(last));
                assert!(len > 0 && first < gone, "{history}, {:?}: {e}", self.keep);
            }
        }
    }

    fn check_lengths(&self, history: &str) {
        let lens: Vec<usize> = (0..self.model.len()).map(|b| self.len(b)).collect();
        assert_eq!(self.cache.lens(), lens, "{history}");
    }

    /// Changes that have to be refused, and to leave everything as it was.
    fn refusals(&mut self, rng: &mut Rng, history: &str) {
        let (n, bytes, [d, dv]) = (self.model.len(), self.cache.bytes(), self.dims);
        let zeros = [0.0f32; 4096];
        let view = |shape| View::bhld(&zeros, shape).expect("small");
        let cache = &mut self.cache;
        // A number that bytes, or f16, have no place for.
        let unfit = match self.home {
            home if home.is_integers() => [rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY])],
            _ => [rng.pick(&[65_520.0, -1e5, f32::MAX])],
        };
        let unfit = View::from_strides(&unfit, 0, [1, self.kv_heads, 1, d], [0; 4]).expect("one element for all");
        let takes_all = matches!(self.home, Home::Cache(Dtype::F32 | Dtype::Bf16));
        let result = match rng.below(9) {
            8 if n * self.kv_heads > 0 && !takes_all => cache.append_to(0, unfit, view([1, self.kv_heads, 1, dv])),
            0 => cache.append_to(n, view([1, self.kv_heads, 2, d]), view([1, self.kv_heads, 2, dv])),
            1 => cache.append(view([n + 1, self.kv_heads, 2, d]), view([n + 1, self.kv_heads, 2, dv])),
            2 => cache.append(view([n, self.kv_heads, 2, d + 1]), view([n, self.kv_heads, 2, dv])),
            3 => cache.append(view([n, self.kv_heads, 2, d]), view([n, self.kv_heads, 3, dv])),
            4 => cache.append(view([n, self.kv_heads + 1, 2, d]), view([n, self.kv_heads, 2, dv])),
            5 => cache.clear(n + rng.below(2) * (usize::MAX - n)),
            6 => cache.fork(0, n),
            _ => match self.model.first() {
                Some(first) => cache.truncate(0, first.kv[0].shape[2] + 1),
                None => cache.truncate(0, 0),
            },
        };
        assert!(result.is_err(), "{history}: nothing wrong was found");
        assert_eq!(self.cache.bytes(), bytes, "{history}");
    }
}
