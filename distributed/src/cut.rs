//! Cut by heads: which rank computes which heads, and how much of a call each has.

use crate::description::{Description, dtype, is_given, number};
use crate::forms::{Form, forms};
use crate::sequences::Sequences;
use crate::share::CAUSAL;
use crate::split::Split;
use crate::workload::Workload;
use core::ops::Range;
use sdpa::Dtype;

/// Name under which a rank says how many columns the log-sum-exps have that it wants.
pub(crate) const LSE_COLUMNS: &str = "columns of the log-sum-exp";

/// Sizes and element types of a call, and what each rank has of it.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(crate) batch: usize,
    /// Query heads, key/value heads.
    pub(crate) heads: [usize; 2],
    /// Of queries, keys and values.
    pub(crate) dims: [usize; 3],
    pub(crate) dtypes: [Dtype; 3],
    /// Columns of log-sum-exps.
    pub(crate) lse_columns: usize,
    /// Forms of bias and mask, where they are given.
    pub(crate) forms: [Option<Form>; 2],
    pub(crate) ranks: Vec<Description>,
}

impl Cut {
    /// Reads what all ranks say.
    pub(crate) fn new(ranks: Vec<Description>) -> Self {
        let number = |name| number(&ranks, name).unwrap_or(0);
        let dtype = |name| dtype(&ranks, name).unwrap_or(Dtype::F32);
        let (dim, value_dim) = (number("head_dim"), number("value_dim"));
        Self {
            batch: number("batch"),
            heads: [number("query heads"), number("key/value heads")],
            dims: [dim, dim, value_dim],
            dtypes: [dtype("element type of q"), dtype("element type of k"), dtype("element type of v")],
            lse_columns: number(LSE_COLUMNS).max(1),
            forms: forms(&ranks),
            ranks,
        }
    }

    /// Returns the only way to cut the call that its options allow, if there is but one.
    pub(crate) fn only(&self) -> Option<Split> {
        if self.ranks.iter().any(|rank| rank.rows.is_empty()) {
            return Some(Split::Rows);
        }
        self.ranks.iter().any(|rank| rank.positions().is_some() || rank.has_suffix()).then_some(Split::Heads)
    }

    pub(crate) fn workload(&self, rows: usize, keys: usize) -> Workload {
        let causal = if is_given(&self.ranks, CAUSAL) { 0.5 } else { 1.0 };
        let visible = causal * Sequences::share_of_pairs(&self.ranks);
        let (dims, bytes) = ([self.dims[0], self.dims[2]], self.dtypes.map(|dtype| dtype.bytes()));
        let options = [false, true].map(|shared| {
            let forms = self.forms.iter().flatten().filter(|form| form.is_shared() == shared);
            forms.map(|form| form.bytes(rows, self.heads[0])).sum()
        });
        Workload { batch: self.batch, heads: self.heads, dims, rows, keys, visible, bytes, options }
    }

    /// Heads of queries, keys and values that a rank computes.
    pub(crate) fn heads_of(&self, rank: usize) -> [Range<usize>; 3] {
        let [heads, kv_heads] = self.heads;
        let (n, group) = (self.ranks.len(), heads / kv_heads.max(1));
        let kv = kv_heads * rank / n..kv_heads * (rank + 1) / n;
        [kv.start * group..kv.end * group, kv.clone(), kv]
    }

    /// Elements of `n` rows of queries, keys or values in the heads of a rank.
    pub(crate) fn elements(&self, which: usize, n: usize, rank: usize) -> usize {
        self.batch * self.heads_of(rank)[which].len() * n * self.dims[which]
    }
}
