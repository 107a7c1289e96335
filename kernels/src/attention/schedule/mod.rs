//! Who computes what, and where results go: tasks and units of a call, the queue that workers take them from, and merges.

mod kept_queries;
pub(crate) mod launch;
pub(crate) mod merge;
pub(crate) mod partials;
pub(crate) mod runs;
pub(crate) mod shared_blocks;
pub(crate) mod split_kv;
pub(crate) mod tasks;
pub(crate) mod units;
