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

#[path = "../../relative_bias.rs"]
mod relative_bias;

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor, Var, bail};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use relative_bias::{Attended, BUCKETS, Data, HEADS, SHAPE, numbers};
use sdpa_candle::sdpa;
use std::sync::{Arc, OnceLock};

const STEPS: usize = 1000;

fn main() -> Result<()> {
    let data = Arc::new(Data::new());
    // The same number more for all keys of a head changes no weight, so both tables have a mean of 0.
    let hidden = centred(&Tensor::from_vec(numbers(4, HEADS * BUCKETS), (HEADS, BUCKETS), &Device::Cpu)?)?;
    let wanted = attention(&data, &hidden)?;

    let table = Var::zeros((HEADS, BUCKETS), hidden.dtype(), &Device::Cpu)?;
    let of_training = ParamsAdamW { lr: 0.03, weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(vec![table.clone()], of_training)?;
    let distance = |table: &Tensor| -> Result<f32> { (centred(table)? - &hidden)?.abs()?.max_all()?.to_scalar() };
    println!(" step         loss   farthest entry from the hidden table");
    let (mut first, mut last) = (None, f32::INFINITY);
    for step in 0..=STEPS {
        let loss = (attention(&data, &table)? - &wanted)?.sqr()?.mean_all()?;
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

/// Returns a table with the mean of each head taken out.
fn centred(table: &Tensor) -> Result<Tensor> {
    table.broadcast_sub(&table.mean_keepdim(1)?)
}

/// Computes attention with a table `[heads, buckets]`; candle's `backward` has a part in its gradient.
fn attention(data: &Arc<Data>, table: &Tensor) -> Result<Tensor> {
    table.apply_op1(WithBias { data: data.clone(), attended: OnceLock::new() })
}

/// Attention as an operation on its table.
struct WithBias {
    data: Arc<Data>,
    /// Results of the forward call, which the step back needs.
    attended: OnceLock<Attended>,
}

impl CustomOp1 for WithBias {
    fn name(&self) -> &'static str {
        "attention with a relative bias"
    }

    fn cpu_fwd(&self, table: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (CpuStorage::F32(table), Some((start, end))) = (table, layout.contiguous_offsets()) else {
            bail!("the table must be contiguous f32")
        };
        let attended = self.data.attention(&table[start..end]).map_err(refused)?;
        let out = attended.out.clone();
        // Candle calls an operation once: there is nothing set yet.
        let _ = self.attended.set(attended);
        Ok((CpuStorage::F32(out), SHAPE.to_vec().into()))
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        let Some(attended) = self.attended.get() else { bail!("backward without a forward call on the CPU") };
        let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let d_table = self.data.gradient(&flat(table)?, attended, &flat(d_out)?).map_err(refused)?;
        Ok(Some(Tensor::from_vec(d_table, table.shape(), table.device())?))
    }
}

fn refused(e: sdpa::Error) -> candle_core::Error {
    candle_core::Error::wrap(e)
}
