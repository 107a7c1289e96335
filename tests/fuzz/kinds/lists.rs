//! Lists of keys, good, damaged and hostile: refused as a model says, or what it says; then calls that lists fit or do not.

mod calls;
mod model;

use crate::fuzzer::array::Array;
use crate::fuzzer::memory::{Flush, Memory};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::selection::{Padded, Unit};
use sdpa::{SelectedKeys, SelectionShape};

/// Number of lists or numbers that no memory holds. A view may repeat one number for some times as many.
const HUGE: usize = usize::MAX >> 9;

/// What a selection is filled with.
#[derive(Debug, Clone)]
struct Filling {
    q_lens: Vec<usize>,
    heads: usize,
    rows: usize,
    unit: usize,
    numbers: Numbers,
}

#[derive(Debug, Clone)]
enum Numbers {
    Ascending { starts: Vec<usize>, numbers: Vec<u32>, asked: Option<Vec<bool>> },
    Padded { kv_lens: Vec<usize>, shown: Places, asked: Option<Places> },
}

/// A rectangle of numbers. The last two dimensions may be repeated, if the array has one element there.
#[derive(Debug, Clone)]
struct Places {
    numbers: Array<i32>,
    groups: usize,
    places: usize,
    lens: Option<Vec<i32>>,
}

/// One selection, filled up to three times; then, at times, calls.
pub(super) fn check(rng: &mut Rng) {
    let mut selected = if rng.one_in(2) { SelectedKeys::new() } else { SelectedKeys::default() };
    is_empty(&selected, "a new one");
    for _ in 0..1 + rng.below(3) {
        let mut filling = Filling::draw(rng);
        if rng.one_in(3) {
            filling.is_filled(rng, &mut selected);
        }
        for _ in 0..rng.below(4) {
            filling.spoil(rng);
        }
        filling.is_filled(rng, &mut selected);
    }
    if rng.one_in(32) {
        calls::check(rng);
    }
}

/// Panics unless a selection is one of nothing.
fn is_empty(selected: &SelectedKeys, what: &str) {
    assert_eq!((selected.sequences(), selected.q_lens()), (0, &[][..]), "{what}");
    let at_0 = (selected.names(0, 0, 0, 0), selected.asks(0, 0, 0, 0), selected.first_in(0, 0..usize::MAX));
    assert!(selected.numbers(0, 0, 0).is_none() && at_0 == (false, false, None), "{what}: {selected:?}");
}

impl Filling {
    /// Good lists, of few rows and units.
    fn draw(rng: &mut Rng) -> Self {
        let q_lens: Vec<usize> = match rng.one_in(2) {
            true => vec![rng.below(5); rng.below(4)],
            false => (0..rng.below(4)).map(|_| rng.below(5)).collect(),
        };
        let (heads, rows) = (1 + rng.below(3), rng.pick(&[1, 1, 2, 3, 1000]));
        let unit = rng.pick(&[1, 1, 2, 3, 16, 256, 1000]);
        let units: Vec<usize> = q_lens.iter().map(|_| rng.below(9)).collect();
        let groups: Vec<usize> = q_lens.iter().map(|q_len| q_len.div_ceil(rows)).collect();
        let numbers = match rng.one_in(2) {
            true => Numbers::ascending(rng, &groups, heads, &units),
            false => Numbers::padded(rng, &groups, heads, &units.iter().map(|n| n * unit).collect::<Vec<_>>(), unit),
        };
        Self { q_lens, heads, rows, unit, numbers }
    }

    /// Changes something, which may or may not be good afterwards.
    fn spoil(&mut self, rng: &mut Rng) {
        match rng.below(12) {
            0 => spoil_list(rng, &mut self.q_lens, |rng, n| rng.pick(&[0, 1, n + 1, n.saturating_sub(1), HUGE])),
            1 => self.heads = rng.pick(&[0, 1, self.heads.saturating_add(1), HUGE]),
            2 => self.rows = rng.pick(&[0, 1, self.rows.saturating_add(1), usize::MAX]),
            3 => {
                let odd = [0, 1, self.unit.saturating_add(1), 1 << 20, (1 << 31) - 1, 1 << 31, usize::MAX];
                self.unit = rng.pick(&odd);
            }
            _ => self.numbers.spoil(rng, &mut self.q_lens),
        }
    }

