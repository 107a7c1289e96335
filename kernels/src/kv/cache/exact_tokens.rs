//! Exact first tokens of the sequences of a cache: their memory, and where tokens move.

use super::Cache;
use super::blocks::is_shared;
use super::exact::ExactRows;
use crate::simd::aligned::AlignedBuf;
use std::sync::Arc;

impl Cache {
    /// Returns true if a write to the first tokens of a sequence takes new memory for their exact rows.
    pub(super) fn lacks_exact(&self, sequence: usize) -> bool {
        self.store.sizes.exact > 0 && self.exact[sequence].as_ref().is_none_or(is_shared)
    }

    /// Takes the exact rows of a sequence without keys, or of one whose first keys are evicted, for others to use.
    pub(super) fn spare_exact(&mut self, sequence: usize) {
        if let Some(rows) = self.exact[sequence].take() {
            self.spare.push_exact(rows);
        }
    }

    /// Returns the exact rows of a sequence to write to: its own, taken from the spare ones unless it has them.
    pub(super) fn exact_mut(&mut self, sequence: usize) -> &mut [f32] {
        if self.lacks_exact(sequence) {
            let floats = self.store.sizes.exact_floats();
            let fresh = || Arc::new(AlignedBuf::try_new(floats).expect("memory for exact rows"));
            let mut own = self.spare.pop_exact().unwrap_or_else(fresh);
            let to = Arc::get_mut(&mut own).expect("spare rows have one owner").floats_mut();
            match &self.exact[sequence] {
                Some(shared) => to[..floats].copy_from_slice(&shared.floats()[..floats]),
                None => to.fill(0.0),
            }
            self.exact[sequence] = Some(own);
        }
        let rows = self.exact[sequence].as_mut().expect("just made");
        Arc::get_mut(rows).expect("the rows have one owner").floats_mut()
    }

    /// Returns the exact rows of a head of a sequence, if it has any.
    #[inline]
    pub(crate) fn exact_rows(&self, sequence: usize, head: usize) -> Option<ExactRows<'_>> {
        let rows = self.exact[sequence].as_ref()?;
        self.store.sizes.exact_rows(rows.floats(), head, self.lens[sequence])
    }

    /// Moves the exact rows of a token that moves, or makes them of what is stored of it.
    pub(super) fn move_exact(&mut self, sequence: usize, [to, from]: [usize; 2]) {
        let sizes = self.store.sizes;
        if to >= sizes.exact {
            return;
        }
        if from < sizes.exact {
            return sizes.copy_exact(self.exact_mut(sequence), [to, from]);
        }
        for (head, part) in sizes.exact_parts() {
            let (dim, _) = sizes.row_form(part);
            let row = self.elements(part, [sequence, head, from], 0..dim).expect("the token is held");
            sizes.set_exact(self.exact_mut(sequence), part, [head, to], row);
        }
    }
}
