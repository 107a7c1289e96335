//! Mixed batches: rows of some sequences of a cache or of pages, in any order, some sequences named twice. They are the
//! same as ragged tensors, and as each sequence in a call of its own.

use crate::fuzzer::array::Array;
use crate::fuzzer::bits::{Recorder, settle};
use crate::fuzzer::case::Case;
use crate::fuzzer::compare::{Place, Results};
use crate::fuzzer::draw::{DTYPES, Home, numbers, options, settings, small};
use crate::fuzzer::kinds::attention::pool;
use crate::fuzzer::oracle::Oracle;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::selection::Selection;
use crate::fuzzer::sources::{Source, place};
use crate::fuzzer::stage::{How, Stage};
use sdpa::{Dtype, Exec, Isa, Workspace};

const ROWS: [usize; 9] = [0, 1, 1, 1, 2, 5, 16, 17, 40];
const KEYS: [usize; 10] = [0, 1, 5, 16, 17, 100, 255, 256, 257, 600];
/// Keys of all sequences of a call.
const MOST_KEYS: usize = 1200;

/// A call, and the sequences that it names.
struct Mixed {
    /// The call as ragged tensors: the keys of each sequence that it names, end to end.
    ragged: Case,
    names: Vec<usize>,
    home: Home,
}

/// One mixed batch.
pub(super) fn check(rng: &mut Rng) {
    check_of(rng, |_, _| {});
}

/// One mixed batch with lists of keys.
pub(super) fn check_selected(rng: &mut Rng) {
    check_of(rng, select);
}

/// Gives a case lists of keys.
fn select(rng: &mut Rng, case: &mut Case) {
    case.selected = Some(Selection::draw(rng, case));
}

/// One mixed batch that is changed.
fn check_of(rng: &mut Rng, change: impl Fn(&mut Rng, &mut Case)) {
    let (held, home) = held_somewhere(rng);
    let mut mixed = Mixed::draw(rng, &held, home);
    change(rng, &mut mixed.ragged);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| mixed.check(rng, &held)));
    if let Err(panic) = result {
        eprintln!("{home:?}, sequences {:?} of lengths {:?}: {}", mixed.names, held.kv_lens, mixed.ragged.describe());
        std::panic::resume_unwind(panic);
    }
}

/// What one mixed batch gives.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    bits_of(rng, recorder, |_, _| {});
}

/// What one mixed batch with lists of keys gives.
pub(super) fn bits_selected(rng: &mut Rng, recorder: &mut Recorder) {
    bits_of(rng, recorder, select);
}

fn bits_of(rng: &mut Rng, recorder: &mut Recorder, change: impl Fn(&mut Rng, &mut Case)) {
    let (mut held, home) = held_somewhere(rng);
    settle(rng, &mut held);
    let mut mixed = Mixed::draw(rng, &held, home);
    let case = &mut mixed.ragged;
    settle(rng, case);
    change(rng, case);
    recorder.describe(case, home);
    recorder.say(format!("sequences {:?}", mixed.names));
    let wanted = Wanted { mass: false, ..Wanted::draw(rng) };
    recorder.say(wanted);
    let source = place(rng, &held, home);
    let stage = Stage::over(rng, case, source).about(rng, &mixed.names);
    recorder.each(rng, |rng, exec| stage.run("bits", &mut Outs::blank(rng, stage.case, wanted), exec).all());
}

/// Sequences, and where they are.
fn held_somewhere(rng: &mut Rng) -> (Case, Home) {
    let dtype = rng.pick(&DTYPES);
    let home = match rng.below(5) {
        0 => Home::Pages,
        4 => Home::Pool(dtype),
        1 => Home::integers(rng),
        _ => Home::Cache(dtype),
    };
    (held(rng, if home.is_integers() { Dtype::F32 } else { dtype }, home), home)
}

/// Every sequence that there is, side by side.
fn held(rng: &mut Rng, dtype: Dtype, home: Home) -> Case {
    let lens: Vec<usize> = (0..rng.up_to(4)).map(|_| rng.pick(&KEYS)).collect();
    let (kv_heads, keys) = (rng.up_to(2), lens.iter().copied().max().unwrap_or(0));
    let kv = [(); 2].map(|()| {
        let dim = rng.pick(&[1, 5, 16, 17, 33, 64]);
        let mut x = numbers(rng, [lens.len(), kv_heads, keys, dim], dtype);
        home.tame(&mut x.data);
        x
    });
    small(rng, kv, [dtype; 2], lens)
}