    fn shape(&self) -> SelectionShape<'_> {
        SelectionShape { q_lens: &self.q_lens, heads: self.heads, rows: self.rows, unit: self.unit }
    }

    /// Fills a selection. Panics unless it is refused or filled as the model says; a refused one is empty.
    fn is_filled(&self, rng: &mut Rng, selected: &mut SelectedKeys) {
        let expected = model::lists(self);
        let done = match &self.numbers {
            Numbers::Ascending { starts, numbers, asked } => {
                let flush = if rng.one_in(2) { Flush::Low } else { Flush::High };
                let [starts, q_lens] = [starts, &self.q_lens].map(|x| Memory::of(x, flush));
                let (numbers, asked) = (Memory::of(numbers, flush), asked.as_ref().map(|x| Memory::of(x, flush)));
                let shape = SelectionShape { q_lens: q_lens.slice(), ..self.shape() };
                selected.fill(shape, starts.slice(), numbers.slice(), asked.as_ref().map(Memory::slice))
            }
            Numbers::Padded { kv_lens, shown, asked } => {
                let (shown, asked) = (shown.placed(rng), asked.as_ref().map(|asked| asked.placed(rng)));
                let asked = asked.as_ref().map(Padded::rectangle);
                selected.fill_padded(self.shape(), kv_lens, shown.rectangle(), asked)
            }
        };
        match (done, expected) {
            (Err(got), Err(expected)) => {
                assert_eq!(got, expected, "{self:?}");
                is_empty(selected, &format!("{self:?}: {got}"));
            }
            (Ok(()), Ok(lists)) => self.holds(rng, selected, &lists),
            (got, expected) => panic!("{self:?}: {got:?}, expected {expected:?}"),
        }
    }

    /// Panics unless a selection has these lists, and whatever is said of them.
    fn holds(&self, rng: &mut Rng, selected: &SelectedKeys, lists: &[Vec<Unit>]) {
        let Self { q_lens, heads, rows, unit, .. } = self;
        let sizes = (selected.sequences(), selected.heads(), selected.rows(), selected.unit());
        assert_eq!((sizes, selected.q_lens()), ((q_lens.len(), *heads, *rows, *unit), &q_lens[..]), "{self:?}");
        let mut firsts = 0;
        for (s, &q_len) in q_lens.iter().enumerate() {
            let groups = q_len.div_ceil(*rows);
            // Without rows there may be any number of heads, and any number of rows in one group.
            for (head, row) in (0..(*heads).min(9)).flat_map(|head| (0..q_len.min(9)).map(move |row| (head, row))) {
                let list = &lists[firsts + head * groups + row / rows];
                let numbers = selected.numbers(s, head, row).expect("a row of it");
                assert!(numbers.len() == list.len() && numbers.eq(list.iter().map(|unit| unit.0 as usize)), "{self:?}");
                let key = rng.below(10).saturating_mul(*unit).saturating_add(rng.below(*unit));
                let named = list.iter().find(|named| named.0 as usize == key / unit);
                let said = [selected.names(s, head, row, key), selected.asks(s, head, row, key)];
                assert_eq!(said, [named.is_some(), named.is_some_and(|named| named.1)], "{self:?}: key {key}");
            }
            let of_sequence = &lists[firsts..firsts + groups.saturating_mul(*heads)];
            self.first_is_found(rng, selected, s, of_sequence);
            firsts += groups.saturating_mul(*heads);
            assert!(selected.numbers(s, *heads, 0).is_none() && selected.numbers(s, 0, q_len).is_none(), "{self:?}");
        }
        assert!(selected.numbers(q_lens.len(), 0, 0).is_none(), "{self:?}");
    }

    /// Panics unless the first row is found of which a list names one of some keys.
    fn first_is_found(&self, rng: &mut Rng, selected: &SelectedKeys, s: usize, lists: &[Vec<Unit>]) {
        let start = rng.below(8).saturating_mul(self.unit).saturating_add(rng.below(3));
        let keys = start..start.saturating_add(rng.below(20));
        let groups = lists.len() / self.heads;
        let mut expected = None;
        for (group, head) in (0..groups).flat_map(|group| (0..self.heads).map(move |head| (group, head))) {
            for &(number, _) in &lists[head * groups + group] {
                let first = number as usize * self.unit;
                let key = keys.start.max(first);
                if expected.is_none() && key < keys.end && key < first + self.unit {
                    expected = Some((group * self.rows, key));
                }
            }
        }
        assert_eq!(selected.first_in(s, keys.clone()), expected, "{self:?}: {keys:?} of {s}");
    }
}

