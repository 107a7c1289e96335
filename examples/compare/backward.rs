//! `--backward`: times forward and backward together and backward alone, and holds every gradient against f64.

mod call;
mod report;

use crate::args::{Args, Format};
use crate::data;
use crate::elements::{self, Elements, Numbers};
use crate::failure::{Refused, Result};
use crate::paths::{self, Method, Pass, Path};
use crate::strips::Cut;
use crate::timing::{self, PER_PATH, Peaks, Timed, median};
use crate::{EXCEEDED, complain, introduction, output, pool, print, progress};
use call::{Call, Gradient};
use indicatif::ProgressBar;
use report::{Bounds, Row};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::Duration;

/// Pairs of row and key up to which the oracle, which holds them all, checks the answers.
const CHECKED_PAIRS: u128 = 1 << 24;

pub(crate) fn compare(args: &Args) -> Result<ExitCode> {
    if let Some(path) = &args.output {
        output::check(path)?;
    }
    let mut tensors = elements::load(&args.source, args.dtype)?;
    if let Some(lists) = &tensors.selected {
        let shape = lists.numbers.shape;
        return Err(Refused::new(format_args!("selected: {shape:?}, but gradients take no lists, and got --backward")));
    }
    let shape = tensors.inputs()?.shape()?;
    let out = [shape.batch, shape.heads, shape.q_len, shape.value_dim];
    let made_up = tensors.d_out.is_none();
    if made_up {
        tensors.d_out = Some(data::made_up_gradient(out)?);
    }
    let elements = Elements::of(&tensors)?;
    let mut call = Call::new(&tensors, &elements, args.settings, shape)?;
    let mut paths = paths::paths(args, &Cut::new(&tensors, args.settings, shape), Pass::Both)?;
    let pool = pool(paths.most_threads())?;
    if args.format == Format::Table {
        let d_out = if made_up { "d_out is made up" } else { "d_out from the file" };
        print(&format!(
            "{}{d_out}\n\n",
            introduction(&args.settings, &tensors, &shape).trim_end_matches('\n').to_owned() + "\n"
        ))?;
    }
    let pairs = [shape.batch, shape.heads, shape.q_len, shape.kv_len].iter().fold(1u128, |n, &size| n * size as u128);
    if let Some(why) = &paths.left_out {
        complain(why);
    }
    // What takes the oracle too long takes the naive path too long.
    let checked = pairs <= CHECKED_PAIRS;
    paths.all.retain(|path| path.method != Method::Naive || checked);
    let progress = progress();
    progress.set_length(Bounds::STEPS + paths.all.len() as u64);
    let bounds = checked.then(|| Bounds::compute(&call, &progress)).transpose()?;
    let peaks = Peaks::measure(&paths.all);
    let measured = pool.install(|| measure(&mut call, &paths.all, args.repeat, bounds.as_ref(), &progress))?;
    progress.finish_and_clear();
    let rows = figures(&measured, call.useful_flops()?, &peaks, Numbers::of_call(&args.settings, &tensors));
    if let Some(path) = &args.output {
        let gradient = pool.install(|| call.gradient(paths.answer))?;
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
    Ok(if report::fused_exceeds(&rows, bounds.as_ref()) { ExitCode::from(EXCEEDED) } else { ExitCode::SUCCESS })
}

/// A path's times and errors.
#[derive(Debug)]
struct Measured {
    /// Forward and backward together.
    timed: Timed,
    backward: Vec<Duration>,
    errors: Option<[f64; 6]>,
}

/// Runs every path once to check its answer, then as often as it takes to time it.
fn measure(
    call: &mut Call<'_>,
    paths: &[Path],
    repeat: Option<NonZeroUsize>,
    bounds: Option<&Bounds>,
    progress: &ProgressBar,
) -> Result<Vec<Measured>> {
    let (mut timed, mut errors, mut backward) = (Vec::new(), Vec::new(), Vec::new());
    progress.set_message("checking the answers");
    for &path in paths {
        call.clear();
        let [forward, back] = call.run(path)?;
        let first = forward + back;
        let is_naive = path.method == Method::Naive;
        errors.push(bounds.map(|bounds| if is_naive { bounds.naive } else { bounds.errors(&call.gradient) }));
        if is_naive && first > PER_PATH {
            timed.push(Timed::new(path, None, first, Some(NonZeroUsize::MIN)).counting(first));
            backward.push(vec![back]);
        } else {
            timed.push(Timed::new(path, None, first, repeat));
            backward.push(Vec::new());
        }
        progress.inc(1);
    }
    timing::time(&mut timed, progress, |index, timed| {
        let [forward, back] = call.run(timed.path)?;
        backward[index].push(back);
        Ok(forward + back)
    })?;
    let all = timed.into_iter().zip(backward).zip(errors);
    Ok(all.map(|((timed, backward), errors)| Measured { timed, backward, errors }).collect())
}

/// A row of the table for each path; `forward` is what the forward pass has to compute, in operations.
fn figures(measured: &[Measured], forward: f64, peaks: &Peaks, numbers: Numbers) -> Vec<Row> {
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let row = |Measured { timed, backward, errors }: &Measured| {
        let (path, seconds) = (timed.path, [timed.median(), median(backward)].map(|time| time.as_secs_f64()));
        let peak = peaks.of(path.method.isa()) * path.threads.min(cores) as f64;
        let (dtype, _) = numbers.of(path.method);
        Row { path, dtype, seconds, runs: timed.runs(), share: 3.5 * forward / seconds[0] / peak, errors: *errors }
    };
    measured.iter().map(row).collect()
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
