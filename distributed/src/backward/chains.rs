//! Way of keys through a backward pass: parcels of whole key blocks, which go with the sums of their gradients from stretch to
//! stretch of the rows, in order.

use crate::layout::{KEY_BLOCK, PARCEL, Parcel, Part};
use core::ops::Range;

/// Rows that make a separate part of a sum.
pub(crate) const ROW_BLOCK: usize = 96;
/// Parcels for each stretch of rows, at least, if there are enough key blocks: each stretch waits for the one before.
const PARCELS_A_STRETCH: usize = 4;

/// Whole key blocks that travel together, and where their keys lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Number of the sequence, if sequences are computed one by one, and where it begins.
    pub(crate) sequence: Option<usize>,
    pub(crate) first: usize,
    pub(crate) keys: Range<usize>,
    /// Pieces of stretches of keys, in order.
    pub(crate) pieces: Vec<Parcel>,
}

/// Cuts keys into whole key blocks of each sequence, for these parts of the rows; each key and its sums take `bytes`.
pub(crate) fn blocks(keys: &[Part], rows: &[Part], bytes: usize) -> Vec<Blocks> {
    let of_one_rank = |parts: &[Part]| {
        let of_rank = |rank| parts.iter().filter(|part| part.rank == rank).count();
        parts.iter().map(|part| of_rank(part.rank)).max().unwrap_or(1)
    };
    // A rank holds those that it computes, and those that come next, for each of its parts of a sequence.
    let most = rows.chunk_by(are_together).map(of_one_rank).max().unwrap_or(1);
    let fit = PARCEL / (2 * most) / bytes.max(1);
    keys.chunk_by(are_together).flat_map(|keys| of_sequence(keys, rows, fit)).collect()
}

/// Returns true if parts are of the same sequence.
fn are_together(a: &Part, b: &Part) -> bool {
    a.sequence == b.sequence
}

/// Cuts the keys of a sequence into whole key blocks, `fit` keys or a block at most.
fn of_sequence(keys: &[Part], rows: &[Part], fit: usize) -> Vec<Blocks> {
    let [Part { sequence, first, .. }, ..] = keys else { return Vec::new() };
    let all = keys.iter().map(|part| part.range.len()).sum::<usize>();
    let through = rows.iter().filter(|part| part.sequence == *sequence).count();
    let step = fit.min(all / (PARCELS_A_STRETCH * through.max(1))) / KEY_BLOCK;
    let step = step.max(1) * KEY_BLOCK;
    let piece = |part: &Part, range: &Range<usize>| {
        let keys = part.range.start.max(range.start)..part.range.end.min(range.end);
        let rows = keys.start.checked_sub(part.begin)?..keys.end.checked_sub(part.begin)?;
        let parcel = Parcel { owner: part.rank, stretch: part.number, rows, batch: part.batch, keys };
        (!parcel.keys.is_empty()).then_some(parcel)
    };
    (0..all.div_ceil(step))
        .map(|n| first + n * step..first + all.min((n + 1) * step))
        .map(|range| {
            let pieces = keys.iter().filter_map(|part| piece(part, &range)).collect();
            Blocks { sequence: *sequence, first: *first, pieces, keys: range }
        })
        .collect()
}

/// One parcel on one stretch of rows: its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Task {
    pub(crate) stretch: usize,
    pub(crate) parcel: usize,
}

/// Stretches of rows that each parcel goes through: from the first to the last that sees some of its keys. In between, those that see
/// none pass it on: they may complete a row block.
///
/// Work is done in *rounds*: a parcel is at its `n`th stretch in round 1 + its number + the number of the stretch, leaves its owners
/// in the round before the first, and its sums are back in the round after the last. A rank begins to receive what a round needs in
/// the round before, and ends a round when all that it sent in it is taken: so no rank waits for one that waits for it.
#[derive(Debug)]
pub(crate) struct Chains {
    /// Parts of stretches of rows.
    stretches: Vec<Part>,
    /// For each parcel.
    through: Vec<Range<usize>>,
}

impl Chains {
    /// `seen` says for each parcel which stretches see some of its keys.
    pub(crate) fn new(stretches: Vec<Part>, seen: impl Iterator<Item = Vec<bool>>) -> Self {
        let through = |seen: Vec<bool>| match seen.iter().position(|&seen| seen) {
            Some(first) => first..seen.iter().rposition(|&seen| seen).unwrap_or(first) + 1,
            None => 0..0,
        };
        Self { stretches, through: seen.map(through).collect() }
    }

    pub(crate) fn stretches(&self) -> &[Part] {
        &self.stretches
    }

    /// Returns the stretches that a parcel goes through.
    pub(crate) fn through(&self, parcel: usize) -> &Range<usize> {
        &self.through[parcel]
    }

    /// Returns the last stretch that a parcel goes through.
    pub(crate) fn last(&self, parcel: usize) -> &Part {
        &self.stretches[self.through[parcel].end - 1]
    }

    /// Returns true if no later parcel goes through a task's stretch.
    pub(crate) fn ends(&self, Task { stretch, parcel }: Task) -> bool {
        !self.through[parcel + 1..].iter().any(|through| through.contains(&stretch))
    }

    /// Number of rounds.
    pub(crate) fn rounds(&self) -> usize {
        self.stretches.len() + self.through.len() + 1
    }

    /// Returns the tasks of a rank in a round.
    pub(crate) fn tasks(&self, rank: usize, round: usize) -> Vec<Task> {
        let task = |(stretch, of): (usize, &Part)| {
            let parcel = round.checked_sub(1 + stretch)?;
            let goes = of.rank == rank && self.through.get(parcel)?.contains(&stretch);
            goes.then_some(Task { stretch, parcel })
        };
        self.stretches.iter().enumerate().filter_map(task).collect()
    }

