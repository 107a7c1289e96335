//! Attention: the call and its options, its tasks and how workers share them, and the one pass over the keys.

pub(crate) mod backward;
pub(crate) mod blocks;
pub(crate) mod call;
pub(crate) mod checked;
pub(crate) mod forward;
mod kept_queries;
pub(crate) mod launch;
pub(crate) mod masks;
pub(crate) mod merge;
pub(crate) mod mods;
pub(crate) mod options;
pub(crate) mod outputs;
pub(crate) mod partials;
pub(crate) mod row_mods;
pub(crate) mod runs;
pub(crate) mod shared_blocks;
pub(crate) mod split_kv;
pub(crate) mod steps;
pub(crate) mod tasks;
pub(crate) mod tiling;
pub(crate) mod units;
pub(crate) mod visibility;
