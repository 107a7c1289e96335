//! Learns a relative bias, as T5 has one: a table of numbers, by head and by how far a key is from the row, that are added to scores.
//!
//! The table is a variable of candle. Attention with it is an operation of one argument; its step back asks sdpa for the gradients in
//! what the score function captures. A hidden table makes the outputs; from queries, keys, values and outputs alone it is found again.
//!
//! ```text
//! cargo run --release --example relative_bias
//! ```
//!
//! Queries, keys and values are constants here. Where they are learned too, such an operation takes them as arguments and writes
//! their gradients beside the table's: `src/attend.rs`, which this adapter's own operation is in.

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor, Var, bail};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use sdpa_candle::Attention;
use sdpa_candle::sdpa::{self, Gradients, Inputs, Mods, Outputs, Position, Run, Saved, ScoreMod, View, ViewMut};
use std::sync::{Arc, OnceLock};

const HEADS: usize = 2;
const ROWS: usize = 64;
const DIM: usize = 16;
/// Entries of a head's table, half of them for keys behind the row.
const BUCKETS: usize = 16;
/// Distance from which on all keys share a bucket.
const FARTHEST: f32 = 32.0;
const STEPS: usize = 1000;
const SHAPE: [usize; 4] = [1, HEADS, ROWS, DIM];
const LSE: [usize; 3] = [1, HEADS, ROWS];

fn main() -> Result<()> {
    let numbers = |seed: usize, n: usize| (0..n).map(move |i| (1.7 * (i * (seed + 2) + seed) as f32).sin()).collect();
    let data = Arc::new(Data { q: numbers(1, HEADS * ROWS * DIM), k: numbers(2, HEADS * ROWS * DIM), v: values() });
    // The same number more for all keys of a head changes no weight, so both tables have a mean of 0.
    let hidden = centred(&Tensor::from_vec(numbers(4, HEADS * BUCKETS), (HEADS, BUCKETS), &Device::Cpu)?)?;
    let wanted = data.attention(&hidden)?;

    let table = Var::zeros((HEADS, BUCKETS), hidden.dtype(), &Device::Cpu)?;
    let of_training = ParamsAdamW { lr: 0.03, weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(vec![table.clone()], of_training)?;
    let distance = |table: &Tensor| -> Result<f32> { (centred(table)? - &hidden)?.abs()?.max_all()?.to_scalar() };
    println!(" step         loss   farthest entry from the hidden table");
    let (mut first, mut last) = (None, f32::INFINITY);
    for step in 0..=STEPS {
        let loss = (data.attention(&table)? - &wanted)?.sqr()?.mean_all()?;
        last = loss.to_scalar()?;
        first.get_or_insert(last);
        if step % 200 == 0 {
            println!("{step:>5}   {last:>10.2e}   {:.4}", distance(&table)?);
        }
        optimizer.backward_step(&loss)?;
    }
    let (first, off) = (first.unwrap_or(f32::NAN), distance(&table)?);
    println!("head 0, hidden:  {:.2?}", hidden.get(0)?.to_vec1::<f32>()?);
    println!("head 0, learned: {:.2?}", centred(&table)?.get(0)?.to_vec1::<f32>()?);
    if last.is_nan() || last > 1e-3 * first || off > 0.05 {
        bail!("the loss went from {first:e} to {last:e}, and the table is {off} off");
    }
    Ok(())
}

/// Values that tell keys apart: each stands out in a few of its numbers.
fn values() -> Vec<f32> {
    (0..HEADS * ROWS * DIM).map(|i| ((i / DIM * (i % DIM + 1)) as f32 * 0.37).sin()).collect()
}

/// Returns a table with the mean of each head taken out.
fn centred(table: &Tensor) -> Result<Tensor> {
    table.broadcast_sub(&table.mean_keepdim(1)?)
}

/// Queries, keys and values, `[1, heads, rows, dim]`.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Data {
    /// Computes attention with a table `[heads, buckets]`, in whose gradient candle's `backward` has a part.
    fn attention(self: &Arc<Self>, table: &Tensor) -> Result<Tensor> {
        table.apply_op1(WithBias { data: self.clone(), lse: OnceLock::new() })
    }

    fn inputs(&self) -> Result<Inputs<'_>> {
        let view = |x| View::bhld(x, SHAPE).map_err(refused);
        Ok(Inputs::new(view(&self.q)?, view(&self.k)?, view(&self.v)?))
    }
}

/// Attention as an operation on its table.
struct WithBias {
    data: Arc<Data>,
    /// Log-sum-exp of the forward call, which the step back needs.
    lse: OnceLock<Vec<f32>>,
}

impl CustomOp1 for WithBias {
    fn name(&self) -> &'static str {
        "attention with a relative bias"
    }

    fn cpu_fwd(&self, table: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (CpuStorage::F32(table), Some((start, end))) = (table, layout.contiguous_offsets()) else {
            bail!("the table must be contiguous f32")
        };
        let mods = Mods::new().score(RelativeBias(&table[start..end]));
        let (mut out, mut lse) = (vec![0.0; HEADS * ROWS * DIM], vec![0.0; HEADS * ROWS]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, SHAPE).map_err(refused)?);
        let outputs = outputs.lse(ViewMut::bhl(&mut lse, LSE).map_err(refused)?);
        sdpa::attention_with(&Attention::new(), self.data.inputs()?, outputs, Run::new().mods(&mods))
            .map_err(refused)?;
        // Candle calls an operation once: there is nothing set yet.
        let _ = self.lse.set(lse);
        Ok((CpuStorage::F32(out), SHAPE.to_vec().into()))
    }

    fn bwd(&self, table: &Tensor, out: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        let Some(lse) = self.lse.get() else { bail!("backward without a forward call on the CPU") };
        let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let (numbers, out, d_out) = (flat(table)?, flat(out)?, flat(d_out)?);
        let view = |x| View::bhld(x, SHAPE).map_err(refused);
        let saved = Saved::new(view(&out)?, View::bhl(lse, LSE).map_err(refused)?, view(&d_out)?);
        let mods = Mods::new().score(RelativeBias(&numbers));
        let mut d_table = vec![0.0; numbers.len()];
        let gradients = Gradients::new().parameters(&mut d_table);
        let (attention, run) = (Attention::new(), Run::new().mods(&mods));
        sdpa::attention_backward_with(&attention, self.data.inputs()?, saved, gradients, run).map_err(refused)?;
        Ok(Some(Tensor::from_vec(d_table, table.shape(), table.device())?))
    }
}

fn refused(e: impl Into<sdpa::Error>) -> candle_core::Error {
    candle_core::Error::wrap(e.into())
}

/// Score function that adds an entry of a table `[heads, buckets]`.
struct RelativeBias<'a>(&'a [f32]);

impl RelativeBias<'_> {
    fn entry(at: Position) -> usize {
        at.head * BUCKETS + bucket(at.distance)
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

/// Bucket of a distance: of its own while it is small, then shared by distances of about the same logarithm (Raffel and others 2020,
/// arXiv:1910.10683). Keys after the row have the second half, from distance 1 on.
fn bucket(distance: isize) -> usize {
    let of_side = BUCKETS / 2;
    let (first, far) = if distance < 0 { (of_side, distance.unsigned_abs() - 1) } else { (0, distance.unsigned_abs()) };
    let exact = of_side / 2;
    let shared = || {
        let share = (far as f32 / exact as f32).ln() / (FARTHEST / exact as f32).ln();
        (exact + (share * (of_side - exact) as f32) as usize).min(of_side - 1)
    };
    first + if far < exact { far } else { shared() }
}
