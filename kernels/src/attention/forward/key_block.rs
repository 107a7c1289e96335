//! Key block that the fused loop is computing.

use crate::attention::forward::task::AttentionTask;
use crate::attention::steps::by_isa::Steps;
use crate::kv::key_block::{BlockValues, Keys};
use crate::matmul::pack::NonFinite;
use crate::matmul::prefetch::PrefetchQueue;
use crate::tensor::rows::{KEY_BLOCK, Table};

/// Key block that the fused loop is computing: its keys, its values, what of it is packed, and what to prefetch.
pub(crate) struct Block {
    /// First key, counted in the sequence.
    pub(crate) first: usize,
    /// Number of keys.
    pub(crate) len: usize,
    pub(crate) keys: Keys,
    pub(crate) values: BlockValues,
    /// First key of the packed run in scratch, if any.
    pub(crate) packed_keys: Option<usize>,
    /// First column of the packed values in scratch, if any, and how they were packed.
    pub(crate) packed_values: Option<(usize, NonFinite)>,
    /// True if this is the first block that the current row block accumulates, and every tile's span of it is nonempty:
    /// running outputs are written, not read.
    pub(crate) fresh: bool,
    /// Memory to prefetch while this block is computed.
    pub(crate) prefetch: PrefetchQueue,
}

/// Creates tables for the addresses of a block's key rows and value rows, used if the rows are scattered.
#[inline(always)]
pub(crate) fn tables() -> [Table; 2] {
    [Table::new(), Table::new()]
}

impl<'t, 'a, S: Steps> AttentionTask<'t, 'a, S> {
    /// Returns the key block that starts at key `first`.
    ///
    /// # Safety
    /// Same contract as [`Self::run`]; `first` is one of [`Self::blocks`], and the tables outlive the block.
    pub(crate) unsafe fn block(&self, first: usize, [keys, values]: &mut [Table; 2]) -> Block {
        let at = self.place(first);
        let len = KEY_BLOCK.min(self.seq.kv_len - first);
        // SAFETY: keys `first .. first + len` exist; the caller guarantees that their block is held and that the tables
        // outlive it.
        unsafe {
            let (keys, values) = (self.call.kv.keys(at, len, keys), self.call.kv.values(at, len, values));
            let prefetch = self.prefetch([first, len], values);
            Block { first, len, keys, values, packed_keys: None, packed_values: None, fresh: false, prefetch }
        }
    }
}
