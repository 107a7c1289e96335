//! Caches of states of linear attention: random histories against plain states, bit for bit. The fuzzer makes any number of them.

mod hybrid;
mod plain;
mod refusals;

use crate::linear_attention_support::{Case, RULES, Rule};
use crate::support::{Rng, Tensor, UNWRITTEN, assert_same_bits};
use plain::{Plain, bits};
use sdpa::{Exec, Isa, ViewMut};
use sdpa_layers::{Compute, Form, LinearAttention, LinearState, Normaliser, StateCache};

#[allow(unused_imports, reason = "for the fuzzer")]
pub(crate) use hybrid::check as check_hybrid;

/// History: its settings, the cache, and plain states beside it.
struct History {
    rule: Rule,
    normaliser: Normaliser,
    form: Form,
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
        let heads = if rng.below(20) == 0 { 0 } else { 1 + rng.below(3) };
        let sizes = [heads, 1 + rng.below(2), 1 + rng.below(9), 1 + rng.below(20)];
        let isas: Vec<Isa> = Isa::available().collect();
        let (room, exec) = (rng.below(6), Exec::default().threads(1 + rng.below(2)).isa(rng.pick(&isas)));
        let mut initial = Case::new(rule, normaliser, [1, sizes[0], 1, 0, 0, sizes[2], sizes[3]], rng.bits()).state;
        if rng.below(2) == 0 {
            initial.as_mut_slice().fill(0.0);
        }
        let cache = StateCache::new(rng.below(4), &initial, room).unwrap();
        let plain = vec![Some(Plain::new(&initial)); cache.sequences()];
        let said = format!("{rule:?} {normaliser:?} {form:?} {sizes:?} room {room}:");
        let compute = Compute::new(exec);
        Self { rule, normaliser, form, sizes, room, exec, cache, initial, plain, compute, said }
    }

    fn layer(&self) -> LinearAttention {
        LinearAttention::new().form(self.form).normaliser(self.normaliser)
    }

    fn there(&self) -> Vec<usize> {
        there(&self.plain)
    }

    /// Some of the sequences, in any order.
    fn some(&self, rng: &mut Rng) -> Vec<usize> {
        let mut sequences = self.there();
        (1..sequences.len()).for_each(|i| sequences.swap(i, rng.below(i + 1)));
        sequences.truncate(rng.below(sequences.len() + 1));
        sequences
    }

    /// A call over these sequences.
    fn case(&self, rng: &mut Rng, sequences: &[usize], tokens: usize) -> Case {
        let [h, group, d, dv] = self.sizes;
        Case::new(self.rule, self.normaliser, [sequences.len(), h, group, tokens, tokens, d, dv], rng.bits())
    }

    fn decode(&mut self, rng: &mut Rng) {
        let sequences = self.some(rng);
        let most = rng.pick(&[0, 1, 1, 1, 2, self.room, self.room + 1, self.room + 2, 20]);
        let [h, group, d, _] = self.sizes;
        let mut case = self.case(rng, &sequences, most);
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
        let layer = self.layer();
        layer.decode(case.inputs(), &mut self.cache, &sequences, out, &mut self.compute).expect("a good call");
        for (b, &sequence) in sequences.iter().enumerate() {
            let mut tokens = case.map(|tensor| tensor.part(b..b + 1, 0..tensor.shape[1], 0..lens[b]));
            tokens.state = self.initial.clone();
            let plain = self.plain[sequence].as_mut().expect("it is there");
            let expected = plain.decode(&tokens, layer, self.room, self.exec);
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
        let before = seen(&self.cache);
        let done = self.cache.truncate(b, len);
        self.said.push_str(&format!(" truncate {b} from {} to {len}: {}", plain.len(), done.is_ok()));
        assert_eq!(checked, done, "{}", self.said);
        match done {
            Ok(()) => plain.truncate(len),
            Err(error) => {
                assert!(!plain.is_promised(len), "{}: {error}", self.said);
                assert!(seen(&self.cache) == before, "{}: refused, and changed", self.said);
            }
        }
    }

    /// Makes a sequence a copy of another by a file.
    fn copy_by_file(&mut self, b: usize, to: usize) {
        self.said.push_str(&format!(" file of {b} to {to}"));
        let file = self.cache.export_sequence(b).expect("it has heads");
        self.cache.truncate(to, 0).expect("always");
        self.cache.import_sequence(to, &file).expect("its own file");
        self.plain[to] = self.plain[b].clone();
    }

    fn add(&mut self) {
        let added = self.cache.add_sequence();
        self.said.push_str(&format!(" add {added}"));
        let free = self.plain.iter().position(Option::is_none);
        assert_eq!(added, free.unwrap_or(self.plain.len()), "{}", self.said);
        self.plain.resize(self.plain.len().max(added + 1), None);
        self.plain[added] = Some(Plain::new(&self.initial));
    }

    fn step(&mut self, rng: &mut Rng) {
        let there = self.there();
        if there.is_empty() {
            return self.add();
        }
        let [b, to] = [rng.pick(&there), rng.pick(&there)];
        match rng.below(24) {
            0..10 => self.decode(rng),
            10..14 => self.truncate(rng, b),
            14..16 => {
                self.said.push_str(&format!(" fork {b} to {to}"));
                self.cache.fork(b, to).unwrap();
                self.plain[to] = self.plain[b].clone();
            }
            16 => {
                self.said.push_str(&format!(" remove {b}"));
                self.cache.remove_sequence(b).unwrap();
                self.plain[b] = None;
            }
            17 if self.plain.len() < 5 || there.len() < self.plain.len() => self.add(),
            18..21 => refusals::refuse(rng, self),
            21..23 if self.sizes[0] > 0 => self.copy_by_file(b, to),
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

    /// Each sequence has the bits of plain states, wherever it goes back to, and no more memory than is stated.
    fn check(&self) {
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
        let most = 1 + self.there().len() * (self.room + 2);
        let (bytes, state) = (self.cache.bytes(), size_of_val(self.initial.as_slice()));
        assert!(bytes <= most * state, "{}: {bytes} bytes, more than {most} states of {state}", self.said);
    }

    /// Each sequence has the state of one call over all its tokens: with its bits, if that is promised.
    fn check_whole(&self) {
        for (b, plain) in self.plain.iter().enumerate().filter(|_| self.form == Form::Recurrent) {
            let Some(plain) = plain else { continue };
            let whole = plain.whole(self.layer(), self.exec);
            assert_eq!(bits(&self.cache.state(b).unwrap()), bits(&whole), "{}: {b} in one call", self.said);
        }
    }
}

/// Indices of the sequences that are there; `None` stands for removed ones.
fn there<T>(sequences: &[Option<T>]) -> Vec<usize> {
    (0..sequences.len()).filter(|&b| sequences[b].is_some()).collect()
}

/// Index of a sequence that is not there.
fn absent<T>(rng: &mut Rng, sequences: &[Option<T>]) -> usize {
    let len = sequences.len();
    let absent: Vec<usize> = (0..len).filter(|&b| sequences[b].is_none()).chain([len, usize::MAX]).collect();
    rng.pick(&absent)
}

/// Each sequence after each number of tokens, where it can go back to that; `None` for removed ones.
fn seen(cache: &StateCache) -> Vec<Option<Vec<Option<Vec<u32>>>>> {
    let after = |b: usize, len: usize| {
        let mut back = cache.clone();
        back.truncate(b, len).ok()?;
        Some(bits(&back.state(b).expect("it is there")))
    };
    let of = |b: usize| Some((0..=cache.len(b).ok()?).map(|len| after(b, len)).collect());
    (0..cache.sequences()).map(of).collect()
}

/// Makes a history of some steps: calls, rollbacks, forks, removals, files and refused calls, in any order. Every state and every row
/// has the bits of plain states, and what is promised to be taken back can be. Panics if something is wrong.
pub(crate) fn check(rng: &mut Rng, steps: usize) {
    let mut history = History::new(rng);
    for _ in 0..steps {
        history.step(rng);
        history.check();
    }
    history.check_whole();
}

#[test]
fn histories() {
    for seed in 0..crate::support::fewer(300) {
        check(&mut Rng::new(seed), 25);
    }
}
