//! Making of lists: from starts and ascending numbers, and from rectangles of numbers in any order.

use crate::attention::call::selection::{ListPlace, MAX_KEYS, SelectedKeys, SelectionError, SelectionShape};
use crate::tensor::view::View;

/// Padded index tensor (`topk_indices`), as other programs hand it over: `[batch, heads, groups of rows, places]`, numbers of units in
/// any order, −1 where a place has none.
///
/// The batch of ragged sequences is 1, and the groups of one sequence follow those of the one before. `heads` is that of
/// the shape, or 1 for lists that all heads share.
#[derive(Debug, Clone, Copy)]
pub struct Rectangle<'a> {
    /// Numbers of units.
    pub numbers: View<'a, i32>,
    /// Number of places that count, from the first: one for each group of rows, or one for each sequence. The others may hold
    /// anything.
    pub lens: Option<&'a [i32]>,
}

impl<'a> Rectangle<'a> {
    /// Takes numbers of which all places count.
    pub fn new(numbers: impl Into<View<'a, i32>>) -> Self {
        Self { numbers: numbers.into(), lens: None }
    }

    /// Sets the number of places that count.
    #[must_use]
    pub fn lens(self, lens: &'a [i32]) -> Self {
        Self { lens: Some(lens), ..self }
    }
}

impl SelectedKeys {
    /// Makes lists of numbers that are ascending already: list `i` has `numbers[starts[i]..starts[i + 1]]`. `asked` says for each
    /// number whether the mask function of a call is asked about the unit's keys; without it, about all.
    ///
    /// Complexity: the numbers.
    ///
    /// # Errors
    /// [`SelectionError`]; the lists are then empty.
    pub fn fill(
        &mut self,
        shape: SelectionShape<'_>,
        starts: &[usize],
        numbers: &[u32],
        asked: Option<&[bool]>,
    ) -> Result<(), SelectionError> {
        let filled = self.take_shape(shape).and_then(|()| self.fill_ascending(starts, numbers, asked));
        self.end(filled)
    }

    /// Makes lists of rectangles: `shown` names units that are seen as far as other rules show them, `asked` those that the mask
    /// function of a call is asked about, too. Without `asked` it is asked about all of `shown`. Sequence `s` has `kv_lens[s]` keys.
    ///
    /// Complexity: n log n for each list of n places.
    ///
    /// # Errors
    /// [`SelectionError`]; the lists are then empty.
    pub fn fill_padded(
        &mut self,
        shape: SelectionShape<'_>,
        kv_lens: &[usize],
        shown: Rectangle<'_>,
        asked: Option<Rectangle<'_>>,
    ) -> Result<(), SelectionError> {
        let filled = self.take_shape(shape).and_then(|()| self.fill_from_rectangles(kv_lens, shown, asked));
        self.end(filled)
    }

    /// Clears the lists, and takes a shape: lists are [added](Self::append) next.
    ///
    /// # Errors
    /// [`SelectionError`]; the lists are then empty.
    #[doc(hidden)] // for `sdpa`
    pub fn begin(&mut self, shape: SelectionShape<'_>) -> Result<(), SelectionError> {
        let begun = self.take_shape(shape).and_then(|()| self.reserve_lists(0));
        self.end(begun)
    }

    /// Clears the lists, and takes a shape, for whose lists there is no memory yet.
    fn take_shape(&mut self, shape: SelectionShape<'_>) -> Result<(), SelectionError> {
        let SelectionShape { q_lens, heads, rows, unit } = shape;
        self.clear();
        if let Some((what, _)) =
            [("heads", heads), ("rows", rows), ("unit", unit)].into_iter().find(|&(_, size)| size == 0)
        {
            return Err(SelectionError::Empty { what });
        }
        (self.heads, self.rows, self.unit) = (heads, rows, unit);
        let memory = |_| SelectionError::Memory { units: q_lens.len() };
        self.q_lens.try_reserve(q_lens.len()).map_err(memory)?;
        self.ends.try_reserve(q_lens.len()).map_err(memory)?;
        self.groups.try_reserve(q_lens.len() + 1).map_err(memory)?;
        self.q_lens.extend_from_slice(q_lens);
        self.ends.resize(q_lens.len(), 0);
        self.groups.push(0);
        let mut all = 0usize;
        for &q_len in q_lens {
            all = all.saturating_add(q_len.div_ceil(rows));
            self.groups.push(all);
        }
        Ok(())
    }

    /// Makes room for the starts of all lists, and for a number of units. Sizes are checked before.
    fn reserve_lists(&mut self, units: usize) -> Result<(), SelectionError> {
        let lists = self.lists();
        self.starts.try_reserve(lists.saturating_add(1)).map_err(|_| SelectionError::Memory { units: lists })?;
        self.starts.push(0);
        self.reserve(units)
    }

    /// Makes room for a number of units beside those there are.
    pub(super) fn reserve(&mut self, units: usize) -> Result<(), SelectionError> {
        self.units.try_reserve(units).map_err(|_| SelectionError::Memory { units })
    }

