//! Calls divided by heads and by sequences, and rows that hold several heads: the bits of the whole, or refused.

use crate::fuzzer::array::{Array, Layout, indices};
use crate::fuzzer::case::{Case, Cover, Entries, Polarity};
use crate::fuzzer::compare::Place;
use crate::fuzzer::draw::{Home, draw_of, own_positions};
use crate::fuzzer::functions::Functions;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::pieces::{any_isa, rows_of, sizes};
use crate::fuzzer::place::{AnyPlaced, Placed};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::Stage;
use core::ops::Range;
use sdpa::{Alignment, AttnState, Dtype, Error, Exec, Inputs, Mask, Outputs, View};

pub(super) fn check(rng: &mut Rng) {
    if rng.one_in(3) {
        // They cost little.
        return (0..10).for_each(|_| split(rng));
    }
    let sizes = sizes(rng);
    let mut case = draw_of(rng, Home::Tensors, sizes);
    // Functions and dropout know heads and sequences by number.
    case.functions = Functions::default();
    case.settings.dropout = None;
    if rng.one_in(4) {
        own_positions(rng, &mut case);
    }
    let exec = Exec::serial().isa(any_isa(rng));
    let by_heads = rng.one_in(2);
    let all = std::panic::AssertUnwindSafe(|| {
        if by_heads { heads(rng, &case, exec) } else { sequences(rng, case.clone(), exec) }
    });
    if let Err(panic) = std::panic::catch_unwind(all) {
        eprintln!("{exec:?}: {}", case.describe());
        std::panic::resume_unwind(panic);
    }
}

/// Rows that hold several heads side by side.
fn split(rng: &mut Rng) {
    let [b, heads, l] = [rng.below(3), rng.pick(&[1, 1, 1, 1, 0, 2]), rng.below(4)];
    let into = rng.pick(&[0, 1, 2, 3, 4, 6, 7, 12, usize::MAX]);
    let columns = if rng.one_in(3) { rng.below(13) } else { rng.below(4) * into.min(12) };
    let data = (0..b * heads * l * columns).map(|i| i as f32).collect();
    let x = Array { shape: [b, heads, l, columns], data };
    let what = format!("{:?} into {into} heads", x.shape);
    let fits = heads == 1 && into > 0 && columns.is_multiple_of(into);
    let placed = Placed::<f32>::of(rng, &x);
    let view = placed.view().split_heads(into);
    assert_eq!(view.is_ok(), fits, "{what}");
    let mut written = Placed::<f32>::of_its_own(rng, &x);
    let written_view = written.view_mut().split_heads(into);
    assert_eq!(written_view.is_ok(), fits, "{what}");
    let (Ok(view), Ok(mut writer)) = (view, written_view) else { return };
    let dim = columns / into;
    assert_eq!((view.shape(), writer.shape()), ([b, into, l, dim], [b, into, l, dim]), "{what}");
    for at @ [b, h, l, d] in indices([b, into, l, dim].map(|n| n.min(16))) {
        assert_eq!(view.get(at), Some(&x.get([b, 0, l, h * dim + d])), "{what}: {at:?}");
        *writer.get_mut(at).expect("it is there") += 0.5;
    }
    let bits = written.take(&what);
    assert!(bits.data.iter().zip(&x.data).all(|(&bits, x)| f32::from_bits(bits) == x + 0.5), "{what}");
}

/// Options of a bias and a mask by query head, by key/value head or for all.
struct Options {
    bias: AnyPlaced,
    mask: Placed<u8>,
}

impl Options {
    fn draw(rng: &mut Rng, case: &Case) -> Self {
        let (rows, keys) = case.longest();
        let mut shape = || {
            [
                rng.pick(&[1, case.batch()]),
                rng.pick(&[1, case.heads(), case.kv_heads(), case.kv_heads()]),
                rng.pick(&[1, rows]),
                keys,
            ]
        };
        let shapes = [shape(), shape()];
        let bias = Array::from_fn(shapes[0], |_| rng.normal());
        let mask = Array::from_fn(shapes[1], |_| if rng.one_in(5) { 0.0 } else { 1.0 });
        Self { bias: AnyPlaced::of(rng, &bias, Dtype::F32), mask: Placed::of(rng, &mask) }
    }

