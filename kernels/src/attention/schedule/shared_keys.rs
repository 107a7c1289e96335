//! Keys that several sequences have in the same memory, for explanations of plans.

use crate::attention::call::Call;
use crate::attention::schedule::split_sequences::{SplitRows, SplitSequences};
use crate::attention::schedule::units::Units;
use crate::tensor::rows::KEY_BLOCK;

impl Call<'_> {
    /// Returns the number of keys, counted once for each key/value head, that split-KV does not read again, because other
    /// sequences have them in the same memory.
    pub fn shared_keys(&self, split: SplitRows) -> usize {
        let mut entries = SplitSequences::new();
        let shared = Units::of(self, split, &mut entries).map_or(0, |units| units.shared_blocks());
        shared.saturating_mul(KEY_BLOCK).saturating_mul(self.kv.kv_heads())
    }
}
