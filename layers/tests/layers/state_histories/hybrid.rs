//! Histories of the caches of a hybrid model's layers, changed together: as each alone, or none of them where one refuses; and as if
//! the tokens of each sequence had come in one step.

use super::plain::join;
use super::{absent, there};
use crate::linear_attention_support::{Case, RULES, Rule};
use crate::support::{Rng, Tensor};
use core::num::NonZeroUsize;
use sdpa::{Dtype, Error, Exec, KvCache, KvShape, ViewMut};
use sdpa_layers::{Compute, HybridCaches, LayerCache, LinearAttention, LinearState, Normaliser, StateCache};

/// Most sequences.
const MOST: usize = 4;

/// Kind and sizes of a layer.
#[derive(Debug, Clone, Copy)]
enum Layer {
    /// `[kv_heads, head_dim, value_dim]`, and how many of the last tokens can be taken back.
    States { rule: Rule, sizes: [usize; 3], room: usize },
    /// A cache of keys; one that slides keeps this number of them.
    Keys { shape: KvShape, dtype: Dtype, last: Option<NonZeroUsize> },
}

impl Layer {
    fn new(rng: &mut Rng) -> Self {
        let sizes @ [kv_heads, head_dim, value_dim] = [1 + rng.below(2), 1 + rng.below(6), 1 + rng.below(9)];
        if rng.below(3) > 0 {
            return Self::States { rule: rng.pick(&RULES), sizes, room: rng.below(5) };
        }
        let last = if rng.below(3) == 0 { NonZeroUsize::new(rng.below(300)) } else { None };
        Self::Keys {
            shape: KvShape { kv_heads, head_dim, value_dim },
            dtype: rng.pick(&[Dtype::F32, Dtype::Bf16]),
            last,
        }
    }

    /// A cache of sequences without tokens.
    fn empty(&self, sequences: usize) -> LayerCache {
        match *self {
            Self::States { sizes: [h, d, dv], room, .. } => {
                let initial = LinearState::new([1, h, d, dv]).expect("good sizes");
                LayerCache::States(StateCache::new(sequences, &initial, room).expect("good sizes"))
            }
            Self::Keys { shape, dtype, last } => {
                let cache = match last {
                    Some(last) => KvCache::sliding(sequences, shape, last, 2).expect("good sizes").rollback_room(20),
                    None => KvCache::new(sequences, shape),
                };
                LayerCache::Keys(cache.expect("good sizes").dtype(dtype).expect("it is empty"))
            }
        }
    }

    /// Takes tokens in one call. What they are depends on their numbers and on the layer.
    fn take(&self, cache: &mut LayerCache, sequence: usize, tokens: &[u64], layer: usize) {
        let seeds = tokens.iter().map(|token| token.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ layer as u64);
        match (self, cache) {
            (&Self::States { rule, sizes: [h, d, dv], .. }, LayerCache::States(states)) => {
                let one = |tokens, seed| Case::new(rule, Normaliser::None, [1, h, 1, tokens, tokens, d, dv], seed);
                let tokens: Vec<Case> = seeds.map(|seed| one(1, seed)).collect();
                let case = join(&tokens).unwrap_or_else(|| one(0, 0));
                let mut out = Tensor::filled(case.out_shape(), 0.0);
                let out = ViewMut::bhld(&mut out.data, case.out_shape()).expect("dense");
                let mut compute = Compute::new(Exec::serial());
                LinearAttention::new().decode(case.inputs(), states, &[sequence], out, &mut compute).expect("they fit");
            }
            (&Self::Keys { shape: KvShape { kv_heads, head_dim, value_dim }, .. }, LayerCache::Keys(keys)) => {
                let mut rngs: Vec<Rng> = seeds.map(Rng::new).collect();
                let [k, v] = [head_dim, value_dim]
                    .map(|dim| Tensor::from_fn([1, kv_heads, tokens.len(), dim], |[_, _, t, _]| rngs[t].normal()));
                keys.append_to(sequence, k.view(), v.view()).expect("they fit");
            }
            (layer, cache) => panic!("{layer:?}: {cache:?}"),
        }
    }

    /// True if the bits of a cache depend on its tokens alone.
    fn is_of_tokens_alone(&self) -> bool {
        !matches!(self, Self::Keys { last: Some(_), .. })
    }
}

/// Evaluates an expression of the cache of either kind.
macro_rules! of_either {
    ($layer:expr, $cache:ident => $result:expr) => {
        match $layer {
            LayerCache::Keys($cache) => $result,
            LayerCache::States($cache) => $result,
            layer => panic!("a new kind: {layer:?}"),
        }
    };
}

