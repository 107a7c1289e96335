//! Layout of a call: which rank has which rows and keys, and the parcels in which keys and values travel.

use crate::error::Error;
use core::ops::Range;
use sdpa::Tensor;

/// Bytes of the keys and values of a parcel, at most, if they are more than [`KEY_BLOCK`] keys: each parcel reads and
/// writes the states of all rows once, and two are held at a time.
pub(crate) const PARCEL: usize = 16 << 20;
/// Keys that are computed by themselves. A parcel ends at a multiple of them, so that few keys wait for others.
pub(crate) const KEY_BLOCK: usize = 256;

/// Stretch of rows or keys that lie together on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) rank: usize,
    /// Number of the stretch on its rank, in the order in which the rank names them.
    pub(crate) number: usize,
    pub(crate) range: Range<usize>,
}

/// Rows or keys of a stretch that are of one sequence: all of them, if sequences are computed together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) rank: usize,
    /// Number of the stretch on its rank, and where it begins.
    pub(crate) number: usize,
    pub(crate) begin: usize,
    pub(crate) range: Range<usize>,
    /// Number of the sequence, if sequences are computed one by one, and where it begins.
    pub(crate) sequence: Option<usize>,
    pub(crate) first: usize,
    /// Index of the sequence in the batch of the stretch's tensors, if it is one of several there.
    pub(crate) batch: Option<usize>,
}

/// Keys that travel together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parcel {
    /// Rank that has them.
    pub(crate) owner: usize,
    /// Number of their stretch on that rank.
    pub(crate) stretch: usize,
    /// Rows of the keys in that stretch, and index in its batch as in a [`Part`].
    pub(crate) rows: Range<usize>,
    pub(crate) batch: Option<usize>,
    /// Positions of the keys, which are of one sequence.
    pub(crate) keys: Range<usize>,
}

/// Words for rows or keys in errors.
pub(crate) type Words = (&'static str, &'static str);
pub(crate) const ROWS: Words = ("rows", "row");
pub(crate) const KEYS: Words = ("keys", "key");

/// Returns the stretches of all ranks in order, without empty ones.
///
/// # Errors
/// [`Error::Missing`] or [`Error::Twice`] unless they follow one another from 0 on.
pub(crate) fn in_order<'a>(
    (many, one): Words,
    of_ranks: impl Iterator<Item = &'a [Range<usize>]>,
) -> Result<Vec<Stretch>, Error> {
    let numbered = |(rank, ranges): (usize, &'a [Range<usize>])| {
        ranges.iter().enumerate().map(move |(number, range)| Stretch { rank, number, range: range.clone() })
    };
    let mut all: Vec<_> = of_ranks.enumerate().flat_map(numbered).filter(|stretch| !stretch.range.is_empty()).collect();
    all.sort_by_key(|stretch| (stretch.range.start, stretch.rank));
    let (mut end, mut before) = (0, 0);
    for stretch in &all {
        let Range { start, .. } = stretch.range;
        if start > end {
            return Err(Error::Missing { what: many, first: end, end: start });
        }
        if start < end {
            return Err(Error::Twice { what: one, at: start, ranks: [before, stretch.rank] });
        }
        (end, before) = (stretch.range.end, stretch.rank);
    }
    Ok(all)
}

/// Cuts parts of stretches of keys (`bytes` each) into few parcels of about the same length.
pub(crate) fn parcels(keys: &[Part], bytes: usize) -> Vec<Parcel> {
    let most = (PARCEL / bytes.max(1) / KEY_BLOCK).max(1);
    let mut parcels = Vec::new();
    for Part { rank, number, begin, range, first: of_sequence, batch, .. } in keys {
        let first = (range.start - of_sequence) / KEY_BLOCK;
        let blocks = (range.end - of_sequence).div_ceil(KEY_BLOCK) - first;
        let parts = blocks.div_ceil(most);
        let cut = |part: usize| {
            let block = first + (blocks as u128 * part as u128 / parts as u128) as usize;
            block.saturating_mul(KEY_BLOCK).saturating_add(*of_sequence).clamp(range.start, range.end)
        };
        for keys in (0..parts).map(|part| cut(part)..cut(part + 1)) {
            let rows = keys.start - begin..keys.end - begin;
            parcels.push(Parcel { owner: *rank, stretch: *number, rows, batch: *batch, keys });
        }
    }
    parcels
}

/// Returns some rows of a stretch's tensor: of all sequences of its batch, or of one.
pub(crate) fn rows_of(tensor: Tensor<'_>, batch: Option<usize>, rows: Range<usize>) -> Option<Tensor<'_>> {
    batch.map_or(Some(tensor), |batch| tensor.batch_in(batch..batch + 1))?.rows_in(rows)
}

/// Way of a parcel from rank to rank: a tree, in which each rank passes it on to two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tree {
    /// The owner, then the ranks that need the parcel.
    order: Vec<usize>,
}

impl Tree {
    /// `needs` says for each rank whether it needs the parcel.
    pub(crate) fn new(owner: usize, needs: &[bool]) -> Self {
        let n = needs.len();
        let others = (1..n).map(|step| (owner + step) % n).filter(|&rank| needs[rank]);
        Self { order: core::iter::once(owner).chain(others).collect() }
    }