    /// Returns the parcels that leave their owners in a round.
    pub(crate) fn leaving(&self, round: usize) -> impl Iterator<Item = usize> {
        let all = self.through.iter().enumerate();
        all.filter(move |(parcel, through)| !through.is_empty() && parcel + through.start == round).map(|(n, _)| n)
    }

    /// Returns the parcels with sums that come back to their owners in a round.
    pub(crate) fn returning(&self, round: usize) -> impl Iterator<Item = usize> {
        let all = self.through.iter().enumerate();
        all.filter(move |(parcel, through)| !through.is_empty() && parcel + through.end + 1 == round).map(|(n, _)| n)
    }

    /// Returns the rank of the stretch before a task's, or after it, if its parcel goes there.
    pub(crate) fn before(&self, Task { stretch, parcel }: Task) -> Option<usize> {
        (stretch > self.through[parcel].start).then(|| self.stretches[stretch - 1].rank)
    }

    pub(crate) fn after(&self, Task { stretch, parcel }: Task) -> Option<usize> {
        (stretch + 1 < self.through[parcel].end).then(|| self.stretches[stretch + 1].rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Stretch;
    use crate::sequences::{OF_KEYS, OF_ROWS, Sequences};

    fn stretch(rank: usize, number: usize, range: Range<usize>) -> Part {
        Part { rank, number, begin: range.start, range, sequence: None, first: 0, batch: None }
    }

    #[test]
    fn parcels_are_whole_blocks_with_all_their_pieces() {
        let keys = [stretch(0, 0, 0..100), stretch(2, 0, 100..700), stretch(0, 1, 700..1000)];
        for bytes in [1, 1 << 12, 1 << 30] {
            let blocks = blocks(&keys, &[stretch(0, 0, 0..5)], bytes);
            let mut next = 0;
            for Blocks { keys: range, pieces, .. } in &blocks {
                assert!(range.start == next && range.start.is_multiple_of(KEY_BLOCK));
                for piece in pieces {
                    assert_eq!((piece.keys.start, piece.keys.len()), (next, piece.rows.len()));
                    let of = keys.iter().find(|k| (k.rank, k.number) == (piece.owner, piece.stretch)).unwrap();
                    assert_eq!(of.range.start + piece.rows.start, next);
                    next = piece.keys.end;
                }
                assert_eq!(range.end, next);
            }
            assert_eq!(next, 1000);
        }
    }

    #[test]
    fn blocks_of_ragged_sequences_begin_with_them() {
        let sequences = Sequences::of(&[0, 5, 9], &[0, 300, 900]).unwrap();
        let stretches = [0..200, 200..900].map(|range| Stretch { rank: 0, number: 0, range });
        let keys = sequences.parts(OF_KEYS, &stretches);
        let rows = sequences.parts(OF_ROWS, &[Stretch { rank: 1, number: 0, range: 0..9 }]);
        let found: Vec<_> = blocks(&keys, &rows, 1 << 30)
            .into_iter()
            .map(|Blocks { sequence, first, keys, pieces }| (sequence, first, keys, pieces.len()))
            .collect();
        let first = [(Some(0), 0, 0..256, 2), (Some(0), 0, 256..300, 1)];
        let second = [(Some(1), 300, 300..556, 1), (Some(1), 300, 556..812, 1), (Some(1), 300, 812..900, 1)];
        assert_eq!(found, [&first[..], &second].concat());
    }

    #[test]
    fn every_parcel_goes_through_its_stretches_in_order() {
        let stretches: Vec<_> = [0, 1, 1, 0, 2].into_iter().map(|rank| stretch(rank, 0, 0..1)).collect();
        let seen = [[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0; 5], [0, 0, 0, 0, 1]].map(|s| s.map(|s| s == 1).to_vec());
        let chains = Chains::new(stretches.clone(), seen.into_iter());
        let expected = [0..5, 1..4, 0..0, 4..5];
        for (parcel, through) in expected.iter().enumerate() {
            let at = |round| {
                (0..3).flat_map(|rank| chains.tasks(rank, round)).filter(|task| task.parcel == parcel).collect()
            };
            let rounds: Vec<Vec<Task>> = (0..chains.rounds()).map(at).collect();
            let visits: Vec<_> = rounds.iter().flatten().map(|task| task.stretch).collect();
            assert_eq!(visits, through.clone().collect::<Vec<_>>());
            let find = |f: &dyn Fn(usize) -> bool| (0..chains.rounds()).find(|&round| f(round));
            let leaves = find(&|round| chains.leaving(round).any(|n| n == parcel));
            let returns = find(&|round| chains.returning(round).any(|n| n == parcel));
            let first = rounds.iter().position(|tasks| !tasks.is_empty());
            assert_eq!(leaves, first.map(|first| first - 1));
            assert_eq!(returns, first.map(|first| first + through.len()));
        }
        let task = Task { stretch: 1, parcel: 0 };
        assert_eq!((chains.before(task), chains.after(task)), (Some(0), Some(1)));
        assert_eq!(chains.before(Task { stretch: 1, parcel: 1 }), None);
        assert_eq!(chains.after(Task { stretch: 4, parcel: 3 }), None);
        assert!(!chains.ends(Task { stretch: 4, parcel: 0 }) && chains.ends(Task { stretch: 2, parcel: 1 }));
    }
}
