//! Parts of cases, and other ways to say the same.

use super::elements::Rounded;
use super::{Case, MaskData, kept};
use crate::support::{Tensor, indices};
use core::ops::Range;
use sdpa::Alignment;

/// Some batches, rows and columns of a bias or mask, where it has them: dimensions of 1 stay.
fn cut(x: &Tensor, batches: &[usize], rows: Range<usize>, columns: usize) -> Tensor {
    let [b, h, l, n] = x.shape;
    let of = |dim: usize, part: usize| if dim == 1 { 1 } else { part };
    Tensor::from_fn([of(b, batches.len()), h, of(l, rows.len()), n.min(columns)], |[ib, ih, il, j]| {
        x.get([if b == 1 { 0 } else { batches[ib] }, ih, if l == 1 { 0 } else { rows.start + il }, j])
    })
}

impl Case {
    /// With every bias and mask cut to these sequences, rows and columns.
    fn cut_options(&self, batches: &[usize], rows: Range<usize>, columns: usize) -> Self {
        let mut place = self.place;
        for (to, &from) in place.batches.iter_mut().zip(batches) {
            *to = self.place.batches[from];
        }
        place.first_row += rows.start;
        let list = |list: &[i32], some: Range<usize>| list[some.start..some.end.min(list.len())].to_vec();
        let lists = |all: Option<&'static [&'static [i32]]>, some: Range<usize>| {
            all.map(|all| kept(batches.iter().map(|&b| list(all[b], some.clone())).collect()))
        };
        Self {
            positions: [lists(self.positions[0], rows.clone()), lists(self.positions[1], 0..columns)],
            bias: self.bias.as_ref().map(|x| Rounded::new(&cut(&x.wide, batches, rows.clone(), columns), x.dtype())),
            mask: self.mask.as_ref().map(|x| x.over(cut(&x.tensor, batches, rows.clone(), columns))),
            place,
            ..self.clone()
        }
    }

    /// One sequence as a call of its own.
    pub fn sequence(&self, b: usize) -> Self {
        let ((qb, row), (kb, key)) = (self.row_at(b, 0), self.key_at(b, 0));
        let (rows, keys) = (self.rows(b), self.keys(b));
        let (h, hkv) = (self.heads(), self.kv_heads());
        Self {
            q: self.q.part(qb..qb + 1, 0..h, row..row + rows),
            k: self.k.part(kb..kb + 1, 0..hkv, key..key + keys),
            v: self.v.part(kb..kb + 1, 0..hkv, key..key + keys),
            kv_lens: self.kv_lens.as_ref().map(|lens| vec![lens[b]]),
            ragged: None,
            ..self.cut_options(&[b], 0..rows, keys)
        }
    }

    /// Some rows of a call of one sequence, against all its keys.
    pub fn some_rows(&self, rows: Range<usize>) -> Self {
        assert!(self.batch() == 1 && self.ragged.is_none(), "one sequence at a time");
        Self {
            q: self.q.rows(rows.clone()),
            alignment: Some(Alignment::Offset(self.offset(0) + rows.start as isize)),
            ..self.cut_options(&[0], rows, self.keys(0))
        }
    }

    /// Some rows of every sequence, all from one position on, against all their keys.
    pub fn stretch(&self, rows: Range<usize>) -> Self {
        let batches: Vec<usize> = (0..self.batch()).collect();
        Self {
            q: self.q.rows(rows.clone()),
            alignment: Some(Alignment::Offset(self.offset(0) + rows.start as isize)),
            ..self.cut_options(&batches, rows, self.keys(0))
        }
    }

    /// Some rows of a call of one sequence, when only the first keys are there.
    pub fn chunk(&self, rows: Range<usize>, keys: usize) -> Self {
        let (h, last) = (0..self.kv_heads(), self.some_rows(rows));
        Self {
            k: self.k.part(0..1, h.clone(), 0..keys),
            v: self.v.part(0..1, h, 0..keys),
            kv_lens: None,
            ..last.cut_options(&[0], 0..last.q.shape[2], keys)
        }
    }

    /// The same call as one that caches and pages can make: sequences side by side, each with its length, and no more
    /// keys than the longest has.
    pub fn side_by_side(&self) -> Self {
        let case = match (&self.ragged, self.alignment) {
            (Some(_), Some(Alignment::BottomRight)) => {
                Self { alignment: Some(Alignment::Offset(3)), ..self.clone() }.padded(0.0)
            }
            (Some(_), _) => self.padded(0.0),
            _ => self.clone(),
        };
        let lens: Vec<usize> = (0..case.batch()).map(|b| case.kv_len(b)).collect();
        let keys = lens.iter().copied().max().unwrap_or(0);
        let batches: Vec<usize> = (0..case.batch()).collect();
        Self {
            k: case.k.rows(0..keys),
            v: case.v.rows(0..keys),
            kv_lens: Some(lens),
            ..case.cut_options(&batches, 0..case.q.shape[2], keys)
        }
    }

    /// The same sequences in another order.
    pub fn reordered(&self, order: &[usize]) -> Self {
        assert!(self.ragged.is_none(), "sequences side by side");
        let moved = |x: &Tensor| Tensor::from_fn(x.shape, |[b, h, l, d]| x.get([order[b], h, l, d]));
        Self {
            q: moved(&self.q),
            k: moved(&self.k),
            v: moved(&self.v),
            kv_lens: self.kv_lens.as_ref().map(|lens| order.iter().map(|&b| lens[b]).collect()),
            ..self.cut_options(order, 0..self.q.shape[2], self.k.shape[2])
        }
    }

    /// Ragged sequences side by side, filled up with `fill`, and the keys that exist named. The alignment must not go by
    /// the number of rows, which becomes another.
    pub fn padded(&self, fill: f32) -> Self {
        assert!(self.alignment != Some(Alignment::BottomRight), "more rows would move the rest");
        let (rows, keys) = self.longest();
        let spread = |x: &Tensor, l: usize, at: &dyn Fn(usize, usize) -> Option<(usize, usize)>| {
            Tensor::from_fn([self.batch(), x.shape[1], l, x.shape[3]], |[b, h, l, d]| {
                at(b, l).map_or(fill, |(b, l)| x.get([b, h, l, d]))
            })
        };
        let row = |b, i| (i < self.rows(b)).then(|| self.row_at(b, i));
        let key = |b, j| (j < self.keys(b)).then(|| self.key_at(b, j));
        Self {
            q: spread(&self.q, rows, &row),
            k: spread(&self.k, keys, &key),
            v: spread(&self.v, keys, &key),
            kv_lens: Some((0..self.batch()).map(|b| self.kv_len(b)).collect()),
            ragged: None,
            ..self.clone()
        }
    }

    /// Every query head with keys and values of its own.
    pub fn repeated_heads(&self) -> Self {
        let repeat = |x: &Tensor| {
            let [b, _, l, d] = x.shape;
            Tensor::from_fn([b, self.heads(), l, d], |[b, h, l, d]| {
                x.get([b, h / (self.heads() / self.kv_heads()), l, d])
            })
        };
        Self { k: repeat(&self.k), v: repeat(&self.v), ..self.clone() }
    }

    /// Returns the same call with a bias and a mask of all sequences, query heads, rows and keys.
    pub fn whole(&self) -> Self {
        let (rows, keys) = self.longest();
        let shape = [self.batch(), self.heads(), rows, keys];
        let all = |x: &Tensor, none: f32| {
            let [b, h, l, n] = x.shape;
            Tensor::from_fn(shape, |at| {
                let column = match (self.suffix, n) {
                    (true, _) => (at[3] + n).checked_sub(self.kv_len(at[0])),
                    (false, 1) => Some(0),
                    (false, _) => Some(at[3]),
                };
                let column = column.filter(|&column| column < n);
                column.map_or(none, |column| x.get([at[0] % b, at[1] / (shape[1] / h), at[2].min(l - 1), column]))
            })
        };
        Self {
            bias: self.bias.as_ref().map(|x| Rounded::new(&all(&x.wide, -0.0), x.dtype())),
            mask: self.mask.as_ref().map(|x| x.over(all(&x.tensor, f32::from(x.keep)))),
            suffix: false,
            period: None,
            ..self.clone()
        }
    }

    /// A keep mask of the shape of the whole call, by position.
    pub fn mask_by(&self, keep: bool, sees: impl Fn([usize; 4]) -> bool) -> MaskData {
        let (rows, keys) = self.longest();
        let shape = [self.batch(), self.heads(), rows, keys];
        MaskData::new(keep, false, Tensor::from_fn(shape, |at| if sees(at) == keep { 1.0 } else { 0.0 }))
    }

    /// Every key that no row sees, or that none of these rows sees: sequence, kv head, key.
    pub fn unseen(&self, hides: impl Fn([usize; 3], usize) -> bool, by: &[[usize; 3]]) -> Vec<[usize; 3]> {
        let sharing = self.heads() / self.kv_heads();
        let longest = self.longest().1;
        indices([self.batch(), self.kv_heads(), longest, 1])
            .map(|[b, g, j, _]| [b, g, j])
            .filter(|&[b, _, j]| j < self.keys(b))
            .filter(|&[b, g, j]| by.iter().all(|&row| row[0] != b || row[1] / sharing != g || hides(row, j)))
            .collect()
    }
}
