//! Texts to embeddings with all-MiniLM-L6-v2: the same tokens for everyone, made beforehand.

#[cfg(feature = "candle")]
mod candle;
mod ours;
mod texts;
#[cfg(feature = "tract")]
mod tract;

use crate::args::{Args, Part};
use crate::elements::{Elements, Limits, Rounding, WRONG};
use crate::failure::Result;
use crate::peer::{Entry, Home, OURS, Peer, python, rust};
use crate::session::{Session, Task, Workers};
use crate::table::{Report, Work};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tokenizers::Tokenizer;

/// Texts of a batch that is sorted by length.
const BUCKET: usize = 8;

/// Largest error of an embedding, of length 1, that does not count as wrong if products are of bf16.
const WRONG_IN_BF16: f64 = 1.0 / 64.0;

/// Texts as tokens, and the model that embeds them: mean over a text's tokens, then length 1.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Texts {
    threads: usize,
    /// The folder.
    model: PathBuf,
    tokens: Vec<Vec<u32>>,
    batches: Batches,
    /// Compute in f64: for the truth.
    exact: bool,
}

/// Places of texts, batch by batch.
type Batch = Vec<usize>;

/// How texts of many lengths are brought to a library that wants rectangles, and pads them where it must.
#[derive(Debug, Serialize, Deserialize)]
struct Batches {
    /// All in one.
    padded: Vec<Batch>,
    /// A few at a time, by length.
    sorted: Vec<Batch>,
    /// One by one.
    single: Vec<Batch>,
}

impl Batches {
    fn new(tokens: &[Vec<u32>]) -> Self {
        let all: Batch = (0..tokens.len()).collect();
        let mut by_length = all.clone();
        by_length.sort_by_key(|&text| tokens[text].len());
        Self {
            sorted: by_length.chunks(BUCKET).map(<[usize]>::to_vec).collect(),
            single: all.iter().map(|&text| vec![text]).collect(),
            padded: vec![all],
        }
    }
}

#[cfg(feature = "tract")]
const TRACT: &str = "tract-core";

#[cfg(feature = "candle")]
const CANDLE: &str = "candle-transformers";

/// Ours, which takes texts of any lengths end to end, and the others in every way that they can be used.
const WAYS: &[Entry] = &[
    rust(OURS, "sdpa"),
    #[cfg(feature = "candle")]
    rust("candle-padded", CANDLE),
    #[cfg(feature = "candle")]
    rust("candle-sorted", CANDLE),
    #[cfg(feature = "candle")]
    rust("candle-single", CANDLE),
    #[cfg(feature = "tract")]
    rust("tract-padded", TRACT),
    #[cfg(feature = "tract")]
    rust("tract-sorted", TRACT),
    #[cfg(feature = "tract")]
    rust("tract-single", TRACT),
    // With TRACT_AMX_BF16.
    #[cfg(feature = "tract")]
    rust("tract-bf16-padded", TRACT).rounds(Rounding::FactorsToBf16),
    #[cfg(feature = "tract")]
    rust("tract-bf16-sorted", TRACT).rounds(Rounding::FactorsToBf16),
    #[cfg(feature = "tract")]
    rust("tract-bf16-single", TRACT).rounds(Rounding::FactorsToBf16),
    python("torch-padded"),
    python("torch-sorted"),
    python("torch-single"),
    python("openvino-padded"),
    python("openvino-sorted"),
    python("openvino-single"),
    // With a hint that bf16 will do.
    python("openvino-bf16-padded").rounds(Rounding::FactorsToBf16),
    python("openvino-bf16-sorted").rounds(Rounding::FactorsToBf16),
    python("openvino-bf16-single").rounds(Rounding::FactorsToBf16),
];

/// The code behind a name, and its package.
pub(crate) fn rust_peer(name: &str) -> Option<(Box<dyn Peer<Texts>>, &'static str)> {
    let entry = WAYS.iter().find(|entry| entry.name == name)?;
    let Home::Rust { package } = entry.home else { return None };
    let peer: Box<dyn Peer<Texts>> = match package {
        #[cfg(feature = "candle")]
        CANDLE => Box::new(candle::Bert::new(entry.name)),
        #[cfg(feature = "tract")]
        TRACT => Box::new(tract::Bert::new(entry.name)),
        _ => Box::new(ours::Bert::default()),
    };
    Some((peer, package))
}

pub(crate) fn compare(args: &Args) -> Result<Report> {
    let entries = args.choose(WAYS)?;
    let tokenizer = Tokenizer::from_file(args.model.join("tokenizer.json"))
        .map_err(|e| format!("{}: {e}; .ci/fetch-minilm fetches it", args.model.display()))?;
    let tokens = texts::tokens(&tokenizer)?;
    let total: usize = tokens.iter().map(Vec::len).sum();
    let name = format!("{} texts, {total} tokens", tokens.len());
    let mut session = Session::new(args, Part::Embeddings)?;
    for &threads in &args.threads {
        let texts = |exact| Texts {
            threads,
            model: args.model.clone(),
            tokens: tokens.clone(),
            batches: Batches::new(&tokens),
            exact,
        };
        let mut workers = Workers::start(&entries, threads, &mut session)?;
        let Some(due) = workers.due(&mut session, &name, Elements::F32) else { continue };
        let truth = workers.answer(&texts(true), session.folder());
        let truth = truth.ok_or("nobody here can embed in f64: candle and torch can")?;
        let task = Task {
            due,
            body: texts(false),
            work: Work::Tokens(total as f64),
            rows_checked: [tokens.len(); 2],
            limits: Limits { own: WRONG, in_bf16: WRONG_IN_BF16 },
        };
        workers.run(&mut session, &task, |out| Ok(vec![error(out, &truth)?]))?;
    }
    Ok(session.report())
}

/// The largest absolute difference; NaN if there is one.
fn error(out: &[f32], truth: &[f32]) -> Result<f64> {
    if out.len() != truth.len() {
        return Err(format!("{} numbers, but {} wanted", out.len(), truth.len()).into());
    }
    let errors = out.iter().zip(truth).map(|(a, b)| f64::from((a - b).abs()));
    Ok(errors.fold(0.0, |max, error| if error > max || error.is_nan() { error } else { max }))
}

/// The table that people read.
pub(crate) fn print(report: &Report, markdown: bool) -> String {
    let table = if markdown { report.markdown(OURS) } else { report.table(OURS) };
    let rate = "Rates: tokens of texts, without padding, over the median. Errors: against the same model in f64.";
    format!("{}\n\n{table}\n{rate}\n\n{}{}", report.machine, report.ways(), report.notes())
}
