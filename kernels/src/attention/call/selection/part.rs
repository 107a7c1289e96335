//! Lists of the keys of a part of the sequences.

use crate::attention::call::selection::{SelectedKeys, SelectionError, SelectionShape};
use core::ops::Range;

impl SelectedKeys {
    /// Makes lists of those keys of `all` that lie in `keys`, counted from `keys.start`. Sequence `s` has `kv_lens[s]` keys;
    /// without lengths, sequences have no end. The unit is the greatest common divisor of `keys.start` and the unit of `all`.
    ///
    /// # Errors
    /// [`SelectionError::Memory`]; the lists are then empty.
    #[doc(hidden)] // for `sdpa`
    pub fn fill_part(
        &mut self,
        all: &Self,
        keys: Range<usize>,
        kv_lens: Option<&[usize]>,
    ) -> Result<(), SelectionError> {
        let (mut unit, mut rest) = (all.unit, keys.start);
        while rest > 0 {
            (unit, rest) = (rest, unit % rest);
        }
        let shape = SelectionShape { q_lens: &all.q_lens, heads: all.heads, rows: all.rows, unit };
        self.begin(shape)?;
        self.partly_asked = all.partly_asked;
        let added = (0..all.lists()).try_for_each(|n| {
            let (list, _) = self.place(n);
            let len = kv_lens.and_then(|lens| lens.get(list.sequence)).copied().unwrap_or(usize::MAX);
            let (units, end) = (&all.units[all.starts[n]..all.starts[n + 1]], keys.end.min(len).max(keys.start));
            self.add_part(units, all.unit, keys.start..end)?;
            self.end_list(list)
        });
        self.end(added)
    }

    /// Adds the units of `unit` keys that have some of these keys.
    fn add_part(&mut self, units: &[u32], unit: usize, keys: Range<usize>) -> Result<(), SelectionError> {
        let first = |of: u32| (of >> 1) as usize * unit;
        let from = units.partition_point(|&of| first(of) + unit <= keys.start);
        for &of in units[from..].iter().take_while(|&&of| first(of) < keys.end) {
            let [start, end] =
                [first(of).max(keys.start), (first(of) + unit).min(keys.end)].map(|key| key - keys.start);
            self.reserve((end - start).div_ceil(self.unit))?;
            self.units.extend((start / self.unit..end.div_ceil(self.unit)).map(|number| 2 * number as u32 + (of & 1)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys that lists of all name, and the questions about them, are those of the lists of parts.
    #[test]
    fn parts_name_what_all_name() {
        for (unit, numbers) in
            [(1, vec![0, 3, 255, 256, 599]), (100, vec![0, 2, 3, 5]), (256, vec![1, 2]), (600, vec![0])]
        {
            let mut all = SelectedKeys::new();
            let asked: Vec<bool> = (0..numbers.len()).map(|n| n % 2 == 0).collect();
            let shape = SelectionShape { q_lens: &[1, 0, 2], heads: 1, rows: 2, unit };
            all.fill(shape, &[0, numbers.len(), numbers.len()], &numbers, Some(&asked)).unwrap();
            for (from, to, len) in
                [(0, 256, 600), (256, 512, 600), (512, 600, 600), (256, 512, 257), (512, 600, 300), (300, 300, 600)]
            {
                let mut part = SelectedKeys::new();
                part.fill_part(&all, from..to, Some(&[len, 600, 600])).unwrap();
                let case = format!("units of {unit}, {from}..{to} of {len}: {part:?}");
                assert_eq!(part.q_lens(), all.q_lens());
                for key in from..to.min(len) {
                    assert_eq!(part.names(0, 0, 0, key - from), all.names(0, 0, 0, key), "{case}, key {key}");
                    assert_eq!(part.asks(0, 0, 0, key - from), all.asks(0, 0, 0, key), "{case}, key {key}");
                }
                assert!(part.ends_within(0, to.min(len).saturating_sub(from)).is_ok(), "{case}");
                assert_eq!(part.key_count(2, 0, 1, 600), 0, "{case}");
            }
        }
    }
}
