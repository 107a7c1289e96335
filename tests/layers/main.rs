//! Layers and whole models: against PyTorch, against scalar references, and what they refuse.

#[path = "../support/counting.rs"]
mod counting;
#[path = "../support/fixture.rs"]
mod fixture;
#[path = "../support/model_folder.rs"]
mod model_folder;
#[path = "../support/models.rs"]
mod models;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/tiny_bert.rs"]
mod tiny_bert;

mod activations;
mod bert;
mod bert_refusals;
mod cache_errors;
mod generation;
mod layer_sizes;
mod linear;
mod linear_attention;
mod linear_attention_bits;
mod linear_attention_errors;
mod linear_attention_support;
mod minilm;
mod minilm_layer;
mod multi_head;
mod norms;
mod torch_layers;
mod transformer;
mod written;
