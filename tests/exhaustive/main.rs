//! What is slow because it is tried in full: every `f32` exponential, thousands of combinations of options.

#[path = "../support/options/mod.rs"]
mod options;
#[path = "../support/mod.rs"]
mod support;

mod combinations;
mod exp;
