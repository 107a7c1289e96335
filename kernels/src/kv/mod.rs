//! Keys and values: their sources, and the block of them that attention works on.

pub(crate) mod block_table;
pub(crate) mod cache;
pub(crate) mod gathered;
pub(crate) mod key_block;
pub(crate) mod pages;
pub(crate) mod slot_index;
pub(crate) mod source;
pub(crate) mod value_panels;
