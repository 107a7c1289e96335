//! The server's program.
//!
//! ```text
//! .ci/fetch-minilm                     # in the repository's root, once: the sentence encoder
//! cargo run --release --bin serve      # in examples/serve
//! cargo run --release --bin serve -- --help
//! ```

use serve::{Decoder, Embedder, Engine, Limits, MODEL, Models, Result, Size, http};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;
use tokio::net::TcpListener;

const HELP: &str = "\
Serves embeddings and generated text over HTTP, in the form of OpenAI's API.

Usage: serve [OPTIONS]

  --listen ADDR         address and port (default: 127.0.0.1:8087); port 0 for any that is free
  --model DIR           folder of the sentence encoder; `none` for none (default: target/models/all-MiniLM-L6-v2)
  --decoder WHICH       `trained`: a GPT on letters (the default); LAYERSxWIDTH: random weights of this size
  --prefix FILE         beginning that prompts share; may be given several times
  --places N            texts written side by side (default: 8)
  --rows N              rows of a step: a row of each text, and chunks of prompts (default: 10)
  --cache-mib N         MiB of keys and values of running texts (default: 64)
  --promised-mib N      MiB that all accepted texts may come to need (default: 256)
  --waiting N           completions that may wait (default: 64)
  --waiting-tokens N    tokens of texts that may wait to be embedded (default: 8192)
  --batch-tokens N      tokens of texts embedded between two steps (default: 32)
  --deadline-ms N       time of a request (default: 30000)
  --threads N           threads that compute; 0 for all (default: 0)
  --help                this

Ctrl-C or SIGTERM ends it: requests under way come to their end. Exit status: 0, or 2 if an argument or a file is wrong.
";

/// Tokens of a text of a decoder with random weights.
const CONTEXT: usize = 2048;
const SEED: u64 = 1;

/// Arguments of the command line.
struct Arguments {
    listen: String,
    model: Option<PathBuf>,
    decoder: String,
    limits: Limits,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("serve: {error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<()> {
    let Some(arguments) = read(std::env::args().skip(1))? else {
        print!("{HELP}");
        return Ok(());
    };
    let decoder = match arguments.decoder.as_str() {
        "trained" => Decoder::trained()?,
        size => Decoder::random(random_size(size)?, SEED)?,
    };
    let embedder = embedder(arguments.model.as_deref())?;
    let engine = Engine::start(Models { decoder, embedder }, arguments.limits)?;
    // One thread for all connections: the engine has the others.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(&arguments.listen).await.map_err(|e| format!("{}: {e}", arguments.listen))?;
        println!("listening on http://{}", listener.local_addr()?);
        http::serve(listener, engine, shutdown()).await
    })
}

/// The encoder of a folder. Without a folder named, that of the usual one, if it is there.
fn embedder(folder: Option<&Path>) -> Result<Option<Embedder>> {
    match folder {
        Some(none) if none.as_os_str() == "none" => Ok(None),
        Some(folder) => Ok(Some(Embedder::load(folder)?)),
        None => {
            let usual = [PathBuf::from(MODEL), Path::new("../..").join(MODEL)];
            if let Some(folder) = usual.iter().find(|folder| folder.is_dir()) {
                return Ok(Some(Embedder::load(folder)?));
            }
            eprintln!("serve: no {MODEL}, so there are no embeddings; .ci/fetch-minilm gets it");
            Ok(None)
        }
    }
}

/// Ends when the process is told to.
async fn shutdown() {
    let interrupt = async {
        // Without a handler the system's own ends the process.
        let _ = tokio::signal::ctrl_c().await;
    };
    #[cfg(unix)]
    let terminate = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    #[cfg(not(unix))]
    let terminate = std::future::pending::<()>();
    tokio::select! {
        () = interrupt => {}
        () = terminate => {}
    }
}

/// Reads the command line; `None` if it asks for help.
fn read(mut words: impl Iterator<Item = String>) -> Result<Option<Arguments>> {
    let (listen, decoder) = ("127.0.0.1:8087".to_owned(), "trained".to_owned());
    let mut arguments = Arguments { listen, model: None, decoder, limits: Limits::default() };
    while let Some(flag) = words.next() {
        if flag == "--help" || flag == "-h" {
            return Ok(None);
        }
        let mut value = || words.next().ok_or_else(|| format!("{flag}: needs a value, but is the last word"));
        let limits = &mut arguments.limits;
        match flag.as_str() {
            "--listen" => arguments.listen = value()?,
            "--model" => arguments.model = Some(value()?.into()),
            "--decoder" => arguments.decoder = value()?,
            "--prefix" => {
                let file = value()?;
                let text = std::fs::read_to_string(&file).map_err(|e| format!("{file}: {e}"))?;
                limits.prefixes.push(text.strip_suffix('\n').unwrap_or(&text).to_owned());
            }
            "--places" => limits.places = number(&flag, &value()?)?,
            "--rows" => limits.rows = number(&flag, &value()?)?,
            "--cache-mib" => limits.cache_bytes = mebibytes(&flag, &value()?)?,
            "--promised-mib" => limits.promised_bytes = mebibytes(&flag, &value()?)?,
            "--waiting" => limits.waiting = number(&flag, &value()?)?,
            "--waiting-tokens" => limits.waiting_tokens = number(&flag, &value()?)?,
            "--batch-tokens" => limits.batch_tokens = number(&flag, &value()?)?,
            "--deadline-ms" => limits.deadline = Duration::from_millis(number(&flag, &value()?)?),
            "--threads" => limits.threads = number(&flag, &value()?)?,
            _ => return Err(format!("{flag}: unknown flag; --help lists them").into()),
        }
    }
    Ok(Some(arguments))
}

fn number<T: FromStr>(flag: &str, word: &str) -> Result<T> {
    word.parse().map_err(|_| format!("{flag}: {word}, but must be a whole number").into())
}

fn mebibytes(flag: &str, word: &str) -> Result<usize> {
    let mebibytes: usize = number(flag, word)?;
    mebibytes.checked_mul(1 << 20).ok_or_else(|| format!("{flag}: {word} MiB are more than memory can be").into())
}

/// Size of a decoder with heads of 64 and a feed-forward four times as wide as its rows.
fn random_size(word: &str) -> Result<Size> {
    let (layers, width) = word.split_once('x').ok_or_else(|| format!("--decoder: {word}, but must be LAYERSxWIDTH"))?;
    let (layers, width): (usize, usize) = (number("--decoder", layers)?, number("--decoder", width)?);
    if layers == 0 || layers > 128 || width == 0 || width > 8192 || !width.is_multiple_of(64) {
        return Err(
            format!("--decoder: {word}, but must be 1 to 128 layers of a width to 8192, a multiple of 64").into()
        );
    }
    Ok(Size { layers, width, heads: width / 64, hidden: 4 * width, context: CONTEXT })
}
