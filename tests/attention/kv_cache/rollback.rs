//! Random histories of sliding caches with room for rollbacks: what `KvCache::rollback_room` promises holds after each of them.

use crate::kv_support::{append_tokens, every_format, new_tokens, same_full};
use crate::options::{Case, Wanted};
use crate::support::{Rng, Tensor};
use core::num::NonZeroUsize;
use sdpa::{Alignment, Exec, Inputs, KvCache, KvShape, Window};

const SEQUENCES: usize = 2;
const MOST_KEYS: usize = 3000;

/// A sliding cache, and one that keeps all keys, with the same history.
struct Pair {
    sliding: KvCache,
    full: KvCache,
    last: usize,
    room: usize,
    /// Of each sequence, the greatest length before an append since it was empty, and the length before the last one.
    highest: [usize; SEQUENCES],
    before: [usize; SEQUENCES],
}

impl Pair {
    fn new(rng: &mut Rng) -> Self {
        let (last, first) = (rng.pick(&[1, 2, 16, 100, 255, 256, 257, 300]), rng.pick(&[0, 0, 4, 256, 300]));
        let (room, format) = (rng.pick(&[0, 0, 1, 5, 30, 255]), rng.below(7));
        let sliding = KvCache::sliding(
            SEQUENCES,
            KvShape { kv_heads: 1, head_dim: 3, value_dim: 5 },
            NonZeroUsize::new(last).unwrap(),
            first,
        )
        .unwrap();
        let empties = [
            sliding.rollback_room(room).unwrap(),
            KvCache::new(SEQUENCES, KvShape { kv_heads: 1, head_dim: 3, value_dim: 5 }).unwrap(),
        ];
        let [sliding, full] = empties.map(|empty| every_format(&empty)[format].1.clone());
        Self { sliding, full, last, room, highest: [0; SEQUENCES], before: [0; SEQUENCES] }
    }

    fn len(&self, b: usize) -> usize {
        self.full.lens()[b]
    }

    /// Whether a sequence can be cut to a length by what is promised.
    fn is_promised(&self, b: usize, len: usize) -> bool {
        len + self.room >= self.highest[b] || len >= self.before[b]
    }

    fn append(&mut self, b: usize, n: usize, rng: &mut Rng) {
        let n = n.min(MOST_KEYS - self.len(b));
        let tokens = new_tokens(&self.full, n, rng);
        if n > 0 {
            self.before[b] = self.len(b);
            self.highest[b] = self.highest[b].max(self.len(b));
        }
        [&mut self.sliding, &mut self.full].into_iter().for_each(|cache| append_tokens(cache, b, &tokens));
    }

    /// A length to go back to, mostly one for which there is room.
    fn shorter(&self, b: usize, rng: &mut Rng) -> usize {
        let beyond = rng.pick(&[0, 0, 1, self.last, 256]);
        let least = self.highest[b].saturating_sub(self.room + beyond).min(self.len(b));
        least + rng.below(self.len(b) - least + 1)
    }

    fn step(&mut self, rng: &mut Rng) -> String {
        let (b, to) = (rng.below(SEQUENCES), rng.below(SEQUENCES));
        match rng.below(20) {
            0..10 => {
                let n = rng.pick(&[0, 1, 5, 90, 256, 300, 400]);
                self.append(b, n, rng);
                format!("append {n} to {b}")
            }
            10..14 => {
                let len = self.shorter(b, rng);
                let refused = self.sliding.truncate(b, len).is_err();
                if refused {
                    self.check_refusal(b, len);
                } else {
                    self.full.truncate(b, len).unwrap();
                }
                format!("truncate {b} to {len}, refused: {refused}")
            }
            14..17 => {
                let from = self.shorter(b, rng);
                let accepted: Vec<usize> = (0..self.len(b) - from).filter(|_| rng.below(3) > 0).collect();
                let refused = self.sliding.keep(b, from, &accepted).is_err();
                if refused {
                    assert!(!self.is_promised(b, from), "{} of {b} from {from}", accepted.len());
                } else {
                    self.full.keep(b, from, &accepted).unwrap();
                }
                format!("keep {} of {b} from {from}, refused: {refused}", accepted.len())
            }
            17..19 => {
                [&mut self.sliding, &mut self.full].into_iter().for_each(|cache| cache.fork(b, to).unwrap());
                (self.highest[to], self.before[to]) = (self.highest[b], self.before[b]);
                format!("fork {b} to {to}")
            }
            _ => {
                [&mut self.sliding, &mut self.full].into_iter().for_each(|cache| cache.clear(b).unwrap());
                (self.highest[b], self.before[b]) = (0, 0);
                format!("clear {b}")
            }
        }
    }