    fn of<'a>(&'a self, inputs: Inputs<'a>) -> Inputs<'a> {
        inputs.bias(self.bias.view()).mask(Mask::keep(self.mask.view()))
    }
}

/// Heads of some key/value heads, or some that share one: the rows that the whole has for them.
fn heads(rng: &mut Rng, case: &Case, exec: Exec) {
    let (stage, options, wanted) = (Stage::new(rng, case, Home::Tensors), Options::draw(rng, case), Wanted::LEAST);
    let own = rng.one_in(2);
    let whole = || if own { options.of(stage.inputs()) } else { stage.inputs() };
    let run = |rng: &mut Rng, inputs, case: &Case| {
        let mut outs = Outs::blank(rng, case, wanted);
        case.attention().problem(inputs, outs.outputs()).expect("a good call").run_once(exec);
        outs.take("heads")
    };
    let (expected, sharing, groups) = (run(rng, whole(), case), case.sharing(), case.kv_heads());
    let first = rng.below(groups + 1);
    let some = if rng.one_in(2) { 1 } else { rng.below(groups + 1) };
    let of_groups = first..groups.min(first + some);
    let mut of_heads = of_groups.start * sharing..of_groups.end * sharing;
    if of_groups.len() == 1 && sharing > 0 && rng.one_in(2) {
        of_heads.start += rng.below(sharing);
        of_heads.end = of_heads.start + 1 + rng.below(of_heads.end - of_heads.start);
    }
    let cut = |x: &Array, heads: &Range<usize>| {
        let [b, _, l, d] = x.shape;
        Array::from_fn([b, heads.len(), l, d], |[b, h, l, d]| x.get([b, heads.start + h, l, d]))
    };
    let (q, k, v) = (cut(&case.q, &of_heads), cut(&case.k, &of_groups), cut(&case.v, &of_groups));
    let some = Case { q, k, v, ..case.clone() };
    let [q, k, v] = [(&some.q, 0), (&some.k, 1), (&some.v, 2)].map(|(x, n)| AnyPlaced::of(rng, x, case.dtypes[n]));
    let inputs = whole().of_heads(of_heads.clone(), [q.view(), k.view(), v.view()]);
    let got = run(rng, inputs, &some);
    let [b, _, l, _] = case.q.shape;
    for [b, h, l, _] in indices([b, of_heads.len(), l, 1]) {
        let place = |h| Place { row: [b, h, l], scores: [b, h, l], keys: 0 };
        got.same_row(&format!("heads {of_heads:?}"), place(h), &expected, place(of_heads.start + h));
    }
}

