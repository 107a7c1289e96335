//! Descriptions of a call that ranks send each other, and whether they agree.

use crate::error::Error;
use core::ops::Range;
use sdpa::Dtype;
use sdpa::parts::Datum;

/// Description of a call by a rank, before it begins.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Description {
    /// Why its own part is wrong.
    pub(crate) refused: Option<String>,
    /// Names of what all must agree on, and what it has. A rank leaves out what it does not know.
    pub(crate) facts: Vec<(String, Datum)>,
    /// Ends of the rows and keys of each ragged sequence, as far as they are known.
    pub(crate) sequences: Vec<[usize; 2]>,
    /// Rows and keys that it has.
    pub(crate) rows: Vec<Range<usize>>,
    pub(crate) keys: Vec<Range<usize>>,
}

impl Description {
    pub(crate) fn fact(&mut self, what: &str, value: impl Into<Datum>) {
        self.facts.push((what.to_owned(), value.into()));
    }

    /// Adds options, as [`Inputs::options`](sdpa::Inputs::options) has them.
    pub(crate) fn options(&mut self, options: Vec<(&str, Datum)>) {
        options.into_iter().for_each(|(what, value)| self.fact(what, value));
    }

    /// Name of the given positions of rows or keys, if there are any.
    pub(crate) fn positions(&self) -> Option<&'static str> {
        ["row positions", "key positions"].into_iter().find(|name| is_given(std::slice::from_ref(self), name))
    }

    /// Returns true if it has a bias or mask of the last keys only. Which keys these are depends on the number of all keys.
    pub(crate) fn has_suffix(&self) -> bool {
        let of_last = |name| said(std::slice::from_ref(self), name) == Some(&"last keys".into());
        of_last("bias covers") || of_last("mask covers")
    }

    /// Returns the numbers that are told: lists, each behind its length.
    pub(crate) fn numbers(&self) -> Vec<u64> {
        let Self { refused, facts, sequences, rows, keys } = self;
        let of_pair = |[a, b]: [usize; 2]| [a as u64, b as u64];
        let of_ranges =
            |ranges: &[Range<usize>]| ranges.iter().flat_map(|range| of_pair([range.start, range.end])).collect();
        let sequences = sequences.iter().flat_map(|&ends| of_pair(ends)).collect();
        let mut lists: Vec<Vec<u64>> =
            vec![Datum::from(refused.as_deref()).into(), sequences, of_ranges(rows), of_ranges(keys)];
        for (what, value) in facts {
            lists.extend([Datum::from(what.as_str()).into(), value.clone().into()]);
        }
        lists.into_iter().flat_map(|list| [list.len() as u64].into_iter().chain(list)).collect()
    }

    /// Reads what [`Self::numbers`] made; anything else is refused.
    pub(crate) fn read(numbers: &[u64]) -> Self {
        let refused = || Self { refused: Some("it says what cannot be read".to_owned()), ..Self::default() };
        Self::parts(numbers).unwrap_or_else(refused)
    }

    fn parts(mut numbers: &[u64]) -> Option<Self> {
        let mut lists = Vec::new();
        while let [len, rest @ ..] = numbers {
            let (list, others) = rest.split_at_checked(usize::try_from(*len).ok()?)?;
            lists.push(list);
            numbers = others;
        }
        let ([refused, sequences, rows, keys], facts) = lists.split_first_chunk()?;
        let (facts, []) = facts.as_chunks() else { return None };
        let pairs = |list: &[u64]| Vec::from_iter(list.as_chunks().0.iter().map(|pair| pair.map(|n| n as usize)));
        let ranges = |list| pairs(list).into_iter().map(|[start, end]| start..end).collect();
        let datum = |list: &[u64]| Datum::from(list.to_vec());
        Some(Self {
            refused: (!refused.is_empty()).then(|| datum(refused).to_string()),
            facts: facts.iter().map(|&[what, value]| (datum(what).to_string(), datum(value))).collect(),
            sequences: pairs(sequences),
            rows: ranges(rows),
            keys: ranges(keys),
        })
    }
}

