//! The key block at hand.

use crate::attention::forward::task::AttentionTask;
use crate::attention::mods::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::attention::steps::by_isa::Steps;
use crate::kv::key_block::{BlockValues, Keys};
use crate::matmul::pack::NonFinite;
use crate::matmul::prefetch::PrefetchQueue;
use crate::tensor::rows::{KEY_BLOCK, Table};

/// The key block at hand.
pub(crate) struct Block {
    /// Its first key, counted in the sequence, and how many there are.
    pub(crate) first: usize,
    pub(crate) len: usize,
    pub(crate) keys: Keys,
    pub(crate) values: BlockValues,
    /// Which packed run is in the scratch, if any: keys by first key, values by first column.
    pub(crate) packed_keys: Option<usize>,
    pub(crate) packed_values: Option<(usize, NonFinite)>,
    /// Whether it is the first that the row block at hand gathers, and all tiles see some of it: outputs are written, not read.
    pub(crate) fresh: bool,
    /// What comes after it.
    pub(crate) prefetch: PrefetchQueue,
}

/// Where the rows of a block's keys and values lie, if they lie scattered.
#[inline(always)]
pub(crate) fn tables() -> [Table; 2] {
    [Table::new(), Table::new()]
}

impl<'t, 'a, S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> AttentionTask<'t, 'a, S, Mods<A, B, C>> {
    /// The block of keys that starts at `first`.
    ///
    /// # Safety
    /// As for [`Self::run`]; `first` is one of [`Self::blocks`], and the tables outlive the block.
    pub(crate) unsafe fn block(&self, first: usize, [keys, values]: &mut [Table; 2]) -> Block {
        let at = self.place(first);
        let len = KEY_BLOCK.min(self.seq.kv_len - first);
        // SAFETY: keys `first .. first + len` exist; the rest is passed on.
        unsafe {
            let (keys, values) = (self.call.kv.keys(at, len, keys), self.call.kv.values(at, len, values));
            let prefetch = self.prefetch([first, len], values);
            Block { first, len, keys, values, packed_keys: None, packed_values: None, fresh: false, prefetch }
        }
    }
}
