//! Gradients in the parameters of the caller's score function: sums over all pairs of a row and a key, in one order.
//!
//! A worker adds up those of a column in its scratch, row block after row block. They are then added to the sums of the column's
//! key/value head, key block after key block, and these at last, head after head. So memory does not grow with rows or keys.

use crate::attention::backward::column::Column;
use crate::attention::backward::memory::locked;
use crate::attention::backward::pass::BlockAt;

impl<S> Column<'_, S> {
    /// Adds the column's sums to those of its head, after those of the key block before. Returns false if the work was stopped.
    pub(crate) fn add_parameters(&self, sums: &[f64]) -> bool {
        let (pass, at) = (self.pass, self.at);
        // One more than its row blocks: its sums, too.
        let done = pass.row_blocks(at.sequence) + 1;
        let before = at.number.checked_sub(1).map(|number| BlockAt { number, ..at });
        if before.is_some_and(|before| !pass.wait(before, done)) {
            return false;
        }
        let head = at.sequence * pass.checked.call().kv.kv_heads() + at.kv_head;
        let mut all = locked(pass.parameter_sums);
        let of_head = &mut all[head * sums.len()..][..sums.len()];
        of_head.iter_mut().zip(sums).for_each(|(sum, &more)| *sum += more);
        pass.progress(at).set(done);
        true
    }
}
