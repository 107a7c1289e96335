//! rten: an ONNX model of one node, inputs as views of memory that stays where it is.
//!
//! The node is opset 23's `Attention`, which is faster than the contributed ones; a window only
//! `GroupQueryAttention` has.

use super::onnx::{Attribute, Node, Tensor, Type};
use crate::case::{Case, transposed};
use crate::failure::Result;
use crate::peer::Peer;
use crate::rounded::Qkv;
use rten::{Model, NodeId, RunOptions, ThreadPool, Value, ValueOrView, ValueView};
use rten_tensor::prelude::*;
use rten_tensor::{NdTensorView, Tensor as RtenTensor};
use std::sync::Arc;

/// Its own pool, kept as long as the number of threads stays.
#[derive(Default)]
pub(super) struct Rten {
    ready: Option<Ready>,
}

struct Ready {
    model: Model,
    inputs: Vec<(NodeId, Input)>,
    output: NodeId,
    options: RunOptions,
    answer: Option<Value>,
    /// If rows come before heads: heads, rows.
    packed: Option<[usize; 4]>,
}

/// A kept input.
enum Input {
    Float { shape: Vec<usize>, data: Vec<f32> },
    Int(RtenTensor<i32>),
}

impl Input {
    fn view(&self) -> ValueOrView<'_> {
        match self {
            Self::Float { shape, data } => match *shape.as_slice() {
                [a, b, c] => ValueView::from(NdTensorView::from_data([a, b, c], data.as_slice())).into(),
                [a, b, c, d] => ValueView::from(NdTensorView::from_data([a, b, c, d], data.as_slice())).into(),
                _ => unreachable!("q, k and v have three or four dimensions"),
            },
            Self::Int(tensor) => ValueView::from(tensor).into(),
        }
    }
}

fn tensor(name: &'static str, element: Type, shape: &[usize]) -> Tensor {
    Tensor { name, element, shape: shape.to_vec() }
}

/// The model's bytes and what goes in, in order.
fn attention(case: &Case, Qkv { q, k, v }: Qkv) -> (Vec<u8>, Vec<(&'static str, Input)>) {
    let Case { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = *case;
    let shapes =
        [[batch, heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim], [batch, kv_heads, kv_len, value_dim]];
    let inputs = [("q", shapes[0]), ("k", shapes[1]), ("v", shapes[2])];
    let mut attributes = vec![("is_causal", Attribute::Int(case.causal.into()))];
    attributes.extend(case.softcap.map(|cap| ("softcap", Attribute::Float(cap))));
    let node = Node {
        domain: "",
        version: 23,
        operator: "Attention",
        attributes: &attributes,
        inputs: &inputs.map(|(name, shape)| tensor(name, Type::F32, &shape)),
        output: &tensor("y", Type::F32, &[batch, heads, q_len, value_dim]),
    };
    let model = node.model();
    let data = [q, k, v].into_iter().zip(inputs);
    (model, data.map(|(data, (name, shape))| (name, Input::Float { shape: shape.to_vec(), data })).collect())
}

/// The same for a causal window of a whole prompt.
fn windowed(case: &Case, window: usize, Qkv { q, k, v }: Qkv) -> (Vec<u8>, Vec<(&'static str, Input)>) {
    let Case { batch, heads, kv_heads, q_len, head_dim, .. } = *case;
    let (q_shape, kv_shape) = ([batch, q_len, heads * head_dim], [batch, q_len, kv_heads * head_dim]);
    let mut attributes = vec![
        ("num_heads", Attribute::Int(heads as i64)),
        ("kv_num_heads", Attribute::Int(kv_heads as i64)),
        ("local_window_size", Attribute::Int(window as i64)),
    ];
    attributes.extend(case.softcap.map(|cap| ("softcap", Attribute::Float(cap))));
    let none = tensor("", Type::F32, &[]);
    let node = Node {
        domain: "com.microsoft",
        version: 1,
        operator: "GroupQueryAttention",
        attributes: &attributes,
        inputs: &[
            tensor("q", Type::F32, &q_shape),
            tensor("k", Type::F32, &kv_shape),
            tensor("v", Type::F32, &kv_shape),
            none.clone(),
            none,
            tensor("last", Type::I32, &[batch]),
            tensor("total", Type::I32, &[]),
        ],
        output: &tensor("y", Type::F32, &q_shape),
    };
    let float = |data: &[f32], heads, shape: [usize; 3]| Input::Float {
        shape: shape.to_vec(),
        data: transposed(data, [batch, heads, q_len, head_dim]),
    };
    let int = |shape: &[usize], data| Input::Int(RtenTensor::from_data(shape, data));
    let inputs = vec![
        ("q", float(&q, heads, q_shape)),
        ("k", float(&k, kv_heads, kv_shape)),
        ("v", float(&v, kv_heads, kv_shape)),
        ("last", int(&[batch], vec![q_len as i32 - 1; batch])),
        ("total", int(&[], vec![q_len as i32])),
    ];
    (node.model(), inputs)
}

impl Peer<Case> for Rten {
    fn name(&self) -> &'static str {
        "rten"
    }

    fn supports(&self, case: &Case) -> std::result::Result<(), String> {
        match case.window {
            Some(_) if case.head_dim != case.value_dim => {
                Err("no window where head_dim and value_dim differ".to_owned())
            }
            _ => Ok(()),
        }
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        // The last one's memory goes first.
        self.ready = None;
        let qkv = case.read()?;
        let (bytes, inputs) = match case.window {
            None => attention(case, qkv),
            Some(window) => windowed(case, window, qkv),
        };
        let model = Model::load(bytes)?;
        let inputs = inputs.into_iter().map(|(name, input)| Ok((model.node_id(name)?, input)));
        let pool = ThreadPool::with_num_threads(case.threads);
        self.ready = Some(Ready {
            inputs: inputs.collect::<Result<_>>()?,
            output: model.node_id("y")?,
            options: RunOptions::default().with_thread_pool(Some(Arc::new(pool))),
            answer: None,
            packed: case.window.map(|_| [case.batch, case.q_len, case.heads, case.value_dim]),
            model,
        });
        let operator =
            if case.window.is_some() { "com.microsoft GroupQueryAttention" } else { "Attention of opset 23" };
        Ok(format!("a model of one node, {operator}"))
    }

    fn run(&mut self) -> Result<()> {
        let ready = self.ready.as_mut().ok_or("not prepared")?;
        let inputs = ready.inputs.iter().map(|(id, input)| (*id, input.view())).collect();
        let [answer] = ready.model.run_n(inputs, [ready.output], Some(ready.options.clone()))?;
        ready.answer = Some(answer);
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        let ready = self.ready.as_ref().ok_or("not prepared")?;
        let Some(Value::FloatTensor(answer)) = &ready.answer else { return Err("no answer".into()) };
        let data = answer.to_vec();
        Ok(ready.packed.map_or_else(|| data.clone(), |shape| transposed(&data, shape)))
    }
}
