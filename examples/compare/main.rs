//! Compares every way this crate computes attention: time, share of the machine's peak, and error against f64.
//!
//! ```text
//! cargo run --release --example compare             # real input, every path
//! cargo run --release --example compare -- --help   # your own tensors, shapes, options
//! ```

mod args;
mod data;
mod failure;
mod output;
mod paths;
mod reference;
mod session;
mod settings;
mod table;
mod timing;

use args::{Args, Command, Format};
use data::Tensors;
use failure::{Refused, Result};
use indicatif::{ProgressBar, ProgressStyle};
use paths::Runner;
use reference::{Cut, Reference, Rows};
use sdpa::{Causality, Plan, Shape};
use settings::Settings;
use std::io::Write;
use std::process::ExitCode;
use timing::Peaks;

/// Exit status if an error exceeds its bound.
const EXCEEDED: u8 = 1;
/// Exit status if an argument, a file or a shape is wrong.
const REFUSED: u8 = 2;

fn main() -> ExitCode {
    let done = args::parse(std::env::args_os().skip(1)).and_then(|command| match command {
        Command::Help => print(args::HELP).map(|()| ExitCode::SUCCESS),
        Command::Compare(args) => compare(&args),
    });
    done.unwrap_or_else(|refused| {
        complain(&refused);
        ExitCode::from(REFUSED)
    })
}

fn compare(args: &Args) -> Result<ExitCode> {
    if let Some(path) = &args.output {
        output::check(path)?;
    }
    let tensors = data::load(&args.source)?;
    let shape = tensors.inputs()?.shape()?;
    let paths = paths::paths(args, &shape)?;
    let rows = Rows::choose(&args.settings, &shape);
    // Says whether the settings go with the shape, before the oracle sets out.
    let plan = Runner::new(&tensors, args.settings, &rows)?.plan(paths.answer)?;
    if args.format == Format::Table {
        print(&introduction(&args.settings, &tensors, &shape, &plan))?;
    }
    if let Some(why) = &paths.left_out {
        complain(why);
    }

    let progress = progress();
    let peaks = Peaks::measure();
    let cut = Cut::new(&tensors, args.settings, shape);
    let reference = Reference::compute(&cut, rows, &progress)?;
    let mut runner = Runner::new(&tensors, args.settings, &reference.rows)?;
    // The paths run in a pool of the size asked for, the oracle in one of all cores.
    let threads = paths.most_threads();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|e| Refused::new(format_args!("--threads: {threads}, but they cannot be started: {e}")))?;
    let measured = pool.install(|| session::measure(&mut runner, &reference, &paths, args.repeat, &progress))?;
    progress.finish_and_clear();
    let peaks = peaks.or(Peaks::measure());
    let rows = session::figures(&args.settings, &reference, &measured, &peaks);

    if let Some(path) = &args.output {
        pool.install(|| runner.run(paths.answer, None))?;
        output::write(path, &shape, &runner.out, &runner.lse)?;
    }
    match args.format {
        Format::Table => print(&table::table(&rows, &reference, &peaks))?,
        Format::Json => {
            print(&rows.iter().fold(String::new(), |text, row| text + &table::json(row, &reference) + "\n"))?;
        }
    }
    let excesses = table::excesses(&rows, &reference);
    excesses.iter().for_each(|line| complain(line));
    Ok(if excesses.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXCEEDED) })
}

/// What is computed, and how the fused path goes about it.
fn introduction(settings: &Settings, tensors: &Tensors, shape: &Shape, plan: &Plan) -> String {
    let scale = settings.attention().scale_for(shape.head_dim);
    let mask = match (settings.causality, settings.alignment) {
        (Causality::Full, _) => "every row sees every key".to_owned(),
        (Causality::Causal, None) => "causal".to_owned(),
        (Causality::Causal, Some(alignment)) => {
            format!("causal, the first row after {} keys", alignment.offset(shape.q_len, shape.kv_len))
        }
    };
    format!(
        "Attention: {}\n\
         q {:?}, k {:?}, v {:?}; scale {scale}; {mask}; {:.4} GFLOP\n\n\
         {plan}\n\n",
        tensors.title,
        tensors.q.shape,
        tensors.k.shape,
        tensors.v.shape,
        settings.useful_flops(shape) / 1e9
    )
}

/// A bar on standard error, if that is a terminal.
fn progress() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} % {msg}");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A line on standard error; if nobody listens there, there is nothing more to say.
fn complain(line: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "compare: {line}");
}

/// To standard output. A reader that has seen enough and hung up is no failure.
fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Refused::new(format_args!("standard output: {e}"))),
        _ => Ok(()),
    }
}
