//! Sequences of a call over ranks: ragged ones, laid end to end, or none of their own.

use crate::description::Description;
use crate::layout::{Part, Stretch};
use core::ops::Range;
use sdpa::Bound;

/// Ends of the rows and of the keys of ragged sequences, from 0 on; none if sequences are not ragged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sequences(Vec<[usize; 2]>);

/// Names of cumulative lengths in errors, of rows and of keys.
const ENDS: [&str; 2] = ["ragged q", "ragged k"];
/// Which ends: those of rows, or of keys.
pub(crate) const OF_ROWS: usize = 0;
pub(crate) const OF_KEYS: usize = 1;

impl Sequences {
    /// Takes cumulative lengths of rows and of keys.
    ///
    /// # Errors
    /// Those of one call: of lists that do not begin at 0, or fall, or are of different lengths.
    pub(crate) fn of(rows: &[usize], keys: &[usize]) -> Result<Self, sdpa::Error> {
        for (argument, ends) in ENDS.into_iter().zip([rows, keys]) {
            let entry = |index: usize, bound, limit, of| {
                Err(sdpa::Error::Entry { argument, index, got: ends[index], bound, limit, of })
            };
            match ends.first() {
                None => return Err(sdpa::Error::Empty { argument, what: "the list of cumulative lengths" }),
                Some(0) => {}
                Some(_) => return entry(0, Bound::Exactly, 0, None),
            }
            if let Some(index) = (1..ends.len()).find(|&index| ends[index] < ends[index - 1]) {
                return entry(index, Bound::AtLeast, ends[index - 1], Some("the entry before it"));
            }
        }
        if rows.len() != keys.len() {
            let [got, expected] = [keys, rows].map(|ends| ends.len() - 1);
            let (argument, what, of) = ("ragged k", "number of sequences", "ragged q");
            return Err(sdpa::Error::Mismatch { argument, what, got, expected, of });
        }
        Ok(Self(rows.iter().zip(keys).map(|(&row, &key)| [row, key]).collect()))
    }

    /// Returns the sequences that ranks with rows name, if those have all `lens` rows and keys.
    ///
    /// # Errors
    /// That of one call.
    pub(crate) fn agreed(all: &[Description], lens: [usize; 2]) -> Result<Self, sdpa::Error> {
        let Some(named) = all.iter().find(|description| !description.sequences.is_empty()) else {
            return Ok(Self::default());
        };
        let sequences = Self(named.sequences.clone());
        for (of, limit) in lens.into_iter().enumerate() {
            let (index, got) = (sequences.count(), sequences.0.last().map_or(0, |ends| ends[of]));
            if got != limit {
                let (argument, bound) = (ENDS[of], Bound::Exactly);
                return Err(sdpa::Error::Entry { argument, index, got, bound, limit, of: None });
            }
        }
        Ok(sequences)
    }

    /// Returns the share of all pairs of rows and keys that are of one sequence.
    pub(crate) fn share_of_pairs(all: &[Description]) -> f64 {
        let named = all.iter().find(|description| !description.sequences.is_empty());
        let ends = named.map_or(&[][..], |description| &description.sequences);
        let pairs = ends.windows(2).map(|ends| (ends[1][0] - ends[0][0]) as f64 * (ends[1][1] - ends[0][1]) as f64);
        ends.last().map_or(1.0, |&[rows, keys]| pairs.sum::<f64>() / (rows as f64 * keys as f64).max(1.0))
    }

    pub(crate) fn ends(&self) -> &[[usize; 2]] {
        &self.0
    }

    pub(crate) fn is_ragged(&self) -> bool {
        !self.0.is_empty()
    }

    /// Number of ragged sequences.
    pub(crate) fn count(&self) -> usize {
        self.0.len().saturating_sub(1)
    }

    /// Returns the rows or keys of a sequence; all there may be, if sequences are not ragged.
    pub(crate) fn range(&self, of: usize, sequence: Option<usize>) -> Range<usize> {
        sequence.map_or(0..usize::MAX, |sequence| self.0[sequence][of]..self.0[sequence + 1][of])
    }

    /// Returns the sequence of a row, and its place in it, if sequences are ragged.
    pub(crate) fn place(&self, row: usize) -> Option<(usize, usize)> {
        let sequence = self.0.partition_point(|ends| ends[OF_ROWS] <= row).checked_sub(1)?;
        Some((sequence, row - self.0[sequence][OF_ROWS]))
    }

