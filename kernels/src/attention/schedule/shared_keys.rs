//! Keys that several sequences have in the same memory, for explanations of plans.

use crate::attention::call::Call;
use crate::attention::call::tiling::Tiling;
use crate::attention::schedule::split_sequences::{SplitRows, SplitSequences};
use crate::attention::schedule::work::Schedule;
use crate::tensor::rows::KEY_BLOCK;

impl Call<'_> {
    /// Returns the number of keys, counted once for each key/value head, that split-KV does not read again, because other
    /// sequences have them in the same memory.
    pub fn shared_keys(&self, tiling: &Tiling, split: SplitRows) -> usize {
        let mut entries = SplitSequences::new();
        let shared =
            Schedule::new(self, tiling, Some(split), &mut entries).units.map_or(0, |units| units.shared_blocks());
        shared.saturating_mul(KEY_BLOCK).saturating_mul(self.kv.kv_heads())
    }
}
