//! `--backward`: times forward and backward together and backward alone, and holds every gradient against f64.

mod call;
mod report;

use crate::args::{Args, Format, Only};
use crate::data;
use crate::failure::{Refused, Result};
use crate::paths::{Method, Path, thread_counts};
use crate::timing::{PER_PATH, Peaks, median};
use crate::{EXCEEDED, complain, introduction, output, pool, print};
use call::{Call, Gradient};
use report::{Bounds, Row};
use sdpa::Isa;
use std::process::ExitCode;
use std::time::Instant;

/// Fewest runs of one path.
const FEWEST: usize = 3;

/// Pairs of row and key up to which the oracle, which holds them all, checks the answers.
const CHECKED_PAIRS: u128 = 1 << 24;

pub(crate) fn compare(args: &Args) -> Result<ExitCode> {
    if let Some(path) = &args.output {
        output::check(path)?;
    }
    let mut tensors = data::load(&args.source)?;
    let shape = tensors.inputs()?.shape()?;
    let out = [shape.batch, shape.heads, shape.q_len, shape.value_dim];
    let made_up = tensors.d_out.is_none();
    if made_up {
        tensors.d_out = Some(data::made_up_gradient(out)?);
    }
    let mut call = Call::new(&tensors, args.settings, shape)?;
    if args.format == Format::Table {
        let d_out = if made_up { "d_out is made up" } else { "d_out from the file" };
        print(&format!(
            "{}{d_out}\n\n",
            introduction(&args.settings, &tensors, &shape).trim_end_matches('\n').to_owned() + "\n"
        ))?;
    }
    let pairs = [shape.batch, shape.heads, shape.q_len, shape.kv_len].iter().fold(1u128, |n, &size| n * size as u128);
    let bounds = (pairs <= CHECKED_PAIRS).then(|| Bounds::compute(&call)).transpose()?;
    let paths = paths(args, bounds.is_some());
    let peaks = Peaks::measure(&paths);
    let most = paths.iter().map(|path| path.threads).max().unwrap_or(1);
    let rows = pool(most)?.install(|| {
        paths.iter().map(|&path| measure(&mut call, path, args, bounds.as_ref(), &peaks)).collect::<Result<Vec<_>>>()
    })?;
    if let Some(path) = &args.output {
        let widest = args.isa.unwrap_or_else(Isa::detect);
        let gradient = call.fused(Path { method: Method::Fused(widest), threads: most })?;
        output::write(path, &gradient.named(&tensors))?;
    }
    match args.format {
        Format::Table => print(&report::table(&rows, bounds.as_ref(), &peaks))?,
        Format::Json => {
            print(&rows.iter().fold(String::new(), |text, row| text + &report::json(row, bounds.as_ref()) + "\n"))?
        }
    }
    let excesses: Vec<_> = rows.iter().filter_map(|row| report::excess(row, bounds.as_ref())).collect();
    excesses.iter().for_each(|line| complain(line));
    Ok(if excesses.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXCEEDED) })
}

/// The paths that the arguments ask for, slowest first; the naive one only where it takes seconds.
fn paths(args: &Args, small: bool) -> Vec<Path> {
    let wanted = |only| args.only.is_none_or(|it| it == only);
    let naive = (wanted(Only::Naive) && small).then_some(Path { method: Method::Naive, threads: 1 });
    let isas = Isa::available().filter(|&isa| args.isa.is_none_or(|forced| forced == isa) && wanted(Only::Fused));
    let fused = isas.flat_map(|isa| {
        thread_counts(args.threads).into_iter().map(move |threads| Path { method: Method::Fused(isa), threads })
    });
    naive.into_iter().chain(fused).collect()
}

/// Runs a path, once to check its answer and then as often as it takes to time it.
fn measure(call: &mut Call<'_>, path: Path, args: &Args, bounds: Option<&Bounds>, peaks: &Peaks) -> Result<Row> {
    let start = Instant::now();
    let (gradient, naive) = match path.method {
        Method::Naive => (call.naive::<f32>()?, true),
        _ => (call.fused(path)?, false),
    };
    let first = start.elapsed();
    let errors = bounds.map(|bounds| bounds.errors(&gradient));
    let fit = (PER_PATH.as_secs_f64() / first.as_secs_f64().max(1e-9)) as usize;
    let runs = args.repeat.map_or(fit.max(FEWEST), usize::from);
    let (mut both, mut backward) = (Vec::new(), Vec::new());
    if naive {
        // Forward is a part of its backward pass.
        both.push(first);
        backward.push(first);
    } else {
        for _ in 0..runs {
            let [forward, back] = call.timed(path)?;
            both.push(forward + back);
            backward.push(back);
        }
    }
    let seconds = [&both, &backward].map(|times| median(times).as_secs_f64());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let peak = peaks.of(path.method.isa()) * path.threads.min(cores) as f64;
    Ok(Row { path, seconds, runs: both.len(), share: 3.5 * call.useful_flops()? / seconds[0] / peak, errors })
}

/// Nothing to time.
fn nothing(shape: [usize; 4]) -> Refused {
    Refused::new(format_args!("q: shape {shape:?} has no rows, so there is nothing to compare"))
}

impl<T: Copy + Into<f64>> Gradient<T> {
    /// The gradients by name.
    fn parts(&self) -> [(&'static str, Vec<f64>); 6] {
        let wide = |x: &[T]| x.iter().map(|&x| x.into()).collect();
        let Self { q, k, v, bias, sinks, slopes } = self;
        [("dq", q), ("dk", k), ("dv", v), ("dbias", bias), ("dsinks", sinks), ("dalibi_slopes", slopes)]
            .map(|(name, x)| (name, wide(x)))
    }
}
