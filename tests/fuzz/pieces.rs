//! Cases in pieces: what states take, and a case's part over some rows or keys of every sequence.

use super::array::Array;
use super::case::{Case, Cover, Entries, Settings};
use super::draw::{DTYPES, Home, SHARED, Sizes, draw_of, own_positions};
use super::functions::{Bound, Functions, Hint, Keep, Origin, Score};
use super::place::AnyPlaced;
use super::rng::Rng;
use super::selection::Selection;
use core::ops::Range;
use sdpa::{Alignment, Dtype, Isa, Mods, Precision};

/// Functions of a state. One combination for all: each one is compiled for every instruction set.
pub(crate) type PieceMods = Mods<Bound<'static, Score>, Bound<'static, (Keep, Hint)>>;

/// Around blocks of 256 keys.
const KEYS: [usize; 12] = [1, 2, 17, 255, 256, 257, 300, 511, 512, 513, 768, 1030];
/// Around row blocks of 96.
const ROWS: [usize; 12] = [1, 1, 2, 16, 17, 40, 95, 96, 97, 191, 193, 290];
const DIMS: [usize; 10] = [1, 2, 3, 8, 15, 16, 17, 33, 64, 65];
const HEADS: [(usize, usize); 8] = [(1, 1), (1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (5, 1)];
const NO_HEADS: [(usize, usize); 3] = [(0, 0), (0, 1), (0, 2)];

/// Sizes around blocks of keys and rows; batch, heads, rows and keys may be 0.
pub(crate) fn sizes(rng: &mut Rng) -> Sizes {
    let products = match rng.below(64) {
        0 => SHARED..=SHARED * 5 / 4,
        1..16 => 100_000..=1_000_000,
        _ => 0..=100_000,
    };
    loop {
        let keys = if rng.one_in(4) { rng.below(600) } else { rng.pick(&KEYS) };
        let rows = if rng.one_in(4) { rng.below(100) } else { rng.pick(&ROWS) };
        let (heads, kv_heads) = if rng.one_in(30) { rng.pick(&NO_HEADS) } else { rng.pick(&HEADS) };
        let batch = if rng.one_in(30) { 0 } else { rng.pick(&[1, 1, 2, 3]) };
        let (d, dv) = (rng.pick(&DIMS), rng.pick(&DIMS));
        let [rows, keys] = [rows, keys].map(|n| if rng.one_in(30) { 0 } else { n });
        if products.contains(&(batch * heads * rows * keys * (d + dv))) {
            return [batch, heads, kv_heads, rows, keys, d, dv];
        }
    }
}

/// A case with every option that states take.
pub(crate) fn draw(rng: &mut Rng) -> Case {
    let sizes = sizes(rng);
    let mut case = loop {
        let case = draw_at(rng, Home::Tensors, sizes);
        if case.ragged.is_none() {
            break case;
        }
    };
    if rng.one_in(3) {
        let (rows, keys) = case.longest();
        case.functions = functions(rng, rows, keys);
    }
    case
}

/// A case of these sizes with its keys in a given source; sequences of tensors may lie end to end.
pub(crate) fn draw_at(rng: &mut Rng, home: Home, sizes: Sizes) -> Case {
    let mut case = draw_of(rng, home, sizes);
    let (rows, keys) = case.longest();
    if rng.one_in(4) {
        own_positions(rng, &mut case);
        if case.positions[1].is_none() {
            case.positions = [None, None];
        }
    }
    let alignment = match case.settings.alignment {
        Some(Alignment::BottomRight) => Some(Alignment::Offset(keys as isize - rows as isize)),
        // Without one, a state does not know where its rows stand.
        other => Some(other.unwrap_or(Alignment::TopLeft)),
    };
    case.settings = Settings { alignment, dropout: None, ..case.settings };
    case.functions.prob = None;
    case
}

fn functions(rng: &mut Rng, rows: usize, keys: usize) -> Functions {
    let holes = 2 + rng.below(5);
    let score = rng.pick(&[None, Some(Score::Relative(0.02)), Some(Score::Holes(holes))]);
    let diagonal = rng.below(keys + 1) as isize - rng.below(rows + 1) as isize / 2;
    let keeps = [Keep::Bands(1 + rng.below(40)), Keep::Diagonal(diagonal), Keep::Holes(2 + rng.below(5))];
    let mask = rng.one_in(2).then(|| (rng.pick(&keeps), rng.pick(&[Hint::Truth, Hint::Nothing, Hint::Keys])));
    Functions { score, mask, prob: None, origin: Origin::default() }
}

/// An instruction set of the machine.
pub(crate) fn any_isa(rng: &mut Rng) -> Isa {
    rng.pick(&Isa::available().collect::<Vec<_>>())
}

/// Cuts at multiples of 256.
pub(crate) fn whole_blocks(rng: &mut Rng, keys: usize) -> Vec<Range<usize>> {
    let (mut at, mut parts) = (0, Vec::new());
    while at < keys {
        let end = keys.min(at + 256 * (1 + rng.below(3)));
        parts.push(at..end);
        at = end;
    }
    parts
}

/// Cuts of rows: at random, or at row blocks of 96; at times none.
pub(crate) fn stretches(rng: &mut Rng, rows: usize) -> Vec<Range<usize>> {
    match rng.below(3) {
        0 => core::iter::once(0..rows).collect(),
        1 => (0..rows).step_by(96).map(|row| row..rows.min(row + 96)).collect(),
        _ => rng.cuts(rows),
    }
}

impl Case {
    /// The functions, if there are any. They see rows and keys where a state says that these lie.
    pub(crate) fn piece_mods(&self) -> Option<PieceMods> {
        let Functions { score, mask, origin, .. } = self.functions;
        (score.is_some() || mask.is_some()).then(|| {
            let score = Bound { function: score.unwrap_or(Score::Same), origin, fuse: None };
            let mask = Bound { function: mask.unwrap_or((Keep::All, Hint::Nothing)), origin, fuse: None };
            Mods::new().score(score).mask(mask)
        })
    }

    /// Some rows of every sequence, as a call over all keys. Functions are those of the whole.
    pub(crate) fn stretch(&self, rows: Range<usize>) -> Self {
        let cut = |x: &Entries| {
            let [b, h, l, n] = x.of.shape;
            let (first, l) = if l == 1 { (0, 1) } else { (rows.start, rows.len()) };
            Entries { of: Array::from_fn([b, h, l, n], |[b, h, l, j]| x.of.get([b, h, first + l, j])), cover: x.cover }
        };
        let [of_rows, of_keys] = &self.positions;
        let of_rows = of_rows.as_ref().map(|all| all.iter().map(|list| list[rows.clone()].to_vec()).collect());
        // A state has no bottom-right alignment, so all sequences stand alike.
        let offset = if self.batch() == 0 { 0 } else { self.offset(0).saturating_add_unsigned(rows.start) };
        let Origin { batch, row } = self.functions.origin;
        Self {
            q: rows_of(&self.q, rows.clone()),
            settings: Settings { alignment: Some(Alignment::Offset(offset)), ..self.settings },
            bias: self.bias.as_ref().map(|(x, dtype)| (cut(x), *dtype)),
            mask: self.mask.as_ref().map(|(x, polarity)| (cut(x), *polarity)),
            positions: [of_rows, of_keys.clone()],
            functions: Functions { origin: Origin { batch, row: row + rows.start }, ..self.functions },
            selected: self.selected.as_ref().map(|of| of.stretch(rows)),
            ..self.clone()
        }
    }

    /// Some keys of every sequence with what options have for them; settings and functions are those of the whole.
    pub(crate) fn some_keys(&self, keys: Range<usize>) -> Self {
        let all = self.longest().1;
        let cut = |x: &Entries| {
            let [b, h, l, columns] = x.of.shape;
            let (first, n) = match x.cover {
                Cover::All if columns == 1 && all != 1 => (0, 1),
                // Of one key's column none is left if no key is.
                _ => (keys.start.min(columns), keys.end.min(columns) - keys.start.min(columns)),
            };
            Entries { of: Array::from_fn([b, h, l, n], |[b, h, l, j]| x.of.get([b, h, l, first + j])), cover: x.cover }
        };
        let [of_rows, of_keys] = &self.positions;
        let list = |all: &Vec<i32>| all[keys.start.min(all.len())..keys.end.min(all.len())].to_vec();
        let len = |&len: &usize| len.saturating_sub(keys.start).min(keys.len());
        let ([k, v], ragged) = self.end_to_end(&keys);
        Self {
            k,
            v,
            ragged,
            bias: self.bias.as_ref().map(|(x, dtype)| (cut(x), *dtype)),
            mask: self.mask.as_ref().map(|(x, polarity)| (cut(x), *polarity)),
            kv_lens: self.kv_lens.as_ref().map(|lens| lens.iter().map(len).collect()),
            positions: [of_rows.clone(), of_keys.as_ref().map(|all| all.iter().map(list).collect())],
            selected: self.selected.as_ref().map(|of| of.below(keys.end)),
            ..self.clone()
        }
    }

    /// Some keys and values of every sequence, and the ends of those that lie end to end.
    fn end_to_end(&self, keys: &Range<usize>) -> ([Array; 2], Option<[Vec<usize>; 2]>) {
        let both = [&self.k, &self.v];
        let Some([rows, ends]) = &self.ragged else { return (both.map(|x| rows_of(x, keys.clone())), None) };
        let of = |s: usize| ends[s + 1].min(ends[s] + keys.start)..ends[s + 1].min(ends[s] + keys.end);
        let places: Vec<usize> = (0..self.batch()).flat_map(of).collect();
        let mut mine = vec![0];
        (0..self.batch()).for_each(|s| mine.push(mine[s] + of(s).len()));
        let cut = |x: &Array| {
            let [b, h, _, d] = x.shape;
            Array::from_fn([b, h, places.len(), d], |[b, h, l, d]| x.get([b, h, places[l], d]))
        };
        (both.map(cut), Some([rows.clone(), mine]))
    }

    /// True if range rules and lengths, the mask, the classes of the mask function and lists each show some row some of these keys:
    /// what a state's `sees` says. Where keys have positions, rules are not asked; where a list has marks, classes are not.
    pub(crate) fn may_be_seen(&self, keys: Range<usize>) -> bool {
        let bare = Self { bias: None, mask: None, selected: None, functions: Functions::default(), ..self.clone() };
        let (rows, own) = (self.every_row(), self.positions[1].is_some());
        let ruled = rows
            .iter()
            .any(|&row| keys.clone().any(|j| if own { j < self.kv_len(row[0]) } else { bare.sees(row, j, None) }));
        let masked = self.mask.as_ref().is_none_or(|(x, polarity)| {
            let [b, h, l, _] = x.of.shape;
            let keeps = super::case::Polarity::NonzeroKeeps == *polarity;
            super::array::indices([b, h, l, 1])
                .any(|[b, h, l, _]| keys.clone().any(|j| x.get([b, h, l, j]).is_some_and(|x| (x != 0.0) == keeps)))
        });
        let classes = self.functions.mask.is_none_or(|(keep, hint)| {
            let partly = self.selected.as_ref().is_some_and(Selection::asks_partly);
            partly
                || hint == Hint::Nothing
                || rows.iter().any(|&row| keys.clone().any(|j| keep.keeps(self.pair(row, j))))
        });
        ruled && masked && classes && self.selected.as_ref().is_none_or(|of| of.names_some(keys))
    }

    /// Keys and values from `keys` on as a push takes them: in the types that they have, or wider ones.
    pub(crate) fn pushed(&self, rng: &mut Rng, keys: Range<usize>) -> [AnyPlaced; 2] {
        let [_, k, v] = self.dtypes;
        // With native precision it counts of what type they are.
        let wide = self.settings.precision == Precision::Exact && rng.one_in(2);
        [(&self.k, k), (&self.v, v)].map(|(x, dtype)| {
            let dtype = if wide { Dtype::F32 } else { dtype };
            AnyPlaced::of(rng, &rows_of(x, keys.clone()), dtype)
        })
    }
}

/// Some rows of every head and sequence.
pub(crate) fn rows_of<T: Copy>(x: &Array<T>, rows: Range<usize>) -> Array<T> {
    let [b, h, _, d] = x.shape;
    Array::from_fn([b, h, rows.len(), d], |[b, h, l, d]| x.get([b, h, rows.start + l, d]))
}

/// An element type for what is written.
pub(crate) fn any_dtype(rng: &mut Rng) -> Dtype {
    if rng.one_in(2) { Dtype::F32 } else { rng.pick(&DTYPES) }
}
