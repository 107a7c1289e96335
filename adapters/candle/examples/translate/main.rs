//! Learns to translate from English to French, from nothing: an encoder, a decoder, and the cross-attention between them.
//! The corpus is made by a grammar, and a tenth of it held out.
//!
//! ```text
//! cargo run --release --example translate -- --train     # minutes; then `--continue` goes on from the checkpoint
//! cargo run --release --example translate                # a few steps, to see that it works
//! ```

mod corpus;
mod evaluate;
mod file;
mod grammar;
mod model;
#[path = "../training/mod.rs"]
mod training;
#[path = "../../../../layers/examples/translate/words.rs"]
mod words;

use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use corpus::Corpus;
use model::{Sizes, Translator};
use training::{Arguments, Batch, Extent, Result, Schedule, Trainer};

const SEED: u64 = 1;

/// Sizes of a course of training.
struct Course {
    schedule: Schedule,
    /// Pairs in a batch.
    pairs: usize,
    /// Held-out sentences and numbers that are translated at the end, at most.
    held_out: usize,
}

impl Course {
    fn of(extent: Extent) -> Self {
        match extent {
            Extent::Trial => Self { schedule: Schedule { steps: 10, warmup: 2, peak: 2e-3 }, pairs: 8, held_out: 4 },
            Extent::Train | Extent::Continue => {
                Self { schedule: Schedule { steps: 4000, warmup: 100, peak: 2e-3 }, pairs: 128, held_out: 5000 }
            }
        }
    }
}

fn main() -> Result<()> {
    let about = "Learns to translate from English to French, and translates what it has never seen.";
    let Some(arguments) = Arguments::read(about)? else { return Ok(()) };
    let Course { schedule, pairs, held_out } = Course::of(arguments.extent);
    let mut corpus = Corpus::new(SEED);
    let words = [&corpus.english, &corpus.french].map(|vocabulary| vocabulary.words().len());
    let sizes = Sizes { words, width: 128, heads: 4, hidden: 512, layers: 2 };
    let vars = VarMap::new();
    let model = Translator::new(arguments.attend, sizes, &VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let mut trainer = Trainer::new(&vars, SEED)?;

    let folder = arguments.folder("translate");
    let checkpoint = folder.join("checkpoint.safetensors");
    if arguments.extent == Extent::Continue {
        trainer.restore(&checkpoint)?;
    }
    let keep = (arguments.extent != Extent::Trial).then_some(&*checkpoint);
    let speed = trainer.run(schedule, arguments.at_most, keep, |step| {
        let batch = corpus.batch(step, pairs)?;
        Ok(Batch { loss: model.loss(&batch)?, tokens: batch.tokens })
    })?;
    let seconds = speed.time.as_secs_f64();
    println!("{} tokens in {seconds:.1} s: {:.0} tokens/s", speed.tokens, speed.tokens_per_second());

    let note = "Translator, English to French: cross-entropy of a batch's French words";
    training::curve(&trainer.losses, &[], &folder, "translate-loss", note)?;
    if trainer.losses.len() < schedule.steps {
        println!("stopped after step {}; --continue goes on", trainer.losses.len());
        return Ok(());
    }
    let file = folder.join("translator.safetensors");
    file::write(&file, &vars, sizes, [&corpus.english, &corpus.french])?;
    println!("wrote {}, which the root's example of this name reads", file.display());

    // Whoever reads the file has its rounded weights.
    let read = file::read(&std::fs::read(&file)?)?;
    let model = Translator::new(arguments.attend, read.sizes, &read.vars)?;
    let sentences = corpus.held_out_sentences(held_out);
    evaluate::score(&model, &corpus, &sentences)?.report("sentences");
    let numbers = Corpus::held_out_numbers();
    evaluate::score(&model, &corpus, &numbers[..held_out.min(numbers.len())])?.report("numbers");
    let longest = sentences.iter().take(50).max_by_key(|phrase| phrase.french.len()).expect("a sentence");
    evaluate::draw_alignment(&model, &corpus, longest, &folder)?;
    Ok(())
}
