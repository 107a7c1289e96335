//! Learns to write, from nothing: a small GPT on lines of English that a grammar makes, letter by letter. It is held
//! against a bigram model on lines that neither has seen.
//!
//! ```text
//! cargo run --release --example write -- --train     # minutes; then `--continue` goes on from the checkpoint
//! cargo run --release --example write                # a few steps, to see that it works
//! ```

mod bigram;
#[path = "../translate/grammar/mod.rs"]
mod grammar;
mod model;
mod text;
#[path = "../training/mod.rs"]
mod training;

use bigram::Bigram;
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use model::Gpt;
use rand::SeedableRng;
use rand::rngs::StdRng;
use text::{Part, Text};
use training::pictures::Level;
use training::{Arguments, Batch, Extent, Result, Schedule, Trainer, export};

const SEED: u64 = 1;
/// Seed of held-out rows; those of training are numbered by step.
const HELD_OUT: u64 = u64::MAX;
/// Lines that are written at the end.
const SAMPLES: u64 = 3;

fn main() -> Result<()> {
    let about = "Learns to write English letter by letter, and is held against a bigram model.";
    let Some(arguments) = Arguments::read(about)? else { return Ok(()) };
    let (schedule, rows) = match arguments.extent {
        Extent::Trial => (Schedule { steps: 5, warmup: 2, peak: 2e-3 }, 2),
        Extent::Train | Extent::Continue => (Schedule { steps: 1000, warmup: 50, peak: 3e-3 }, 4),
    };
    let vars = VarMap::new();
    let model = Gpt::new(arguments.attend, &VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let mut trainer = Trainer::new(&vars, SEED)?;
    let folder = arguments.folder("write");
    let checkpoint = folder.join("checkpoint.safetensors");
    if arguments.extent == Extent::Continue {
        trainer.restore(&checkpoint)?;
    }
    let text = Text::new();
    let keep = (arguments.extent != Extent::Trial).then_some(&*checkpoint);
    let speed = trainer.run(schedule, arguments.at_most, keep, |step| {
        let batch = text::tensor(&text.rows(Part::Training, step as u64, rows))?;
        Ok(Batch { loss: model.loss(&batch)?, tokens: rows * text::LENGTH })
    })?;
    let seconds = speed.time.as_secs_f64();
    println!("{} letters in {seconds:.1} s: {:.0} letters/s", speed.tokens, speed.tokens_per_second());

    if trainer.losses.len() < schedule.steps {
        println!("stopped after step {}; --continue goes on", trainer.losses.len());
        return Ok(());
    }

    if arguments.extent != Extent::Trial {
        let file = folder.join("letters.safetensors");
        let [heads, context] = [model::HEADS, text::LENGTH].map(|n| n.to_string());
        export(&file, &vars, &[("heads", heads), ("context", context)])?;
        println!("wrote {}, which the root's examples/serve reads", file.display());
    }

    // The bigram model counts all that the GPT has seen.
    let seen: Vec<_> = (0..schedule.steps as u64).flat_map(|step| text.rows(Part::Training, step, rows)).collect();
    let held_out = text.rows(Part::HeldOut, HELD_OUT, 2 * rows);
    let bigram = Bigram::new(&seen).loss(&held_out);
    let loss = model.loss(&text::tensor(&held_out)?)?.to_scalar::<f32>()?;
    println!("Held-out lines, nats a letter: {loss:.3}; a bigram model: {bigram:.3}");
    let levels = [Level { name: "bigram model, held-out lines", y: bigram }];
    let note = "Small GPT on letters: cross-entropy of a batch";
    training::curve(&trainer.losses, &levels, &folder, "write-loss", note)?;
    for sample in 0..SAMPLES {
        let written = model.write(&[0], &mut StdRng::seed_from_u64(sample))?;
        println!("\nSample {}:{}", sample + 1, text::read(&written));
    }
    Ok(())
}