/// Adds an element to a list, removes one, or changes one.
fn spoil_list<T: Copy>(rng: &mut Rng, list: &mut Vec<T>, other: impl Fn(&mut Rng, T) -> T) {
    if list.is_empty() {
        return;
    }
    let at = rng.below(list.len());
    match rng.below(4) {
        0 => list.push(list[at]),
        1 => {
            list.remove(at);
        }
        _ => list[at] = other(rng, list[at]),
    }
}

impl Numbers {
    fn ascending(rng: &mut Rng, groups: &[usize], heads: usize, units: &[usize]) -> Self {
        let (mut starts, mut numbers) = (vec![0], Vec::new());
        for (groups, &units) in groups.iter().zip(units) {
            for _ in 0..groups * heads {
                numbers.extend((0..units as u32).filter(|_| rng.one_in(2)));
                starts.push(numbers.len());
            }
        }
        let asked = rng.one_in(2).then(|| numbers.iter().map(|_| rng.one_in(2)).collect());
        Self::Ascending { starts, numbers, asked }
    }

    fn padded(rng: &mut Rng, groups: &[usize], heads: usize, kv_lens: &[usize], unit: usize) -> Self {
        let even = !groups.is_empty() && groups.iter().all(|&n| n == groups[0]) && rng.one_in(2);
        let shape = |rng: &mut Rng| {
            let heads = if rng.one_in(3) { 1 } else { heads };
            let [batch, groups] = if even { [groups.len(), groups[0]] } else { [1, groups.iter().sum()] };
            [batch, heads, groups, rng.below(7)]
        };
        let of_group: Vec<usize> =
            groups.iter().zip(kv_lens).flat_map(|(&n, len)| vec![len.div_ceil(unit); n]).collect();
        // Even numbers in one rectangle, odd ones in the other.
        let two = rng.one_in(2);
        let one = |rng: &mut Rng, odd: usize| {
            let shape = shape(rng);
            let mut free: Vec<i32> = Vec::new();
            let numbers = Array::from_fn(shape, |[b, _, group, place]| {
                if place == 0 {
                    let all = 0..of_group[b * shape[2] + group];
                    free = all.filter(|n| !two || n % 2 == odd).map(|n| n as i32).collect();
                }
                let at = rng.below(free.len() + 2);
                if at < free.len() { free.swap_remove(at) } else { -1 }
            });
            let lens = match rng.below(3) {
                0 => Some(of_group.iter().map(|_| rng.below(shape[3] + 1) as i32).collect()),
                1 => Some(kv_lens.iter().map(|_| rng.below(shape[3] + 1) as i32).collect()),
                _ => None,
            };
            Places { numbers, groups: shape[2], places: shape[3], lens }
        };
        let shown = one(rng, 0);
        let asked = two.then(|| one(rng, 1));
        Self::Padded { kv_lens: kv_lens.to_vec(), shown, asked }
    }