    /// Cuts a stretch of rows or keys at the ends of sequences: into parts that are not empty, or if sequences are not ragged
    /// into one.
    pub(crate) fn parts(&self, of: usize, stretch: &Stretch) -> Vec<Part> {
        let part = |sequence, range| Part {
            rank: stretch.rank,
            number: stretch.number,
            begin: stretch.range.start,
            range,
            sequence,
            first: self.range(of, sequence).start,
        };
        if !self.is_ragged() {
            return vec![part(None, stretch.range.clone())];
        }
        let Range { start, end } = stretch.range;
        let first = self.0.partition_point(|ends| ends[of] <= start).saturating_sub(1);
        let all = (first..self.count()).map(|sequence| (sequence, self.range(of, Some(sequence))));
        all.take_while(|(_, range)| range.start < end)
            .map(|(sequence, range)| (sequence, range.start.max(start)..range.end.min(end)))
            .filter(|(_, range)| !range.is_empty())
            .map(|(sequence, range)| part(Some(sequence), range))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{PARCEL, parcels};

    #[test]
    fn stretches_are_cut_where_sequences_end() {
        let sequences = Sequences::of(&[0, 3, 3, 7], &[0, 0, 5, 6]).unwrap();
        let cut = |of, range| {
            let parts = sequences.parts(of, &Stretch { rank: 2, number: 1, range });
            parts
                .into_iter()
                .map(|part| (part.sequence.unwrap(), part.range, part.begin, part.first))
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(OF_ROWS, 2..6), [(0, 2..3, 2, 0), (2, 3..6, 2, 3)]);
        assert_eq!(cut(OF_ROWS, 3..7), [(2, 3..7, 3, 3)]);
        assert_eq!(cut(OF_KEYS, 0..6), [(1, 0..5, 0, 0), (2, 5..6, 0, 5)]);
        assert_eq!(cut(OF_KEYS, 4..4), []);
        assert_eq!([2, 3, 6].map(|row| sequences.place(row)), [Some((0, 2)), Some((2, 0)), Some((2, 3))]);
        let one = Sequences::default().parts(OF_ROWS, &Stretch { rank: 0, number: 0, range: 4..4 });
        assert_eq!((one.len(), one[0].range.clone(), one[0].first), (1, 4..4, 0));
    }

    #[test]
    fn lists_that_are_no_cumulative_lengths_are_refused_as_in_one_call() {
        let words = |rows: &[usize], keys: &[usize]| Sequences::of(rows, keys).unwrap_err().to_string();
        assert!(words(&[1, 2], &[0, 2]).contains("ragged q"));
        assert!(words(&[0, 2], &[0, 2, 1]).contains("ragged k"));
        assert!(words(&[0, 2], &[0, 2, 3]).contains("number of sequences"));
        let all = [Description::default(), Description { sequences: vec![[0, 0], [9, 2]], ..Description::default() }];
        assert!(Sequences::agreed(&all, [9, 3]).unwrap_err().to_string().contains("ragged k"));
        assert_eq!(Sequences::agreed(&all, [9, 2]).unwrap().count(), 1);
        assert!(!Sequences::agreed(&all[..1], [9, 2]).unwrap().is_ragged());
        assert_eq!(Sequences::share_of_pairs(&all[..1]), 1.0);
        let two = Description { sequences: vec![[0, 0], [4, 1], [8, 2]], ..Description::default() };
        assert_eq!(Sequences::share_of_pairs(&[two]), 0.5);
    }

    #[test]
    fn parcels_end_with_sequences_and_count_blocks_from_their_first_key() {
        let stretch = |rank, number, range| Stretch { rank, number, range };
        let keys = [stretch(0, 0, 0..1000), stretch(1, 0, 1000..1200), stretch(0, 1, 1200..1300)];
        let sequences = Sequences::of(&[0, 1, 1, 2], &[0, 100, 100, 1300]).unwrap();
        let parts: Vec<_> = keys.iter().flat_map(|stretch| sequences.parts(OF_KEYS, stretch)).collect();
        let found = parcels(&parts, PARCEL / 256);
        let ends: Vec<_> = found.iter().map(|p| (p.owner, p.rows.clone(), p.keys.end)).collect();
        let first =
            [(0, 0..100, 100), (0, 100..356, 356), (0, 356..612, 612), (0, 612..868, 868), (0, 868..1000, 1000)];
        assert_eq!(ends, [&first[..], &[(1, 0..124, 1124), (1, 124..200, 1200), (0, 0..100, 1300)]].concat());
    }
}
