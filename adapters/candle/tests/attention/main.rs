//! Attention on candle's tensors, held against candle's own: matmul, softmax, matmul.

mod cache;
mod layouts;
mod options;
mod oracle;
mod refusals;
