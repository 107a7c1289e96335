//! One call: its numbers and settings, and who sees whom.

use super::array::Array;
use super::functions::{Functions, Origin, Pair};
use super::selection::Selection;
use core::ops::Range;
use sdpa::{Alignment, Attention, Dropout, Dtype, Position, Precision, Window};

/// A sliding window: keys up to `left` before a row and `right` behind it, and the first ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sides {
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
    pub(crate) first: usize,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) causal: bool,
    pub(crate) window: Option<Sides>,
    pub(crate) alignment: Option<Alignment>,
    pub(crate) precision: Precision,
    pub(crate) dropout: Option<Dropout>,
}

/// Which bytes of a mask let a row see a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Polarity {
    NonzeroKeeps,
    NonzeroHides,
}

/// A bias or mask, and the keys that it has columns for: all of them, one column standing for all; or the first ones, the
/// others being hidden.
#[derive(Debug, Clone)]
pub(crate) struct Entries {
    pub(crate) of: Array,
    pub(crate) cover: Cover,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cover {
    All,
    First,
    Last,
}

/// What may hide a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    Bias,
    Mask,
}

#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// As the call has them: the sequences side by side, or end to end.
    pub(crate) q: Array,
    pub(crate) k: Array,
    pub(crate) v: Array,
    /// What q, k and v are made of; their numbers are rounded to it.
    pub(crate) dtypes: [Dtype; 3],
    pub(crate) settings: Settings,
    /// Each of batch, heads and rows may be 1. The numbers of a bias are rounded to its type.
    pub(crate) bias: Option<(Entries, Dtype)>,
    pub(crate) mask: Option<(Entries, Polarity)>,
    pub(crate) alibi: Option<Vec<f32>>,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) kv_lens: Option<Vec<usize>>,
    pub(crate) ragged: Option<[Vec<usize>; 2]>,
    /// Positions of the rows and of the keys of each sequence.
    pub(crate) positions: [Option<Vec<Vec<i32>>>; 2],
    /// Keys that rows select.
    pub(crate) selected: Option<Selection>,
    pub(crate) functions: Functions,
}

impl Entries {
    /// The entry for a row and a key, unless the key has no column: it is then hidden.
    pub(crate) fn get(&self, at: [usize; 4]) -> Option<f32> {
        (self.cover == Cover::All || at[3] < self.of.shape[3]).then(|| self.of.repeated(at))
    }

    /// Number of columns if the number of keys changes to this.
    fn columns(&self, keys: usize, before: usize) -> usize {
        let columns = self.of.shape[3];
        if self.cover == Cover::All && columns == before { keys } else { columns.min(keys) }
    }

    /// With no more than this number of keys.
    pub(crate) fn first(&self, keys: usize) -> Self {
        let [b, h, l, columns] = self.of.shape;
        Self { of: Array::from_fn([b, h, l, columns.min(keys)], |at| self.of.get(at)), cover: self.cover }
    }
}

impl Case {
    /// Queries, keys and values, and no options beside settings.
    pub(crate) fn new([q, k, v]: [Array; 3], dtypes: [Dtype; 3], settings: Settings) -> Self {
        Self {
            q,
            k,
            v,
            dtypes,
            settings,
            bias: None,
            mask: None,
            alibi: None,
            sinks: None,
            kv_lens: None,
            ragged: None,
            positions: [None, None],
            selected: None,
            functions: Functions::default(),
        }
    }

    pub(crate) fn batch(&self) -> usize {
        self.ragged.as_ref().map_or(self.q.shape[0], |[q, _]| q.len() - 1)
    }

    pub(crate) fn heads(&self) -> usize {
        self.q.shape[1]
    }

    pub(crate) fn kv_heads(&self) -> usize {
        self.k.shape[1]
    }

    pub(crate) fn value_dim(&self) -> usize {
        self.v.shape[3]
    }

    /// Query heads that share one of the keys.
    pub(crate) fn sharing(&self) -> usize {
        self.heads().checked_div(self.kv_heads()).unwrap_or(1)
    }

    /// Rows of a sequence.
    pub(crate) fn rows(&self, b: usize) -> usize {
        self.ragged.as_ref().map_or(self.q.shape[2], |[q, _]| q[b + 1] - q[b])
    }

    /// Keys of a sequence, existing or not.
    pub(crate) fn keys(&self, b: usize) -> usize {
        self.ragged.as_ref().map_or(self.k.shape[2], |[_, k]| k[b + 1] - k[b])
    }

    /// Keys of a sequence that exist.
    pub(crate) fn kv_len(&self, b: usize) -> usize {
        self.kv_lens.as_ref().map_or_else(|| self.keys(b), |lens| lens[b])
    }

