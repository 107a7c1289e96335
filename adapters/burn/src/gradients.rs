//! Attention as an operation of burn's autodiff: gradients in queries, keys, values and bias, by sdpa's backward pass.

use crate::error::Error;
use crate::operands::Operands;
use crate::views;
use burn_autodiff::Autodiff;
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn_backend::tensor::FloatTensor;
use burn_dispatch::{DispatchKindConversion, DispatchTensor, GradientCheckpointingStrategy};
use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor, TensorData, bf16, f16};
use sdpa::{Attention, Saved, TensorMut, View, ViewMut};

/// Tensor with burn's autodiff.
type Tracked = FloatTensor<Autodiff<Flex>>;

/// Computes attention on tensors with burn's autodiff (at least one has it), with the given strategy of its checkpoints.
pub(crate) fn attention_by(
    strategy: GradientCheckpointingStrategy,
    attention: &Attention,
    qkv: [Tensor<4>; 3],
    mask: Option<FlexTensor>,
    bias: Option<Tensor<4>>,
) -> Result<Tensor<4>, Error> {
    let tracked = |tensor: Tensor<4>| match tensor.gradient_checkpointing_strategy() {
        Some(_) => tensor,
        None => tensor.autodiff().with_gradient_checkpointing_strategy(strategy),
    };
    let (qkv, bias) = (qkv.map(tracked), bias.map(tracked));
    match strategy {
        GradientCheckpointingStrategy::Disabled => record::<NoCheckpointing>(attention, qkv, mask, bias),
        GradientCheckpointingStrategy::Balanced => record::<BalancedCheckpointing>(attention, qkv, mask, bias),
    }
}

/// Computes attention and, where a tensor is tracked, records the step back.
fn record<C: CheckpointStrategy>(
    attention: &Attention,
    [query, key, value]: [Tensor<4>; 3],
    mask: Option<FlexTensor>,
    bias: Option<Tensor<4>>,
) -> Result<Tensor<4>, Error>
where
    DispatchTensor: DispatchKindConversion<Autodiff<Flex, C>>,
{
    let float = |argument, tensor: Tensor<4>| {
        tensor.try_into_primitive::<Autodiff<Flex, C>>().map_err(|e| views::elsewhere(argument, e))
    };
    let qkv = [float("query", query)?, float("key", key)?, float("value", value)?];
    let nodes = qkv.each_ref().map(Tracked::node);
    let call = Call { attention: *attention, qkv, mask, bias: bias.map(|bias| float("attn_bias", bias)).transpose()? };
    let out = match &call.bias {
        None => call.record::<C, 3>(nodes),
        Some(bias) => {
            let [query, key, value] = nodes;
            call.record::<C, 4>([query, key, value, bias.node()])
        }
    };
    Ok(Tensor::from_primitive::<Autodiff<Flex, C>>(out?))
}

/// Settings and tensors of a call.
struct Call {
    attention: Attention,
    qkv: [Tracked; 3],
    mask: Option<FlexTensor>,
    bias: Option<Tracked>,
}

impl Call {
    /// Computes the call; `nodes` are those of its tensors, in the order of their gradients.
    fn record<C: CheckpointStrategy, const N: usize>(&self, nodes: [NodeGuard; N]) -> Result<Tracked, Error> {
        let [query, key, value] = self.qkv.each_ref().map(|tensor| tensor.primitive().clone());
        let bias = self.bias.as_ref().map(|bias| bias.primitive().clone());
        let operands = Operands { query, key, value, mask: self.mask.clone(), bias };
        Ok(match Backward::<Flex, N>::prepare::<C>(Step, nodes).compute_bound().stateful() {
            OpsKind::UnTracked(prepared) => prepared.finish(operands.attention(&self.attention, None)?),
            OpsKind::Tracked(mut prepared) => {
                let mut lse = Vec::new();
                let out = operands.attention(&self.attention, Some(&mut lse))?;
                let state = State {
                    attention: self.attention,
                    qkv: self.qkv.each_ref().map(|tensor| prepared.checkpoint(tensor)),
                    bias: self.bias.as_ref().map(|bias| prepared.checkpoint(bias)),
                    mask: operands.mask,
                    out: out.clone(),
                    lse,
                };
                prepared.finish(state, out)
            }
        })
    }
}

/// Results and inputs of the forward pass that the backward pass needs.
#[derive(Debug, Clone)]
struct State {
    attention: Attention,
    qkv: [NodeId; 3],
    bias: Option<NodeId>,
    mask: Option<FlexTensor>,
    out: FlexTensor,
    lse: Vec<f32>,
}

/// Step back through attention: parents are queries, keys, values and, if `N` is 4, the bias.
#[derive(Debug)]
struct Step;