    /// Adds the next lists, each a row of ascending numbers and, last, their count.
    ///
    /// # Errors
    /// [`SelectionError`]; the lists are then empty.
    #[doc(hidden)] // for `sdpa`
    pub fn append(&mut self, rows: &[u32], width: usize) -> Result<(), SelectionError> {
        let added = rows.chunks_exact(width).try_for_each(|row| {
            let (list, numbers) = (self.place(self.starts.len() - 1).0, &row[..row[width - 1] as usize]);
            self.reserve(numbers.len())?;
            self.add_ascending(list, numbers.iter().map(|&number| (number, true)))?;
            self.end_list(list)
        });
        self.end(added)
    }

    /// Adds ascending numbers to a list, and whether the mask function is asked about each.
    fn add_ascending(
        &mut self,
        list: ListPlace,
        numbers: impl Iterator<Item = (u32, bool)>,
    ) -> Result<(), SelectionError> {
        let mut before = None;
        for (place, (got, asked)) in numbers.enumerate() {
            match before {
                Some(before) if before == got => {
                    return Err(SelectionError::Repeated { list, places: [place - 1, place], got });
                }
                Some(before) if before > got => return Err(SelectionError::Order { list, place, got, before }),
                _ => before = Some(got),
            }
            if got as usize >= MAX_KEYS / self.unit {
                let keys = (got as usize + 1).saturating_mul(self.unit);
                return Err(SelectionError::TooLarge { sequence: list.sequence, keys });
            }
            self.units.push(2 * got + u32::from(asked));
        }
        Ok(())
    }

    /// Clears the lists if they were refused.
    pub(super) fn end(&mut self, filled: Result<(), SelectionError>) -> Result<(), SelectionError> {
        if filled.is_err() {
            self.clear();
        }
        filled
    }

    /// Removes all lists, but keeps their memory.
    #[doc(hidden)] // for `sdpa`
    pub fn clear(&mut self) {
        let Self { q_lens, groups, starts, units, ends, .. } = self;
        q_lens.clear();
        ends.clear();
        units.clear();
        [groups, starts].into_iter().for_each(Vec::clear);
        (self.longest, self.partly_asked) = (0, false);
    }

    /// Number of lists.
    #[doc(hidden)] // for `sdpa`
    pub fn lists(&self) -> usize {
        self.all_groups().saturating_mul(self.heads)
    }

    /// Returns the place of list `n`, and its group among those of all sequences.
    pub(crate) fn place(&self, n: usize) -> (ListPlace, usize) {
        let sequence = self.groups.partition_point(|&first| first * self.heads <= n) - 1;
        let [first, end] = [self.groups[sequence], self.groups[sequence + 1]];
        let (head, group) = ((n - first * self.heads) / (end - first), (n - first * self.heads) % (end - first));
        (ListPlace { sequence, head, row: group * self.rows }, first + group)
    }

    /// Ends the list of a sequence whose units were added, ascending.
    pub(crate) fn end_list(&mut self, list: ListPlace) -> Result<(), SelectionError> {
        let start = self.starts[self.starts.len() - 1];
        let units = &self.units[start..];
        debug_assert!(units.windows(2).all(|pair| pair[0] >> 1 < pair[1] >> 1), "units that ascend");
        self.longest = self.longest.max(units.len());
        let end = units.last().map_or(0, |&last| (last as usize >> 1) + 1);
        let keys = end.saturating_mul(self.unit);
        if keys > MAX_KEYS {
            return Err(SelectionError::TooLarge { sequence: list.sequence, keys });
        }
        let end_of_sequence = &mut self.ends[list.sequence];
        *end_of_sequence = end.max(*end_of_sequence);
        self.starts.push(self.units.len());
        Ok(())
    }

    fn fill_ascending(
        &mut self,
        starts: &[usize],
        numbers: &[u32],
        asked: Option<&[bool]>,
    ) -> Result<(), SelectionError> {
        let size = |what, got, expected| match got == expected {
            true => Ok(()),
            false => Err(SelectionError::Size { what, got, expected }),
        };
        let lists = self.lists();
        size("number of starts", starts.len(), lists.saturating_add(1))?;
        asked.map_or(Ok(()), |asked| {
            size("number of answers whether units are asked about", asked.len(), numbers.len())
        })?;
        if starts[0] != 0 {
            return Err(SelectionError::Starts { index: 0, got: starts[0], least: 0 });
        }
        if let Some(index) = (1..starts.len()).find(|&index| starts[index] < starts[index - 1]) {
            return Err(SelectionError::Starts { index, got: starts[index], least: starts[index - 1] });
        }
        size("last start", starts[lists], numbers.len())?;
        self.reserve_lists(numbers.len())?;
        self.partly_asked = asked.is_some_and(|asked| !asked.iter().all(|&asked| asked));
        for (n, ends) in starts.windows(2).enumerate() {
            let (list, _) = self.place(n);
            let asks = |n: usize| asked.is_none_or(|asked| asked[n]);
            self.add_ascending(list, (ends[0]..ends[1]).map(|n| (numbers[n], asks(n))))?;
            self.end_list(list)?;
        }
        Ok(())
    }

