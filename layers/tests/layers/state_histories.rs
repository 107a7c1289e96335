//! States of linear attention kept in a cache: random histories against plain states, bit for bit.

use crate::linear_attention_support::{Case, RULES, Rule};
use crate::support::{Rng, Tensor, UNWRITTEN, assert_same_bits, fewer};
use sdpa::{Exec, ViewMut};
use sdpa_layers::{Compute, Form, LinearAttention, LinearState, Normaliser, StateCache};

/// A sequence as plain states tell it.
#[derive(Debug, Clone)]
struct Plain {
    /// After each number of tokens, from 0 on; none inside the chunked part of a call.
    states: Vec<Option<LinearState>>,
    /// First of the lengths up to the current one that can be gone back to, one by one, and the one before the last call.
    promised: [usize; 2],
}

impl Plain {
    fn new(zeros: &LinearState) -> Self {
        Self { states: vec![Some(zeros.clone())], promised: [0; 2] }
    }

    fn len(&self) -> usize {
        self.states.len() - 1
    }

    fn state(&self, len: usize) -> Option<&LinearState> {
        self.states[len].as_ref()
    }

    fn is_promised(&self, len: usize) -> bool {
        len == 0 || len <= self.len() && (len >= self.promised[0] || len == self.promised[1])
    }

    fn truncate(&mut self, len: usize) {
        self.states.truncate(len + 1);
        self.promised[0] = self.promised[0].min(len);
        self.promised[1] = if self.promised[1] > len { 0 } else { self.promised[1] };
    }

    /// Takes the tokens of a call, in calls of plain states: the first ones together, the last ones one by one.
    fn decode(&mut self, tokens: &Case, layer: LinearAttention, room: usize, exec: Exec) -> Tensor {
        let before = self.len();
        let len = tokens.k.shape[2];
        let together = if len > room + 1 { len - room } else { 0 };
        let mut out = Tensor::filled(tokens.out_shape(), f32::from_bits(UNWRITTEN));
        let mut done = 0;
        while done < len {
            let end = if done < together { together } else { done + 1 };
            let mut piece = tokens.map(|tensor| tensor.rows(done..end));
            piece.state = self.state(self.len()).expect("a current state").clone();
            let got = piece.run(layer, exec);
            for [_, h, t, _] in crate::support::indices([1, out.shape[1], end - done, 1]) {
                out.copy_row([0, h, done + t], &got.out, [0, h, t]);
            }
            self.states.extend((done + 1..end).map(|_| None));
            self.states.push(Some(got.state));
            done = end;
        }
        if len > 0 {
            let first = self.len().saturating_sub(room);
            self.promised = [if together > 0 { first } else { first.max(self.promised[0]) }, before];
        }
        out
    }
}

/// What a history is about.
struct History {
    rule: Rule,
    normaliser: Normaliser,
    layer: LinearAttention,
    /// `[kv_heads, group, head_dim, value_dim]`.
    sizes: [usize; 4],
    room: usize,
    exec: Exec<'static>,
    cache: StateCache,
    initial: LinearState,
    /// `None` for removed sequences.
    plain: Vec<Option<Plain>>,
    compute: Compute<'static>,
    said: String,
}

impl History {
    fn new(rng: &mut Rng) -> Self {
        let rule = rng.pick(&RULES);
        let adds = matches!(rule, Rule::Linear | Rule::Gated);
        let normaliser = if adds && rng.below(3) == 0 { Normaliser::KeySum } else { Normaliser::None };
        let form = rng.pick(&[Form::Recurrent, Form::Chunked(3), Form::Chunked(4), Form::Chunked(64)]);
        let sizes = [1 + rng.below(3), 1 + rng.below(2), 1 + rng.below(9), 1 + rng.below(20)];
        let (room, exec) = (rng.below(6), Exec::default().threads(1 + rng.below(2)));
        let mut initial = Case::new(rule, normaliser, [1, sizes[0], 1, 0, 0, sizes[2], sizes[3]], rng.bits()).state;
        if rng.below(2) == 0 {
            initial.as_mut_slice().fill(0.0);
        }
        let cache = StateCache::new(1 + rng.below(3), &initial, room).unwrap();
        let plain = vec![Some(Plain::new(&initial)); cache.sequences()];
        let layer = LinearAttention::new().form(form).normaliser(normaliser);
        let said = format!("{rule:?} {normaliser:?} {form:?} {sizes:?} room {room}:");
        let compute = Compute::new(exec);
        Self { rule, normaliser, layer, sizes, room, exec, cache, initial, plain, compute, said }
    }

    fn there(&self) -> Vec<usize> {
        (0..self.plain.len()).filter(|&b| self.plain[b].is_some()).collect()
    }