impl<const N: usize> Backward<Flex, N> for Step {
    type State = State;

    /// # Panics
    /// If memory for the gradients is missing: the call itself was checked forward.
    fn backward(self, ops: Ops<State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let d_out = grads.consume::<Flex>(&ops.node);
        let State { attention, qkv, bias, mask, out, lse } = ops.state;
        let [query, key, value] = qkv.map(|node| checkpointer.retrieve_node_output::<FlexTensor>(node));
        let bias = bias.map(|node| checkpointer.retrieve_node_output::<FlexTensor>(node));
        let operands = Operands { query, key, value, mask, bias };
        let wanted = core::array::from_fn(|i| ops.parents.get(i).is_some_and(Option::is_some));
        let gradients = operands.gradients(&attention, [&out, &d_out], &lse, wanted);
        let gradients = gradients.unwrap_or_else(|e| panic!("gradients of attention: {e}"));
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(node.id, gradient);
            }
        }
    }
}

impl Operands {
    /// Computes those gradients in queries, keys, values and bias that are wanted, from the output, its gradient, and the
    /// log-sum-exp of the forward call.
    fn gradients(
        &self,
        attention: &Attention,
        [out, d_out]: [&FlexTensor; 2],
        lse: &[f32],
        wanted: [bool; 4],
    ) -> Result<[Option<FlexTensor>; 4], Error> {
        let inputs = self.inputs()?;
        let sdpa::Shape { batch, heads, q_len, .. } = inputs.shape()?;
        let lse = View::bhl(lse, [batch, heads, q_len])?;
        let saved = Saved::new(views::tensor("output", out)?, lse, views::tensor("gradient", d_out)?);
        let tensors = [Some(&self.query), Some(&self.key), Some(&self.value), self.bias.as_ref()];
        let mut gradients: [_; 4] = core::array::from_fn(|i| {
            let tensor = tensors[i].filter(|_| wanted[i])?;
            // Sums over what the bias is broadcast to are in `f32`.
            Some(Gradient::new(tensor.layout().shape().dims(), if i == 3 { DType::F32 } else { tensor.dtype() }))
        });
        let [dq, dk, dv, d_bias] = &mut gradients;
        let mut all = sdpa::Gradients::new();
        if let Some(dq) = dq {
            all = all.q(dq.view()?);
        }
        if let Some(dk) = dk {
            all = all.k(dk.view()?);
        }
        if let Some(dv) = dv {
            all = all.v(dv.view()?);
        }
        if let Some(Gradient { shape, elements: Elements::F32(elements) }) = d_bias {
            all = all.bias(ViewMut::bhld(elements, *shape)?);
        }
        sdpa::attention_backward(attention, inputs, saved, all)?;
        let mut gradients = gradients.into_iter().zip(tensors);
        Ok(core::array::from_fn(|_| {
            let (gradient, tensor) = gradients.next()?;
            Some(gradient?.cast(tensor?.dtype()).into_tensor())
        }))
    }
}

/// Dense gradient in a tensor.
struct Gradient {
    shape: [usize; 4],
    elements: Elements,
}

enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Gradient {
    /// Makes room for elements of a type.
    fn new(shape: [usize; 4], dtype: DType) -> Self {
        let n = shape.iter().product();
        let elements = match dtype {
            DType::BF16 => Elements::Bf16(vec![bf16::ZERO; n]),
            DType::F16 => Elements::F16(vec![f16::ZERO; n]),
            _ => Elements::F32(vec![0.0; n]),
        };
        Self { shape, elements }
    }

    fn view(&mut self) -> Result<TensorMut<'_>, Error> {
        let shape = self.shape;
        Ok(match &mut self.elements {
            Elements::F32(data) => ViewMut::bhld(data, shape)?.into(),
            Elements::Bf16(data) => ViewMut::bhld(data, shape)?.into(),
            Elements::F16(data) => ViewMut::bhld(data, shape)?.into(),
        })
    }

    /// Rounds elements of `f32` to a type.
    fn cast(self, dtype: DType) -> Self {
        let elements = match (self.elements, dtype) {
            (Elements::F32(data), DType::BF16) => Elements::Bf16(data.into_iter().map(bf16::from_f32).collect()),
            (Elements::F32(data), DType::F16) => Elements::F16(data.into_iter().map(f16::from_f32).collect()),
            (elements, _) => elements,
        };
        Self { elements, ..self }
    }

    fn into_tensor(self) -> FlexTensor {
        FlexTensor::from_data(match self.elements {
            Elements::F32(data) => TensorData::new(data, self.shape),
            Elements::Bf16(data) => TensorData::new(data, self.shape),
            Elements::F16(data) => TensorData::new(data, self.shape),
        })
    }
}
