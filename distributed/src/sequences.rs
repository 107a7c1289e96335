//! Sequences of a call over ranks that are computed one by one: ragged ones, laid end to end, or those of a batch; or none.

use crate::description::Description;
use crate::layout::{Part, Stretch};
use core::ops::Range;
use sdpa::Bound;

/// Sequences that are computed one by one; none if all are computed together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sequences {
    /// Ends of the rows and of the keys of each, from 0 on. Those of a batch count as if they lay end to end, too.
    ends: Vec<[usize; 2]>,
    /// Rows and keys of each, if they are those of a batch: a stretch then has some of every sequence.
    of_batch: Option<[usize; 2]>,
}

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
                Some(_) => return entry(0, Bound::Exactly, 0, "where cumulative lengths begin"),
            }
            if let Some(index) = (1..ends.len()).find(|&index| ends[index] < ends[index - 1]) {
                return entry(index, Bound::AtLeast, ends[index - 1], "the entry before it");
            }
        }
        if rows.len() != keys.len() {
            let [got, expected] = [keys, rows].map(|ends| ends.len() - 1);
            let (argument, what, of) = ("ragged k", "number of sequences", "ragged q");
            return Err(sdpa::Error::Mismatch { argument, what, got, expected, of });
        }
        Ok(Self { ends: rows.iter().zip(keys).map(|(&row, &key)| [row, key]).collect(), of_batch: None })
    }

    /// Takes the sequences of a batch, each of which has `lens` rows and keys.
    ///
    /// # Errors
    /// [`sdpa::Error::TooLarge`], [`sdpa::Error::Memory`].
    pub(crate) fn of_batch(batch: usize, lens: [usize; 2]) -> Result<Self, sdpa::Error> {
        let too_large = sdpa::Error::TooLarge { what: "sequences of a batch", sizes: [batch, lens[0], lens[1], 1] };
        if lens.iter().any(|&len| batch.checked_mul(len).is_none_or(|all| all > isize::MAX as usize)) {
            return Err(too_large);
        }
        let (mut ends, memory) = (Vec::new(), batch.saturating_add(1).saturating_mul(size_of::<[usize; 2]>()));
        let refused = |_| sdpa::Error::Memory { what: "sequences of a batch", bytes: memory };
        ends.try_reserve_exact(batch.saturating_add(1)).map_err(refused)?;
        ends.extend((0..=batch).map(|sequence| lens.map(|len| sequence * len)));
        Ok(Self { ends, of_batch: Some(lens) })
    }

    /// Returns the sequences that ranks with rows name, if those have all `lens` rows and keys.
    ///
    /// # Errors
    /// That of one call.
    pub(crate) fn agreed(all: &[Description], lens: [usize; 2]) -> Result<Self, sdpa::Error> {
        let Some(named) = all.iter().find(|description| !description.sequences.is_empty()) else {
            return Ok(Self::default());
        };
        let sequences = Self { ends: named.sequences.clone(), of_batch: None };
        for (of, limit) in lens.into_iter().enumerate() {
            let (index, got) = (sequences.count(), sequences.ends.last().map_or(0, |ends| ends[of]));
            if got != limit {
                let (argument, bound, of) = (ENDS[of], Bound::Exactly, "the number of rows");
                return Err(sdpa::Error::Entry { argument, index, got, bound, limit, of });
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
        &self.ends
    }

    /// Returns true if sequences are computed one by one.
    pub(crate) fn are_apart(&self) -> bool {
        !self.ends.is_empty()
    }

    /// Returns true if these are the sequences of a batch.
    pub(crate) fn are_of_batch(&self) -> bool {
        self.of_batch.is_some()
    }

    /// Number of sequences that are computed one by one.
    pub(crate) fn count(&self) -> usize {
        self.ends.len().saturating_sub(1)
    }

    /// Returns the rows or keys of a sequence; all there may be, if sequences are computed together.
    pub(crate) fn range(&self, of: usize, sequence: Option<usize>) -> Range<usize> {
        sequence.map_or(0..usize::MAX, |sequence| self.ends[sequence][of]..self.ends[sequence + 1][of])
    }

    /// Returns the sequence of a row, and its place in it, if sequences are ragged.
    pub(crate) fn place(&self, row: usize) -> Option<(usize, usize)> {
        let sequence = self.ends.partition_point(|ends| ends[OF_ROWS] <= row).checked_sub(1)?;
        Some((sequence, row - self.ends[sequence][OF_ROWS]))
    }

    /// Cuts stretches of rows or keys into parts of one sequence each, which are not empty; or if sequences are computed together,
    /// makes one part of each stretch. Stretches in order give parts in order.
    pub(crate) fn parts(&self, of: usize, stretches: &[Stretch]) -> Vec<Part> {
        let Some(lens) = self.of_batch else {
            return stretches.iter().flat_map(|stretch| self.parts_of(of, stretch)).collect();
        };
        let moved = |range: &Range<usize>, first: usize| first + range.start..first + range.end;
        let part = |sequence: usize, Stretch { rank, number, range }: &Stretch| {
            let (first, batch) = (sequence * lens[of], Some(sequence));
            let (range, begin) = (moved(range, first), first + range.start);
            Part { rank: *rank, number: *number, begin, range, sequence: Some(sequence), first, batch }
        };
        let filled = || stretches.iter().filter(|stretch| !stretch.range.is_empty());
        (0..self.count()).flat_map(|sequence| filled().map(move |stretch| part(sequence, stretch))).collect()
    }

    /// Cuts a stretch at the ends of ragged sequences, if there are any.
    fn parts_of(&self, of: usize, stretch: &Stretch) -> Vec<Part> {
        let part = |sequence, range| Part {
            rank: stretch.rank,
            number: stretch.number,
            begin: stretch.range.start,
            range,
            sequence,
            first: self.range(of, sequence).start,
            batch: None,
        };
        if !self.are_apart() {
            return vec![part(None, stretch.range.clone())];
        }
        let Range { start, end } = stretch.range;
        let first = self.ends.partition_point(|ends| ends[of] <= start).saturating_sub(1);
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
            let parts = sequences.parts(of, &[Stretch { rank: 2, number: 1, range }]);
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
        let one = Sequences::default().parts(OF_ROWS, &[Stretch { rank: 0, number: 0, range: 4..4 }]);
        assert_eq!((one.len(), one[0].range.clone(), one[0].first), (1, 4..4, 0));
    }

    #[test]
    fn stretches_of_a_batch_have_a_part_of_each_sequence() {
        let sequences = Sequences::of_batch(2, [9, 300]).unwrap();
        let stretch = |rank, number, range| Stretch { rank, number, range };
        let stretches = [stretch(1, 0, 0..4), stretch(0, 3, 4..4), stretch(0, 0, 4..9)];
        let found: Vec<_> = sequences
            .parts(OF_ROWS, &stretches)
            .into_iter()
            .map(|part| (part.rank, part.batch, part.sequence, part.range, part.begin, part.first))
            .collect();
        let [first, second] = [Some(0), Some(1)];
        let of_second = [(1, second, second, 9..13, 9, 9), (0, second, second, 13..18, 13, 9)];
        assert_eq!(found, [[(1, first, first, 0..4, 0, 0), (0, first, first, 4..9, 4, 0)], of_second].concat());
        let keys = sequences.parts(OF_KEYS, &[stretch(0, 0, 0..300)]);
        let found: Vec<_> =
            parcels(&keys, PARCEL / 256).into_iter().map(|parcel| (parcel.batch, parcel.rows, parcel.keys)).collect();
        let of_first = [(first, 0..256, 0..256), (first, 256..300, 256..300)];
        assert_eq!(found, [of_first, [(second, 0..256, 300..556), (second, 256..300, 556..600)]].concat());
        assert!(Sequences::of_batch(1 << 40, [1 << 40, 1]).is_err());
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
        assert!(!Sequences::agreed(&all[..1], [9, 2]).unwrap().are_apart());
        assert_eq!(Sequences::share_of_pairs(&all[..1]), 1.0);
        let two = Description { sequences: vec![[0, 0], [4, 1], [8, 2]], ..Description::default() };
        assert_eq!(Sequences::share_of_pairs(&[two]), 0.5);
    }

    #[test]
    fn parcels_end_with_sequences_and_count_blocks_from_their_first_key() {
        let stretch = |rank, number, range| Stretch { rank, number, range };
        let keys = [stretch(0, 0, 0..1000), stretch(1, 0, 1000..1200), stretch(0, 1, 1200..1300)];
        let sequences = Sequences::of(&[0, 1, 1, 2], &[0, 100, 100, 1300]).unwrap();
        let found = parcels(&sequences.parts(OF_KEYS, &keys), PARCEL / 256);
        let ends: Vec<_> = found.iter().map(|p| (p.owner, p.rows.clone(), p.keys.end)).collect();
        let first =
            [(0, 0..100, 100), (0, 100..356, 356), (0, 356..612, 612), (0, 612..868, 868), (0, 868..1000, 1000)];
        assert_eq!(ends, [&first[..], &[(1, 0..124, 1124), (1, 124..200, 1200), (0, 0..100, 1300)]].concat());
    }
}
