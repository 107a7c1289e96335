//! LinearAttention against its specification: the ONNX conformance suite.

#[path = "../../../tests/conformance/cases.rs"]
mod cases;
#[path = "../../../tests/conformance/node.rs"]
mod node;

mod linear_attention_op;
mod onnx;
