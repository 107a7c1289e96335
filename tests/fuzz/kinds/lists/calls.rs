//! Calls with lists that were made for them, or for others: refused before anything is written, or right.

use crate::fuzzer::array::{Array, Layout};
use crate::fuzzer::case::{Case, Settings};
use crate::fuzzer::draw::{Home, draw_of};
use crate::fuzzer::functions::Functions;
use crate::fuzzer::oracle::Oracle;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::place::Placed;
use crate::fuzzer::rng::Rng;
use crate::fuzzer::selection::Selection;
use crate::fuzzer::sources::{Source, append, in_integers, place};
use crate::fuzzer::stage::Stage;
use core::num::NonZeroUsize;
use core::ops::Range;
use sdpa::{
    Alignment, Attention, Dtype, Error, Exec, Gradients, Inputs, Isa, KvCache, KvShape, Saved, SelectedKeys, View,
};

const KEYS: [usize; 10] = [0, 1, 3, 15, 16, 17, 40, 255, 257, 300];

pub(super) fn check(rng: &mut Rng) {
    match rng.below(8) {
        0 => backward(rng),
        1 | 2 => sliding(rng),
        _ => fitting(rng),
    }
}

/// A small call with keys that are there.
fn small(rng: &mut Rng, home: Home) -> Case {
    let (heads, kv_heads) = rng.pick(&[(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)]);
    let sizes = [rng.below(4), heads, kv_heads, rng.below(6), rng.pick(&KEYS), 1 + rng.below(9), 1 + rng.below(9)];
    draw_of(rng, home, sizes)
}

/// A call with lists of its own, or somewhat others.
fn fitting(rng: &mut Rng) {
    let home = Home::draw(rng);
    let mut case = small(rng, home);
    let mut lists = Selection::draw(rng, &case);
    for _ in 0..rng.below(3) {
        lists.spoil(rng, &case);
    }
    let mut source = place(rng, &case, home);
    let mut wanted = Wanted::draw(rng);
    if let (Source::Cache(cache), true) = (&mut source, rng.one_in(2)) {
        truncate(rng, &mut case, cache);
        wanted = Wanted { out: wanted.out, ..Wanted::LEAST };
    }
    let fits = lists.fit(&case);
    check_call(rng, &Call { case, home, lists, wanted, fits }, source);
}

/// Takes keys from a cache that lists were made for, and from its case all that has a column for a key.
fn truncate(rng: &mut Rng, case: &mut Case, cache: &mut KvCache) {
    let Some(lens) = &mut case.kv_lens else { return };
    for (b, len) in lens.iter_mut().enumerate() {
        *len = rng.pick(&[*len, len.saturating_sub(1), rng.clone().below(*len + 1)]);
        cache.truncate(b, *len).expect("it has more");
    }
    (case.bias, case.mask) = (None, None);
    case.settings.alignment = case.settings.alignment.or(Some(Alignment::TopLeft));
}

/// A call over a sliding cache: refused if a list names a key that is gone.
fn sliding(rng: &mut Rng) {
    let home = Home::Cache(Dtype::F32);
    let case = small(rng, home);
    let functions = Functions::default();
    let settings = Settings { causal: false, window: None, ..case.settings };
    let mut case = Case { settings, functions, bias: None, mask: None, ..case };
    case.settle_precision();
    let (last, first) = (NonZeroUsize::new(rng.pick(&[1, 16, 100])).expect("some"), rng.pick(&[0, 1, 4]));
    let shape = KvShape { kv_heads: case.kv_heads(), head_dim: case.q.shape[3], value_dim: case.value_dim() };
    let mut cache = KvCache::sliding(case.batch(), shape, last, first).expect("good sizes");
    for b in 0..case.batch() {
        for keys in rng.cuts(case.kv_len(b)) {
            append(rng, &mut cache, b, [case.k.part(b, keys.clone()), case.v.part(b, keys)], Dtype::F32);
        }
    }
    let gone: Vec<Range<usize>> = (0..case.batch()).map(|b| cache.evicted(b).expect("a sequence")).collect();
    let mut lists = Selection::draw(rng, &case);
    if rng.one_in(2) {
        lists.leave_out(&gone);
    }
    let wanted = Wanted::LEAST;
    let names = |row: [usize; 3], gone: &Range<usize>| {
        lists.keys(case.list_of(&lists, row), case.kv_len(row[0])).iter().any(|key| gone.contains(key))
    };
    let fits = !case.every_row().into_iter().any(|row| names(row, &gone[row[0]]));
    check_call(rng, &Call { case, home, lists, wanted, fits }, Source::Cache(cache));
}

/// A call, its lists, and whether they fit.
struct Call {
    case: Case,
    home: Home,
    lists: Selection,
    wanted: Wanted,
    fits: bool,
}

