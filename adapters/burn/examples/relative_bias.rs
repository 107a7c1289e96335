//! Learns a relative bias, as T5 has one: a table of numbers, by head and by how far a key is from the row, that are added to scores.
//!
//! The table is a tensor with burn's autodiff. Attention with it is an operation with one parent; its step back asks sdpa for the
//! gradients in what the score function captures. A hidden table makes the outputs; from queries, keys, values and outputs alone it
//! is found again.
//!
//! ```text
//! cargo run --release --example relative_bias
//! ```
//!
//! Queries, keys and values are constants here. Where they are learned too, such an operation has them as parents and registers
//! their gradients beside the table's: `src/gradients.rs`, which this adapter's own operation is in.

#[path = "../../relative_bias.rs"]
mod relative_bias;

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_flex::{Flex, FlexTensor};
use burn_tensor::{Device, Tensor, TensorData};
use relative_bias::{Attended, BUCKETS, Data, HEADS, SHAPE, numbers};
use std::sync::Arc;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const STEPS: usize = 1000;
const LEARNING_RATE: f32 = 0.1;
/// Share of a step that the next goes on with.
const MOMENTUM: f32 = 0.9;

fn main() -> Result<()> {
    let data = Arc::new(Data::new());
    // The same number more for all keys of a head changes no weight, so both tables have a mean of 0.
    let of_numbers = TensorData::new(numbers(4, HEADS * BUCKETS), [HEADS, BUCKETS]);
    let hidden = centred(Tensor::from_data(of_numbers, &Device::default()));
    let wanted = attention(&data, hidden.clone().autodiff())?.detach();

    let mut table = Tensor::<2>::zeros([HEADS, BUCKETS], &Device::default());
    let mut step_before = table.zeros_like();
    let distance = |table: &Tensor<2>| (centred(table.clone()) - hidden.clone()).abs().max().into_scalar::<f32>();
    println!(" step         loss   farthest entry from the hidden table");
    let (mut first, mut last) = (None, f32::INFINITY);
    for step in 0..=STEPS {
        let leaf = table.clone().autodiff().require_grad();
        let loss = (attention(&data, leaf.clone())? - wanted.clone()).powf_scalar(2.0).sum();
        last = loss.clone().into_scalar::<f32>();
        first.get_or_insert(last);
        if step % 200 == 0 {
            println!("{step:>5}   {last:>10.2e}   {:.4}", distance(&table));
        }
        let gradient = leaf.grad(&loss.backward()).ok_or("the table has no gradient")?;
        step_before = step_before * MOMENTUM - gradient * LEARNING_RATE;
        table = table + step_before.clone();
    }
    let (first, off) = (first.unwrap_or(f32::NAN), distance(&table));
    for (name, table) in [("hidden", hidden), ("learned", centred(table))] {
        println!("head 0, {name}: {:.2?}", table.narrow(0, 0, 1).into_data().try_to_vec::<f32>()?);
    }
    if last.is_nan() || last > 1e-3 * first || off > 0.05 {
        return Err(format!("the loss went from {first:e} to {last:e}, and the table is {off} off").into());
    }
    Ok(())
}

/// Returns a table with the mean of each head taken out.
fn centred(table: Tensor<2>) -> Tensor<2> {
    table.clone() - table.mean_dim(1)
}

/// Computes attention with a table `[heads, buckets]` that has autodiff, and records the step back if it is tracked.
fn attention(data: &Arc<Data>, table: Tensor<2>) -> Result<Tensor<4>> {
    let table = table.try_into_primitive::<Autodiff<Flex>>().map_err(|e| format!("{e:?}"))?;
    let step = Backward::<Flex, 1>::prepare::<NoCheckpointing>(WithBias, [table.node()]);
    let table = table.primitive().storage::<f32>().to_vec();
    let attended = data.attention(&table)?;
    let out = tensor(attended.out.clone(), SHAPE);
    Ok(Tensor::from_primitive::<Autodiff<Flex>>(match step.compute_bound().stateful() {
        OpsKind::UnTracked(prepared) => prepared.finish(out),
        OpsKind::Tracked(prepared) => prepared.finish(OfForward { data: data.clone(), table, attended }, out),
    }))
}

/// Inputs and results of the forward call, which the step back needs.
#[derive(Debug, Clone)]
struct OfForward {
    data: Arc<Data>,
    table: Vec<f32>,
    attended: Attended,
}

/// Step back through attention, to the table.
#[derive(Debug)]
struct WithBias;

impl Backward<Flex, 1> for WithBias {
    type State = OfForward;

    fn backward(self, ops: Ops<OfForward, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let d_out = gradients.consume::<Flex>(&ops.node).to_contiguous();
        let [Some(parent)] = ops.parents else { return };
        let OfForward { data, table, attended } = ops.state;
        let d_table = data.gradient(&table, &attended, d_out.storage());
        let d_table = d_table.unwrap_or_else(|e| panic!("gradient in the table: {e}"));
        gradients.register::<Flex>(parent.id, tensor(d_table, [HEADS, BUCKETS]));
    }
}

fn tensor<const D: usize>(numbers: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(numbers, shape))
}