    /// Returns the rank that it comes from, if any, and those it goes to; `None` if it does not come to this rank.
    pub(crate) fn at(&self, rank: usize) -> Option<(Option<usize>, Vec<usize>)> {
        let place = self.order.iter().position(|&at| at == rank)?;
        let from = place.checked_sub(1).map(|before| self.order[before / 2]);
        let to = [2 * place + 1, 2 * place + 2].into_iter().filter_map(|next| self.order.get(next).copied());
        Some((from, to.collect()))
    }
}

/// Returns the two stretches of rank `rank` of `ranks`, one early and one late: under a causal rule all ranks then have
/// about as much to compute. Stretches begin at multiples of 256, so for few tokens some are empty.
///
/// ```
/// // 4096 tokens for two ranks: the first and the last quarter, and those between.
/// assert_eq!(sdpa_mpi::zigzag(4096, 0, 2), [0..1024, 3072..4096]);
/// assert_eq!(sdpa_mpi::zigzag(4096, 1, 2), [1024..2048, 2048..3072]);
/// ```
pub fn zigzag(tokens: usize, rank: usize, ranks: usize) -> [Range<usize>; 2] {
    let parts = 2 * ranks.max(1);
    let cut = |part: usize| match part {
        part if part >= parts => tokens,
        part => (tokens as u128 * part as u128 / parts as u128) as usize / KEY_BLOCK * KEY_BLOCK,
    };
    [rank, parts - 1 - rank.min(parts - 1)].map(|part| cut(part)..cut(part + 1))
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "stretches are ranges, and a rank may have one")]
mod tests {
    use super::*;

    fn parts(keys: &[Stretch]) -> Vec<Part> {
        let part = |Stretch { rank, number, range }: &Stretch| Part {
            rank: *rank,
            number: *number,
            begin: range.start,
            range: range.clone(),
            sequence: None,
            first: 0,
            batch: None,
        };
        keys.iter().map(part).collect()
    }

    fn all(of_ranks: &[Vec<Range<usize>>]) -> Result<Vec<Stretch>, Error> {
        in_order(KEYS, of_ranks.iter().map(Vec::as_slice))
    }

    #[test]
    fn stretches_must_follow_one_another() {
        let good = all(&[vec![0..10, 30..40], vec![], vec![20..30, 10..20, 7..7]]).unwrap();
        let ranks: Vec<_> = good.iter().map(|stretch| (stretch.rank, stretch.number)).collect();
        assert_eq!(ranks, [(0, 0), (2, 1), (2, 0), (0, 1)]);
        assert_eq!(all(&[vec![0..10], vec![12..13]]), Err(Error::Missing { what: "keys", first: 10, end: 12 }));
        assert_eq!(all(&[vec![0..10], vec![9..13]]), Err(Error::Twice { what: "key", at: 9, ranks: [0, 1] }));
        assert_eq!(all(&[vec![1..10], vec![]]), Err(Error::Missing { what: "keys", first: 0, end: 1 }));
        assert_eq!(all(&[]), Ok(Vec::new()));
    }

    #[test]
    fn parcels_hold_every_key_once_and_end_at_whole_blocks() {
        let keys = all(&[vec![0..1000, 5000..5001], vec![1000..5000]]).unwrap();
        for bytes in [1, 16 << 10, 40 << 10, 1 << 20, usize::MAX] {
            let parcels = parcels(&parts(&keys), bytes);
            let mut next = 0;
            for Parcel { keys, rows, .. } in &parcels {
                assert_eq!((keys.start, keys.len()), (next, rows.len()));
                assert!(keys.len() * bytes.min(1 << 30) <= PARCEL || keys.len() <= KEY_BLOCK, "{bytes}");
                next = keys.end;
            }
            assert_eq!(next, 5001);
            assert!(parcels.iter().all(|p| p.keys.end % 256 == 0 || [1000, 5000, 5001].contains(&p.keys.end)));
        }
    }

    #[test]
    fn a_tree_reaches_whoever_needs_the_parcel_once() {
        for n in 1..10 {
            for owner in 0..n {
                for needs in 0..1usize << n {
                    let needs: Vec<_> = (0..n).map(|rank| needs >> rank & 1 == 1).collect();
                    let tree = Tree::new(owner, &needs);
                    let mut got = vec![0; n];
                    for rank in 0..n {
                        let Some((from, to)) = tree.at(rank) else { continue };
                        assert_eq!(from.is_none(), rank == owner);
                        for to in to {
                            assert_eq!(tree.at(to).unwrap().0, Some(rank));
                            got[to] += 1;
                        }
                    }
                    let expected: Vec<_> = (0..n).map(|rank| usize::from(needs[rank] && rank != owner)).collect();
                    assert_eq!(got, expected);
                }
            }
        }
    }

    #[test]
    fn stripes_hold_every_token_once() {
        for (tokens, ranks) in [(0, 1), (1, 3), (255, 2), (4096, 2), (100_000, 7), (usize::MAX, 5)] {
            let stripes = (0..ranks).flat_map(|rank| zigzag(tokens, rank, ranks));
            let mut stripes: Vec<_> = stripes.filter(|stripe| !stripe.is_empty()).collect();
            stripes.sort_by_key(|stripe| stripe.start);
            assert_eq!(stripes.iter().fold(0, |end, stripe| if stripe.start == end { stripe.end } else { 1 }), tokens);
        }
    }
}