/// Some rows of one sequence in a state: those that the whole has.
fn sequences(rng: &mut Rng, mut case: Case, exec: Exec) {
    // States have no such positions, and need others.
    if case.positions[1].is_none() {
        case.positions = [None, None];
    }
    let period = period(rng, &mut case);
    let stage = Stage::new(rng, &case, Home::Tensors);
    let mut outs = Outs::blank(rng, &case, Wanted::LEAST);
    let expected = stage.run("one call", &mut outs, exec);
    let here = stretch(rng, &case);
    let rows = end_to_end(&case, here.clone(), period);
    let (q, placed) = (AnyPlaced::of(rng, &rows_of(&case.q, here.clone()), case.dtypes[0]), rows.place(rng));
    let [k, v] = [(&case.k, 1), (&case.v, 2)].map(|(x, n)| AnyPlaced::of(rng, x, case.dtypes[n]));
    let inputs = rows.inputs(&case, &placed, stage.inputs(), [&q, &k, &v]);
    let inputs = period.map_or(inputs, |period| inputs.batch_period(period));
    refused(rng, &case, inputs, here.len());
    for b in 0..case.batch() {
        let first = case.row_at(b, 0).1;
        let mine = first.max(here.start)..(first + case.rows(b)).min(here.end).max(first.max(here.start));
        let whole_list = mine.len() == case.rows(b);
        if case.positions[0].is_some() && !whole_list {
            continue;
        }
        let some = if mine.is_empty() { 0..0 } else { mine.start - here.start..mine.end - here.start };
        let one = inputs.of_sequence(b, some.clone()).expect("they are there");
        let from = mine.start - first;
        let alignment = Alignment::Offset(case.offset(b).saturating_add_unsigned(from));
        let attention = case.attention().align(alignment);
        let state = AttnState::from_inputs(attention, one, exec);
        let mut state = state.expect("a good state");
        push(rng, &mut state, &case, b);
        let ([_, h, ..], dv, n) = (case.q.shape, case.value_dim(), some.len());
        let mut got = [[1, h, n, dv], [1, h, n, 1]].map(|shape| blank(rng, shape));
        let [out, lse] = &mut got;
        state.read(Outputs::new(out.view_mut()).lse(lse.view_mut())).expect("good outputs");
        let got = got.map(|mut x| x.take("a sequence"));
        for [_, h, i, _] in indices([1, h, n, 1]) {
            let (at, row) = case.row_at(b, from + i);
            let lse = &expected.lse.as_ref().expect("it was asked for").bits;
            for (name, got, expected) in [("out", &got[0], &expected.out.bits), ("lse", &got[1], lse)] {
                let (got, expected) = (got.row(0, h, i), expected.row(at, h, row));
                assert!(got == expected, "sequence {b}, {name} of row {} is {got:x?}, not {expected:x?}", from + i);
            }
        }
    }
}

/// Makes biases and masks repeat after some sequences, or not.
fn period(rng: &mut Rng, case: &mut Case) -> Option<usize> {
    let batch = case.batch();
    let all: Vec<usize> = (1..=batch).filter(|&n| batch.is_multiple_of(n)).collect();
    let period = *all.get(rng.below(all.len())).filter(|_| rng.one_in(2))?;
    let entries = [case.bias.as_mut().map(|(x, _)| x), case.mask.as_mut().map(|(x, _)| x)];
    for x in entries.into_iter().flatten() {
        x.of = Array::from_fn(x.of.shape, |[b, h, l, j]| x.of.get([b % period, h, l, j]));
    }
    Some(period)
}

fn blank(rng: &mut Rng, shape: [usize; 4]) -> Placed<f32> {
    let layout = Layout::draw(rng, shape);
    Placed::blank(rng, layout)
}

/// The rows of the queries that are here: all of them, or some of ragged ones.
fn stretch(rng: &mut Rng, case: &Case) -> Range<usize> {
    let rows = case.q.shape[2];
    if case.ragged.is_none() || rng.one_in(2) {
        return 0..rows;
    }
    let first = rng.below(rows + 1);
    first..first + rng.below(rows + 1 - first)
}

/// Pushes the keys of a sequence.
fn push(rng: &mut Rng, state: &mut AttnState<'_>, case: &Case, b: usize) {
    let (at, first) = case.key_at(b, 0);
    // Positions are of the keys that count.
    let n = if case.positions[1].is_some() { case.kv_len(b) } else { case.keys(b) };
    for keys in rng.cuts(n) {
        let keys = first + keys.start..first + keys.end;
        let [k, v] =
            [(&case.k, 1), (&case.v, 2)].map(|(x, n)| AnyPlaced::of(rng, &x.part(at, keys.clone()), case.dtypes[n]));
        state.push(k.view(), v.view()).expect("they fit");
    }
}

/// Bias and mask as queries laid end to end have them: of all rows here, in one entry of the batch.
struct EndToEnd {
    bias: Option<Array>,
    mask: Option<Array>,
}

struct PlacedRows {
    bias: Option<AnyPlaced>,
    mask: Option<Placed<u8>>,
}

