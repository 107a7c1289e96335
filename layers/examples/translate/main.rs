//! Translates what you type from English to French, and shows how: the encoder's states, the decoder step by step, and
//! where each step looks by cross-attention.
//!
//! The model, `layers/examples/models/translator.safetensors`, was trained by the example of the same name in `adapters/candle`
//! on sentences and numbers that a grammar makes. It knows no other words (`--words` lists them).
//!
//! ```text
//! cargo run --release -p sdpa-layers --example translate         # some sentences it has never seen
//! cargo run --release -p sdpa-layers --example translate -- "I like to go to the park and play"
//! cargo run --release -p sdpa-layers --example translate -- -    # lines of standard input
//! ```

#[path = "../../../examples/arguments/mod.rs"]
mod arguments;
#[path = "../../../examples/pictures/mod.rs"]
mod pictures;
mod translator;
mod words;

use arguments::{Given, Output, Program, Refused};
use pictures::{HeatMap, Labels, Picture, colour_bar, page, save};
use std::io::BufRead;
use std::path::Path;
use std::process::ExitCode;
use translator::{Result, Translation, Translator};
use words::POSITIONS;

const MODEL: &[u8] = include_bytes!("../models/translator.safetensors");

/// Panels of a picture, at most.
const PANELS: usize = 6;

fn main() -> ExitCode {
    let about = "Translates from English to French, and shows where each step looks.";
    let flags = &[("--words", "list the words that it knows")];
    Program { name: "translate", about, flags, output: Output::PicturesOfText }.run(run)
}

fn run(given: &Given) -> Result<()> {
    let mut translator = Translator::read(MODEL)?;
    if given.has("--words") {
        println!("{}", translator.english()[1..].join(" "));
        return Ok(());
    }
    let mut panels = Vec::new();
    match given.text().as_str() {
        "" => words::EXAMPLES.iter().try_for_each(|text| translate(&mut translator, text, &mut panels))?,
        "-" => {
            for line in std::io::stdin().lock().lines() {
                translate(&mut translator, &line?, &mut panels)?;
            }
        }
        text => translate(&mut translator, text, &mut panels)?,
    }
    draw(panels, given.folder())
}

/// Translates the sentences of a text one by one.
fn translate(translator: &mut Translator, text: &str, panels: &mut Vec<Picture>) -> Result<()> {
    for sentence in words::sentences(text) {
        let english = words::english(sentence);
        // Its end takes a place, too.
        if english.len() >= POSITIONS {
            let (words, most) = (english.len(), POSITIONS - 1);
            return Err(Refused::new(format_args!("a sentence has {words} words, but at most {most} fit")).into());
        }
        let source = translator.numbers(&english).map_err(|word| {
            let known = translator.english().len() - 1;
            Refused::new(format_args!(
                "{word:?}: not among the {known} English words that were learned; --words lists them"
            ))
        })?;
        let translation = translator.translate(source)?;
        // The whole at once, by the library's own layers, has the bits of the steps.
        let steps = translation.steps.iter().flat_map(|step| &step.logits);
        assert!(translator.whole(&translation)?.iter().eq(steps), "steps have the bits of the whole");
        panels.push(report(translator, sentence, &translation));
    }
    Ok(())
}

/// Prints the steps; returns their alignment as a picture.
fn report(translator: &Translator, sentence: &str, translation: &Translation) -> Picture {
    let english: Vec<String> =
        translation.source.iter().map(|&word| translator.english()[word as usize].clone()).collect();
    let french: Vec<&str> = translation.steps.iter().map(|step| translator.french(step.word)).collect();
    println!("{sentence}");
    let (rows, width, layers) = (english.len(), translator.width(), translator.layers());
    let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
    let longest = translation.states.chunks_exact(width).map(norm).fold(0.0, f32::max);
    println!("  encoder, {layers} layers: {rows} states of {width} numbers, the longest {longest:.1}; <end> is one");
    println!("  decoder, {layers} layers: word, its probability, where cross-attention looks");
    for (n, (step, word)) in translation.steps.iter().zip(&french).enumerate() {
        println!("  {n:>3} {word:>14} {:.3}  {}", step.probability, bars(&english, &step.looks_at));
    }
    let text = words::french(translation.words().map(|word| translator.french(word)));
    println!("→ {text}\n");

    let french: Vec<String> = french.into_iter().map(str::to_owned).collect();
    let weights: Vec<f32> = translation.steps.iter().flat_map(|step| step.looks_at.clone()).collect();
    let (rows, columns) = (Labels::new("next word", &french), Labels::new("looks at", &english));
    HeatMap { title: &text, rows, columns, values: &weights, top: 1.0, cell: 36.0 }.picture()
}

/// The three largest, as bars of text.
fn bars(names: &[String], weights: &[f32]) -> String {
    let mut order: Vec<usize> = (0..names.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let bar = |&j: &usize| {
        format!("{:>10} {:.2} {:<10}", names[j], weights[j], "█".repeat((weights[j] * 10.0).round() as usize))
    };
    order.iter().take(3).map(bar).collect::<Vec<_>>().join(" ").trim_end().to_owned()
}

fn draw(panels: Vec<Picture>, folder: &Path) -> Result<()> {
    let Some(first) = panels.first() else { return Ok(()) };
    let bar = colour_bar("weight", 1.0, first.height().max(160.0));
    let shown = &panels[..panels.len().min(PANELS)];
    let note = "Rows: French words, as they are decoded. Columns: English words.\n\
                Cross-attention of the last decoder layer, the mean of its heads; each row sums to 1";
    save(&page("Where a translator looks", note, 2, shown, Some(bar)), folder, "translate")
}
