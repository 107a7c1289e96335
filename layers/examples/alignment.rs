//! Alignment by cross-attention: the words of one text query the words of another.
//!
//! Nothing here is learned for translating, as it is in the example `translate`: queries and keys are word vectors, or the
//! states of a sentence model, made to length 1, and the score is their cosine over a temperature. What it shows is what
//! cross-attention does with such scores, and the picture that is drawn of it.
//!
//! ```text
//! cargo run --release -p sdpa-layers --example alignment              # to target/pictures
//! cargo run --release -p sdpa-layers --example alignment -- FOLDER
//! ```

#[path = "../../examples/arguments/mod.rs"]
mod arguments;
#[path = "../../examples/fixtures/mod.rs"]
mod fixtures;
#[path = "../../examples/pictures/mod.rs"]
mod pictures;

use arguments::{Given, Output, Program};
use fixtures::{Sentence, WIDTH, Words, rows, sentence, unit, words};
use pictures::{HeatMap, Labels, Picture, colour_bar, page, save};
use sdpa::{Attention, Inputs};
use sdpa_layers::{Compute, Dictionary, Steps};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

/// Of the cosine.
const TEMPERATURE: f32 = 0.08;
/// The states that are aligned: after two layers a word knows its neighbours and is still itself.
const STATES: usize = 2;

fn main() -> ExitCode {
    let about = "Draws alignments by cross-attention: the words of one text query the words of another.";
    Program { name: "alignment", about, flags: &[], output: Output::Pictures }.run(run)
}

fn run(given: &Given) -> Result<(), Box<dyn Error>> {
    let mut compute = Compute::default();
    wordings(given.folder(), &mut compute)?;
    println!();
    sentences(given.folder(), &mut compute)
}

/// The same things in other words and another order.
fn wordings(folder: &Path, compute: &mut Compute) -> Result<(), Box<dyn Error>> {
    let all = words();
    let to = ["cheap", "fast", "car", "red", "colour", "road", "maker"].map(str::to_owned);
    let from = ["speed", "color", "engine", "street", "price", "manufacturer", "black"].map(str::to_owned);
    println!(
        "Words ({}) query words ({}): cosine of their vectors over {TEMPERATURE}.",
        to.join(", "),
        from.join(", ")
    );
    let vectors = |words: &[String]| words.iter().flat_map(|word| all.vector(word).to_vec()).collect::<Vec<_>>();
    let steps = cross(&vectors(&to), &vectors(&from), compute)?;
    // The context of each word is a mixture of vectors; what word is it most like?
    let mut dictionary = Dictionary::new(WIDTH, TEMPERATURE)?;
    for (_, vector) in all.iter() {
        dictionary.insert(vector, 0.0)?;
    }
    let nearest = dictionary.best_many(steps.output(), compute)?;
    report(&steps, &to, &from);
    println!("Nearest word to each context: {}", named(&nearest, &all));
    let note = "Queries and keys are word vectors of all-MiniLM-L6-v2";
    save(&alignment(&steps, &to, &from, "Alignment of two wordings", note), folder, "alignment-words")
}

/// Two sentences of one build.
fn sentences(folder: &Path, compute: &mut Compute) -> Result<(), Box<dyn Error>> {
    let (to, from) = (sentence("minilm_park"), sentence("minilm_sauerkraut"));
    println!("{:?} queries {:?}: cosine of the states after layer {}.", to.text, from.text, STATES - 1);
    let states = |sentence: &Sentence| unit(&sentence.hidden[STATES]);
    let steps = cross(&states(&to), &states(&from), compute)?;
    report(&steps, &to.tokens, &from.tokens);
    let note = format!("Queries and keys are states of all-MiniLM-L6-v2 after layer {}", STATES - 1);
    let picture = alignment(&steps, &to.tokens, &from.tokens, "Alignment of two sentences", &note);
    save(&picture, folder, "alignment-sentences")
}

/// Rows of length 1 attend to others, which are keys and values.
fn cross(queries: &[f32], keys: &[f32], compute: &mut Compute) -> Result<Steps, sdpa::Error> {
    let inputs = Inputs::new(rows(queries)?, rows(keys)?, rows(keys)?);
    Steps::new(&Attention::new().scale(1.0 / TEMPERATURE), inputs, compute)
}

fn report(steps: &Steps, to: &[String], from: &[String]) {
    for (i, word) in to.iter().enumerate() {
        let row = steps.row(0, i).expect("a row for each word");
        let mut order: Vec<usize> = (0..from.len()).collect();
        order.sort_by(|&a, &b| row.weights[b].total_cmp(&row.weights[a]));
        let listed: Vec<String> = order.iter().take(3).map(|&j| format!("{} {:.2}", from[j], row.weights[j])).collect();
        println!("  {word:>8} → {}", listed.join(", "));
    }
}

fn named(entries: &[usize], words: &Words) -> String {
    entries.iter().map(|&entry| words.words[entry].as_str()).collect::<Vec<_>>().join(", ")
}

fn alignment(steps: &Steps, to: &[String], from: &[String], title: &str, note: &str) -> Picture {
    let (rows, columns) = (Labels::new("queries", to), Labels::new("keys", from));
    let map = HeatMap { title: "", rows, columns, values: steps.weights(), top: 1.0, cell: 40.0 };
    let bar = colour_bar("weight", 1.0, map.cell * to.len() as f64);
    let note = format!("{note}.\nWeights are softmax(cosine / {TEMPERATURE}); each row sums to 1");
    page(title, &note, 1, &[map.picture()], Some(bar))
}