struct History {
    layers: Vec<Layer>,
    caches: HybridCaches,
    /// Caches like these, each changed alone.
    alone: Vec<LayerCache>,
    /// Tokens that all layers have; `None` for removed sequences.
    tokens: Vec<Option<Vec<u64>>>,
    said: String,
}

impl History {
    fn new(rng: &mut Rng) -> Self {
        let layers: Vec<Layer> = (0..1 + rng.below(4)).map(|_| Layer::new(rng)).collect();
        let sequences = 1 + rng.below(3);
        let alone: Vec<LayerCache> = layers.iter().map(|layer| layer.empty(sequences)).collect();
        let caches = HybridCaches::new(alone.clone()).expect("the same sequences");
        let said = format!("{layers:?}:");
        Self { layers, caches, alone, tokens: vec![Some(Vec::new()); sequences], said }
    }

    /// Changes all layers together, and each alone: all of them if all can. Returns true if they were changed.
    fn change(
        &mut self,
        what: &str,
        together: impl Fn(&mut HybridCaches) -> Result<(), Error>,
        alone: impl Fn(&mut LayerCache) -> Result<(), Error>,
    ) -> bool {
        let mut changed = self.alone.clone();
        let can = changed.iter_mut().all(|cache| alone(cache).is_ok());
        let result = together(&mut self.caches);
        self.said.push_str(&format!(" {what}: {can}"));
        assert_eq!(result.is_ok(), can, "{}: {result:?}", self.said);
        if can {
            self.alone = changed;
        }
        can
    }

    /// Takes a step of all layers, or of all but one.
    fn step(&mut self, rng: &mut Rng, b: usize, skipped: Option<usize>) {
        let n = rng.pick(&[0, 1, 1, 2, 3, 4, 5, 6, 20]);
        let tokens: Vec<u64> = (0..n).map(|_| rng.bits()).collect();
        self.said.push_str(&format!(" {n} tokens to {b} without {skipped:?}"));
        for (layer, of) in self.layers.iter().enumerate().filter(|&(layer, _)| Some(layer) != skipped) {
            of.take(self.caches.layer_mut(layer).expect("a layer"), b, &tokens, layer);
            of.take(&mut self.alone[layer], b, &tokens, layer);
        }
        if skipped.is_none() {
            self.tokens[b].as_mut().expect("it is there").extend(tokens);
        }
    }

    /// Takes back what a step of one sequence has left, in one way or another.
    fn after_a_failed_step(&mut self, rng: &mut Rng, b: usize) {
        let len = self.tokens[b].as_ref().expect("it is there").len();
        assert_eq!(self.caches.len(b), Ok(len), "{}: one layer has no more", self.said);
        if rng.below(2) == 0 {
            self.said.push_str(" roll back");
            self.caches.roll_back().expect("each layer has had one call");
            for cache in &mut self.alone {
                of_either!(cache, cache => cache.truncate(b, len)).expect("one call");
            }
        } else {
            assert!(self.cut("cut", b, len), "{}: it was the length before the call", self.said);
        }
    }

    /// Truncates a sequence. Returns true if it can go back so far.
    fn cut(&mut self, what: &str, b: usize, len: usize) -> bool {
        let alone = |cache: &mut LayerCache| of_either!(cache, cache => cache.truncate(b, len));
        self.change(what, |caches| caches.truncate(b, len), alone)
    }

    fn truncate(&mut self, rng: &mut Rng, b: usize) {
        let had = self.tokens[b].as_ref().expect("it is there").len();
        let len = if rng.below(2) == 0 { rng.below(had + 2) } else { had.saturating_sub(rng.below(4)) };
        let done = self.cut(&format!("truncate {b} from {had} to {len}"), b, len);
        if done {
            self.tokens[b].as_mut().expect("it is there").truncate(len);
        }
        assert!(done || len != 0 && len != had, "{}: always possible", self.said);
    }

    /// Makes a sequence a copy of another, by a fork or by a file.
    fn copy(&mut self, rng: &mut Rng, from: usize, to: usize) {
        if rng.below(2) == 0 {
            let fork = |cache: &mut LayerCache| of_either!(cache, cache => cache.fork(from, to));
            self.change(&format!("fork {from} to {to}"), |caches| caches.fork(from, to), fork);
        } else {
            let file = self.caches.export_sequence(from).expect("they have heads");
            let cut = self.caches.import_sequence(to, &file[..rng.below(file.len())]);
            assert!(matches!(cut, Err(Error::File { .. } | Error::Range { .. })), "{}: {cut:?}", self.said);
            self.check();
            self.caches.truncate(to, 0).expect("always");
            self.caches.import_sequence(to, &file).expect("its own file");
            for cache in &mut self.alone {
                of_either!(cache, cache => cache.export_sequence(from).and_then(|file| {
                    cache.truncate(to, 0)?;
                    cache.import_sequence(to, &file)
                }))
                .expect("as all together");
            }
            self.said.push_str(&format!(" file of {from} to {to}"));
        }
        self.tokens[to] = self.tokens[from].clone();
    }