fn end_to_end(case: &Case, here: Range<usize>, period: Option<usize>) -> EndToEnd {
    let laid = |x: &Entries| {
        let [b, h, l, n] = x.of.shape;
        if case.ragged.is_none() || l == 1 {
            // Of one row for all, or of sequences side by side: as they are, up to the period.
            return Array::from_fn([period.unwrap_or(b).min(b), h, l, n], |at| x.of.get(at));
        }
        let mut rows = Array::from_fn([1, h, here.len(), n], |_| 0.0);
        for [s, head, i] in case.every_row() {
            let row = case.row_at(s, i).1;
            if head < h && here.contains(&row) {
                (0..n).for_each(|j| rows.set([0, head, row - here.start, j], x.of.repeated_in(s, [head, i, j])));
            }
        }
        rows
    };
    EndToEnd { bias: case.bias.as_ref().map(|(x, _)| laid(x)), mask: case.mask.as_ref().map(|(x, _)| laid(x)) }
}

impl Array {
    /// The element of a sequence. All may share one entry.
    fn repeated_in(&self, s: usize, [h, i, j]: [usize; 3]) -> f32 {
        self.get([if self.shape[0] == 1 { 0 } else { s }, h, i, j])
    }
}

impl EndToEnd {
    fn place(&self, rng: &mut Rng) -> PlacedRows {
        PlacedRows {
            bias: self.bias.as_ref().map(|x| AnyPlaced::of(rng, x, Dtype::F32)),
            mask: self.mask.as_ref().map(|x| Placed::of(rng, x)),
        }
    }

    /// The inputs of the case with these queries, and with these in place of its bias and mask.
    fn inputs<'a>(
        &self,
        case: &'a Case,
        rows: &'a PlacedRows,
        whole: Inputs<'a>,
        [q, k, v]: [&'a AnyPlaced; 3],
    ) -> Inputs<'a> {
        let all = 0..case.heads();
        let inputs = whole.of_heads(all, [q.view(), k.view(), v.view()]);
        let inputs = match (&rows.bias, &case.bias) {
            (Some(x), Some((entries, _))) if entries.cover == Cover::First => inputs.bias_prefix(x.view()),
            (Some(x), _) => inputs.bias(x.view()),
            _ => inputs,
        };
        let (Some(x), Some((entries, polarity))) = (&rows.mask, &case.mask) else { return inputs };
        let mask = if *polarity == Polarity::NonzeroKeeps { Mask::keep(x.view()) } else { Mask::drop(x.view()) };
        if entries.cover == Cover::First { inputs.mask_prefix(mask) } else { inputs.mask(mask) }
    }
}

/// Sequences and rows that are not there.
fn refused(rng: &mut Rng, case: &Case, inputs: Inputs<'_>, rows: usize) {
    let (beyond, here) = (rng.pick(&[case.batch(), usize::MAX]), rng.below(case.batch()));
    assert!(matches!(inputs.of_sequence(beyond, 0..0), Err(Error::Range { .. })), "sequence {beyond}");
    if case.batch() > 0 {
        let backwards = Range { start: rows.max(1), end: rows.max(1) - 1 };
        for some in [0..rows + 1, rows + 1..rows + 1, backwards, 0..usize::MAX] {
            let refused = inputs.of_sequence(here, some.clone());
            assert!(matches!(refused, Err(Error::Range { .. })), "rows {some:?} of {rows}: {refused:?}");
        }
    }
    let one = [0.0f32];
    let view = |shape| View::from_strides(&one, 0, shape, [0; 4]).expect("one element for all");
    let cache = sdpa::KvCache::new(1, sdpa::KvShape { kv_heads: 1, head_dim: 1, value_dim: 1 }).expect("small");
    let cached = Inputs::cached(view([1, 1, 1, 1]), &cache).of_sequence(0, 0..1);
    assert!(matches!(cached, Err(Error::Needs { .. })), "{cached:?}");
}
