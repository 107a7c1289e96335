//! Changes of more than one sequence, or of the tokens and places that there are.

use super::{Pair, Sequence};
use crate::fuzzer::array::Array;
use crate::fuzzer::rng::Rng;
use sdpa::{Error, KvCache};

impl Pair {
    /// A sequence without keys.
    pub(super) fn blank(&self) -> Sequence {
        let kv = self.dims.map(|dim| Array::from_fn([1, self.kv_heads, 0, dim], |_| 0.0));
        Sequence { kv, fresh: 0, gone: 0, removed: false }
    }

    /// Adds a sequence: at the lowest free place, otherwise at the end.
    pub(super) fn add(&mut self, history: &mut String) {
        let place = self.model.iter().position(|sequence| sequence.removed).unwrap_or(self.model.len());
        history.push_str(&format!(" add {place}"));
        assert_eq!(self.cache.add_sequence(), place, "{history}");
        let blank = self.blank();
        if place == self.model.len() { self.model.push(blank) } else { self.model[place] = blank }
    }

    pub(super) fn remove(&mut self, b: usize, history: &mut String) {
        history.push_str(&format!(" remove {b}"));
        self.cache.remove_sequence(b).expect("it is there");
        self.model[b] = Sequence { removed: true, ..self.blank() };
    }

    /// Whatever names a sequence that was removed is refused.
    pub(super) fn name_removed(&mut self, rng: &mut Rng, b: usize, history: &str) {
        let tokens = self.tokens(rng, 1);
        let tokens = self.placed(rng, &tokens);
        let (k, v) = (tokens.k(), tokens.v());
        let cache = &mut self.cache;
        let result = match rng.below(7) {
            0 => cache.append_to(b, k, v),
            1 => cache.append_ragged(&[b], &[0, 1], k, v),
            2 => cache.truncate(b, 0),
            3 => cache.keep(b, 0, &[]),
            4 => cache.remove_sequence(b),
            5 => cache.clear(b),
            _ => cache.fork(b, b),
        };
        assert!(matches!(result, Err(Error::Removed { sequence, .. }) if sequence == b), "{history}: {result:?}");
    }

    /// Appends to any of the sequences in any order.
    pub(super) fn append_ragged(&mut self, rng: &mut Rng, history: &mut String) {
        let mut sequences = rng.shuffled(self.model.len());
        sequences.truncate(1 + rng.below(self.model.len()));
        sequences.retain(|&b| !self.model[b].removed);
        let lens: Vec<usize> = sequences.iter().map(|&b| self.some(rng, b)).collect();
        history.push_str(&format!(" append {lens:?} to {sequences:?}"));
        let mut ends = vec![0];
        lens.iter().for_each(|n| ends.push(ends[ends.len() - 1] + n));
        let all = self.tokens(rng, ends[sequences.len()]);
        let placed = self.placed(rng, &all);
        let (k, v) = (placed.k(), placed.v());
        if let Some(&again) = sequences.first().filter(|_| rng.one_in(4)) {
            let (mut sequences, mut ends) = (sequences.clone(), ends.clone());
            sequences.push(again);
            ends.push(ends[ends.len() - 1]);
            let result = self.cache.append_ragged(&sequences, &ends, k, v);
            assert!(matches!(result, Err(Error::Repeated { .. })), "{history}: {result:?}");
        }
        self.cache.append_ragged(&sequences, &ends, k, v).expect("they fit");
        for (&b, at) in sequences.iter().zip(ends.windows(2)) {
            let tokens = all.each_ref().map(|x| x.part(0, at[0]..at[1]));
            self.extend(b, &tokens);
        }
    }

    /// Keeps some of the tokens behind a place. A sliding cache may refuse to, where keys were evicted.
    pub(super) fn keep_some(&mut self, rng: &mut Rng, b: usize, history: &mut String) {
        let (len, fresh) = (self.len(b), self.model[b].fresh);
        // Of what was appended last, mostly.
        let from = if rng.one_in(3) { rng.below(len + 1) } else { len - fresh };
        let sparse = rng.pick(&[1, 2, 3, 10]);
        let accepted: Vec<usize> = (0..len - from).filter(|_| rng.one_in(sparse)).collect();
        let rows: Vec<usize> = (0..from).chain(accepted.iter().map(|i| from + i)).collect();
        let result = self.cache.keep(b, from, &accepted);
        history.push_str(&format!(" keep {from} and {} of {} in {b}", accepted.len(), len - from));
        if let Err(e) = result {
            history.push_str(" refused");
            let sees = self.keep.map_or(rows.len(), |[last, ..]| (rows.len() + 1).saturating_sub(last));
            let moved = rows.iter().enumerate().find(|&(i, &row)| i != row).map_or(sees, |(i, _)| i);
            assert!(self.keep.is_some() && sees.min(moved) < self.model[b].gone, "{history}, {:?}: {e}", self.keep);
            return;
        }
        let kept = [0, 1].map(|of| {
            let was = &self.model[b].kv[of];
            let [_, heads, _, dim] = was.shape;
            Array::from_fn([1, heads, rows.len(), dim], |[_, h, j, c]| was.get([0, h, rows[j], c]))
        });
        self.cut(b, rows.len());
        self.model[b].kv = kept;
    }

    /// Goes on with what was exported; a file with a byte of it changed is refused, or is a cache.
    pub(super) fn export(&mut self, rng: &mut Rng, history: &mut String) {
        history.push_str(" export");
        if self.kv_heads == 0 {
            let refused = Err(Error::Empty { argument: "cache", what: "kv_heads" });
            return assert_eq!(self.cache.export(), refused, "{history}");
        }
        let mut bytes = self.cache.export().expect("it has heads");
        let imported = KvCache::import(&bytes).expect("it was exported");
        assert_eq!(imported.format(), self.cache.format(), "{history}");
        assert_eq!(imported.is_latent(), self.cache.is_latent(), "{history}");
        for (b, sequence) in self.model.iter().enumerate() {
            assert_eq!(imported.has_sequence(b), !sequence.removed, "{history}");
        }
        self.cache = imported;
        let i = rng.below(bytes.len());
        bytes[i] ^= 1 << rng.below(8);
        if let Ok(other) = KvCache::import(&bytes) {
            assert!(other.bytes() <= self.cache.bytes(), "{history}: byte {i}");
        }
        let error = KvCache::import(&bytes[..i]).expect_err("it is cut off");
        assert!(matches!(error, Error::File { .. }), "{history}: {error}");
    }
}
