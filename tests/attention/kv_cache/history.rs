//! Random histories of a cache, held against plain lists of rows.

use crate::kv_support::same_full;
use crate::options::{Case, Full, Wanted};
use crate::support::{Rng, Tensor, execs};
use core::cell::Cell;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use sdpa::{Alignment, Exec, Inputs, KvCache, KvShape, Window};
use std::num::NonZeroUsize;

const MOST_KEYS: usize = 1100;
const MOST_SEQUENCES: usize = 6;

/// What may happen to a cache. Numbers are taken modulo what there is.
#[derive(Debug, Clone)]
enum Step {
    Append {
        tokens: usize,
    },
    AppendTo {
        sequence: usize,
        tokens: usize,
    },
    /// Down to this number of thousandths, or to a whole block.
    Truncate {
        sequence: usize,
        share: usize,
        block: bool,
    },
    Clear {
        sequence: usize,
    },
    Fork {
        from: usize,
        to: usize,
    },
    /// To a file, and from it into another sequence.
    Swap {
        from: usize,
        to: usize,
    },
    AddSequence,
    /// Tokens of NaN and ∞, rolled back.
    Poison {
        sequence: usize,
        tokens: usize,
    },
    /// A copy of the cache goes its own way from here; this one is looked at again in the end.
    Copy,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tokens = || {
        let edges = prop::sample::select(vec![0usize, 1, 1, 2, 15, 16, 17, 33, 255, 256, 257]);
        prop_oneof![edges, 1..40usize, 1..400usize]
    };
    let which = 0..MOST_SEQUENCES;
    let step = prop_oneof![
        3 => tokens().prop_map(|tokens| Step::Append { tokens }),
        6 => (which.clone(), tokens()).prop_map(|(sequence, tokens)| Step::AppendTo { sequence, tokens }),
        3 => (which.clone(), 0..=1000usize, any::<bool>())
            .prop_map(|(sequence, share, block)| Step::Truncate { sequence, share, block }),
        1 => which.clone().prop_map(|sequence| Step::Clear { sequence }),
        3 => (which.clone(), which.clone()).prop_map(|(from, to)| Step::Fork { from, to }),
        2 => (which.clone(), which.clone()).prop_map(|(from, to)| Step::Swap { from, to }),
        1 => Just(Step::AddSequence),
        3 => (which, tokens()).prop_map(|(sequence, tokens)| Step::Poison { sequence, tokens }),
        1 => Just(Step::Copy),
    ];
    prop::collection::vec(step, 1..40)
}

/// Rows of keys and of values, all heads of a token side by side.
type Token = [Vec<f32>; 2];

/// A cache, and what should be in it.
#[derive(Clone)]
struct Pair {
    cache: KvCache,
    model: Vec<Vec<Token>>,
    sizes: [usize; 4],
}

impl Pair {
    fn new(sequences: usize, sizes @ [_, kv_heads, d, dv]: [usize; 4]) -> Self {
        let cache = KvCache::new(sequences, KvShape { kv_heads, head_dim: d, value_dim: dv }).unwrap();
        Self { cache, model: vec![Vec::new(); sequences], sizes }
    }

    fn token(&self, rng: &mut Rng) -> Token {
        let [_, kv_heads, d, dv] = self.sizes;
        [d, dv].map(|dim| (0..kv_heads * dim).map(|_| rng.normal()).collect())
    }

    /// `[lists, kv_heads, n, dim]` of keys or values; where a list is shorter, `fill`.
    fn tensor(&self, lists: &[&[Token]], which: usize, fill: f32) -> Tensor {
        let [_, kv_heads, d, dv] = self.sizes;
        let (dim, longest) = ([d, dv][which], lists.iter().map(|list| list.len()).max().unwrap_or(0));
        Tensor::from_fn([lists.len(), kv_heads, longest, dim], |[b, h, j, c]| {
            lists[b].get(j).map_or(fill, |token| token[which][h * dim + c])
        })
    }

    fn append_to(&mut self, sequence: usize, tokens: Vec<Token>) {
        let [k, v] = [0, 1].map(|which| self.tensor(&[&tokens], which, f32::NAN));
        self.cache.append_to(sequence, k.view(), v.view()).unwrap();
        self.model[sequence].extend(tokens);
    }

