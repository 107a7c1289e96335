//! The forward and the backward pass: results against the oracle, bits, memory, errors.

#[path = "../support/counting.rs"]
mod counting;
#[path = "../support/golden.rs"]
mod golden;
#[path = "../support/mistake.rs"]
mod mistake;
#[path = "../support/model_folder.rs"]
mod model_folder;
#[path = "../support/options/mod.rs"]
mod options;
#[path = "../support/mod.rs"]
mod support;

mod backward;
mod balance;
mod bits;
mod block_states;
mod cache_errors;
mod choosing;
mod columns;
mod corners;
mod dropout;
mod errors;
mod executors;
mod explain;
mod extremes;
mod functions;
mod half;
mod hidden;
mod identities;
mod ieee;
mod int8_cache;
mod interrupted;
mod kv_cache;
mod kv_codes;
mod kv_formats;
mod kv_support;
mod latent;
mod layer_caches;
mod limits;
mod masks;
mod memory;
mod merging;
mod mistakes;
mod mixed;
mod ndarray;
mod oracle;
mod page_pool;
mod paged;
mod partial;
mod plans;
mod pool_changes;
mod positions;
mod selected;
mod shared_prefixes;
mod short;
mod slots;
mod split_keys;
mod state_memory;
mod states;
mod trees;
mod windows;
mod written;
