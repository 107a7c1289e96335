//! Compares every way this crate computes attention: time, share of the machine's peak, and error against f64.
//!
//! ```text
//! cargo run --release --example compare             # real input, every path
//! cargo run --release --example compare -- --sweep  # a picture: GFLOP/s against length
//! cargo run --release --example compare -- --help   # your own tensors, shapes, options
//! ```

mod args;
mod backward;
mod data;
mod elements;
mod failure;
mod file;
#[path = "../arguments/folder.rs"]
mod folder;
mod help;
mod lists;
mod output;
mod paths;
#[path = "../pictures/mod.rs"]
mod pictures;
mod pool;
mod reference;
mod runner;
mod session;
mod settings;
mod strips;
mod sweep;
mod table;
#[cfg(test)]
#[path = "../../tests/support/temporary_folder.rs"]
mod temporary_folder;
mod timing;

use args::{Args, Command, Format};
use data::Tensors;
use elements::{Elements, Numbers};
use failure::{Refused, Result};
use indicatif::{ProgressBar, ProgressStyle};
use paths::{Pass, Paths};
use pool::pool;
use reference::Reference;
use runner::Runner;
use sdpa::{Isa, Machine, Shape};
use settings::Settings;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use strips::{Cut, Rows};
use timing::Peaks;

/// Exit status if an error exceeds its bound.
pub(crate) const EXCEEDED: u8 = 1;
/// Exit status if an argument, a file or a shape is wrong.
const REFUSED: u8 = 2;
/// A machine that does other things now and then shows its peak at one time or another; sooner than this it is the same
/// time still.
const SAME_TIME: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    let done = args::parse(std::env::args_os().skip(1)).and_then(|command| match command {
        Command::Help => print(help::HELP).map(|()| ExitCode::SUCCESS),
        Command::Compare(args) => compare(&args),
        Command::Backward(args) => backward::compare(&args),
        Command::Sweep(args, sweep) => sweep::run(&args, &sweep).map(|()| ExitCode::SUCCESS),
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
    let mut tensors = elements::load(&args.source, args.dtype)?;
    tensors.select(args.selected)?;
    let shape = tensors.inputs()?.shape()?;
    runner::points_fit(&shape, &args.points)?;
    let rows = Rows::choose(&shape);
    // Nothing would be timed; and sizes of an empty tensor may be anything, so that even counting blocks takes for ever.
    if rows.all == 0 {
        let shape = tensors.q.shape;
        return Err(Refused::new(format_args!("q: shape {shape:?} has no rows, so there is nothing to compare")));
    }
    let elements = Elements::of(&tensors)?;
    let mut runner = Runner::new(&tensors, &elements, args.settings, &rows)?;
    // Says whether the settings and tensors go together, before anything is cut out of them.
    runner.problem().map(drop)?;
    let cut = Cut::new(&tensors, args.settings, shape);
    let paths = paths::paths(args, &cut, Pass::Forward)?;
    // The paths run in a pool of the size asked for, the oracle in one of all cores.
    let pool = pool(paths.most_threads())?;
    let explanation = runner.explain(paths.answer, None)?;
    if args.format == Format::Table {
        print(&introduction(&args.settings, &tensors, &shape))?;
        print(&if args.explain { explanations(&paths, &mut runner)? } else { format!("{explanation}\n\n") })?;
    }
    drop(runner);
    if let Some(why) = &paths.left_out {
        complain(why);
    }

    let progress = progress();
    let (peaks, start) = (Peaks::measure(&paths.all), Instant::now());
    let reference = Reference::compute(&cut, rows, &progress)?;
    let mut runner = Runner::new(&tensors, &elements, args.settings, &reference.rows)?;
    let measured = pool.install(|| session::measure(&mut runner, &reference, &paths, args.repeat, &progress))?;
    progress.finish_and_clear();
    let peaks = if start.elapsed() < SAME_TIME { peaks } else { peaks.or(Peaks::measure(&paths.all)) };
    // Plans count the keys that range rules show, listed or not.
    let work = if tensors.selected.is_none() { explanation.useful_flops } else { 0.0 };
    let rows = session::figures(work, &reference, &measured, &peaks);

    if let Some(path) = &args.output {
        pool.install(|| runner.answer(paths.answer, &args.points, |tensors| output::write(path, tensors)))?;
    }
    match args.format {
        Format::Table => print(&table::table(&rows, &reference, &peaks))?,
        Format::Json => {
            print(&rows.iter().fold(String::new(), |text, row| text + &table::json(row, &reference) + "\n"))?;
        }
    }
    let excesses = table::excesses(&rows, &reference);
    excesses.iter().for_each(|line| complain(line));
    Ok(if table::fused_exceeds(&rows, &reference) { ExitCode::from(EXCEEDED) } else { ExitCode::SUCCESS })
}

/// What is computed.
pub(crate) fn introduction(settings: &Settings, tensors: &Tensors, shape: &Shape) -> String {
    let scale = settings.attention().scale_for(shape.head_dim);
    let mut options = vec![format!("scale {scale}"), settings.to_string()];
    options.extend(tensors.options());
    options.extend(Numbers::of_call(settings, tensors).in_words());
    format!(
        "Attention: {}\n\
         q {:?}, k {:?}, v {:?}\n\
         {}\n\n",
        tensors.title,
        tensors.q.shape,
        tensors.k.shape,
        tensors.v.shape,
        options.join("; ")
    )
}

/// How each fused path goes about it, with the least time it can take on this machine.
fn explanations(paths: &Paths, runner: &mut Runner<'_>) -> Result<String> {
    let mut text = String::new();
    let mut machines: Vec<(Isa, Machine)> = Vec::new();
    for &path in &paths.all {
        let Some(isa) = path.method.isa() else { continue };
        let known = machines.iter().find(|(known, _)| *known == isa).map(|(_, machine)| *machine);
        let machine = known.unwrap_or_else(|| {
            let machine = Machine::measure(isa);
            machines.push((isa, machine));
            machine
        });
        let (flops, bytes) = (machine.flops / 1e9, machine.bytes / 1e9);
        let explanation = runner.explain(path, Some(machine))?;
        let _ = writeln!(
            text,
            "fused {isa} on {} thread(s), where a core does {flops:.1} GFLOP/s and reads {bytes:.1} GB/s:\n{explanation}\n",
            path.threads
        );
    }
    Ok(text)
}

/// A bar on standard error, if that is a terminal. It shows how long it has been there, so that even a long step moves it.
fn progress() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} % {elapsed:>4} {msg}");
    let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_secs(1));
    bar
}

/// A line on standard error; if nobody listens there, there is nothing more to say.
pub(crate) fn complain(line: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "compare: {line}");
}

/// To standard output. A reader that has seen enough and hung up is no failure.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Refused::new(format_args!("standard output: {e}"))),
        _ => Ok(()),
    }
}
