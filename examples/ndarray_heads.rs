//! Attention on arrays of the crate ndarray: the heads of a real model, as its projections leave them, without copies.
//!
//! A projection gives `[tokens, heads · dim]`. Reshaped and permuted that is `[1, heads, tokens, dim]`, and the output lies
//! the same way, ready for the next projection. Queries, keys and values are those of all-MiniLM-L6-v2 for a sentence.
//!
//! ```text
//! cargo run --release --features ndarray --example ndarray_heads
//! ```

#[path = "arguments/mod.rs"]
mod arguments;
#[path = "fixtures/mod.rs"]
mod fixtures;

use arguments::{Given, Output, Program};
use fixtures::{HEAD_DIM, HEADS, WIDTH, sentence};
use ndarray::{Array2, Array4, ArrayView2, ArrayView4, ArrayViewMut2, ArrayViewMut4, Axis};
use sdpa::{Attention, Inputs, Outputs, View, ViewMut};
use std::error::Error;
use std::process::ExitCode;

/// Largest error of an output of size 1, in f32 against f64.
const BOUND: f64 = 1e-5;

fn main() -> ExitCode {
    let about = "Runs attention on arrays of the crate ndarray, without copies.";
    Program { name: "ndarray_heads", about, flags: &[], output: Output::Text }.run(run)
}

fn run(_: &Given) -> Result<(), Box<dyn Error>> {
    let sentence = sentence("minilm_park");
    let tokens = sentence.tokens.len();
    println!("{:?}: {tokens} tokens, {HEADS} heads of {HEAD_DIM}\n", sentence.text);
    println!("layer  strides of q       largest error against f64");
    for (n, layer) in sentence.layers.iter().enumerate() {
        let projected = [&layer.q, &layer.k, &layer.v].map(|data| projection(data, tokens));
        let [q, k, v] = projected.each_ref().map(|array| heads(array.view()));
        let mut context = Array2::zeros((tokens, WIDTH));

        let inputs = Inputs::new(View::try_from(q)?, View::try_from(k)?, View::try_from(v)?);
        let outputs = Outputs::new(ViewMut::try_from(heads_mut(context.view_mut()))?);
        sdpa::attention(&Attention::new(), inputs, outputs)?;

        let pairs = heads(context.view()).into_iter().zip(&layer.context);
        let error = pairs.fold(0.0, |most: f64, (&x, &exact)| most.max((f64::from(x) - exact).abs()));
        println!("{n:>5}  {:<18?} {error:.1e}", q.strides());
        if error > BOUND {
            return Err(format!("layer {n}: {error:e} is beyond {BOUND:e}").into());
        }
    }
    Ok(())
}

/// `[heads, tokens, dim]` as the projection before it left it: `[tokens, heads · dim]`.
fn projection(data: &[f32], tokens: usize) -> Array2<f32> {
    let heads = ArrayView4::from_shape((1, HEADS, tokens, HEAD_DIM), data).expect("a fixture's shape");
    let rows: Array4<f32> = heads.permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
    rows.into_shape_with_order((tokens, WIDTH)).expect("the same number of elements")
}

/// `[tokens, heads · dim]` as `[1, heads, tokens, dim]`.
fn heads(rows: ArrayView2<'_, f32>) -> ArrayView4<'_, f32> {
    let shape = (rows.nrows(), HEADS, HEAD_DIM);
    let split = rows.into_shape_with_order(shape).expect("the same number of elements");
    split.insert_axis(Axis(0)).permuted_axes([0, 2, 1, 3])
}

/// `[tokens, heads · dim]` as `[1, heads, tokens, dim]`.
fn heads_mut(rows: ArrayViewMut2<'_, f32>) -> ArrayViewMut4<'_, f32> {
    let shape = (rows.nrows(), HEADS, HEAD_DIM);
    let split = rows.into_shape_with_order(shape).expect("the same number of elements");
    split.insert_axis(Axis(0)).permuted_axes([0, 2, 1, 3])
}