impl Mixed {
    fn draw(rng: &mut Rng, held: &Case, home: Home) -> Self {
        let (mut names, mut ends) = (Vec::new(), [vec![0], vec![0]]);
        let calls = if held.batch() > 0 { rng.below(6) } else { 0 };
        for _ in 0..calls {
            let (name, rows) = (rng.below(held.batch()), rng.pick(&ROWS));
            let last = ends.each_ref().map(|ends| ends[ends.len() - 1]);
            if last[1] + held.kv_len(name) <= MOST_KEYS {
                ends[0].push(last[0] + rows);
                ends[1].push(last[1] + held.kv_len(name));
                names.push(name);
            }
        }
        let total = ends.each_ref().map(|ends| ends[names.len()]);
        let q_type = rng.pick(&[Dtype::F32, Dtype::F32, Dtype::Bf16, Dtype::F16]);
        let q = numbers(rng, [1, held.heads(), total[0], held.q.shape[3]], q_type);
        let places: Vec<(usize, usize)> =
            names.iter().flat_map(|&name| (0..held.kv_len(name)).map(move |key| (name, key))).collect();
        let end_to_end = |x: &Array| {
            let [_, h, _, dim] = x.shape;
            Array::from_fn([1, h, total[1], dim], |[_, h, j, c]| x.get([places[j].0, h, places[j].1, c]))
        };
        let longest = ends.each_ref().map(|ends| ends.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0));
        let mut ragged = Case {
            q,
            k: end_to_end(&held.k),
            v: end_to_end(&held.v),
            dtypes: [q_type, held.dtypes[1], held.dtypes[2]],
            settings: settings(rng, longest[0], longest[1]),
            // So that none are drawn: the sequences' lengths are those of their keys.
            kv_lens: Some(names.iter().map(|&name| held.kv_len(name)).collect()),
            ragged: Some(ends),
            ..held.clone()
        };
        (ragged.bias, ragged.mask, ragged.alibi, ragged.sinks) = (None, None, None, None);
        options(rng, &mut ragged);
        ragged.settle_precision();
        ragged.kv_lens = None;
        Self { ragged, names, home }
    }

    fn check(&self, rng: &mut Rng, held: &Case) {
        let isas: Vec<Isa> = Isa::available().collect();
        let exec = Exec::serial().isa(rng.pick(&isas));
        // Sums of key weights have a row for each sequence of the call, not for each key of a tensor.
        let wanted = Wanted { mass: false, ..Wanted::draw(rng) };
        let case = &self.ragged;
        let source = place(rng, held, self.home);
        let stage = Stage::over(rng, case, source).about(rng, &self.names);
        let results = stage.run("a mixed batch", &mut Outs::blank(rng, case, wanted), exec);
        if !self.home.is_integers() {
            results.check("a mixed batch", &Oracle::of(case).answer());
            let tensors = Stage::new(rng, case, Home::Tensors);
            let expected = tensors.run("ragged tensors", &mut Outs::blank(rng, case, wanted), exec);
            results.same("ragged tensors", &expected);
        }
        if rng.one_in(3) {
            let (mut outs, mut workspace) = (Outs::blank(rng, case, wanted), Workspace::new());
            let how = How::from(exec.threads(2));
            let done = pool().install(|| stage.run_into(outs.outputs(), how, &mut workspace));
            assert!(done.is_ok(), "nothing was to be thrown");
            outs.take("two threads").same("two threads", &results);
        }
        // What is dropped goes by the number of the sequence in the call.
        if !self.names.is_empty() && case.settings.dropout.is_none() {
            self.alone(rng, stage.source, &results, exec);
        }
    }

    /// One of the sequences in a call of its own, over the same keys.
    fn alone(&self, rng: &mut Rng, source: Source, together: &Results, exec: Exec) {
        let (case, s) = (&self.ragged, rng.below(self.names.len()));
        let one = case.some_rows(s, 0..case.rows(s));
        let stage = Stage::over(rng, &one, source).about(rng, &self.names[s..=s]);
        let results = stage.run("a sequence", &mut Outs::blank(rng, &one, Wanted { mass: false, ..Wanted::ALL }), exec);
        let out = together.out.dtype;
        for [_, h, i] in one.every_row() {
            let (b, l) = case.row_at(s, i);
            let mine = Place { row: [0, h, i], scores: [0, h, i], keys: one.keys(0) };
            let others = Place { row: [b, h, l], scores: [s, h, i], keys: case.longest().1 };
            if out == results.out.dtype {
                results.same_row("a sequence of its own", mine, together, others);
            }
        }
    }
}
