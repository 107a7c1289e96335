//! Keys that rows select, as plain lists, and how they come into a call.

use super::array::{Array, At, Layout, indices};
use super::case::Case;
use super::memory::{Flush, Memory};
use super::rng::Rng;
use core::ops::Range;
use sdpa::{Rectangle, SelectedKeys, SelectionShape, View};

/// A unit of a list: its number, and whether the mask function is asked about it.
pub(crate) type Unit = (u32, bool);

/// Lists of units for groups of rows and heads.
#[derive(Debug, Clone)]
pub(crate) struct Selection {
    pub(crate) q_lens: Vec<usize>,
    pub(crate) heads: usize,
    /// Rows of a group.
    pub(crate) rows: usize,
    /// Keys of a unit.
    pub(crate) unit: usize,
    /// Lists, ascending, in the order `[sequence][head][group of rows]`.
    pub(crate) lists: Vec<Vec<Unit>>,
}

impl Selection {
    /// Lists for the rows of a case, of keys that it has.
    pub(crate) fn draw(rng: &mut Rng, case: &Case) -> Self {
        let heads = rng.pick(&[1, case.kv_heads().max(1), case.heads().max(1)]);
        let q_lens: Vec<usize> = (0..case.batch()).map(|b| case.rows(b)).collect();
        let longest = q_lens.iter().copied().max().unwrap_or(0);
        let rows = rng.pick(&[1, 1, 2, 1 + rng.clone().below(longest + 1), longest.max(1), 16, 1000]);
        let unit = rng.pick(&[1, 1, 1, 3, 16, 64, 128, 256, 1000]);
        let marks = rng.below(4);
        let mut lists = Vec::new();
        for (b, q_len) in q_lens.iter().enumerate() {
            for _ in 0..heads * q_len.div_ceil(rows) {
                let numbers = numbers(rng, case.kv_len(b).div_ceil(unit));
                let asked = |_: &u32| match marks {
                    0 => rng.one_in(2),
                    mark => mark != 1,
                };
                let marks: Vec<bool> = numbers.iter().map(asked).collect();
                lists.push(numbers.into_iter().zip(marks).collect());
            }
        }
        Self { q_lens, heads, rows, unit, lists }
    }

    /// Number of groups of rows of a sequence.
    pub(crate) fn groups(&self, b: usize) -> usize {
        self.q_lens[b].div_ceil(self.rows)
    }

    /// Place of a list among all.
    fn index(&self, b: usize, head: usize, group: usize) -> usize {
        let before: usize = (0..b).map(|b| self.groups(b)).sum();
        before * self.heads + head * self.groups(b) + group
    }

    /// The list of a row. `head` is one of the heads that have lists.
    pub(crate) fn list(&self, b: usize, head: usize, i: usize) -> &[Unit] {
        &self.lists[self.index(b, head, i / self.rows)]
    }

    /// Whether the mask function is asked about a key that the list of a row names; `None` if it does not name the key.
    pub(crate) fn asked(&self, [b, head, i]: [usize; 3], key: usize) -> Option<bool> {
        let list = self.list(b, head, i);
        let at = list.binary_search_by_key(&(key / self.unit), |&(number, _)| number as usize).ok()?;
        Some(list[at].1)
    }

    /// Place of a key in the list of a row, which names it.
    pub(crate) fn place(&self, [b, head, i]: [usize; 3], key: usize) -> usize {
        let before = self.list(b, head, i).partition_point(|&(number, _)| (number as usize) < key / self.unit);
        before * self.unit + key % self.unit
    }

    /// Keys that the list of a row names, of a sequence of `kv_len` keys.
    pub(crate) fn keys(&self, [b, head, i]: [usize; 3], kv_len: usize) -> Vec<usize> {
        let of_unit = |&(number, _): &Unit| number as usize * self.unit..(number as usize + 1) * self.unit;
        self.list(b, head, i).iter().flat_map(of_unit).filter(|&key| key < kv_len).collect()
    }

