//! ONNX's own node tests of LinearAttention, through the public API on every instruction set. `SDPA_ONNX_CASES` names another
//! directory of such cases. Whatever the runner does not know (an operator, attribute, input or output) fails its case.

use crate::cases::{Case, Outcome, fails, run_all};
use crate::node::Node;

#[test]
fn onnx_node_tests() {
    run_all("SDPA_ONNX_CASES", "tests/conformance/onnx", "case", run);
}

fn run(case: &Case) -> Result<Outcome, String> {
    let node = Node::new(case)?;
    match node.op.as_str() {
        "LinearAttention" => crate::linear_attention_op::run(&node).map(Outcome::Passed),
        "Attention" | "FlexAttention" => Ok(Outcome::Skipped("an operator of sdpa")),
        op => Err(format!("unknown operator {op}")),
    }
}

/// The runner itself: what it does not know, and a wrong answer, must not pass.
#[test]
fn the_unknown_and_the_wrong_fail() {
    use serde_json::json;
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/onnx");
    let linear = Case::load(&directory.join("test_linear_attention_prefill_with_past.safetensors"), "case").unwrap();
    assert!(matches!(run(&linear), Ok(Outcome::Passed(_))));
    let heads = |mut attributes: serde_json::Value| {
        (attributes["q_num_heads"], attributes["kv_num_heads"]) = (json!(4), json!(4));
        attributes
    };
    for (key, value, why) in [
        ("/op", json!("Softmax"), "unknown operator"),
        ("/attributes", heads(json!({ "dropout": 0.0 })), "unknown attribute"),
        ("/attributes", heads(json!({ "update_rule": "gated" })), "forbids"),
        ("/attributes", heads(json!({ "update_rule": "momentum" })), "update_rule"),
        ("/attributes", heads(json!({ "scale": 0.5 })), "output["),
        ("/attributes", heads(json!({ "chunk_size": 0 })), "chunk_size"),
        ("/attributes", json!({ "q_num_heads": 4 }), "kv_num_heads"),
        ("/attributes", json!({ "q_num_heads": 4, "kv_num_heads": 5 }), "heads"),
        ("/inputs", json!(["query", "key", "value", "", "decay", "beta"]), "tensors named"),
        ("/inputs", json!(["query", "key", "value", "past_state", "decay", "beta", ""]), "unknown inputs"),
        ("/outputs", json!(["output"]), "tensors named"),
    ] {
        fails(&linear, key, value, why, run);
    }
}
