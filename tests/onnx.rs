//! ONNX's own node tests of Attention and FlexAttention, through the public API on every instruction set.
//! `SDPA_ONNX_CASES` names another directory of such cases. Whatever the runner does not know (an operator, attribute,
//! input or output) fails its case.

#[path = "conformance/attention_op.rs"]
mod attention_op;
#[path = "conformance/flex_op.rs"]
mod flex_op;
#[path = "conformance/node.rs"]
mod node;
#[path = "conformance/subgraph.rs"]
mod subgraph;
#[path = "conformance/support.rs"]
mod support;

use node::Node;
use support::{Case, Outcome, run_all};

#[test]
fn onnx_node_tests() {
    run_all("SDPA_ONNX_CASES", "tests/conformance/onnx", "case", run);
}

fn run(case: &Case) -> Result<Outcome, String> {
    let node = Node::new(case)?;
    match node.op.as_str() {
        "Attention" => attention_op::run(&node).map(Outcome::Passed),
        "FlexAttention" => flex_op::run(&node).map(Outcome::Passed),
        "LinearAttention" => Ok(Outcome::Skipped("LinearAttention belongs to the systems issue")),
        op => Err(format!("unknown operator {op}")),
    }
}