/// Finds what is wrong with what all ranks say: the same on every rank.
///
/// # Errors
/// [`Error::Refused`] or [`Error::Disagree`].
pub(crate) fn agree(description: &[Description]) -> Result<(), Error> {
    if let Some((rank, why)) =
        description.iter().enumerate().find_map(|(rank, description)| Some((rank, description.refused.clone()?)))
    {
        return Err(Error::Refused { rank, why });
    }
    for (rank, later) in description.iter().enumerate() {
        for (what, got) in &later.facts {
            let first =
                (0..description.len()).find_map(|other| Some((other, said(&description[other..=other], what)?)));
            if let Some((other, expected)) = first.filter(|(_, expected)| *expected != got) {
                let (got, expected) = (got.to_string(), expected.to_string());
                return Err(Error::Disagree { what: what.clone(), rank, got, other, expected });
            }
        }
    }
    Ok(())
}

/// Returns what the first rank that knows says of something.
pub(crate) fn said<'d>(ranks: &'d [Description], name: &str) -> Option<&'d Datum> {
    let mut facts = ranks.iter().flat_map(|rank| &rank.facts);
    facts.find(|(what, _)| what == name).map(|(_, value)| value)
}

/// Returns true if the first rank that knows of something has it.
pub(crate) fn is_given(ranks: &[Description], name: &str) -> bool {
    said(ranks, name).is_some_and(|value| *value != Datum::default())
}

/// Returns the number that the first rank that knows says.
pub(crate) fn number(ranks: &[Description], name: &str) -> Option<usize> {
    said(ranks, name)?.size()
}

/// Returns the element type that the first rank that knows says.
pub(crate) fn dtype(ranks: &[Description], name: &str) -> Option<Dtype> {
    said(ranks, name)?.dtype()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "stretches are ranges, and a rank may have one")]
mod tests {
    use super::*;

    fn description(value: impl Into<Datum>) -> Description {
        let mut description = Description {
            sequences: vec![[0, 0], [9, 2]],
            rows: vec![0..3, 7..9],
            keys: vec![4..4],
            ..Description::default()
        };
        description.fact("scale", value);
        description
    }

    #[test]
    fn what_is_told_is_read() {
        let mut all = description("0.5");
        all.refused = Some("two\nlines and a tab\t".to_owned());
        let lists = [&[2usize, 1, 300][..], &[]];
        let values =
            [false.into(), true.into(), 7usize.into(), Dtype::F16.into(), (&lists[..]).into(), "two\tparts".into()];
        values.into_iter().for_each(|value: Datum| all.fact("a name\nof two lines", value));
        let told = all.numbers();
        assert_eq!(Description::read(&told), all);
        // A rank of another version, or a list that ends too early.
        for other in [&told[..told.len() - 1], &[2, 3], &[0, 1, 0, 6], &[0, u64::MAX], &[1, u64::MAX]] {
            assert!(Description::read(other).refused.is_some(), "{other:?}");
        }
    }

    #[test]
    fn the_first_that_differs_is_named_with_the_first_that_speaks() {
        let silent = Description::default();
        let all = [silent.clone(), description("0.5"), description("0.5"), description("0.25")];
        let expected = Error::Disagree {
            what: "scale".to_owned(),
            rank: 3,
            got: "0.25".to_owned(),
            other: 1,
            expected: "0.5".to_owned(),
        };
        assert_eq!(agree(&all), Err(expected));
        assert_eq!(agree(&[silent, description("1")]), Ok(()));
    }

    #[test]
    fn long_values_stay_different() {
        let (a, mut b) = ([0.5f32; 5000], [0.5; 5000]);
        b[4999] = 0.25;
        assert_ne!(description(&a[..]), description(&b[..]));
        assert!(size_of_val(&*description(&a[..]).numbers()) < 1000);
    }
}
