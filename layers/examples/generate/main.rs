//! Generation: a decoder takes a prompt in, then goes on token by token from its keys and values.
//!
//! First the two-layer GPT-2 and Llama under `tests/fixtures`, whose hidden states PyTorch has recorded: every step has the
//! bits of the whole sequence at once. Then larger ones with random weights: what a step costs, and what it reads.
//!
//! ```text
//! cargo run --release -p sdpa-layers --example generate              # a minute, 2 GB; pictures to target/pictures
//! cargo run --release -p sdpa-layers --example generate -- FOLDER
//! cargo run --release -p sdpa-layers --example generate -- --quick   # small decoders
//! ```

#[path = "../../../examples/arguments/mod.rs"]
mod arguments;
mod check;
mod decoders;
#[path = "../../../tests/support/fixture.rs"]
mod fixture;
#[path = "../../tests/support/models.rs"]
mod models;
#[path = "../../../examples/pictures/mod.rs"]
mod pictures;
mod speed;

use arguments::{Given, Output, Program};
use decoders::{Family, Size};
use fixture::Fixture;
use models::{Params, gpt2, llama};
use pictures::{Axis, Level, LineChart, Picture, Scale, Series, page, save};
use speed::{Measured, Memory, Step, measure};
use std::error::Error;
use std::process::ExitCode;

/// The model's own prompt: so many of its 17 tokens; the others follow one by one.
const PROMPT: usize = 8;

fn main() -> ExitCode {
    let about = "Generates token by token: every step has the bits of the whole sequence, and what it costs is drawn.";
    let flags = &[("--quick", "small decoders")];
    Program { name: "generate", about, flags, output: Output::Pictures }.run(|given| {
        // Steps are short. From within the pool, nobody has to be woken to begin one.
        Ok(rayon::scope(|_| run(given).map_err(|error| error.to_string()))?)
    })
}

fn run(given: &Given) -> Result<(), Box<dyn Error>> {
    let file = Fixture::open("torch_layers.safetensors", "SDPA_TORCH_LAYERS");
    check::run(&file, "gpt2", &gpt2(&Params::new(&file, "gpt2")), PROMPT)?;
    check::run(&file, "llama", &llama(&Params::new(&file, "llama")), PROMPT)?;

    let quick = given.has("--quick");
    let (sizes, pasts): (_, &[usize]) =
        if quick { (small(), &[64, 128, 256]) } else { (large(), &[128, 256, 512, 1024, 2048]) };
    let cache = if quick {
        "These decoders fit a cache, which is faster than memory."
    } else {
        "No cache holds these decoders."
    };
    println!("Random weights, one sequence, beside a plain read of memory on as many threads. {cache}\n");
    let memory = Memory::new(if quick { 16 << 20 } else { 64 << 20 });
    let measured = sizes.iter().map(|size| measure(size, pasts, &memory)).collect::<Result<Vec<_>, _>>()?;
    save(&picture(&measured), given.folder(), "generate")
}

fn large() -> [Size; 2] {
    let llama = Size { family: Family::Llama, layers: 8, heads: [32, 8], head_dim: 64, hidden: 5632 };
    [llama, Size { family: Family::Gpt2, heads: [32, 32], hidden: 8192, ..llama }]
}

fn small() -> [Size; 2] {
    let llama = Size { family: Family::Llama, layers: 2, heads: [8, 2], head_dim: 32, hidden: 704 };
    [llama, Size { family: Family::Gpt2, heads: [8, 8], hidden: 1024, ..llama }]
}

/// Tokens a second, and bytes, against the length of the past.
fn picture(measured: &[Measured]) -> Picture {
    let names: Vec<String> = measured.iter().map(|m| m.size.name()).collect();
    let points = |of: fn(&Step) -> f64| -> Vec<Vec<(f64, f64)>> {
        measured.iter().map(|m| m.steps.iter().map(|step| (step.past as f64, of(step))).collect()).collect()
    };
    let chart = |title, y, points: &[Vec<(f64, f64)>], levels: &[Level<'_>]| {
        let series: Vec<_> = names.iter().zip(points).map(|(name, points)| Series { name, points }).collect();
        let x = Axis { title: "tokens before", scale: Scale::Log2 };
        let y = Axis { title: y, scale: Scale::Linear };
        let chart = LineChart { title, x, y, series: &series, levels, size: (330.0, 240.0) };
        (chart.plot(), chart.legend())
    };
    let mut reads: Vec<f64> = measured.iter().flat_map(|m| &m.steps).map(|step| step.plain).collect();
    reads.sort_unstable_by(f64::total_cmp);
    let plain = [Level { name: "a plain read", y: reads[reads.len() / 2] / 1e9 }];
    let (tokens, legend) = chart("", "tokens a second", &points(|step| 1.0 / step.seconds), &[]);
    let (bytes, _) = chart("", "GB a second", &points(|step| step.bytes() / step.seconds / 1e9), &plain);
    let note = format!(
        "One sequence, f32, {}: each token reads every weight, and the keys and values of those before it",
        measured[0].size.shared()
    );
    page("A token from the cache", &note, 2, &[tokens, bytes], Some(legend))
}