    fn take(&mut self, step: &Step, rng: &mut Rng) {
        let n = self.model.len();
        match *step {
            Step::Append { tokens } => {
                let room = MOST_KEYS - self.model.iter().map(Vec::len).max().unwrap_or(0);
                let lists: Vec<Vec<_>> =
                    (0..n).map(|_| (0..tokens.min(room)).map(|_| self.token(rng)).collect()).collect();
                let slices: Vec<&[Token]> = lists.iter().map(Vec::as_slice).collect();
                let [k, v] = [0, 1].map(|which| self.tensor(&slices, which, f32::NAN));
                self.cache.append(k.view(), v.view()).unwrap();
                self.model.iter_mut().zip(lists).for_each(|(rows, new)| rows.extend(new));
            }
            Step::AppendTo { sequence, tokens } => {
                let b = sequence % n;
                let tokens = tokens.min(MOST_KEYS - self.model[b].len());
                let tokens = (0..tokens).map(|_| self.token(rng)).collect();
                self.append_to(b, tokens);
            }
            Step::Truncate { sequence, share, block } => {
                let b = sequence % n;
                let len = self.model[b].len() * share / 1000;
                let len = if block { len / 256 * 256 } else { len };
                self.cache.truncate(b, len).unwrap();
                self.model[b].truncate(len);
            }
            Step::Clear { sequence } => {
                self.cache.clear(sequence % n).unwrap();
                self.model[sequence % n].clear();
            }
            Step::Fork { from, to } => {
                self.cache.fork(from % n, to % n).unwrap();
                self.model[to % n] = self.model[from % n].clone();
            }
            Step::Swap { from, to } => {
                let (from, to) = (from % n, to % n);
                let file = self.cache.export_sequence(from).unwrap();
                [from, to].into_iter().for_each(|sequence| self.cache.clear(sequence).unwrap());
                self.cache.import_sequence(to, &file).unwrap();
                self.model[to] = core::mem::take(&mut self.model[from]);
            }
            Step::AddSequence if n < MOST_SEQUENCES => {
                assert_eq!(self.cache.add_sequence(), n);
                self.model.push(Vec::new());
            }
            Step::Poison { sequence, tokens } => {
                let (b, len) = (sequence % n, self.model[sequence % n].len());
                let poison = |i: usize| [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3];
                let token = |i: usize| self.token(rng).map(|row| vec![poison(i); row.len()]);
                let tokens = (0..tokens).map(token).collect();
                self.append_to(b, tokens);
                self.cache.truncate(b, len).unwrap();
                self.model[b].truncate(len);
            }
            Step::AddSequence | Step::Copy => {}
        }
    }

    /// Attention from the cache, over tensors, and from a new cache with the same rows.
    fn check(&self, what: &str, rng: &mut Rng) {
        let lens: Vec<usize> = self.model.iter().map(Vec::len).collect();
        assert_eq!(self.cache.lens(), lens, "{what}");
        let (longest, [sharing, kv_heads, d, dv]) = (lens.iter().copied().max().unwrap_or(0), self.sizes);
        let rows = 1 + rng.below(3);
        let mut case = Case::plain(rng, [lens.len(), sharing * kv_heads, kv_heads, rows, longest, d, dv]);
        let lists: Vec<&[Token]> = self.model.iter().map(Vec::as_slice).collect();
        // What is behind the end of a sequence is nobody's business.
        (case.k, case.v) = (self.tensor(&lists, 0, f32::NAN), self.tensor(&lists, 1, f32::NAN));
        (case.kv_lens, case.alignment) = (Some(lens), Some(Alignment::BottomRight));
        case.causal = rng.below(2) == 0;
        let last = NonZeroUsize::new(1 + rng.below(300)).expect("at least 1");
        case.window = (rng.below(3) == 0).then(|| Window::last_tokens(last).keep_first(rng.below(20)));
        case.softcap = (rng.below(3) == 0).then_some(3.0);
        let wanted = rng.pick(&[Wanted::LEAST, Wanted::ALL]);

        let mut fresh = Self::new(self.model.len(), self.sizes);
        for (b, tokens) in self.model.iter().enumerate() {
            fresh.append_to(b, tokens.clone());
        }
        for (isa, exec) in execs() {
            let expected = case.run(exec, wanted);
            same_full(&format!("{what}, {isa}: cache"), &from(&case, &self.cache, exec, wanted), &expected);
            same_full(&format!("{what}, {isa}: new cache"), &from(&case, &fresh.cache, exec, wanted), &expected);
        }
    }
}

