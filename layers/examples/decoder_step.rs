//! A decoder, position by position: each state attends to those before it, then to the states of an encoder.
//!
//! The states are real, those of all-MiniLM-L6-v2 for two sentences; a trained decoder's weights are not in this
//! repository, so there are no projections: scores are dot products of states made to length 1 over a temperature (the
//! "dot" of Luong, Pham and Manning 2015), and keys are values.
//!
//! ```text
//! cargo run --release -p sdpa-layers --example decoder_step              # to target/pictures
//! cargo run --release -p sdpa-layers --example decoder_step -- FOLDER
//! ```

#[path = "../../examples/arguments/mod.rs"]
mod arguments;
#[path = "../../examples/fixtures/mod.rs"]
mod fixtures;
#[path = "../../examples/pictures/mod.rs"]
mod pictures;

use arguments::{Given, Output, Program};
use fixtures::{Sentence, WIDTH, rows, sentence, unit};
use pictures::{Bars, Labels, Picture, page, save};
use sdpa::{Alignment, Attention, Inputs};
use sdpa_layers::{Compute, Steps};
use std::error::Error;
use std::process::ExitCode;

/// Of the cosine, on the encoder's states.
const TEMPERATURE: f32 = 0.1;
/// On the decoder's own: higher, or each would see little but itself, which is the state most like it.
const OWN: f32 = 0.3;
/// The states taken: after two layers a word knows its neighbours and is still itself.
const STATES: usize = 2;

fn main() -> ExitCode {
    let about = "Draws a decoder's weights, position by position.";
    Program { name: "decoder_step", about, flags: &[], output: Output::Pictures }.run(run)
}

fn run(given: &Given) -> Result<(), Box<dyn Error>> {
    let (encoder, decoder) = (sentence("minilm_sauerkraut"), sentence("minilm_park"));
    println!("Encoder: {:?}. Decoder: {:?}, one position after another.", encoder.text, decoder.text);
    println!("Each step: causal self-attention, its context added to the state, then cross-attention.\n");
    let (source, target) = (unit(&encoder.hidden[STATES]), unit(&decoder.hidden[STATES]));
    let attention = Attention::new().scale(1.0 / TEMPERATURE);
    let own = Attention::new().scale(1.0 / OWN).causal();
    // One row among as many keys as there are states so far: it stands at the last of them.
    let step = own.align(Alignment::BottomRight);
    let mut compute = Compute::default();

    let (mut queries, mut contexts, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    for (t, token) in decoder.tokens.iter().enumerate() {
        let (state, so_far) = (&target[t * WIDTH..(t + 1) * WIDTH], &target[..(t + 1) * WIDTH]);
        let before = Steps::new(&step, Inputs::new(rows(state)?, rows(so_far)?, rows(so_far)?), &mut compute)?;
        let query = unit(&state.iter().zip(before.output()).map(|(x, context)| x + context).collect::<Vec<_>>());
        let inputs = Inputs::new(rows(&query)?, rows(&source)?, rows(&source)?);
        let across = Steps::new(&attention, inputs, &mut compute)?;
        println!("{t:>2} {token:>6}  itself {:.2}  {}", before.weights()[t], bars(&encoder.tokens, across.weights()));
        queries.extend(query);
        contexts.extend_from_slice(across.output());
        weights.push(across.weights().to_vec());
    }
    println!(
        "\nThe context vector of the last step, {WIDTH} numbers: {:.3?} …",
        &contexts[contexts.len() - WIDTH..][..5]
    );

    let together = Inputs::new(rows(&queries)?, rows(&source)?, rows(&source)?);
    let cross = Steps::new(&attention, together, &mut compute)?;
    let whole = Inputs::new(rows(&target)?, rows(&target)?, rows(&target)?);
    let selfs = Steps::new(&own, whole, &mut compute)?;
    let added: Vec<f32> = target.iter().zip(selfs.output()).map(|(x, context)| x + context).collect();
    assert!(unit(&added) == queries && cross.output() == contexts, "a step has the bits of its row of the whole");
    println!("All positions in one causal call and one cross call have the same bits.");

    let picture = picture(&encoder, &decoder, &weights);
    save(&picture, given.folder(), "decoder-steps")
}

/// The weights of each step on the encoder's states, a panel each.
fn picture(encoder: &Sentence, decoder: &Sentence, weights: &[Vec<f32>]) -> Picture {
    const PER_ROW: usize = 4;
    let panel = |t: usize| {
        let labels = Labels::new("", &encoder.tokens);
        let title = format!("{t}: {}", decoder.tokens[t]);
        let labels = if t.is_multiple_of(PER_ROW) { labels } else { labels.hidden() };
        Bars { title: &title, labels, values: &weights[t], top: 1.0, length: 160.0 }.picture()
    };
    let panels: Vec<Picture> = (0..weights.len()).map(panel).collect();
    let note = format!(
        "States of “{}”, after causal self-attention, query those of “{}”.\n\
         States of all-MiniLM-L6-v2 after layer {}; weights are softmax(cosine / {TEMPERATURE}); each panel sums to 1",
        decoder.text,
        encoder.text,
        STATES - 1
    );
    page("A decoder, step by step", &note, PER_ROW, &panels, None)
}

/// The three largest, as bars of text.
fn bars(names: &[String], weights: &[f32]) -> String {
    let mut order: Vec<usize> = (0..names.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let bar = |&j: &usize| {
        format!("{:>6} {:.2} {:<10}", names[j], weights[j], "█".repeat((weights[j] * 10.0).round() as usize))
    };
    order.iter().take(3).map(bar).collect::<Vec<_>>().join(" ")
}