    /// A rollback is refused where it was not promised, and the next row would see a key that was evicted.
    fn check_refusal(&self, b: usize, len: usize) {
        let evicted = self.sliding.evicted(b).unwrap();
        assert!(!self.is_promised(b, len), "to {len} of {:?}", self.sliding.lens());
        assert!(evicted.start < len && len + 1 < evicted.end + self.last, "to {len} without {evicted:?}");
    }

    /// The next row of every sequence is that over the cache that keeps all keys.
    fn check(&self, what: &str, rng: &mut Rng) {
        assert_eq!(self.sliding.lens(), self.full.lens(), "{what}");
        let mut next = Self { sliding: self.sliding.clone(), full: self.full.clone(), ..*self };
        let window = self.sliding.sliding_window().expect("a sliding cache");
        let [sliding, full] = [&mut next.sliding, &mut next.full];
        for b in 0..SEQUENCES {
            let token = new_tokens(full, 1, rng);
            [&mut *sliding, &mut *full].into_iter().for_each(|cache| append_tokens(cache, b, &token));
        }
        let mut case = Case::plain(rng, [SEQUENCES, 2, 1, 1, 0, 3, 5]);
        let longest = full.lens().iter().copied().max().expect("a sequence");
        (case.k, case.v) = (Tensor::filled([0, 1, longest, 3], 0.0), Tensor::filled([0, 1, longest, 5], 0.0));
        case.alignment = Some(Alignment::BottomRight);
        case.window = Some(Window::last_tokens(window.last).keep_first(window.first));
        let [got, expected] = [&*sliding, &*full]
            .map(|cache| case.run_over(Inputs::cached(case.q.view(), cache), Exec::serial(), Wanted::LEAST));
        same_full(what, &got, &expected);
    }
}

#[test]
fn what_a_rollback_promises_holds_after_any_history() {
    let mut refused = 0;
    for seed in 0..120 {
        let rng = &mut Rng::new(seed);
        let mut pair = Pair::new(rng);
        let mut history = String::new();
        for _ in 0..40 {
            let step = pair.step(rng);
            refused += usize::from(step.ends_with("true"));
            history = format!("{history}; {step}");
            pair.check(&format!("seed {seed}, {:?}{history}", pair.sliding.sliding_window()), rng);
        }
    }
    assert!(refused > 15, "{refused} refusals say little");
}

/// What is promised is counted from the longest that the sequence was, not from where it is: keys that were evicted then do
/// not come back.
#[test]
fn room_for_a_rollback_is_counted_from_the_greatest_length() {
    let sliding =
        KvCache::sliding(1, KvShape { kv_heads: 1, head_dim: 3, value_dim: 5 }, NonZeroUsize::new(100).unwrap(), 0)
            .unwrap();
    let mut cache = sliding.rollback_room(60).unwrap();
    let append = |cache: &mut KvCache, n| {
        let tokens = new_tokens(cache, n, &mut Rng::new(1));
        append_tokens(cache, 0, &tokens);
    };
    append(&mut cache, 415); // 415 + 1 − 160 keys may go: a block
    append(&mut cache, 1);
    cache.truncate(0, 355).unwrap(); // 60 back from 415
    append(&mut cache, 1);
    assert_eq!(cache.truncate(0, 354).unwrap_err().to_string(), super::too_short(354, 355));
    cache.truncate(0, 355).unwrap();
}
