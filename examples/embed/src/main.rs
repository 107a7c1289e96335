//! Embeds texts with all-MiniLM-L6-v2, or another sentence encoder of the BERT family, and compares them.
//!
//! ```text
//! .ci/fetch-minilm                                                             # the model, once
//! cargo run --release -p embed -- "A man eats." "A man is eating food."
//! cargo run --release -p embed -- --help                                # files, limits, JSON
//! ```

mod args;
mod encoder;
#[path = "../../compare/failure.rs"]
mod failure;
mod panics;
mod report;

use args::{Args, Command, Format};
use encoder::{Embedded, Encoder};
use failure::{Refused, Result};
use indicatif::{ProgressBar, ProgressStyle};
use sdpa::Exec;
use sdpa_layers::Compute;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;

/// Exit status if an argument, a file or the model is wrong.
const REFUSED: u8 = 2;
/// Texts between two steps of the bar: a fraction of a second's worth.
const STEP: usize = 256;

/// What is embedded where nothing is given.
const TEXTS: [&str; 5] = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A cheetah is running behind its prey.",
    "Attention lets every word of a sentence look at every other word.",
];

fn main() -> ExitCode {
    let done = args::parse(std::env::args_os().skip(1)).and_then(|command| match command {
        Command::Help => print(args::HELP),
        Command::Embed(args) => embed(args),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(refused) => {
            complain(&refused);
            ExitCode::from(REFUSED)
        }
    }
}

fn embed(args: Args) -> Result<()> {
    let threads = args.threads.map_or(0, |n| n.get());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|e| Refused::new(format_args!("--threads: {threads}, but they cannot be started: {e}")))?;
    let encoder = Encoder::load(&args.model, args.max_tokens)?;
    let texts = texts(args.texts, args.file.as_deref())?;

    let start = Instant::now();
    // Cores are the pool's business, so that tokenizing and embedding have the same.
    let embedded = pool.install(|| embed_all(&encoder, &texts))?;
    let seconds = start.elapsed().as_secs_f64();

    match args.format {
        Format::Similarities => print(&report::similarities(&texts, &embedded, encoder.width()))?,
        Format::Json => print(&report::json(&texts, &embedded, encoder.width()))?,
    }
    let (count, tokens) = (texts.len(), embedded.tokens.iter().sum::<usize>());
    let threads = pool.current_num_threads();
    complain(&format_args!(
        "{count} texts, {tokens} tokens in {:.1} ms on {threads} thread(s): {:.0} tokens/s, tokenizing included",
        seconds * 1e3,
        tokens as f64 / seconds
    ));
    if !embedded.cut.is_empty() {
        let (cut, limit) = (embedded.cut.len(), encoder.max_tokens());
        complain(&format_args!("{cut} of {count} texts had more than {limit} tokens and were cut to that"));
    }
    if let Some(limit) = encoder.made_for().filter(|_| embedded.long > 0) {
        let long = embedded.long;
        complain(&format_args!(
            "{long} of {count} texts have more than {limit} tokens, which the model was made for; sentence-transformers \
             cuts them there, and so does --max-tokens {limit}"
        ));
    }
    Ok(())
}

/// Texts in steps, so that there is progress to show.
fn embed_all(encoder: &Encoder, texts: &[String]) -> Result<Embedded> {
    let (mut done, mut compute) = (Embedded::default(), Compute::new(Exec::default()));
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} texts, {eta} left");
    let progress = if texts.len() > STEP { ProgressBar::new(texts.len() as u64) } else { ProgressBar::hidden() };
    let progress = progress.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    for texts in texts.chunks(STEP) {
        encoder.embed(texts, &mut done, &mut compute)?;
        progress.inc(texts.len() as u64);
    }
    progress.finish_and_clear();
    Ok(done)
}

/// Those given, then the lines of the file.
fn texts(mut texts: Vec<String>, file: Option<&std::path::Path>) -> Result<Vec<String>> {
    if let Some(file) = file {
        let lines = String::from_utf8(encoder::read(file)?);
        let lines = lines.map_err(|e| Refused::new(format_args!("{}: {e}", file.display())))?;
        texts.extend(lines.lines().map(str::to_owned));
    } else if texts.is_empty() {
        texts.extend(TEXTS.map(str::to_owned));
    }
    Ok(texts)
}

/// A line on standard error; if nobody listens there, there is nothing more to say.
fn complain(line: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "embed: {line}");
}

/// To standard output. A reader that has seen enough and hung up is no failure.
fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Refused::new(format_args!("standard output: {e}"))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
