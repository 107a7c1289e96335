//! What a selection should be, or why it should be refused, by loops.

use super::{Filling, Numbers, Places};
use crate::fuzzer::selection::Unit;
use sdpa::{ListPlace, SelectionError};

/// An error, as a filling returns it.
type Refused = SelectionError;

/// One past the largest key.
const MOST: usize = i32::MAX as usize;
/// Lists or numbers for which there is no memory, whatever they hold.
const NO_MEMORY: usize = 1 << (usize::BITS * 5 / 8);

/// The lists of a filling, in the order `[sequence][head][group of rows]`.
pub(super) fn lists(of: &Filling) -> Result<Vec<Vec<Unit>>, Refused> {
    for (what, size) in [("heads", of.heads), ("rows", of.rows), ("unit", of.unit)] {
        if size == 0 {
            return Err(SelectionError::Empty { what });
        }
    }
    match &of.numbers {
        Numbers::Ascending { starts, numbers, asked } => ascending(of, starts, numbers, asked.as_deref()),
        Numbers::Padded { kv_lens, shown, asked } => padded(of, kv_lens, shown, asked.as_ref()),
    }
}

fn size(what: &'static str, got: usize, expected: usize) -> Result<(), Refused> {
    if got == expected { Ok(()) } else { Err(SelectionError::Size { what, got, expected }) }
}

impl Filling {
    fn groups(&self, sequence: usize) -> usize {
        self.q_lens[sequence].div_ceil(self.rows)
    }

    fn all_groups(&self) -> usize {
        (0..self.q_lens.len()).fold(0, |all: usize, s| all.saturating_add(self.groups(s)))
    }

    /// The place of each list, and its group among those of all sequences.
    fn places(&self) -> Vec<(ListPlace, usize)> {
        let (mut all, mut before) = (Vec::new(), 0);
        for sequence in 0..self.q_lens.len() {
            let groups = self.groups(sequence);
            let heads = if groups == 0 { 0 } else { self.heads };
            for head in 0..heads {
                for group in 0..groups {
                    all.push((ListPlace { sequence, head, row: group * self.rows }, before + group));
                }
            }
            before += groups;
        }
        all
    }
}

fn ascending(
    of: &Filling,
    starts: &[usize],
    numbers: &[u32],
    asked: Option<&[bool]>,
) -> Result<Vec<Vec<Unit>>, Refused> {
    let count = of.all_groups().saturating_mul(of.heads);
    size("number of starts", starts.len(), count.saturating_add(1))?;
    if let Some(asked) = asked {
        size("number of answers whether units are asked about", asked.len(), numbers.len())?;
    }
    let mut least = 0;
    for (index, &got) in starts.iter().enumerate() {
        if got < least || index == 0 && got != 0 {
            return Err(SelectionError::Starts { index, got, least });
        }
        least = got;
    }
    size("last start", least, numbers.len())?;
    let mut lists = Vec::new();
    for ((list, _), ends) in of.places().into_iter().zip(starts.windows(2)) {
        let mut units: Vec<Unit> = Vec::new();
        for (place, n) in (ends[0]..ends[1]).enumerate() {
            let got = numbers[n];
            match units.last() {
                Some(&(before, _)) if before == got => {
                    return Err(SelectionError::Repeated { list, places: [place - 1, place], got });
                }
                Some(&(before, _)) if before > got => return Err(SelectionError::Order { list, place, got, before }),
                _ => {}
            }
            let keys = (got as u128 + 1) * of.unit as u128;
            if keys > MOST as u128 {
                let keys = usize::try_from(keys).unwrap_or(usize::MAX);
                return Err(SelectionError::TooLarge { sequence: list.sequence, keys });
            }
            units.push((got, asked.is_none_or(|asked| asked[n])));
        }
        lists.push(units);
    }
    Ok(lists)
}

fn padded(of: &Filling, kv_lens: &[usize], shown: &Places, asked: Option<&Places>) -> Result<Vec<Vec<Unit>>, Refused> {
    size("number of key lengths", kv_lens.len(), of.q_lens.len())?;
    fits(of, shown)?;
    asked.map_or(Ok(()), |asked| fits(of, asked))?;
    let count = of.all_groups().saturating_mul(of.heads);
    if count > NO_MEMORY {
        return Err(SelectionError::Memory { units: count });
    }
    let mut lists = Vec::new();
    for (list, group) in of.places() {
        let units = kv_lens[list.sequence].div_ceil(of.unit);
        let keys = units.saturating_mul(of.unit);
        if keys > MOST {
            return Err(SelectionError::TooLarge { sequence: list.sequence, keys });
        }
        // Each number with its place; those of the second rectangle are counted after all places of the first.
        let mut found: Vec<(i32, usize, bool)> = Vec::new();
        let mut before = 0;
        for (places, mark) in [(Some(shown), asked.is_none()), (asked, true)] {
            let Some(places) = places else { continue };
            for place in 0..length(of, places, list, group)? {
                let [_, heads, groups, _] = places.shape();
                let got = places.get([group / groups, if heads == 1 { 0 } else { list.head }, group % groups, place]);
                if got != -1 {
                    if got < 0 || got as usize >= units {
                        return Err(SelectionError::Beyond { list, place, got: got.into(), units });
                    }
                    found.push((got, before + place, mark));
                }
            }
            before += places.places;
        }
        found.sort_unstable();
        if let Some(twice) = found.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let places = [twice[0].1, twice[1].1];
            return Err(SelectionError::Repeated { list, places, got: twice[0].0 as u32 });
        }
        lists.push(found.into_iter().map(|(number, _, mark)| (number as u32, mark)).collect());
    }
    Ok(lists)
}

/// Refuses a rectangle of another shape.
fn fits(of: &Filling, places: &Places) -> Result<(), Refused> {
    let [batch, heads, groups, _] = places.shape();
    let (sequences, all) = (of.q_lens.len(), of.all_groups());
    if heads != 1 {
        size("heads of the numbers", heads, of.heads)?;
    }
    size("groups of the numbers", batch.saturating_mul(groups), all)?;
    if batch > 1 && (0..sequences).any(|sequence| of.groups(sequence) != groups) {
        let what = "batch of numbers of ragged sequences";
        return Err(SelectionError::Size { what, got: batch, expected: 1 });
    }
    match places.lens.as_ref().map(Vec::len) {
        Some(got) if got != all && got != sequences => size("number of lengths", got, all),
        _ => Ok(()),
    }
}

/// Number of places of a list that count.
fn length(of: &Filling, places: &Places, list: ListPlace, group: usize) -> Result<usize, Refused> {
    let len = match &places.lens {
        None => places.places,
        Some(lens) => {
            let got = if lens.len() == of.all_groups() { lens[group] } else { lens[list.sequence] };
            if got < 0 || got as usize > places.places {
                return Err(SelectionError::Length { list, got: got.into(), places: places.places });
            }
            got as usize
        }
    };
    if len > NO_MEMORY { Err(SelectionError::Memory { units: len }) } else { Ok(len) }
}
