//! Attention heads of a text, for a page without a framework: the page hands over tokens, and reads queries, keys, values,
//! weights and output from the memory of this module. [`exports`] is all that JavaScript sees.

pub mod exports;
mod heads;
mod model;
