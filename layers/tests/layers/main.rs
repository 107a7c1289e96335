//! Layers and whole models: against PyTorch, against scalar references, and what they refuse.

#[path = "../../../tests/support/counting.rs"]
mod counting;
#[path = "../../../tests/support/fixture.rs"]
mod fixture;
#[path = "../../../tests/support/golden.rs"]
mod golden_file;
#[path = "../../../tests/support/mistake.rs"]
mod mistake;
#[path = "../../../tests/support/model_folder.rs"]
mod model_folder;
#[path = "../support/models.rs"]
mod models;
#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "../support/tiny_bert.rs"]
mod tiny_bert;

mod accurate;
mod activations;
mod bert;
mod bert_refusals;
mod executors;
mod golden;
mod hybrid_caches;
mod linear_attention;
mod linear_attention_bits;
mod linear_attention_heads;
mod linear_attention_support;
mod minilm;
mod minilm_layer;
mod mistakes;
mod norms;
mod state_cache;
mod state_files;
mod state_histories;
mod torch_layers;
mod transformer;
mod vectors;
mod written;

// Sizes beyond any machine's memory, which 32 bits cannot write down.
#[cfg(target_pointer_width = "64")]
mod generation;
#[cfg(target_pointer_width = "64")]
mod layer_sizes;
#[cfg(target_pointer_width = "64")]
mod linear;
#[cfg(target_pointer_width = "64")]
mod linear_attention_errors;
#[cfg(target_pointer_width = "64")]
mod multi_head;
#[cfg(target_pointer_width = "64")]
mod positions;
#[cfg(target_pointer_width = "64")]
mod ragged_decoding;