    /// Lists of some rows of one sequence.
    pub(crate) fn of_rows(&self, b: usize, rows: Range<usize>) -> Self {
        // Groups are the same groups if rows begin with one.
        let step = if rows.start.is_multiple_of(self.rows) { self.rows } else { 1 };
        let firsts = || rows.clone().step_by(step);
        let lists = (0..self.heads).flat_map(|head| firsts().map(move |i| self.list(b, head, i).to_vec())).collect();
        Self { q_lens: vec![rows.len()], rows: step, lists, ..*self }
    }

    /// Lists of some rows of every sequence.
    pub(crate) fn stretch(&self, rows: Range<usize>) -> Self {
        let parts: Vec<Self> = (0..self.q_lens.len()).map(|b| self.of_rows(b, rows.clone())).collect();
        let step = parts.first().map_or(1, |part| part.rows);
        let lists = parts.into_iter().flat_map(|part| part.lists).collect();
        Self { q_lens: vec![rows.len(); self.q_lens.len()], rows: step, lists, ..*self }
    }

    /// Lists without units that begin at a key or after it.
    pub(crate) fn below(&self, key: usize) -> Self {
        let cut = |list: &Vec<Unit>| list.iter().copied().filter(|&(n, _)| (n as usize) * self.unit < key).collect();
        Self { q_lens: self.q_lens.clone(), lists: self.lists.iter().map(cut).collect(), ..*self }
    }

    /// True if a list names a unit that has one of these keys.
    pub(crate) fn names_some(&self, keys: Range<usize>) -> bool {
        let has = |&(n, _): &Unit| (n as usize) * self.unit < keys.end && (n as usize + 1) * self.unit > keys.start;
        !keys.is_empty() && self.lists.iter().flatten().any(has)
    }

    /// True if the mask function is not asked about every unit.
    pub(crate) fn asks_partly(&self) -> bool {
        self.lists.iter().flatten().any(|&(_, asked)| !asked)
    }

    fn shape(&self) -> SelectionShape<'_> {
        SelectionShape { q_lens: &self.q_lens, heads: self.heads, rows: self.rows, unit: self.unit }
    }

    /// The lists as calls take them, made in one of two ways. `kv_lens` are the sequences' numbers of keys.
    pub(crate) fn made(&self, rng: &mut Rng, kv_lens: &[usize]) -> SelectedKeys {
        let mut made = SelectedKeys::new();
        if rng.one_in(2) {
            self.fill(&mut made)
        } else {
            self.fill_padded(rng, kv_lens, &mut made)
        }
        made
    }

    /// Fills by ascending numbers.
    pub(crate) fn fill(&self, made: &mut SelectedKeys) {
        let mut starts = vec![0];
        let mut all: Vec<Unit> = Vec::new();
        for list in &self.lists {
            all.extend(list);
            starts.push(all.len());
        }
        let (numbers, asked): (Vec<u32>, Vec<bool>) = all.into_iter().unzip();
        let asked = (!asked.iter().all(|&asked| asked)).then_some(&asked[..]);
        made.fill(self.shape(), &starts, &numbers, asked).expect("good lists");
    }

    /// Fills by rectangles, numbers in any order.
    fn fill_padded(&self, rng: &mut Rng, kv_lens: &[usize], made: &mut SelectedKeys) {
        let marked = self.lists.iter().flatten().any(|&(_, asked)| !asked);
        let shown = Padded::draw(rng, self, |&(_, asked)| !marked || !asked);
        let asked = marked.then(|| Padded::draw(rng, self, |&(_, asked)| asked));
        let asked = asked.as_ref().map(Padded::rectangle);
        made.fill_padded(self.shape(), kv_lens, shown.rectangle(), asked).expect("good lists");
    }
}

/// Ascending numbers of units: none, all, few, those next to where blocks begin, as many as fill a block, and others.
fn numbers(rng: &mut Rng, units: usize) -> Vec<u32> {
    let near = [1, 15, 16, 17, 31, 33, 255, 256, 257, 511, 513];
    let all = units as u32;
    match rng.below(10) {
        0 => Vec::new(),
        1 => (0..all).collect(),
        2 => (0..rng.pick(&near).min(units) as u32).collect(),
        3 => (all - rng.pick(&near).min(units) as u32..all).collect(),
        4 => (0..all).filter(|&n| n == 0 || n + 1 == all).collect(),
        5 => (0..all).filter(|&n| matches!(n % 256, 0 | 1 | 255)).collect(),
        6 => {
            let many = rng.pick(&near).min(units);
            let mut some: Vec<u32> = rng.shuffled(units)[..many].iter().map(|&n| n as u32).collect();
            some.sort_unstable();
            some
        }
        7 => rng.cuts(units).into_iter().step_by(2).flatten().map(|n| n as u32).collect(),
        _ => {
            let share = rng.pick(&[2, 2, 4, 16, 64]);
            (0..all).filter(|_| rng.one_in(share)).collect()
        }
    }
}

