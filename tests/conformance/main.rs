//! Operators against their specifications: the ONNX conformance suite, and options as PyTorch computes them.

mod attention_op;
mod backward;
mod cases;
mod flex_op;
mod node;
mod onnx;
mod options;
mod subgraph;
