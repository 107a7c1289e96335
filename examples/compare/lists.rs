//! Lists of selected keys: numbers of a file, and what the command line says that they count.

use crate::data::Tensor;
use crate::failure::Result;
use crate::settings::Groups;
use sdpa::{Rectangle, SelectedKeys, SelectionShape};

/// Numbers of a file, and the lists made of them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Lists {
    /// `[batch, heads, groups, places]`; −1 where a place has none.
    pub(crate) numbers: Tensor<i32>,
    /// Places that count, of each group or of each sequence.
    pub(crate) lens: Option<Vec<i32>>,
    /// Empty until they are made.
    pub(crate) keys: SelectedKeys,
}

impl Lists {
    /// Makes lists for `q_len` rows of each sequence, of which sequence `b` has `kv_lens[b]` keys.
    pub(crate) fn make(&mut self, Groups { rows, unit }: Groups, q_len: usize, kv_lens: &[usize]) -> Result<()> {
        let q_lens = vec![q_len; kv_lens.len()];
        let shape = SelectionShape { q_lens: &q_lens, heads: self.numbers.shape[1], rows, unit };
        let shown = Rectangle { numbers: self.numbers.view()?, lens: self.lens.as_deref() };
        Ok(self.keys.fill_padded(shape, kv_lens, shown, None).map_err(sdpa::Error::from)?)
    }

    /// Makes the lists of some rows of a query head, of `heads`, as those of a call of their own.
    pub(crate) fn of_rows(
        &self,
        [batch, head]: [usize; 2],
        heads: usize,
        rows: std::ops::Range<usize>,
        into: &mut SelectedKeys,
    ) -> Result<()> {
        let (mut starts, mut numbers) = (vec![0], Vec::new());
        let head = head * self.keys.heads() / heads;
        for row in rows.clone() {
            numbers.extend(self.keys.numbers(batch, head, row).into_iter().flatten().map(|number| number as u32));
            starts.push(numbers.len());
        }
        let shape = SelectionShape { q_lens: &[rows.len()], heads: 1, rows: 1, unit: self.keys.unit() };
        Ok(into.fill(shape, &starts, &numbers, None).map_err(sdpa::Error::from)?)
    }

    /// In words.
    pub(crate) fn in_words(&self) -> String {
        let (rows, unit) = (self.keys.rows(), self.keys.unit());
        format!("selected keys {:?}, a list for {rows} row(s), units of {unit} key(s)", self.numbers.shape)
    }
}