    fn spoil(&mut self, rng: &mut Rng, q_lens: &mut Vec<usize>) {
        match self {
            Self::Ascending { starts, numbers, asked } => match rng.below(5) {
                0 | 1 => spoil_list(rng, starts, |rng, n| {
                    rng.pick(&[0, n.saturating_add(1), n.saturating_sub(1), usize::MAX])
                }),
                2 | 3 => spoil_list(rng, numbers, |rng, n| {
                    rng.pick(&[0, n.wrapping_add(1), n.wrapping_sub(1), (1 << 31) - 2, (1 << 31) - 1, u32::MAX, 8])
                }),
                _ => match asked {
                    Some(asked) => spoil_list(rng, asked, |_, asked| !asked),
                    None => *asked = Some(vec![true; numbers.len()]),
                },
            },
            Self::Padded { kv_lens, shown, asked } => {
                let places = asked.as_mut().filter(|_| rng.one_in(2)).unwrap_or(shown);
                match rng.below(8) {
                    0 => spoil_list(rng, kv_lens, |rng, n| {
                        rng.pick(&[0, n.saturating_sub(1), n.saturating_add(1), (1 << 31) - 1, 1 << 31, usize::MAX])
                    }),
                    1 if rng.one_in(4) => {
                        // A rectangle as large as the shape says, and larger than memory.
                        *q_lens = vec![HUGE];
                        *kv_lens = vec![8];
                        let many = rng.below(4);
                        *places = Places::repeated(rng, HUGE, many);
                    }
                    n => places.spoil(rng, n),
                }
            }
        }
    }
}

impl Places {
    /// One number for all groups and places.
    fn repeated(rng: &mut Rng, groups: usize, places: usize) -> Self {
        let number = rng.pick(&[-1, -1, 0, 3]);
        Self { numbers: Array { shape: [1; 4], data: vec![number] }, groups, places, lens: None }
    }

    fn spoil(&mut self, rng: &mut Rng, how: usize) {
        let Self { numbers, places, groups, lens } = self;
        // Numbers that all count, in 2³¹ places, are there: they take 8 GB.
        let few = lens.iter().flatten().all(|&len| len < 100);
        match how {
            2 | 3 if *places < HUGE => match lens {
                Some(lens) => spoil_list(rng, lens, |rng, n| {
                    rng.pick(&[-1, 0, n.saturating_add(1), n.saturating_sub(1), i32::MAX, i32::MIN])
                }),
                None => *lens = Some(vec![rng.below(9) as i32; rng.below(9)]),
            },
            4 => {
                // Another shape, with what fits of the numbers.
                let dim = rng.below(4);
                let mut shape = numbers.shape;
                shape[dim] = rng.pick(&[0, 1, shape[dim] + 1, shape[dim].saturating_sub(1)]);
                let old = numbers.clone();
                *numbers = Array::from_fn(shape, |at| {
                    let inside = at.iter().zip(old.shape).all(|(&at, n)| at < n);
                    if inside { old.get(at) } else { rng.below(10) as i32 - 2 }
                });
                (*groups, *places) = (shape[2], shape[3]);
            }
            5 if numbers.shape[3] == 1 && *groups < HUGE && few => *places = rng.pick(&[3, HUGE]),
            _ if numbers.data.is_empty() => {}
            _ => {
                let [at, other] = [0, 1].map(|_| rng.below(numbers.data.len()));
                let odd = [-1, -2, i32::MIN, i32::MAX, 8, numbers.data[other], numbers.data[other]];
                numbers.data[at] = rng.pick(&odd);
            }
        }
    }

    fn shape(&self) -> [usize; 4] {
        let [batch, heads, ..] = self.numbers.shape;
        [batch, heads, self.groups, self.places]
    }

    fn placed(&self, rng: &mut Rng) -> Padded {
        Padded::of(rng, &self.numbers, self.shape(), self.lens.as_deref())
    }

    /// The number at an index of the rectangle.
    fn get(&self, [b, h, group, place]: [usize; 4]) -> i32 {
        let [.., groups, places] = self.numbers.shape;
        self.numbers.get([b, h, if groups == 1 { 0 } else { group }, if places == 1 { 0 } else { place }])
    }
}
