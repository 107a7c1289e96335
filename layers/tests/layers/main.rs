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

mod activations;
mod bert;
mod bert_refusals;
mod executors;
mod generation;
mod golden;
mod layer_sizes;
mod linear;
mod linear_attention;
mod linear_attention_bits;
mod linear_attention_errors;
mod linear_attention_heads;
mod linear_attention_support;
mod minilm;
mod minilm_layer;
mod mistakes;
mod multi_head;
mod norms;
mod positions;
mod torch_layers;
mod transformer;
mod written;
