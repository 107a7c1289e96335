//! ONNX LinearAttention, opset 27, in terms of the public API.

use crate::cases::Tensor;
use crate::node::Node;
use sdpa::{Exec, Isa, View, ViewMut};
use sdpa_layers::{Compute, Form, LinearAttention, LinearInputs, LinearState, Update};

const ATTRIBUTES: [&str; 5] = ["chunk_size", "kv_num_heads", "q_num_heads", "scale", "update_rule"];

/// The chunk length of a node that does not name one.
const DEFAULT_CHUNK: i64 = 64;

/// A `[batch, len, heads · dim]` tensor.
struct Packed {
    data: Vec<f32>,
    /// Batch, len, heads, dim.
    stored: [usize; 4],
}

impl Packed {
    fn new(name: &str, tensor: &Tensor, heads: usize) -> Result<Self, String> {
        let &[b, l, hidden] = tensor.shape.as_slice() else {
            return Err(format!("{name} of shape {:?}", tensor.shape));
        };
        if heads == 0 || hidden % heads != 0 {
            return Err(format!("{name} of shape {:?} with {heads} heads", tensor.shape));
        }
        Ok(Self { data: tensor.f32s()?, stored: [b, l, heads, hidden / heads] })
    }

    fn view(&self) -> Result<View<'_>, String> {
        View::blhd(&self.data, self.stored).map_err(|e| e.to_string())
    }
}

/// Runs a node; the largest error found.
pub(crate) fn run(node: &Node<'_>) -> Result<f64, String> {
    node.knows(&ATTRIBUTES, 6, 2)?;
    let heads = |name: &str| {
        let n = node.int(name)?.ok_or(format!("no {name}"))?;
        usize::try_from(n).map_err(|_| format!("{name} {n}"))
    };
    let (q_heads, kv_heads) = (heads("q_num_heads")?, heads("kv_num_heads")?);
    let q = Packed::new("query", node.needed(0)?, q_heads)?;
    let (k, v) = (Packed::new("key", node.needed(1)?, kv_heads)?, Packed::new("value", node.needed(2)?, kv_heads)?);
    let decay = node.input(4).map(|decay| Packed::new("decay", decay, kv_heads)).transpose()?;
    // One strength for all heads, or one for each.
    let beta_heads = |beta: &Tensor| if beta.shape.last() == Some(&1) { 1 } else { kv_heads };
    let beta = node.input(5).map(|beta| Packed::new("beta", beta, beta_heads(beta))).transpose()?;
    let (log_decay, beta) =
        (decay.as_ref().map(Packed::view).transpose()?, beta.as_ref().map(Packed::view).transpose()?);
    let update = update(node, log_decay, beta)?;
    // Says how to compute, not what.
    let chunk = node.int("chunk_size")?.unwrap_or(DEFAULT_CHUNK);
    let chunk = usize::try_from(chunk).ok().filter(|&n| n > 0).ok_or(format!("chunk_size {chunk}"))?;
    let mut layer = LinearAttention::new();
    if let Some(scale) = node.float("scale")?.filter(|&scale| scale != 0.0) {
        layer = layer.scale(scale);
    }

    let ([batch, len, ..], [.., head_dim], [.., value_dim]) = (q.stored, k.stored, v.stored);
    let state_shape = [batch, kv_heads, head_dim, value_dim];
    let past = node.input(3);
    if let Some(past) = past {
        past.expect_shape(&state_shape).map_err(|e| format!("past_state: {e}"))?;
    }
    let inputs = LinearInputs::new(q.view()?, k.view()?, v.view()?, update);
    let mut worst = 0.0f64;
    for isa in Isa::available() {
        for form in [Form::Recurrent, Form::Chunked(chunk), Form::Chunked(3)] {
            let mut state = LinearState::new(state_shape).map_err(|e| e.to_string())?;
            if let Some(past) = past {
                state.as_mut_slice().copy_from_slice(&past.f32s()?);
            }
            let mut out = vec![f32::NAN; batch * len * q_heads * value_dim];
            let view = ViewMut::blhd(&mut out, [batch, len, q_heads, value_dim]).map_err(|e| e.to_string())?;
            let mut compute = Compute::new(Exec::serial().isa(isa));
            layer.form(form).forward(inputs, &mut state, view, &mut compute).map_err(|e| e.to_string())?;
            let what = |name: &str| format!("{isa}, {form:?}: {name}");
            worst = worst.max(node.check(0, &what("output"), &out, &[batch, len, q_heads * value_dim])?);
            worst = worst.max(node.check(1, &what("present_state"), state.as_slice(), &state_shape)?);
        }
    }
    Ok(worst)
}

/// What the node's rule does with the decay and the strength that it is given.
fn update<'a>(node: &Node<'_>, log_decay: Option<View<'a>>, beta: Option<View<'a>>) -> Result<Update<'a>, String> {
    let rule = node.attribute("update_rule").map_or(Some("gated_delta"), |rule| rule.as_str());
    Ok(match (rule, log_decay, beta) {
        (Some("linear"), None, None) => Update::Linear,
        (Some("gated"), Some(log_decay), None) => Update::Gated { log_decay },
        (Some("delta"), None, Some(beta)) => Update::Delta { beta },
        (Some("gated_delta"), Some(log_decay), Some(beta)) => Update::GatedDelta { log_decay, beta },
        (Some(rule @ ("linear" | "gated" | "delta" | "gated_delta")), log_decay, beta) => {
            let given = |x: bool| if x { "given" } else { "left out" };
            let (decay, beta) = (given(log_decay.is_some()), given(beta.is_some()));
            return Err(format!("{rule} needs or forbids: decay is {decay}, beta is {beta}"));
        }
        (rule, ..) => return Err(format!("update_rule {rule:?}")),
    })
}