    fn decode(&mut self, rng: &mut Rng) {
        let mut sequences = self.there();
        (1..sequences.len()).for_each(|i| sequences.swap(i, rng.below(i + 1)));
        sequences.truncate(rng.below(sequences.len() + 1));
        let most = rng.pick(&[0, 1, 1, 1, 2, self.room, self.room + 1, self.room + 2, 20]);
        let [h, group, d, dv] = self.sizes;
        let mut case =
            Case::new(self.rule, self.normaliser, [sequences.len(), h, group, most, most, d, dv], rng.bits());
        let lens: Vec<usize> = sequences.iter().map(|_| most - rng.below(most + 1) * rng.below(2)).collect();
        self.said.push_str(&format!(" decode {lens:?} of {sequences:?}"));
        // Padding of NaN.
        for (b, &len) in lens.iter().enumerate() {
            for [_, head, t, i] in crate::support::indices([1, h, most - len, d]) {
                case.k.set([b, head, len + t, i], f32::NAN);
            }
        }
        case.lens = Some(lens.clone());
        let mut got = Tensor::filled(case.out_shape(), f32::from_bits(UNWRITTEN));
        let out = ViewMut::bhld(&mut got.data, case.out_shape()).unwrap();
        self.layer.decode(case.inputs(), &mut self.cache, &sequences, out, &mut self.compute).expect("a good call");
        for (b, &sequence) in sequences.iter().enumerate() {
            let tokens = case.map(|tensor| tensor.part(b..b + 1, 0..tensor.shape[1], 0..lens[b]));
            let plain = self.plain[sequence].as_mut().expect("it is there");
            let expected = plain.decode(&tokens, self.layer, self.room, self.exec);
            let heads = 0..h * group;
            assert_same_bits(&self.said, &got.part(b..b + 1, heads.clone(), 0..lens[b]), &expected);
            let padding = got.part(b..b + 1, heads, lens[b]..most);
            assert!(padding.data.iter().all(|&x| x == 0.0), "{}: padding", self.said);
        }
    }

    fn truncate(&mut self, rng: &mut Rng, b: usize) {
        let plain = self.plain[b].as_mut().expect("it is there");
        let len = if rng.below(2) == 0 { rng.below(plain.len() + 2) } else { plain.len().saturating_sub(rng.below(4)) };
        let checked = self.cache.check_truncate(b, len);
        let done = self.cache.truncate(b, len);
        self.said.push_str(&format!(" truncate {b} from {} to {len}: {}", plain.len(), done.is_ok()));
        assert_eq!(checked, done, "{}", self.said);
        match done {
            Ok(()) => plain.truncate(len),
            Err(error) => assert!(!plain.is_promised(len), "{}: {error}", self.said),
        }
    }

    fn step(&mut self, rng: &mut Rng) {
        let there = self.there();
        let Some(&b) = there.get(rng.below(there.len().max(1))) else {
            self.plain[0] = Some(Plain::new(&self.initial));
            assert_eq!(self.cache.add_sequence(), 0, "{}", self.said);
            return;
        };
        match rng.below(20) {
            0..10 => self.decode(rng),
            10..14 => self.truncate(rng, b),
            14..16 => {
                let to = rng.pick(&there);
                self.said.push_str(&format!(" fork {b} to {to}"));
                self.cache.fork(b, to).unwrap();
                self.plain[to] = self.plain[b].clone();
            }
            16 => {
                self.said.push_str(&format!(" remove {b}"));
                self.cache.remove_sequence(b).unwrap();
                self.plain[b] = None;
            }
            17 if self.plain.len() < 5 || there.len() < self.plain.len() => {
                let added = self.cache.add_sequence();
                self.said.push_str(&format!(" add {added}"));
                let free = self.plain.iter().position(Option::is_none);
                assert_eq!(added, free.unwrap_or(self.plain.len()), "{}", self.said);
                self.plain.resize(self.plain.len().max(added + 1), None);
                self.plain[added] = Some(Plain::new(&self.initial));
            }
            _ => {
                // What is cloned does not see what comes.
                let (cache, plain) = (self.cache.clone(), self.plain.clone());
                self.said.push_str(" clone");
                (0..2).for_each(|_| self.decode(rng));
                self.check();
                (self.cache, self.plain) = (cache, plain);
            }
        }
    }

    /// Each sequence has the bits of plain states, wherever it goes back to.
    fn check(&self) {
        let bits = |state: &LinearState| state.as_slice().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (b, plain) in self.plain.iter().enumerate() {
            assert_eq!(self.cache.has_sequence(b), plain.is_some(), "{}", self.said);
            let Some(plain) = plain else { continue };
            assert_eq!(self.cache.len(b), Ok(plain.len()), "{}", self.said);
            for len in 0..=plain.len() {
                let mut back = self.cache.clone();
                if back.truncate(b, len).is_ok() {
                    let expected = plain.state(len).unwrap_or_else(|| panic!("{}: no state {len} of {b}", self.said));
                    assert_eq!(bits(&back.state(b).unwrap()), bits(expected), "{}: {b} at {len}", self.said);
                } else {
                    assert!(!plain.is_promised(len), "{}: {b} does not go back to {len}", self.said);
                }
            }
        }
    }
}

/// Calls, rollbacks, forks, removals and loads in any order: every state and every row has the bits of plain states, and what
/// is promised to be taken back can be.
#[test]
fn histories() {
    for seed in 0..fewer(300) {
        let mut rng = Rng::new(seed);
        let mut history = History::new(&mut rng);
        for _ in 0..25 {
            history.step(&mut rng);
            history.check();
        }
    }
}