    fn fill_from_rectangles(
        &mut self,
        kv_lens: &[usize],
        shown: Rectangle<'_>,
        asked: Option<Rectangle<'_>>,
    ) -> Result<(), SelectionError> {
        if kv_lens.len() != self.sequences() {
            let (got, expected) = (kv_lens.len(), self.sequences());
            return Err(SelectionError::Size { what: "number of key lengths", got, expected });
        }
        self.check_rectangle(&shown)?;
        asked.map_or(Ok(()), |asked| self.check_rectangle(&asked))?;
        self.reserve_lists(0)?;
        self.partly_asked = asked.is_some();
        let mark = u32::from(asked.is_none());
        for n in 0..self.lists() {
            let (list, group) = self.place(n);
            let units = kv_lens[list.sequence].div_ceil(self.unit);
            let keys = units.saturating_mul(self.unit);
            if keys > MAX_KEYS {
                return Err(SelectionError::TooLarge { sequence: list.sequence, keys });
            }
            let start = self.units.len();
            self.add_places(&shown, list, group, units, mark)?;
            if let Some(asked) = &asked {
                self.add_places(asked, list, group, units, 1)?;
            }
            let added = &mut self.units[start..];
            if !added.is_sorted() {
                added.sort_unstable();
            }
            if let Some(pair) = added.windows(2).find(|pair| pair[0] >> 1 == pair[1] >> 1) {
                let got = pair[0] >> 1;
                return Err(SelectionError::Repeated {
                    list,
                    places: self.find_twice([Some(shown), asked], list, group, got),
                    got,
                });
            }
            self.end_list(list)?;
        }
        Ok(())
    }

    /// Refuses a rectangle of other heads, groups or lengths than the shape has.
    fn check_rectangle(&self, Rectangle { numbers, lens }: &Rectangle<'_>) -> Result<(), SelectionError> {
        let ([batch, heads, groups, _], all) = (numbers.shape(), self.all_groups());
        let expected = if heads == 1 { 1 } else { self.heads };
        let got = batch.saturating_mul(groups);
        let even = batch <= 1 || (0..self.sequences()).all(|sequence| self.groups_of(sequence) == groups);
        for (what, got, expected) in [("heads of the numbers", heads, expected), ("groups of the numbers", got, all)] {
            if got != expected {
                return Err(SelectionError::Size { what, got, expected });
            }
        }
        if !even {
            return Err(SelectionError::Size { what: "batch of numbers of ragged sequences", got: batch, expected: 1 });
        }
        match lens.map(<[i32]>::len).filter(|&got| got != all && got != self.sequences()) {
            Some(got) => Err(SelectionError::Size { what: "number of lengths", got, expected: all }),
            None => Ok(()),
        }
    }

    /// Iterates over the places of a list in a rectangle that count, and their numbers.
    fn places_of<'r>(
        &self,
        Rectangle { numbers, lens }: Rectangle<'r>,
        list: ListPlace,
        group: usize,
    ) -> Result<impl ExactSizeIterator<Item = (usize, i32)> + use<'r>, SelectionError> {
        let [_, heads, groups, places] = numbers.shape();
        let given = lens.map(|lens| lens[if lens.len() == self.all_groups() { group } else { list.sequence }]);
        let len = match given.map(|got| (got, usize::try_from(got))) {
            None => places,
            Some((_, Ok(len))) if len <= places => len,
            Some((got, _)) => return Err(SelectionError::Length { list, got: got.into(), places }),
        };
        let (head, at) = (if heads == 1 { 0 } else { list.head }, [group / groups, group % groups]);
        let numbers = (0..len).map(move |place| (place, numbers.get([at[0], head, at[1], place])));
        Ok(numbers.map(|(place, number)| (place, number.copied().unwrap_or(-1))))
    }

    /// Adds the numbers of a list in a rectangle, in the order of their places.
    fn add_places(
        &mut self,
        rectangle: &Rectangle<'_>,
        list: ListPlace,
        group: usize,
        units: usize,
        mark: u32,
    ) -> Result<(), SelectionError> {
        let places = self.places_of(*rectangle, list, group)?;
        self.reserve(places.len())?;
        for (place, number) in places.filter(|&(_, number)| number != -1) {
            match u32::try_from(number) {
                Ok(number) if (number as usize) < units => self.units.push(2 * number + mark),
                _ => return Err(SelectionError::Beyond { list, place, got: number.into(), units }),
            }
        }
        Ok(())
    }

    /// Returns two places of a number in a list; those of the second rectangle are counted after the first's.
    fn find_twice(
        &self,
        rectangles: [Option<Rectangle<'_>>; 2],
        list: ListPlace,
        group: usize,
        got: u32,
    ) -> [usize; 2] {
        let mut before = 0;
        let mut found = Vec::new();
        for rectangle in rectangles.into_iter().flatten() {
            if let Ok(places) = self.places_of(rectangle, list, group) {
                found.extend(
                    places.filter(|&(_, number)| u32::try_from(number) == Ok(got)).map(|(place, _)| before + place),
                );
            }
            before += rectangle.numbers.shape()[3];
        }
        [found.first(), found.get(1)].map(|place| place.copied().unwrap_or(0))
    }
}
