//! Rows apart and keys in pieces: the bits of the whole.

use super::array::Array;
use super::case::{Case, Settings};
use super::compare::{Place, Results};
use super::functions::Functions;
use super::kinds::attention::Whole;
use super::outs::{Outs, Wanted};
use super::place::{AnyPlaced, Placed};
use super::rng::Rng;
use super::stage::Stage;
use core::ops::Range;
use sdpa::{Alignment, AttnState, Dtype, Exec, KvShape, Precision, Tensor, View};

/// Rows of a sequence, cut at random places, each part as a call of its own.
pub(crate) fn rows(rng: &mut Rng, whole: &Whole<'_>) {
    let case = whole.case;
    // What is dropped goes by sequence and row.
    if case.batch() == 0 || far(case) || case.settings.dropout.is_some() {
        return;
    }
    let wanted = if rng.one_in(2) { Wanted::ALL } else { Wanted::LEAST };
    let expected = whole.run(rng, "once more", case, wanted);
    let b = rng.below(case.batch());
    for part in rng.cuts(case.rows(b)).into_iter().take(4) {
        let what = format!("sequence {b}, rows {part:?}");
        let some = case.some_rows(b, part.clone());
        let some = trimmed(some, whole);
        let wanted = Wanted { mass: false, ..wanted };
        let results = whole.run(rng, &what, &some, wanted);
        for h in 0..case.heads() {
            for i in part.clone() {
                let (at, l) = case.row_at(b, i);
                let mine = Place { row: [0, h, i - part.start], scores: [0, h, i - part.start], keys: some.keys(0) };
                let others = Place { row: [at, h, l], scores: [b, h, i], keys: case.longest().1 };
                results.same_row(&what, mine, &expected, others);
            }
        }
    }
}

/// True if rows stand so far from the keys that their positions cannot be counted on from one to the next.
fn far(case: &Case) -> bool {
    matches!(case.settings.alignment, Some(Alignment::Offset(n)) if n.unsigned_abs() > 1 << (usize::BITS * 25 / 32))
}

/// With no more keys than there are, where the source knows how many that is.
fn trimmed(case: Case, whole: &Whole<'_>) -> Case {
    if whole.home == super::draw::Home::Tensors {
        return case;
    }
    with_keys(case)
}

/// With no more keys than the only sequence has.
fn with_keys(case: Case) -> Case {
    let keys = case.kv_len(0);
    let rows = |x: &Array| x.part(0, 0..keys);
    Case {
        k: rows(&case.k),
        v: rows(&case.v),
        bias: case.bias.as_ref().map(|(x, dtype)| (x.first(keys), *dtype)),
        mask: case.mask.as_ref().map(|(x, polarity)| (x.first(keys), *polarity)),
        kv_lens: case.kv_lens.is_some().then(|| vec![keys]),
        ..case
    }
}

/// What a state can take of a case: one sequence, no options of single keys.
fn stateful(case: &Case, b: usize) -> Case {
    let one = with_keys(case.some_rows(b, 0..case.rows(b)));
    let settings = Settings { precision: Precision::Exact, dropout: None, ..one.settings };
    let functions = Functions { score: None, mask: None, prob: None, ..one.functions };
    let dtypes = [Dtype::F32; 3];
    Case { bias: None, mask: None, kv_lens: None, selected: None, settings, functions, dtypes, ..one }
}

fn state<'a>(case: &'a Case, q: View<'a>, exec: Exec<'a>) -> AttnState<'a> {
    let mut state = AttnState::new(
        case.attention(),
        q,
        KvShape { kv_heads: case.kv_heads(), head_dim: case.q.shape[3], value_dim: case.value_dim() },
        exec,
    )
    .expect("a good state");
    if let Some(slopes) = &case.alibi {
        state = state.alibi(slopes).expect("good slopes");
    }
    match &case.sinks {
        Some(sinks) => state.sinks(sinks).expect("good sinks"),
        None => state,
    }
}

