//! Draws attention weights: each head's and their average, of a sentence on itself, causally, and on another sentence.
//!
//! ```text
//! cargo run --release -p sdpa-layers --example heatmap              # to target/pictures
//! cargo run --release -p sdpa-layers --example heatmap -- FOLDER
//! ```

#[path = "../../examples/arguments/mod.rs"]
mod arguments;
#[path = "../../examples/fixtures/mod.rs"]
mod fixtures;
#[path = "../../examples/pictures/mod.rs"]
mod pictures;

use arguments::{Given, Output, Program};
use fixtures::{HEADS, Sentence, sentence};
use pictures::{HeatMap, Labels, Picture, colour_bar, page, save};
use sdpa::Attention;
use sdpa_layers::{Compute, Steps};
use std::error::Error;
use std::process::ExitCode;

/// The layer whose heads are drawn: the first, where one of them looks at the token before, whatever it says.
const LAYER: usize = 0;

fn main() -> ExitCode {
    let about = "Draws attention weights: each head's and their average.";
    Program { name: "heatmap", about, flags: &[], output: Output::Pictures }.run(run)
}

fn run(given: &Given) -> Result<(), Box<dyn Error>> {
    let (park, fish) = (sentence("minilm_park"), sentence("minilm_sauerkraut"));
    println!("Attention weights of all-MiniLM-L6-v2, layer {LAYER}, {HEADS} heads:");
    println!("{:?} on itself, causally, and on {:?}.", park.text, fish.text);
    let mut compute = Compute::default();
    for (name, attention, keys, what) in [
        ("self", Attention::new(), &park, "Self-attention"),
        ("causal", Attention::new().causal(), &park, "Causal self-attention"),
        ("cross", Attention::new(), &fish, "Cross-attention"),
    ] {
        let inputs = park.layers[LAYER].attends_to(&keys.layers[LAYER])?;
        let steps = Steps::new(&attention, inputs, &mut compute)?;
        let drawing = Drawing { steps: &steps, rows: &park, columns: keys, what };
        println!();
        drawing.report();
        save(&drawing.average(), given.folder(), &format!("heatmap-{name}"))?;
        save(&drawing.heads(), given.folder(), &format!("heatmap-{name}-heads"))?;
    }
    Ok(())
}

/// One call and what its rows and columns are.
struct Drawing<'a> {
    steps: &'a Steps,
    rows: &'a Sentence,
    columns: &'a Sentence,
    what: &'a str,
}

impl Drawing<'_> {
    /// Weights, NaN where a score of −∞ hides the key: what is not seen is left blank, which is not the same as 0.
    fn seen(&self, weights: &[f32]) -> Vec<f32> {
        let hidden = |&score: &f32| score == f32::NEG_INFINITY;
        weights.iter().zip(self.steps.scores()).map(|(&w, score)| if hidden(score) { f32::NAN } else { w }).collect()
    }

    fn title(&self, of: &str) -> String {
        format!("{}, {of}", self.what)
    }

    fn note(&self) -> String {
        let (rows, columns) = (&self.rows.text, &self.columns.text);
        let sentences = match (rows == columns, self.steps.scores().contains(&f32::NEG_INFINITY)) {
            (true, false) => format!("“{rows}”"),
            (true, true) => format!("“{rows}”; what is blank comes later and is not seen"),
            (false, _) => format!("queries of “{rows}” on keys of “{columns}”"),
        };
        format!("{sentences}\nall-MiniLM-L6-v2, layer {LAYER}; rows are queries, columns keys; each row sums to 1")
    }

    fn average(&self) -> Picture {
        let mean = self.seen(&self.steps.mean_weights());
        // To the next twentieth, so that the colour bar ends at a round number.
        let top = (mean.iter().copied().fold(0.0, f32::max) * 20.0).ceil() / 20.0;
        let map = HeatMap {
            title: "",
            rows: Labels::new("queries", &self.rows.tokens),
            columns: Labels::new("keys", &self.columns.tokens),
            values: &mean,
            top,
            cell: 40.0,
        };
        let bar = colour_bar("weight", top, map.cell * self.rows.tokens.len() as f64);
        page(&self.title(&format!("average of {HEADS} heads")), &self.note(), 1, &[map.picture()], Some(bar))
    }

    fn heads(&self) -> Picture {
        const PER_ROW: usize = 4;
        let head = |h: usize| {
            let (rows, columns) = (Labels::new("", &self.rows.tokens), Labels::new("", &self.columns.tokens));
            let map = HeatMap {
                title: &format!("head {h}"),
                // Panels share their labels: those on the left and at the foot have them.
                rows: if h.is_multiple_of(PER_ROW) { rows } else { rows.hidden() },
                columns: if h + PER_ROW >= HEADS { columns } else { columns.hidden() },
                values: &self.seen(self.steps.head_weights(h).expect("a head")),
                top: 1.0,
                cell: 17.0,
            };
            map.picture()
        };
        let panels: Vec<Picture> = (0..HEADS).map(head).collect();
        page(&self.title("head by head"), &self.note(), PER_ROW, &panels, Some(colour_bar("weight", 1.0, 400.0)))
    }

    /// In words: where each word looks most, by the average. [CLS] and [SEP] are left out, on which most of what is not
    /// needed elsewhere is put.
    fn report(&self) {
        println!("{}. Each word, and the word it weighs most, averaged over the heads:", self.what);
        let mean = self.steps.mean_weights();
        let special = |token: &String| token.starts_with('[');
        for (token, row) in self.rows.tokens.iter().zip(mean.chunks(self.columns.tokens.len())) {
            let words = row.iter().zip(&self.columns.tokens).filter(|(_, column)| !special(column));
            let most = words.max_by(|a, b| a.0.total_cmp(b.0));
            if let Some((weight, word)) = most.filter(|(weight, _)| !special(token) && **weight > 0.0) {
                println!("  {token:>6} → {word:<6} {weight:.2}");
            }
        }
    }
}
