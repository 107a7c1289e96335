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

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_flex::{Flex, FlexTensor};
use burn_tensor::{Device, Tensor, TensorData};
use sdpa_burn::sdpa::{self, Attention, Inputs, Mods, Outputs, Position, Run, Saved, ScoreMod, View, ViewMut};
use std::sync::Arc;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const HEADS: usize = 2;
const ROWS: usize = 64;
const DIM: usize = 16;
/// Entries of a head's table: keys that are this far or farther on either side share the outermost.
const FARTHEST: isize = 8;
const BUCKETS: usize = 2 * FARTHEST as usize + 1;
const STEPS: usize = 1000;
const LEARNING_RATE: f32 = 0.1;
/// Share of a step that the next goes on with.
const MOMENTUM: f32 = 0.9;
const SHAPE: [usize; 4] = [1, HEADS, ROWS, DIM];
const LSE: [usize; 3] = [1, HEADS, ROWS];

fn main() -> Result<()> {
    let numbers = |seed: usize, n: usize| (0..n).map(move |i| (1.7 * (i * (seed + 2) + seed) as f32).sin()).collect();
    let data = Arc::new(Data { q: numbers(1, HEADS * ROWS * DIM), k: numbers(2, HEADS * ROWS * DIM), v: values() });
    // The same number more for all keys of a head changes no weight, so both tables have a mean of 0.
    let of_numbers = TensorData::new(numbers(4, HEADS * BUCKETS), [HEADS, BUCKETS]);
    let hidden = centred(Tensor::from_data(of_numbers, &Device::default()));
    let wanted = data.attention(hidden.clone().autodiff())?.detach();

    let mut table = Tensor::<2>::zeros([HEADS, BUCKETS], &Device::default());
    let mut step_before = table.zeros_like();
    let distance = |table: &Tensor<2>| (centred(table.clone()) - hidden.clone()).abs().max().into_scalar::<f32>();
    println!(" step         loss   farthest entry from the hidden table");
    let (mut first, mut last) = (None, f32::INFINITY);
    for step in 0..=STEPS {
        let leaf = table.clone().autodiff().require_grad();
        let loss = (data.attention(leaf.clone())? - wanted.clone()).powf_scalar(2.0).sum();
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

/// Values that tell keys apart: each stands out in a few of its numbers.
fn values() -> Vec<f32> {
    (0..HEADS * ROWS * DIM).map(|i| ((i / DIM * (i % DIM + 1)) as f32 * 0.37).sin()).collect()
}

/// Returns a table with the mean of each head taken out.
fn centred(table: Tensor<2>) -> Tensor<2> {
    table.clone() - table.mean_dim(1)
}

/// Queries, keys and values, `[1, heads, rows, dim]`.
#[derive(Debug)]
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Data {
    /// Computes attention with a table `[heads, buckets]` that has autodiff, and records the step back if it is tracked.
    fn attention(self: &Arc<Self>, table: Tensor<2>) -> Result<Tensor<4>> {
        let table = table.try_into_primitive::<Autodiff<Flex>>().map_err(|e| format!("{e:?}"))?;
        let step = Backward::<Flex, 1>::prepare::<NoCheckpointing>(WithBias, [table.node()]);
        let table = table.primitive().storage::<f32>().to_vec();
        let (out, lse) = self.forward(&table)?;
        let out = tensor(out, SHAPE);
        Ok(Tensor::from_primitive::<Autodiff<Flex>>(match step.compute_bound().stateful() {
            OpsKind::UnTracked(prepared) => prepared.finish(out),
            OpsKind::Tracked(prepared) => {
                let saved = OfForward { data: self.clone(), table, out: out.clone(), lse };
                prepared.finish(saved, out)
            }
        }))
    }

    fn inputs(&self) -> Result<Inputs<'_>> {
        Ok(Inputs::new(View::bhld(&self.q, SHAPE)?, View::bhld(&self.k, SHAPE)?, View::bhld(&self.v, SHAPE)?))
    }

    /// Computes the output and its log-sum-exp.
    fn forward(&self, table: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let mods = Mods::new().score(RelativeBias(table));
        let (mut out, mut lse) = (vec![0.0; HEADS * ROWS * DIM], vec![0.0; HEADS * ROWS]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, SHAPE)?).lse(ViewMut::bhl(&mut lse, LSE)?);
        sdpa::attention_with(&Attention::new(), self.inputs()?, outputs, Run::new().mods(&mods))?;
        Ok((out, lse))
    }
}

/// Inputs and results of the forward call that the step back needs.
#[derive(Debug, Clone)]
struct OfForward {
    data: Arc<Data>,
    table: Vec<f32>,
    out: FlexTensor,
    lse: Vec<f32>,
}

impl OfForward {
    /// Computes the gradient in the table from that of the output.
    fn gradient(&self, d_out: &FlexTensor) -> Result<Vec<f32>> {
        let (out, d_out) = (self.out.storage::<f32>(), d_out.to_contiguous());
        let d_out = View::bhld(d_out.storage::<f32>(), SHAPE)?;
        let saved = Saved::new(View::bhld(out, SHAPE)?, View::bhl(&self.lse, LSE)?, d_out);
        let mods = Mods::new().score(RelativeBias(&self.table));
        let mut d_table = vec![0.0; self.table.len()];
        let gradients = sdpa::Gradients::new().parameters(&mut d_table);
        let run = Run::new().mods(&mods);
        sdpa::attention_backward_with(&Attention::new(), self.data.inputs()?, saved, gradients, run)?;
        Ok(d_table)
    }
}

/// Step back through attention, to the table.
#[derive(Debug)]
struct WithBias;

impl Backward<Flex, 1> for WithBias {
    type State = OfForward;

    fn backward(self, ops: Ops<OfForward, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let d_out = gradients.consume::<Flex>(&ops.node);
        let [Some(table)] = ops.parents else { return };
        let d_table = ops.state.gradient(&d_out).unwrap_or_else(|e| panic!("gradient in the table: {e}"));
        gradients.register::<Flex>(table.id, tensor(d_table, [HEADS, BUCKETS]));
    }
}

fn tensor<const D: usize>(numbers: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(numbers, shape))
}

/// Score function that adds an entry of a table `[heads, buckets]`.
struct RelativeBias<'a>(&'a [f32]);

impl RelativeBias<'_> {
    fn entry(at: Position) -> usize {
        at.head * BUCKETS + (at.distance.clamp(-FARTHEST, FARTHEST) + FARTHEST) as usize
    }
}

impl ScoreMod for RelativeBias<'_> {
    fn score(&self, score: f32, at: Position) -> f32 {
        score + self.0[Self::entry(at)]
    }

    fn derivative(&self, _: f32, _: Position) -> Option<f32> {
        Some(1.0)
    }

    fn parameters(&self) -> usize {
        self.0.len()
    }

    fn parameter_derivatives(&self, _: f32, at: Position, add: &mut dyn FnMut(usize, f32)) {
        add(Self::entry(at), 1.0);
    }
}
