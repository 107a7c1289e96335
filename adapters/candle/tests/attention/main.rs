//! Attention on candle's tensors, held against candle's own: matmul, softmax, matmul.

mod additive;
mod cache;
mod gradients;
#[path = "../../../../benches/support/interleaved.rs"]
mod interleaved;
mod layouts;
mod options;
mod oracle;
mod padding;
mod refusals;
mod selected;
mod wide;