/// What a state can take of one sequence of a case; nothing if there is no sequence, or rows stand too far away.
pub(crate) fn for_a_state(rng: &mut Rng, case: &Case) -> Option<Case> {
    (case.batch() > 0 && !far(case)).then(|| stateful(case, rng.below(case.batch())))
}

/// How keys come into a state.
#[derive(Debug)]
pub(crate) enum Pieces {
    /// A piece at a time, read on the way.
    One(Vec<Range<usize>>),
    /// Each into a state of its own, these then merged in order.
    Merged(Vec<Range<usize>>),
}

impl Pieces {
    pub(crate) fn draw(rng: &mut Rng, keys: usize) -> Self {
        if rng.one_in(2) {
            return Self::One(rng.cuts(keys));
        }
        // Whole blocks, any number of them in each.
        let (mut at, mut parts) = (0, Vec::new());
        while at < keys {
            let end = keys.min(at + 256 * (1 + rng.below(3)));
            parts.push(at..end);
            at = end;
        }
        Self::Merged(parts)
    }

    /// What the state of all keys gives.
    pub(crate) fn gather(&self, rng: &mut Rng, case: &Case, exec: Exec) -> Results {
        let q = Placed::<f32>::of(rng, &case.q);
        let mut gathered = state(case, q.view(), exec);
        match self {
            Self::One(parts) => parts.iter().for_each(|part| push(rng, &mut gathered, case, part.clone())),
            Self::Merged(parts) => {
                for part in parts {
                    let mut next = state(case, q.view(), exec).starting_at(part.start).expect("a whole block");
                    push(rng, &mut next, case, part.clone());
                    gathered.merge(&next).expect("the next blocks");
                }
            }
        }
        read(rng, case, &mut gathered, Wanted::LEAST)
    }
}

/// Keys of a sequence pushed piece by piece into a state, read on the way; or gathered a block at a time and merged.
pub(crate) fn pieces_of_keys(rng: &mut Rng, whole: &Whole<'_>) {
    let case = whole.case;
    if case.batch() == 0 || far(case) || case.positions.iter().any(Option::is_some) {
        return;
    }
    let case = &stateful(case, rng.below(case.batch()));
    let stage = Stage::new(rng, case, super::draw::Home::Tensors);
    let expected = stage.run("stripped", &mut Outs::blank(rng, case, Wanted::LEAST), whole.exec);
    let q = Placed::<f32>::of(rng, &case.q);
    let (mut gathered, keys) = (state(case, q.view(), whole.exec), case.keys(0));
    if rng.one_in(3) {
        for first in (0..keys).step_by(256) {
            let mut block = state(case, q.view(), whole.exec).starting_at(first).expect("a whole block");
            push(rng, &mut block, case, first..keys.min(first + 256));
            gathered.merge(&block).expect("the next block");
        }
    } else {
        for part in rng.cuts(keys) {
            push(rng, &mut gathered, case, part);
            if rng.one_in(3) {
                read(rng, case, &mut gathered, Wanted::LEAST);
            }
        }
    }
    assert_eq!(gathered.len(), keys);
    read(rng, case, &mut gathered, Wanted::LEAST).same("a state", &expected);
}

fn push(rng: &mut Rng, state: &mut AttnState<'_>, case: &Case, keys: Range<usize>) {
    let [k, v] = [&case.k, &case.v].map(|x| AnyPlaced::of(rng, &x.part(0, keys.clone()), Dtype::F32));
    let (Tensor::F32(k), Tensor::F32(v)) = (k.view(), v.view()) else { unreachable!("they are f32") };
    state.push(k, v).expect("they fit");
}

fn read(rng: &mut Rng, case: &Case, state: &mut AttnState<'_>, wanted: Wanted) -> Results {
    let mut outs = Outs::blank(rng, case, wanted);
    state.read(outs.outputs()).expect("good outputs");
    outs.take("a state")
}