    /// Rows and keys of the longest sequence.
    pub(crate) fn longest(&self) -> (usize, usize) {
        if self.ragged.is_none() {
            return (self.q.shape[2], self.k.shape[2]);
        }
        let most = |f: &dyn Fn(usize) -> usize| (0..self.batch()).map(f).max().unwrap_or(0);
        (most(&|b| self.rows(b)), most(&|b| self.keys(b)))
    }

    /// Where row `i` of a sequence lies in q and the outputs.
    pub(crate) fn row_at(&self, b: usize, i: usize) -> (usize, usize) {
        self.ragged.as_ref().map_or((b, i), |[q, _]| (0, q[b] + i))
    }

    /// Where key `j` of a sequence lies in k, v and the key mass.
    pub(crate) fn key_at(&self, b: usize, j: usize) -> (usize, usize) {
        self.ragged.as_ref().map_or((b, j), |[_, k]| (0, k[b] + j))
    }

    /// Where row 0 of a sequence stands.
    pub(crate) fn offset(&self, b: usize) -> isize {
        match self.settings.alignment {
            Some(Alignment::BottomRight) => self.kv_len(b) as isize - self.rows(b) as isize,
            Some(Alignment::Offset(n)) => n,
            _ => 0,
        }
    }

    /// Sequence, head and row of every row there is.
    pub(crate) fn every_row(&self) -> Vec<[usize; 3]> {
        let heads = self.heads();
        let rows = |b: usize| (0..heads).flat_map(move |h| (0..self.rows(b)).map(move |i| [b, h, i]));
        (0..self.batch()).flat_map(rows).collect()
    }

    /// Multiplications of QKᵀ and PV, everything visible.
    pub(crate) fn products(&self) -> usize {
        let (rows, keys) = self.longest();
        self.batch() * self.heads() * rows * keys * (self.q.shape[3] + self.value_dim())
    }

    pub(crate) fn scale(&self) -> f32 {
        self.settings.scale.unwrap_or_else(|| (1.0 / (self.q.shape[3] as f64).sqrt()) as f32)
    }

    /// Row and key as functions know them.
    pub(crate) fn pair(&self, [b, h, i]: [usize; 3], key: usize) -> Pair {
        let Origin { batch, row } = self.functions.origin;
        let position = self.offset(b).saturating_add_unsigned(i);
        Pair { batch: batch + b, head: h, row: row + i, key, position }
    }

    /// What dropout multiplies a weight by.
    pub(crate) fn kept(&self, [batch, head, row]: [usize; 3], key: usize) -> f32 {
        let at = Position { batch, head, row, key, position: 0, distance: 0 };
        let kept = |dropout: Dropout| if dropout.keeps(at, self.heads()) { dropout.factor() } else { 0.0 };
        self.settings.dropout.map_or(1.0, kept)
    }

    /// How far a key is behind a row's position; ahead if negative.
    pub(crate) fn behind(&self, [b, _, i]: [usize; 3], j: usize) -> i128 {
        let [rows, keys] = &self.positions;
        let row = rows.as_ref().map_or(self.offset(b) as i128 + i as i128, |rows| rows[b][i].into());
        row - self.place_of_key(b, j).unwrap_or(if keys.is_some() { 0 } else { j as i128 })
    }

    /// Position of a key, if it is there.
    fn place_of_key(&self, b: usize, j: usize) -> Option<i128> {
        self.positions[1].as_ref().map_or(Some(j as i128), |keys| keys[b].get(j).map(|&key| key.into()))
    }

    /// Sequence, head with a list, and row, by which the list of a row is found.
    pub(crate) fn list_of(&self, of: &Selection, [b, h, i]: [usize; 3]) -> [usize; 3] {
        [b, h * of.heads / self.heads(), i]
    }

    /// Whether the mask function is asked about a key; `None` if the row selects keys, and not this one.
    pub(crate) fn asked(&self, row: [usize; 3], j: usize) -> Option<bool> {
        self.selected.as_ref().map_or(Some(true), |of| of.asked(self.list_of(of, row), j))
    }

