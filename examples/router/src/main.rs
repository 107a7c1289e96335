//! Time and memory of a router's attention function: candle's plain products, the loop over blocks of rows, and sdpa. One text
//! of 2,048 and of 8,192 tokens, 12 heads of 64 in `f32`; every row sees all keys, or those within 64 of its position.
//!
//! All cases run in turns, shuffled. Printed are the median of each, the median of its turns' times over sdpa's, and the
//! most memory in use at once above the inputs, with the output and without it. Exits with 1 if answers differ.
//!
//! `cargo run --release [-- --turns 5 | --quick]`; plain products of 8,192 tokens take 6.5 GB.

#[path = "../../../benches/support/interleaved.rs"]
mod interleaved;
mod peak;

use candle_core::{Device, Result, Tensor};
use interleaved::{median, random, shuffled};
use router::{Options, Softmax, chunked_sdpa, plain, tiled};
use std::hint::black_box;
use std::process::ExitCode;

const HEADS: usize = 12;
const DIM: usize = 64;
/// Tokens on either side.
const WINDOW: usize = 64;
/// Query rows of a block of the loop.
const BLOCK: usize = 512;
/// Largest difference of two answers, which are means of normal numbers.
const BOUND: f32 = 1e-5;

type Path = (&'static str, fn(&[Tensor; 3], &Options) -> Result<Tensor>);

/// sdpa is the last.
const PATHS: [Path; 4] = [
    ("candle's products", |[q, k, v], options| plain(q, k, v, None, options)),
    ("loop over blocks", |[q, k, v], options| tiled(q, k, v, None, options, Softmax::Composed)),
    ("loop, fused softmax", |[q, k, v], options| tiled(q, k, v, None, options, Softmax::Fused)),
    ("sdpa", |[q, k, v], options| chunked_sdpa(q, k, v, None, options)),
];

fn main() -> Result<ExitCode> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let (lengths, turns) = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => ([2048, 8192], 5),
        ["--quick"] => ([200, 600], 1),
        ["--turns", turns] => ([2048, 8192], turns.parse().map_err(candle_core::Error::wrap)?),
        other => candle_core::bail!("{other:?}: the arguments are --turns N, or --quick"),
    };
    println!("1 text, {HEADS} heads of {DIM}, f32, {} threads, {turns} turns", rayon::current_num_threads());
    let mut worst = 0f32;
    for tokens in lengths {
        for window in [None, Some(WINDOW)] {
            worst = worst.max(compare(tokens, window, turns)?);
        }
    }
    println!("answers differ by {worst:.1e}, bound {BOUND:e}");
    Ok(if worst <= BOUND { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs all paths and prints their time and memory. Returns the largest difference of an answer from sdpa's.
fn compare(tokens: usize, window: Option<usize>, turns: usize) -> Result<f32> {
    let options = Options { window, causal: false, scale: 1.0 / (DIM as f64).sqrt(), block_size: BLOCK, q_offset: 0 };
    let shape = (1, HEADS, tokens, DIM);
    let input = |seed| Tensor::from_vec(random(HEADS * tokens * DIM, seed), shape, &Device::Cpu);
    let inputs = [input(1)?, input(2)?, input(3)?];
    let (mut answers, mut memory) = (Vec::new(), Vec::new());
    for (_, path) in PATHS {
        // The first call makes the threads and their scratch.
        drop(path(&inputs, &options)?);
        let (answer, bytes) = peak::peak(|| path(&inputs, &options));
        answers.push(answer?);
        memory.push(bytes);
    }
    let ours = answers.last().expect("sdpa's");
    let difference = |answer: &Tensor| (answer - ours)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    let differences = answers.iter().map(difference).collect::<Result<Vec<_>>>()?;
    drop(answers);
    let mut cases = PATHS.map(|(_, path)| -> Box<dyn FnMut() + '_> {
        let (inputs, options) = (&inputs, &options);
        Box::new(move || drop(black_box(path(inputs, options).expect("ran before"))))
    });
    let seconds = shuffled(turns, &mut cases);
    let keys = window.map_or("all keys".to_owned(), |side| format!("keys within {side}"));
    println!("\n{tokens:>19} tokens, {keys}");
    let output = HEADS * tokens * DIM * size_of::<f32>();
    let last = PATHS.len() - 1;
    for (n, (name, _)) in PATHS.into_iter().enumerate() {
        let mut ratios: Vec<_> = seconds[n].iter().zip(&seconds[last]).map(|(path, ours)| path / ours).collect();
        let [all, beyond] = [memory[n], memory[n].saturating_sub(output)].map(|bytes| bytes as f64 / 1e6);
        println!(
            "{name:>19} {:9.1} ms, {:5.2} of sdpa's; {all:7.1} MB, {beyond:7.1} MB beside the output",
            1e3 * median(&mut seconds[n].clone()),
            median(&mut ratios),
        );
    }
    Ok(differences.into_iter().fold(0.0, |a, b| if b.is_nan() { f32::INFINITY } else { a.max(b) }))
}
