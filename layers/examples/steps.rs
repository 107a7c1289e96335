//! The steps of self-attention, one by one: scores, weights, output, and what order means to them.
//!
//! ```text
//! cargo run --release -p sdpa-layers --example steps
//! ```

#[path = "../../examples/arguments/mod.rs"]
mod arguments;
#[path = "../../examples/fixtures/mod.rs"]
mod fixtures;

use arguments::{Output, Program};
use fixtures::{HEAD_DIM, HEADS, Layer, WIDTH, sentence, words};
use sdpa::{Attention, Error, Inputs, Outputs, View, ViewMut};
use sdpa_layers::{Compute, Steps};
use std::process::ExitCode;

/// Of the model's first layer, a head that looks for what belongs together.
const HEAD: usize = 4;

fn main() -> ExitCode {
    let about = "Prints the steps of self-attention, one by one.";
    Program { name: "steps", about, flags: &[], output: Output::Text }.run(|_| Ok(run()?))
}

fn run() -> Result<(), Error> {
    let mut compute = Compute::default();
    let sentence = sentence("minilm_sauerkraut");
    let (layer, tokens) = (&sentence.layers[0], &sentence.tokens);
    let steps = Steps::new(&Attention::new(), layer.attends()?, &mut compute)?;

    println!("{:?}, all-MiniLM-L6-v2, layer 0, head {HEAD}.\n", sentence.text);
    println!("Weights, {0} × {0}; rows are queries, columns keys:\n", tokens.len());
    print!("{:8}", "");
    tokens.iter().for_each(|token| print!("{token:>7}"));
    println!("{:>9}", "sum");
    for (i, token) in tokens.iter().enumerate() {
        let row = steps.row(HEAD, i).expect("a row for each token");
        print!("{token:>8}");
        row.weights.iter().for_each(|weight| print!("{weight:7.3}"));
        println!("{:9.6}", row.weights.iter().sum::<f32>());
    }

    let fish = steps.row(HEAD, 9).expect("a row for each token");
    println!("\nThe way of \"fish\":");
    println!("  scores  q·k / √{HEAD_DIM}     {}", some(fish.scores));
    println!("  weights softmax         {}", some(fish.weights));
    println!("  output  Σ weight·value  {}", some(fish.output));

    let mut fused = vec![0.0; steps.output().len()];
    let shape = [1, HEADS, tokens.len(), HEAD_DIM];
    sdpa::attention(&Attention::new(), layer.attends()?, Outputs::new(ViewMut::bhld(&mut fused, shape)?))?;
    let differ = fused.iter().zip(steps.output()).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    println!("\nThe fused call, which writes neither scores nor weights, gives the same output:");
    println!("  numbers with other bits: {differ} of {}", fused.len());
    assert_eq!(differ, 0, "these are the steps of the fused call");
    let model = layer.context.iter().zip(steps.output()).map(|(a, &b)| (a - f64::from(b)).abs()).fold(0.0, f64::max);
    println!("  largest difference from the model's answer in f64: {model:.1e}");

    permuted(layer, &steps, &mut compute)?;
    positions(&mut compute)
}

/// Attention has no order: keys may be moved if their values go with them.
fn permuted(layer: &Layer, steps: &Steps, compute: &mut Compute) -> Result<(), Error> {
    let rows = layer.k.len() / WIDTH;
    // Last key first, in every head.
    let turned = |x: &[f32]| -> Vec<f32> {
        let heads = x.chunks(rows * HEAD_DIM);
        heads.flat_map(|head| head.chunks(HEAD_DIM).rev().flatten().copied().collect::<Vec<_>>()).collect()
    };
    let (k, v) = (turned(&layer.k), turned(&layer.v));
    let (q, k, v, fixed_v) =
        (fixtures::heads(&layer.q)?, fixtures::heads(&k)?, fixtures::heads(&v)?, fixtures::heads(&layer.v)?);
    let both = Steps::new(&Attention::new(), Inputs::new(q, k, v), compute)?;
    let alone = Steps::new(&Attention::new(), Inputs::new(q, k, fixed_v), compute)?;
    println!("\nKeys in reverse, largest change of the output:");
    println!("  their values with them  {:.1e}  (sums in another order)", change(both.output(), steps.output()));
    println!("  keys alone              {:.1e}", change(alone.output(), steps.output()));
    Ok(())
}

/// Which is why positions are added to the tokens.
fn positions(compute: &mut Compute) -> Result<(), Error> {
    let (words, text) = (words(), ["big", "fish", "eat", "small", "fish"]);
    let plain: Vec<f32> = text.iter().flat_map(|word| words.vector(word).to_vec()).collect();
    // Word vectors have length 1, so numbers of about 1/20; a sinusoid of that size.
    let encoding = sinusoid(text.len());
    let placed: Vec<f32> = plain.iter().zip(encoding).map(|(x, p)| x + 0.05 * p).collect();
    println!("\n{:?}, each word attending to all. The rows of \"fish\" and \"fish\":", text.join(" "));
    for (what, x) in [("words alone", &plain), ("positions added", &placed)] {
        let x = View::bhld(x, [1, 1, text.len(), WIDTH])?;
        // Vectors this short want a larger scale than 1/√384.
        let steps = Steps::new(&Attention::new().scale(5.0), Inputs::new(x, x, x), compute)?;
        let rows = [1, 4].map(|i| steps.row(0, i).expect("five rows"));
        let same = if rows[0] == rows[1] { "the same, to the bit" } else { "differ" };
        println!("  {what:<16} {}   {}   {same}", some(rows[0].weights), some(rows[1].weights));
    }
    Ok(())
}

/// sin and cos of the position over wavelengths from 2π to 20,000π, as in "Attention is all you need", 3.5.
fn sinusoid(rows: usize) -> impl Iterator<Item = f32> {
    (0..rows).flat_map(|row| {
        (0..WIDTH).map(move |i| {
            let angle = row as f32 / 10_000f32.powf((i / 2 * 2) as f32 / WIDTH as f32);
            if i % 2 == 0 { angle.sin() } else { angle.cos() }
        })
    })
}

fn change(got: &[f32], from: &[f32]) -> f32 {
    got.iter().zip(from).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The first few numbers.
fn some(xs: &[f32]) -> String {
    let shown: Vec<String> = xs.iter().take(5).map(|x| format!("{x:6.3}")).collect();
    shown.join(" ") + if xs.len() > 5 { " …" } else { "" }
}