    /// True if nothing hides a key from a row, one rule not being asked. Scores may hide it still.
    pub(crate) fn sees(&self, row: [usize; 3], j: usize, but: Option<Rule>) -> bool {
        let [b, h, i] = row;
        let Some(asked) = self.asked(row, j) else { return false };
        let behind = self.behind(row, j);
        let causal = !self.settings.causal || behind >= 0;
        let window = self.settings.window.is_none_or(|Sides { left, right, first }| {
            let left = left.is_none_or(|n| behind <= n as i128);
            let kept = self.place_of_key(row[0], j).is_some_and(|key| key >= 0 && key < first as i128);
            kept || left && right.is_none_or(|n| -behind <= n as i128)
        });
        let bias = || {
            but == Some(Rule::Bias)
                || self.bias.as_ref().is_none_or(|(x, _)| x.get([b, h, i, j]).is_some_and(|x| x != f32::NEG_INFINITY))
        };
        let mask = || {
            but == Some(Rule::Mask)
                || self.mask.as_ref().is_none_or(|(x, polarity)| {
                    x.get([b, h, i, j]).is_some_and(|x| (x != 0.0) == (*polarity == Polarity::NonzeroKeeps))
                })
        };
        let pair = self.pair(row, j);
        let functions = || {
            let Functions { score, mask, .. } = self.functions;
            mask.is_none_or(|(keep, _)| !asked || keep.keeps(pair))
                && score.is_none_or(|score| score.line(pair).is_some())
        };
        j < self.kv_len(b) && causal && window && bias() && mask() && functions()
    }

    pub(crate) fn attention(&self) -> Attention {
        let Settings { scale, softcap, causal, window, alignment, precision, dropout } = self.settings;
        let mut attention = Attention::new().precision(precision);
        attention = scale.map_or(attention, |x| attention.scale(x));
        attention = softcap.map_or(attention, |x| attention.softcap(x));
        attention = alignment.map_or(attention, |x| attention.align(x));
        attention = dropout.map_or(attention, |Dropout { p, seed, offset }| attention.dropout(p, seed, offset));
        attention = window.map_or(attention, |Sides { left, right, first }| {
            attention.window(Window::inclusive(left, right).keep_first(first))
        });
        if causal { attention.causal() } else { attention }
    }

    /// Some rows of one sequence, as a call of its own.
    pub(crate) fn some_rows(&self, b: usize, rows: Range<usize>) -> Self {
        let ((qb, row), (kb, key)) = (self.row_at(b, rows.start), self.key_at(b, 0));
        let keys = self.keys(b);
        let cut = |x: &Entries| {
            let [n, h, l, _] = x.of.shape;
            let (b, first) = (if n == 1 { 0 } else { b }, if l == 1 { 0 } else { rows.start });
            let shape = [1, h, if l == 1 { 1 } else { rows.len() }, x.columns(keys, self.longest().1)];
            Entries { of: Array::from_fn(shape, |[_, h, l, j]| x.of.get([b, h, first + l, j])), cover: x.cover }
        };
        let Origin { batch, row: first } = self.functions.origin;
        let origin = Origin { batch: batch + b, row: first + rows.start };
        let positions = [
            self.positions[0].as_ref().map(|all| vec![all[b][rows.clone()].to_vec()]),
            self.positions[1].as_ref().map(|all| vec![all[b].clone()]),
        ];
        let alignment = Some(Alignment::Offset(self.offset(b).saturating_add_unsigned(rows.start)));
        Self {
            q: self.q.part(qb, row..row + rows.len()),
            k: self.k.part(kb, key..key + keys),
            v: self.v.part(kb, key..key + keys),
            dtypes: self.dtypes,
            settings: Settings { alignment, ..self.settings },
            bias: self.bias.as_ref().map(|(x, dtype)| (cut(x), *dtype)),
            mask: self.mask.as_ref().map(|(x, polarity)| (cut(x), *polarity)),
            alibi: self.alibi.clone(),
            sinks: self.sinks.clone(),
            kv_lens: self.kv_lens.as_ref().map(|lens| vec![lens[b]]),
            ragged: None,
            positions,
            selected: self.selected.as_ref().map(|of| of.of_rows(b, rows)),
            functions: Functions { origin, ..self.functions },
        }
    }

    /// The case without its numbers.
    pub(crate) fn describe(&self) -> String {
        let Self { settings, alibi, sinks, kv_lens, ragged, positions, functions, dtypes, .. } = self;
        let shapes = [&self.q, &self.k, &self.v].map(|x| x.shape);
        let bias = self.bias.as_ref().map(|(x, dtype)| (x.of.shape, x.cover, dtype));
        let mask = self.mask.as_ref().map(|(x, polarity)| (x.of.shape, x.cover, polarity));
        let lists = self.selected.as_ref().map(|of| (of.heads, of.rows, of.unit, of.lists.len()));
        format!(
            "q, k, v {shapes:?} {dtypes:?} {settings:?} bias {bias:?} mask {mask:?} alibi {alibi:?} sinks {sinks:?} \
             kv_lens {kv_lens:?} ragged {ragged:?} positions {positions:?} lists {lists:?} {functions:?}"
        )
    }
}