/// The call is refused and writes nothing, or is what the oracle says.
fn check_call(rng: &mut Rng, call: &Call, source: Source) {
    let Call { case, home, lists, wanted, fits } = call;
    let what = || format!("{home:?}, {lists:?}: {}", case.describe());
    let isas: Vec<Isa> = Isa::available().collect();
    let exec = Exec::serial().isa(rng.pick(&isas));
    let mut selected = SelectedKeys::new();
    lists.fill(&mut selected);
    let mut stage = Stage::over(rng, case, source);
    stage.selected = Some(selected);
    let mut outs = Outs::blank(rng, case, *wanted);
    if !fits {
        let refused = case.attention().problem(stage.inputs(), outs.outputs()).err();
        let good = matches!(refused, Some(Error::Mismatch { .. } | Error::Entry { .. } | Error::Evicted { .. }));
        assert!(good && outs.is_blank(), "{refused:?}: {}", what());
        return;
    }
    let with = Case { selected: Some(lists.clone()), ..case.clone() };
    let oracle = match &stage.source {
        Source::Cache(cache) if home.is_integers() => in_integers(&with, cache, *home),
        _ => Oracle::of(&with),
    };
    stage.run("lists that fit", &mut outs, exec).check(&what(), &oracle.answer());
}

/// A backward call with lists, which is refused.
fn backward(rng: &mut Rng) {
    let x = [0.25f32];
    let one = View::from_strides(&x, 0, [1, 1, 2, 3], [0; 4]).expect("one element for all");
    let lse = View::from_strides(&x, 0, [1, 1, 2, 1], [0; 4]).expect("one element for all");
    let [shape, settings] = [[1, 1, 2, 3]; 2];
    let of = Array::from_fn(settings, |_| 0.25);
    let case = Case::new([of.clone(), of.clone(), of], [Dtype::F32; 3], crate::fuzzer::draw::settings(rng, 2, 2));
    let selected = Selection::draw(rng, &case).made(rng, &[2]);
    let layout = Layout::draw(rng, shape);
    let mut d_q = Placed::<f32>::blank(rng, layout);
    let inputs = Inputs::new(one, one, one).selected(&selected);
    let refused =
        Attention::new().backward(inputs, Saved::new(one, lse, one), Gradients::new().q(d_q.view_mut())).err();
    assert!(matches!(refused, Some(Error::Needs { argument: "selected keys", .. })), "{refused:?}");
    assert!(d_q.is_blank(), "a refused call wrote");
}

impl Selection {
    /// Number of lists of a sequence.
    fn of_sequence(&self, b: usize) -> usize {
        self.groups(b) * self.heads
    }

    /// Makes the lists those of other rows, heads, sequences or keys. They stay lists of a shape.
    fn spoil(&mut self, rng: &mut Rng, case: &Case) {
        match rng.below(7) {
            0 if !self.q_lens.is_empty() => {
                let b = rng.below(self.q_lens.len());
                self.q_lens[b] = rng.pick(&[0, self.q_lens[b] + 1, self.q_lens[b].saturating_sub(1)]);
            }
            1 => {
                self.q_lens.pop();
            }
            2 => self.q_lens.push(rng.below(3)),
            3 => self.heads = rng.pick(&[1, 2, 3, 4, 6, 12]),
            4 => self.rows = 1 + rng.below(4),
            5 => self.unit = rng.pick(&[1, 2, 64, 1000, 1 << 20]),
            _ if !self.lists.is_empty() => {
                let (list, keys) = (rng.below(self.lists.len()), case.longest().1);
                let least = self.lists[list].last().map_or(0, |last| last.0 + 1);
                let beyond = keys.div_ceil(self.unit) as u32 + rng.pick(&[0, 0, 1, 1000]);
                self.lists[list].push((least.max(beyond), true));
            }
            _ => {}
        }
        let lists = (0..self.q_lens.len()).map(|b| self.of_sequence(b)).sum();
        self.lists.resize(lists, vec![(0, true)]);
    }

    /// Leaves out units with keys of some ranges, one for each sequence.
    fn leave_out(&mut self, keys: &[Range<usize>]) {
        let (counts, unit) = ((0..self.q_lens.len()).map(|b| self.of_sequence(b)).collect::<Vec<_>>(), self.unit);
        let mut lists = self.lists.iter_mut();
        for (count, keys) in counts.into_iter().zip(keys) {
            let beside = |n: usize| (n + 1) * unit <= keys.start || n * unit >= keys.end;
            lists.by_ref().take(count).for_each(|list| list.retain(|&(number, _)| beside(number as usize)));
        }
    }

    /// True if the lists are those of a case: the rules, one line each.
    fn fit(&self, case: &Case) -> bool {
        let mut good = self.q_lens.len() == case.batch();
        good &= [1, case.kv_heads(), case.heads()].contains(&self.heads);
        let mut lists = self.lists.iter();
        for (b, &rows) in self.q_lens.iter().enumerate() {
            let last = lists.by_ref().take(self.of_sequence(b)).filter_map(|list| list.last()).max();
            good = good && rows == case.rows(b);
            good = good && last.is_none_or(|&(last, _)| (last as usize) < case.kv_len(b).div_ceil(self.unit));
        }
        good
    }
}
