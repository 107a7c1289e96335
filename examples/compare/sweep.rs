//! Times the paths over lengths and head sizes and draws GFLOP/s against length.
//!
//! Every call has equally many rows and keys. The rate hardly depends on the number of heads as long as every thread has the
//! same number of them: there are about twelve where the sequence is short and fewer where it is long, so that a run
//! takes bounded time.

mod options;
mod picture;

pub(crate) use options::{LONGEST, OF_ONE_CALL, Sweep, WIDEST, sizes};

use crate::args::{Args, Source};
use crate::complain;
use crate::elements::{self, Elements, Numbers};
use crate::failure::{Refused, Result};
use crate::folder::try_writing;
use crate::paths::{self, Method, Pass, Path};
use crate::runner::Runner;
use crate::strips::{Cut, Rows, Strip};
use crate::timing::{self, Peaks, Timed};
use indicatif::ProgressBar;
use sdpa::Shape;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::time::Duration;

/// Heads of short sequences.
const HEADS: usize = 12;
/// Operations for each thread from which on there are fewer heads, as long as there is one for every thread.
const WORK: f64 = 2e9;
/// Operations of the rows that the naive path is timed on, and fewest rows of a head.
const NAIVE_WORK: f64 = 1e8;
const NAIVE_ROWS: usize = 16;
/// How long the runs of one path at one point may take together, if they are no fewer than [`RUNS`].
const PER_PATH: Duration = Duration::from_millis(150);
/// Fewest and most runs in that time.
const RUNS: [f64; 2] = [3.0, 500.0];
/// A first run that takes so long is counted: caches and clocks have long settled.
const COUNTED: Duration = Duration::from_millis(50);
/// One that takes so long is enough.
const ENOUGH: Duration = Duration::from_millis(500);
/// A path is left out from the length on at which one run would take longer than this.
const LONGEST_RUN: f64 = 4.0;

/// A path at a point.
#[derive(Debug, Clone)]
struct Sample {
    shape: Shape,
    path: Path,
    /// Threads of the paths it ran beside: the naive one has but one thread of its own.
    threads: usize,
    runs: usize,
    seconds: f64,
    /// Useful operations in a second.
    flops: f64,
    /// Rows it was timed on, if not on all.
    estimated_from: Option<usize>,
    numbers: Numbers,
}

/// Measures, draws, writes and says where.
pub(crate) fn run(args: &Args, sweep: &Sweep) -> Result<()> {
    let refuse = |e: &dyn std::fmt::Display| Refused::new(format_args!("--sweep: {}: {e}", sweep.folder.display()));
    // Rather now than in two minutes.
    std::fs::create_dir_all(&sweep.folder).and_then(|()| try_writing(&sweep.folder)).map_err(|e| refuse(&e))?;
    let counts = paths::thread_counts(args.threads);
    let progress = crate::progress();
    progress.set_length((counts.len() * sweep.dims.len() * sweep.lengths.len()) as u64);
    let mut samples = Vec::new();
    for &dim in &sweep.dims {
        for &threads in &counts {
            let line = Line { args, dim, threads, alone: counts.len() == 1 };
            crate::pool(threads)?.install(|| line.measure(&sweep.lengths, &mut samples, &progress))?;
        }
    }
    progress.finish_and_clear();
    let paths: Vec<Path> = samples.iter().map(|sample| sample.path).collect();
    let peaks = Peaks::measure(&paths).or(Peaks::measure(&paths));

    let file = sweep.folder.join("sweep.csv");
    std::fs::write(&file, csv(&samples, &peaks)).map_err(|e| refuse(&e))?;
    crate::print(&format!("wrote {}\n", file.display()))?;
    crate::pictures::save(&picture::page(&samples, &peaks, sweep), &sweep.folder, "sweep").map_err(|e| refuse(&e))
}

/// The points of one head size and one number of threads.
struct Line<'a> {
    args: &'a Args,
    dim: usize,
    threads: usize,
    /// No other number of threads is measured, so that this one's picture has to show the naive path too.
    alone: bool,
}

