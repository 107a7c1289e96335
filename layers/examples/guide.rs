//! Draws the pictures of the guide that no other example draws: a soft dictionary, the steps of one row, and masks.
//!
//! ```text
//! cargo run --release -p sdpa-layers --example guide              # to target/pictures
//! cargo run --release -p sdpa-layers --example guide -- FOLDER
//! ```

#[path = "../../examples/arguments/mod.rs"]
mod arguments;
#[path = "../../examples/pictures/mod.rs"]
mod pictures;

use arguments::{Given, Output, Program};
use pictures::{Bars, HeatMap, Labels, Picture, page, save};
use sdpa::{Alignment, Attention, Inputs, Mask, View, Window};
use sdpa_layers::{Compute, Dictionary, Steps};
use std::error::Error;
use std::num::NonZeroUsize;
use std::process::ExitCode;

fn main() -> ExitCode {
    let about = "Draws pictures of the guide: a soft dictionary, the steps of one row, masks.";
    Program { name: "guide", about, flags: &[], output: Output::Pictures }.run(run)
}

fn run(given: &Given) -> Result<(), Box<dyn Error>> {
    let mut compute = Compute::default();
    save(&dictionary(&mut compute)?, given.folder(), "guide-dictionary")?;
    save(&steps(&mut compute)?, given.folder(), "guide-steps")?;
    save(&masks(&mut compute)?, given.folder(), "guide-masks")
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// The weights of one query at three temperatures.
fn dictionary(compute: &mut Compute) -> Result<Picture, sdpa::Error> {
    // Sweetness, sourness.
    let fruit = [("banana", [1.0, 0.0]), ("apple", [0.8, 0.6]), ("orange", [0.6, 0.8]), ("lemon", [0.0, 1.0])];
    let keys = names(&fruit.map(|(name, _)| name));
    let mut dictionary = Dictionary::new(2, 1.0)?;
    for (n, (_, key)) in fruit.iter().enumerate() {
        dictionary.insert(key, n as f32)?;
    }
    let mut panels = Vec::new();
    for (n, temperature) in [1.0, 0.1, 0.01].into_iter().enumerate() {
        dictionary.set_temperature(temperature)?;
        let found = dictionary.get(&[0.8, 0.6], compute)?;
        println!("temperature {temperature}: {:.3?}", found.weights);
        let labels = Labels::new("", &keys);
        let labels = if n == 0 { labels } else { labels.hidden() };
        let title = format!("temperature {temperature}");
        panels.push(Bars { title: &title, labels, values: &found.weights, top: 1.0, length: 150.0 }.picture());
    }
    let note = "Keys are directions (sweet, sour); the query is that of the apple.\n\
                Weights are softmax(cosine / temperature), and sum to 1";
    Ok(page("A soft dictionary: one query, four keys", note, 3, &panels, None))
}

/// The row of `docs/guide/steps.md`: dot products, scores, weights, output.
fn steps(compute: &mut Compute) -> Result<Picture, sdpa::Error> {
    let q = [2.0, 0.0, 1.0, 1.0];
    let k = [2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 2.0, 0.0, 0.0];
    let v = [10.0, 0.0, 0.0, 10.0, 0.0, 0.0];
    let (q, k) = (View::bhld(&q, [1, 1, 1, 4])?, View::bhld(&k, [1, 1, 3, 4])?);
    let steps = Steps::new(&Attention::new(), Inputs::new(q, k, View::bhld(&v, [1, 1, 3, 2])?), compute)?;
    let dots: Vec<f32> = steps.scores().iter().map(|score| score * 2.0).collect();
    println!("q·k {dots:?}, scores {:?}", steps.scores());
    println!("weights {:.3?}, output {:.3?}", steps.weights(), steps.output());
    let (keys, numbers) = (names(&["key 0", "key 1", "key 2"]), names(&["out 0", "out 1"]));
    let bars = |title, names, values, top| {
        Bars { title, labels: Labels::new("", names), values, top, length: 100.0 }.picture()
    };
    let panels = [
        bars("q·k", &keys, &dots, 4.0),
        bars("q·k / √4", &keys, steps.scores(), 4.0),
        bars("softmax", &keys, steps.weights(), 1.0),
        bars("Σ weight·value", &numbers, steps.output(), 10.0),
    ];
    let note = "Of one query and three keys with their values: dot products, scores, weights, output";
    Ok(page("The steps of attention", note, 4, &panels, None))
}

/// Rows and keys of most panels of [`masks`].
const LEN: usize = 10;

/// The keys that rows see, by several rules.
fn masks(compute: &mut Compute) -> Result<Picture, sdpa::Error> {
    let last = |n| Window::last_tokens(NonZeroUsize::new(n).expect("some tokens"));
    let causal = Attention::new().causal();
    // Documents of four, three and three tokens.
    let document = |token: usize| usize::from(token >= 4) + usize::from(token >= 7);
    let documents = table(|row, key| document(row) == document(key));
    let prefix = table(|row, key| key < 4 || key <= row);
    let padding: Vec<bool> = (0..LEN).map(|key| key < 7).collect();
    let (square, four) = ([LEN; 2], [4, LEN]);
    let panels = [
        panel("causal", causal, square, None, compute)?,
        panel("the last 3 tokens", causal.window(last(3)), square, None, compute)?,
        panel("… and the first 2 kept", causal.window(last(3).keep_first(2)), square, None, compute)?,
        panel("window (2, 1)", Attention::new().window(Window::inclusive(Some(2), Some(1))), square, None, compute)?,
        panel("7 of 10 keys", Attention::new(), square, Some(&padding), compute)?,
        panel("documents, causal", causal, square, Some(&documents), compute)?,
        panel("a prefix of 4", Attention::new(), square, Some(&prefix), compute)?,
        panel("causal, top-left", causal.align(Alignment::TopLeft), four, None, compute)?,
        panel("causal, bottom-right", causal.align(Alignment::BottomRight), four, None, compute)?,
    ];
    let note = "Rows are queries, columns keys; what is blank is hidden";
    Ok(page("Which keys a row sees", note, 5, &panels, None))
}

/// A mask of rows and keys, row-major.
fn table(sees: impl Fn(usize, usize) -> bool) -> Vec<bool> {
    (0..LEN * LEN).map(|at| sees(at / LEN, at % LEN)).collect()
}

/// The keys that rows see in a call. A mask is of all rows, or of one that stands for all.
fn panel(
    title: &str,
    attention: Attention,
    [rows, keys]: [usize; 2],
    mask: Option<&[bool]>,
    compute: &mut Compute,
) -> Result<Picture, sdpa::Error> {
    let zeros = vec![0.0; rows.max(keys)];
    let (q, kv) = (View::bhld(&zeros[..rows], [1, 1, rows, 1])?, View::bhld(&zeros[..keys], [1, 1, keys, 1])?);
    let mut inputs = Inputs::new(q, kv, kv);
    if let Some(mask) = mask {
        inputs = inputs.mask(Mask::keep(View::bhld(mask, [1, 1, mask.len() / keys, keys])?));
    }
    let steps = Steps::new(&attention, inputs, compute)?;
    let seen: Vec<f32> = steps.scores().iter().map(|score| if score.is_finite() { 0.5 } else { f32::NAN }).collect();
    let empty = vec![String::new(); rows.max(keys)];
    let (rows, columns) = (Labels::new("", &empty[..rows]).hidden(), Labels::new("", &empty[..keys]).hidden());
    Ok(HeatMap { title, rows, columns, values: &seen, top: 1.0, cell: 15.0 }.picture())
}
