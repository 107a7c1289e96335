//! Who computes what, and where results go: the list of a call's work, the queue that workers take it from, and merges.

pub(crate) mod accumulation;
pub(crate) mod block_states;
pub(crate) mod choice_launch;
pub(crate) mod index_launch;
pub(crate) mod key_blocks;
pub(crate) mod launch;
pub(crate) mod merge;
pub(crate) mod partials;
mod query_slots;
mod shared_keys;
pub(crate) mod split_kv;
pub(crate) mod split_sequences;
pub(crate) mod units;
pub(crate) mod work;