impl Line<'_> {
    fn measure(&self, lengths: &[usize], samples: &mut Vec<Sample>, progress: &ProgressBar) -> Result<()> {
        let mut rates: Vec<(Method, f64)> = Vec::new();
        let mut complained = false;
        for &length in lengths {
            progress.set_message(format!("{length} keys, heads of {}, {} thread(s)", self.dim, self.threads));
            let shape = self.shape(length);
            let tensors = elements::load(&Source::Random(shape), self.args.dtype)?;
            let elements = Elements::of(&tensors)?;
            let rows = naive_rows(&shape);
            let cut = Cut::new(&tensors, self.args.settings, shape);
            let mut paths = paths::paths(self.args, &cut, Pass::Forward)?;
            if let Some(why) = paths.left_out.as_ref().filter(|_| !complained) {
                progress.suspend(|| complain(&format_args!("heads of {}, {length} keys and more: {why}", self.dim)));
                complained = true;
            }
            paths.all.retain(|path| self.alone || path.threads == self.threads);
            paths.all.retain(|path| {
                let rate = rates.iter().rfind(|(method, _)| *method == path.method);
                // The naive path's runs are on a sample of rows that takes no longer.
                path.method == Method::Naive || rate.is_none_or(|(_, rate)| work(&shape) / rate <= LONGEST_RUN)
            });
            let mut runner = Runner::new(&tensors, &elements, self.args.settings, &rows)?;
            for timed in self.time(&mut runner, &paths.all)? {
                let sampled = timed.path.method == Method::Naive && !rows.are_all();
                let seconds = timed.median().as_secs_f64() * if sampled { rows.scale() } else { 1.0 };
                let flops = work(&shape) / seconds.max(1e-9);
                rates.push((timed.path.method, flops));
                let estimated_from = sampled.then_some(rows.checked);
                let (path, threads, runs) = (timed.path, self.threads, timed.runs());
                samples.push(Sample {
                    shape,
                    path,
                    threads,
                    runs,
                    seconds,
                    flops,
                    estimated_from,
                    numbers: cut.numbers(),
                });
            }
            progress.inc(1);
        }
        Ok(())
    }

    /// Runs the paths alternately.
    fn time(&self, runner: &mut Runner<'_>, paths: &[Path]) -> Result<Vec<Timed>> {
        let mut all = Vec::new();
        for &path in paths {
            let plan = match path.method {
                Method::Fused(_) => Some(runner.plan(path)?),
                _ => None,
            };
            let first = runner.run(path, plan.as_ref())?;
            let fit = PER_PATH.as_secs_f64() / first.as_secs_f64().max(1e-9);
            let usual = if first >= ENOUGH { 1 } else { fit.clamp(RUNS[0], RUNS[1]) as usize };
            let runs = self.args.repeat.or(NonZeroUsize::new(usual));
            let timed = Timed::new(path, plan, first, runs);
            all.push(if first >= COUNTED { timed.counting(first) } else { timed });
        }
        timing::time(&mut all, &ProgressBar::hidden(), |_, timed| runner.run(timed.path, timed.plan.as_ref()))?;
        Ok(all)
    }

    fn shape(&self, length: usize) -> Shape {
        let (dim, threads) = (self.dim, self.threads);
        let mut shape =
            Shape { batch: 1, heads: 1, kv_heads: 1, q_len: length, kv_len: length, head_dim: dim, value_dim: dim };
        let each = (WORK / work(&shape)) as usize;
        shape.heads = threads * each.clamp(1, HEADS.div_ceil(threads));
        shape.kv_heads = shape.heads;
        shape
    }
}

/// The rows that the naive path is timed on: the first of every head, all of them where they are few. Not those that the
/// answers are checked on: a row at a time, naive would be slower than it is.
fn naive_rows(shape: &Shape) -> Rows {
    let row = work(shape) / shape.q_len as f64;
    let len = ((NAIVE_WORK / row) as usize).clamp(NAIVE_ROWS.min(shape.q_len), shape.q_len);
    let strips: Vec<_> = (0..shape.heads).map(|head| Strip { batch: 0, head, first: 0, len }).collect();
    Rows { checked: strips.len() * len, strips, all: shape.heads * shape.q_len }
}

/// Operations of a call: two products of `length × length × dim` for every head, as everywhere in this program.
fn work(shape: &Shape) -> f64 {
    let pairs = [shape.batch, shape.heads, shape.q_len, shape.kv_len].iter().map(|&n| n as f64).product::<f64>();
    2.0 * pairs * (shape.head_dim + shape.value_dim) as f64
}

/// Part of what the cores of a path could do.
fn share(sample: &Sample, peaks: &Peaks) -> f64 {
    sample.flops / (peaks.of(sample.path.method.isa()) * cores(sample.path.threads) as f64)
}

/// Threads that have a separate core.
fn cores(threads: usize) -> usize {
    threads.min(std::thread::available_parallelism().map_or(1, NonZeroUsize::get))
}

/// A line for every sample.
fn csv(samples: &[Sample], peaks: &Peaks) -> String {
    let mut text = "head_dim,length,heads,path,isa,threads,median_ms,gflops,share_of_peak,runs,estimated_from_rows,\
                    dtype,precision\n"
        .to_owned();
    for sample in samples {
        let (Shape { head_dim, q_len, heads, .. }, Path { method, threads }) = (sample.shape, sample.path);
        let isa = method.isa().map_or(String::new(), |isa| isa.to_string());
        let (ms, gflops, share) = (sample.seconds * 1e3, sample.flops / 1e9, share(sample, peaks));
        let rows = sample.estimated_from.map_or(String::new(), |rows| rows.to_string());
        let (dtype, precision) = sample.numbers.of(method);
        let precision = precision.map_or(String::new(), |precision| precision.to_string());
        let _ = writeln!(
            text,
            "{head_dim},{q_len},{heads},{},{isa},{threads},{ms:.6},{gflops:.3},{share:.4},{},{rows},{dtype},{precision}",
            method.name(),
            sample.runs
        );
    }
    text
}
