//! Attention on candle's tensors, held against candle's own: matmul, softmax, matmul.

mod cache;
mod gradients;
#[path = "../../../../benches/support/interleaved.rs"]
mod interleaved;
mod layouts;
mod options;
mod oracle;
mod refusals;
mod selected;