/// A rectangle of numbers in guarded memory.
#[derive(Debug)]
pub(crate) struct Padded {
    numbers: Memory<i32>,
    layout: Layout,
    lens: Option<Memory<i32>>,
}

impl Padded {
    /// Numbers in a random layout. A dimension of the shape that is another than the array's, which is 1, repeats it.
    pub(crate) fn of(rng: &mut Rng, x: &Array<i32>, shape: At, lens: Option<&[i32]>) -> Self {
        let mut layout = Layout::draw(rng, x.shape);
        let flush = if rng.one_in(2) { Flush::Low } else { Flush::High };
        let mut numbers = Memory::new(layout.len, flush);
        let elements = numbers.slice_mut();
        indices(x.shape).for_each(|at| elements[layout.index(at)] = x.get(at));
        for (dim, n) in shape.into_iter().enumerate().filter(|&(dim, n)| n != x.shape[dim]) {
            (layout.shape[dim], layout.strides[dim]) = (n, 0);
        }
        Self { numbers, layout, lens: lens.map(|lens| Memory::of(lens, flush)) }
    }

    pub(crate) fn rectangle(&self) -> Rectangle<'_> {
        let Layout { shape, strides, offset, .. } = self.layout;
        let view = View::from_strides(self.numbers.slice(), offset, shape, strides).expect("it fits its memory");
        let rectangle = Rectangle::new(view);
        self.lens.as_ref().map_or(rectangle, |lens| rectangle.lens(lens.slice()))
    }

    /// Some of the units of lists, in any order, with −1 between them or behind; or lengths, and anything behind.
    fn draw(rng: &mut Rng, of: &Selection, is_in: impl Fn(&Unit) -> bool) -> Self {
        let mut lists: Vec<Vec<i32>> = Vec::new();
        for list in &of.lists {
            let mut some: Vec<i32> = list.iter().filter(|unit| is_in(unit)).map(|&(number, _)| number as i32).collect();
            if rng.one_in(4) {
                some.extend((0..rng.below(4)).map(|_| -1));
            }
            let order = rng.shuffled(some.len());
            lists.push(if rng.one_in(2) { order.into_iter().map(|at| some[at]).collect() } else { some });
        }
        let places = lists.iter().map(Vec::len).max().unwrap_or(0) + rng.below(3);
        let (sequences, heads) = (of.q_lens.len(), of.heads);
        let even = sequences > 0 && (0..sequences).all(|b| of.groups(b) == of.groups(0));
        let all: usize = (0..sequences).map(|b| of.groups(b)).sum();
        let places_of: Vec<(usize, usize)> =
            (0..sequences).flat_map(|b| (0..of.groups(b)).map(move |group| (b, group))).collect();
        let list = |head: usize, group: usize| &lists[of.index(places_of[group].0, head, places_of[group].1)];
        let shape = match even && rng.one_in(2) {
            true => [sequences, heads, of.groups(0), places],
            false => [1, heads, all, places],
        };
        let lens: Option<Vec<i32>> = rng.one_in(3).then(|| {
            let longest = |group: usize| (0..heads).map(|head| list(head, group).len()).max().unwrap_or(0);
            (0..all).map(|group| longest(group) as i32).collect()
        });
        let numbers = Array::from_fn(shape, |[b, head, group, place]| {
            let group = b * shape[2] + group;
            let beyond = lens.as_ref().is_some_and(|lens| place >= lens[group] as usize);
            list(head, group).get(place).copied().unwrap_or(if beyond { i32::MIN } else { -1 })
        });
        Self::of(rng, &numbers, shape, lens.as_deref())
    }
}