    fn remove(&mut self, b: usize) {
        let remove = |cache: &mut LayerCache| of_either!(cache, cache => cache.remove_sequence(b));
        self.change(&format!("remove {b}"), |caches| caches.remove_sequence(b), remove);
        self.tokens[b] = None;
    }

    fn add(&mut self) {
        let added = self.caches.add_sequence();
        self.said.push_str(&format!(" add {added}"));
        for cache in &mut self.alone {
            assert_eq!(of_either!(cache, cache => cache.add_sequence()), added, "{}", self.said);
        }
        self.tokens.resize(self.tokens.len().max(added + 1), None);
        self.tokens[added] = Some(Vec::new());
    }

    /// Calls that name what is not there.
    fn refuse(&mut self, rng: &mut Rng, b: usize) {
        let absent = absent(rng, &self.tokens);
        self.said.push_str(&format!(" refuse {absent}"));
        let caches = &mut self.caches;
        let results = [
            caches.layer_mut(self.layers.len()).map(drop),
            caches.len(absent).map(drop),
            caches.truncate(absent, 0),
            caches.fork(absent, b),
            caches.fork(b, absent),
            caches.remove_sequence(absent),
            caches.export_sequence(absent).map(drop),
            caches.import_sequence(absent, &[]),
        ];
        assert!(results.iter().all(Result::is_err), "{}: {results:?}", self.said);
    }

    /// A change of some kind; at times what was cloned before it is what goes on.
    fn act(&mut self, rng: &mut Rng) {
        let there = there(&self.tokens);
        if there.is_empty() {
            return self.add();
        }
        let [b, other] = [rng.pick(&there), rng.pick(&there)];
        match rng.below(16) {
            0..5 => self.step(rng, b, None),
            5 | 6 => {
                let skipped = rng.below(self.layers.len());
                self.step(rng, b, Some(skipped));
                self.after_a_failed_step(rng, b);
            }
            7..10 => self.truncate(rng, b),
            10 | 11 => self.copy(rng, b, other),
            12 => self.remove(b),
            13 if there.len() < MOST => self.add(),
            14 => self.refuse(rng, b),
            _ => {
                let (caches, alone, tokens) = (self.caches.clone(), self.alone.clone(), self.tokens.clone());
                self.said.push_str(" clone");
                (0..2).for_each(|_| self.step(rng, b, None));
                self.check();
                (self.caches, self.alone, self.tokens) = (caches, alone, tokens);
            }
        }
    }

    /// All layers are as each alone. The file of a sequence has all that a rollback needs.
    fn check(&self) {
        for (b, tokens) in self.tokens.iter().enumerate() {
            assert_eq!(self.caches.len(b).ok(), tokens.as_ref().map(Vec::len), "{}: {b}", self.said);
            for (layer, (together, alone)) in self.caches.layers().iter().zip(&self.alone).enumerate() {
                let file = |cache: &LayerCache| of_either!(cache, cache => cache.export_sequence(b));
                assert_eq!(file(together).is_ok(), tokens.is_some(), "{}: {b} of {layer}", self.said);
                assert!(file(together) == file(alone), "{}: {b} of layer {layer} is another alone", self.said);
            }
        }
    }

    /// All layers are as if the tokens of each sequence had come at once.
    fn check_whole(&self) {
        for (b, tokens) in self.tokens.iter().enumerate() {
            let Some(tokens) = tokens else { continue };
            let all = self.layers.iter().zip(self.caches.layers()).enumerate();
            for (layer, (of, got)) in all.filter(|(_, (of, _))| of.is_of_tokens_alone()) {
                let mut whole = of.empty(1);
                of.take(&mut whole, 0, tokens, layer);
                let same = match (got, &whole) {
                    (LayerCache::States(got), LayerCache::States(whole)) => {
                        super::bits(&got.state(b).expect("it is there")) == super::bits(&whole.state(0).expect("one"))
                    }
                    (LayerCache::Keys(got), LayerCache::Keys(whole)) => {
                        got.export_sequence(b) == whole.export_sequence(0)
                    }
                    _ => false,
                };
                assert!(same, "{}: {b} of layer {layer} is another in one call", self.said);
            }
        }
    }
}

/// Makes a history of some steps, and panics if something is wrong.
pub(crate) fn check(rng: &mut Rng, steps: usize) {
    let mut history = History::new(rng);
    for _ in 0..steps {
        history.act(rng);
        history.check();
    }
    history.check_whole();
}

#[test]
fn histories_of_all_layers() {
    for seed in 0..crate::support::fewer(200) {
        check(&mut Rng::new(seed), 20);
    }
}
