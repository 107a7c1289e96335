//! Attention: the call and its options, its tasks and how workers share them, and the one pass over the keys.

pub(crate) mod backward;
pub(crate) mod blocks;
pub(crate) mod call;
pub(crate) mod forward;
pub(crate) mod products;
pub(crate) mod schedule;
pub(crate) mod scratch;
pub(crate) mod steps;