fn from(case: &Case, cache: &KvCache, exec: Exec, wanted: Wanted) -> Full {
    case.run_over(Inputs::cached(case.q.view(), cache), exec, wanted)
}

#[test]
fn any_history_is_the_rows_that_it_leaves() {
    // A fixed sequence of histories; SDPA_SEED gives others.
    let seed = std::env::var("SDPA_SEED").ok().and_then(|s| s.parse::<u8>().ok()).unwrap_or(0);
    let config = Config { cases: 60, failure_persistence: None, max_shrink_time: 20_000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]));
    let (checks, copies) = (Cell::new(0), Cell::new(0));
    let sizes = prop::sample::select(vec![
        [1, 1, 1, 1],
        [2, 2, 17, 5],
        [1, 3, 16, 33],
        [3, 1, 40, 16],
        [2, 1, 3, 64],
        [2, 1, 4, 80],
    ]);
    let strategy = (any::<u64>(), 1..4usize, sizes, steps());
    let result = runner.run(&strategy, |(seed, sequences, sizes, steps)| {
        let rng = &mut Rng::new(seed);
        let mut pair = Pair::new(sequences, sizes);
        let mut others = Vec::new();
        for (i, step) in steps.iter().enumerate() {
            if let (Step::Copy, true) = (step, others.len() < 2) {
                // Either of the two may be the one that goes on.
                let copy = pair.clone();
                others.push(if i % 2 == 0 { copy } else { core::mem::replace(&mut pair, copy) });
            }
            pair.take(step, rng);
            if i % 4 == 3 || i + 1 == steps.len() {
                checks.set(checks.get() + 1);
                pair.check(&format!("after step {i}, {step:?}"), rng);
            }
        }
        for (i, other) in others.iter_mut().enumerate() {
            copies.set(copies.get() + 1);
            other.check(&format!("copy {i}"), rng);
            // It can still be written to, and the one that went on does not see it.
            other.take(&Step::Append { tokens: 3 }, rng);
            other.check(&format!("copy {i}, appended to"), rng);
            pair.check(&format!("beside copy {i}"), rng);
        }
        Ok(())
    });
    println!("{} checks, {} copies", checks.get(), copies.get());
    result.unwrap();
    assert!(checks.get() > 200 && copies.get() > 10, "the histories are too short to say anything");
}

/// The example of a shared system prompt: a fork shares blocks, and takes memory only where it writes.
#[test]
fn forks_share_memory_until_they_write() {
    let rng = &mut Rng::new(1);
    let mut pair = Pair::new(1, [2, 2, 8, 8]);
    let tokens = (0..600).map(|_| pair.token(rng)).collect();
    pair.append_to(0, tokens);
    let (three, block) = (pair.cache.bytes(), pair.cache.bytes() / 3);
    for _ in 0..3 {
        let to = pair.model.len();
        pair.take(&Step::AddSequence, rng);
        pair.take(&Step::Fork { from: 0, to }, rng);
    }
    assert_eq!(pair.cache.bytes(), three, "forks take no memory");
    for sequence in 1..4 {
        pair.take(&Step::AppendTo { sequence, tokens: 1 }, rng);
        assert_eq!(pair.cache.bytes(), three + sequence * block, "the last block, and no other, became its own");
        pair.check(&format!("sequence {sequence} written to"), rng);
    }
    // A rollback into a shared block, and writing there.
    pair.take(&Step::Truncate { sequence: 2, share: 500, block: false }, rng);
    pair.take(&Step::AppendTo { sequence: 2, tokens: 20 }, rng);
    pair.check("rolled back into what is shared", rng);
    for sequence in [0, 1, 3] {
        pair.take(&Step::Clear { sequence }, rng);
    }
    pair.check("the others cleared", rng);
    let held = pair.cache.bytes();
    pair.take(&Step::AppendTo { sequence: 1, tokens: 256 }, rng);
    assert_eq!(pair.cache.bytes(), held, "memory that was freed is used again");
}
