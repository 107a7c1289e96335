//! Order of the query rows that share a key/value head.

use core::ops::Range;

/// Order of the rows of a sequence that share a key/value head: all rows of a head, then those of the next; where heads share
/// lists of keys, the rows of one list, head by head, then those of the next list; likewise where a number of rows is
/// [together](crate::attention::call::options::Options::together).
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowOrder {
    /// Number of query heads that share the key/value head.
    group_size: usize,
    /// Number of rows of a head.
    q_len: usize,
    /// Number of rows of a head before those of the next: `q_len`, or those of a list.
    together: usize,
    /// Number of rows of a head that have a list in common, and of heads.
    list_rows: usize,
    list_heads: usize,
}

/// Heads that a list is of, among those that share a key/value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListsOf {
    AllHeads,
    QueryHeads,
}

/// Place of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowAt {
    /// Number of its head among those that share the key/value head.
    pub(crate) head: usize,
    /// Row in the sequence.
    pub(crate) i: usize,
    /// Number of rows from this one on that follow one another in the sequence.
    pub(crate) left: usize,
}

impl RowOrder {
    /// Returns the order of rows without lists: `q_len` of each of `group_size` heads, all of a head or so many together.
    #[inline]
    pub(crate) fn without_lists(group_size: usize, q_len: usize, together: Option<usize>) -> Self {
        let whole = q_len.max(1);
        let together = together.map_or(whole, |rows| rows.clamp(1, whole));
        Self { group_size, q_len, together, list_rows: together, list_heads: group_size }
    }

    /// Returns the order of rows where `rows` of each head have a list, which all heads share or each head has for itself.
    #[inline]
    pub(crate) fn with_lists(self, rows: usize, of: ListsOf) -> Self {
        let list_rows = rows.min(self.q_len.max(1));
        match of {
            ListsOf::AllHeads => Self { together: list_rows, list_rows, ..self },
            ListsOf::QueryHeads => Self { list_rows, list_heads: 1, ..self },
        }
    }

    /// Returns the place of a row.
    #[inline(always)]
    pub(crate) fn at(self, row: usize) -> RowAt {
        // Divides only if heads have several rows, and the row does not belong to the first head.
        if self.q_len == 1 {
            return RowAt { head: row, i: 0, left: 1 };
        }
        if row < self.together {
            return RowAt { head: 0, i: row, left: self.together - row };
        }
        let all = self.together * self.group_size;
        let (first, row) = (row / all * self.together, row % all);
        let len = self.together.min(self.q_len - first);
        RowAt { head: row / len, i: first + row % len, left: len - row % len }
    }

    /// Returns the first and the last row, in the sequence, of a range of rows: of all rows together, if these are of several
    /// heads. Rows beyond are those of other sequences.
    pub(crate) fn ends(self, rows: &Range<usize>) -> [usize; 2] {
        let (q_len, together, last) = (self.q_len, self.together, rows.end - 1);
        // One row a head needs no division.
        if q_len == 1 || last >= self.group_size * q_len {
            return [0, q_len - 1];
        }
        let [first, last] = [rows.start, last].map(|row| self.at(row));
        let of_one = |row: usize| row / together * together..q_len.min((row / together + 1) * together);
        match rows.len() <= first.left {
            true => [first.i, last.i],
            false => [of_one(first.i).start, of_one(last.i).end - 1],
        }
    }

    /// Number of lists.
    pub(crate) fn lists(self) -> usize {
        self.q_len.div_ceil(self.list_rows) * (self.group_size / self.list_heads.max(1))
    }

    /// Returns the rows of a list.
    pub(crate) fn rows_of_list(self, list: usize) -> Range<usize> {
        let Self { q_len, list_rows, list_heads, .. } = self;
        let of_head = q_len.div_ceil(list_rows);
        let (head, first) = (list / of_head * list_heads, list % of_head * list_rows);
        let [start, end] = [first, q_len.min(first + list_rows)].map(|row| head * q_len + row * list_heads);
        start..end
    }

    /// Returns the list of a row: the head that it is of, counted as in [`RowAt`], and its group of rows.
    pub(crate) fn list_of(self, row: usize) -> [usize; 2] {
        let RowAt { head, i, .. } = self.at(row);
        [if self.list_heads == 1 { head } else { 0 }, i / self.list_rows]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row has a place of its own, rows of a list follow one another, and ends hold all their rows.
    #[test]
    fn rows_are_in_order() {
        let sizes = || (1..4usize).flat_map(|group_size| (1..8usize).map(move |q_len| (group_size, q_len)));
        let orders = sizes().flat_map(|(group_size, q_len)| {
            let lists = (1..=q_len).flat_map(move |rows| [(rows, rows, group_size), (q_len, rows, 1)]);
            lists.map(move |(together, list_rows, list_heads)| RowOrder {
                group_size,
                q_len,
                together,
                list_rows,
                list_heads,
            })
        });
        for order in orders {
            let RowOrder { group_size, q_len, list_rows, .. } = order;
            let all: Vec<RowAt> = (0..group_size * q_len).map(|row| order.at(row)).collect();
            let mut places: Vec<_> = all.iter().map(|at| (at.head, at.i)).collect();
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), group_size * q_len, "{order:?}");
            for (row, at) in all.iter().enumerate() {
                let next = all.get(row + 1).filter(|_| at.left > 1);
                assert!(next.is_none_or(|next| (next.head, next.i, next.left) == (at.head, at.i + 1, at.left - 1)));
                assert_eq!(next.is_some(), at.left > 1, "{order:?}");
            }
            let mut end = 0;
            for rows in (0..order.lists()).map(|list| order.rows_of_list(list)) {
                assert!(rows.start == end && !rows.is_empty(), "{order:?}");
                assert!(rows.clone().all(|row| order.list_of(row) == order.list_of(end)), "{order:?}");
                assert!(rows.clone().all(|row| all[row].i / list_rows == all[end].i / list_rows), "{order:?}");
                end = rows.end;
            }
            assert_eq!(end, group_size * q_len, "{order:?}");
            for (start, end) in (0..all.len()).flat_map(|start| (start + 1..=all.len()).map(move |end| (start, end))) {
                let [first, last] = order.ends(&(start..end));
                assert!(all[start..end].iter().all(|at| (first..=last).contains(&at.i)), "{order:?} {start}..{end}");
            }
        }
    }
}
