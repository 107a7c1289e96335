//! ONNX's own node tests of Attention and FlexAttention, through the public API on every instruction set.
//! `SDPA_ONNX_CASES` names another directory of such cases. Whatever the runner does not know (an operator, attribute,
//! input or output) fails its case.

use crate::cases::{Case, Outcome, fails, run_all};
use crate::node::Node;

#[test]
fn onnx_node_tests() {
    run_all("SDPA_ONNX_CASES", "tests/conformance/onnx", "case", run);
}

fn run(case: &Case) -> Result<Outcome, String> {
    let node = Node::new(case)?;
    match node.op.as_str() {
        "Attention" => crate::attention_op::run(&node).map(Outcome::Passed),
        "FlexAttention" => crate::flex_op::run(&node).map(Outcome::Passed),
        "LinearAttention" => Ok(Outcome::Skipped("an operator of sdpa-layers")),
        op => Err(format!("unknown operator {op}")),
    }
}

/// The runner itself: what it does not know, and a wrong answer, must not pass.
#[test]
fn the_unknown_and_the_wrong_fail() {
    use serde_json::json;
    let load = |name: &str| {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/onnx");
        Case::load(&directory.join(name).with_extension("safetensors"), "case").unwrap()
    };
    let (attention, flex) =
        (load("test_attention_4d_causal_with_past_and_present"), load("test_flexattention_causal_mask"));
    for case in [&attention, &flex] {
        assert!(matches!(run(case), Ok(Outcome::Passed(_))));
    }
    let graph = |text: &str| json!({ "graph": format!("f (float[B,H,L,S] x) => (float[B,H,L,S] y)\n{{\n{text}\n}}") });
    for (case, key, value, why) in [
        (&attention, "/op", json!("Softmax"), "unknown operator"),
        (&attention, "/attributes", json!({ "is_causal": 1, "dropout": 0.0 }), "unknown attribute"),
        (&attention, "/attributes", json!({ "is_causal": 0 }), "Y["),
        (&attention, "/attributes", json!({ "is_causal": 1, "softmax_precision": 2 }), "softmax_precision"),
        (&attention, "/inputs", json!(["Q", "K", "V", "", "past_key"]), "tensors named"),
        (&attention, "/inputs", json!(["Q", "K", "V", "", "past_key", "past_value", "", ""]), "unknown inputs"),
        (&attention, "/outputs", json!(["Y", "present_key"]), "tensors named"),
        (&flex, "/attributes/score_mod", graph("y = Sin (x)"), "unknown"),
        (&flex, "/attributes/score_mod", graph("y = Add (x, c)"), "not defined"),
        (&flex, "/attributes/score_mod", graph("y = Neg (x)"), "Y["),
        (&flex, "/attributes", json!({}), "Y["),
    ] {
        fails(case, key, value, why, run);
    }
}
