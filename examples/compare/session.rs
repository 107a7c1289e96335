//! Runs all the paths and turns what was measured into figures.

use crate::failure::Result;
use crate::paths::{Method, Paths};
use crate::reference::{Errors, Reference};
use crate::runner::Runner;
use crate::table::Row;
use crate::timing::{self, Peaks, Timed};
use indicatif::ProgressBar;
use std::num::NonZeroUsize;

/// The paths' times and errors.
#[derive(Debug)]
pub(crate) struct Measured {
    paths: Vec<(Timed, Errors)>,
    /// Fused paths without the lists of selected keys, if the call has any.
    dense: Vec<Timed>,
}

/// Runs every path once to check its answer, then as often as it takes to time it.
pub(crate) fn measure(
    runner: &mut Runner<'_>,
    reference: &Reference,
    paths: &Paths,
    repeat: Option<NonZeroUsize>,
    progress: &ProgressBar,
) -> Result<Measured> {
    let shape = runner.shape;
    progress.reset();
    progress.set_length(paths.all.len() as u64);
    progress.set_message("checking the answers");
    let (mut timed, mut errors, mut dense) = (Vec::new(), Vec::new(), Vec::new());
    for &path in &paths.all {
        let plan = match path.method {
            Method::Fused(_) => Some(runner.plan(path)?),
            _ => None,
        };
        runner.clear();
        let first = runner.run(path, plan.as_ref())?;
        errors.push(match path.method {
            Method::Naive => reference.naive,
            _ => reference.errors(&shape, &runner.out, &runner.lse),
        });
        timed.push(Timed::new(path, plan, first, repeat));
        if let Some(plan) = runner.dense_plan(path)? {
            let first = runner.run_dense(&plan)?;
            dense.push(Timed::new(path, Some(plan), first, repeat));
        }
        progress.inc(1);
    }
    let with_lists = timed.len();
    timed.append(&mut dense);
    timing::time(&mut timed, progress, |n, timed| match &timed.plan {
        Some(plan) if n >= with_lists => runner.run_dense(plan),
        plan => runner.run(timed.path, plan.as_ref()),
    })?;
    let dense = timed.split_off(with_lists);
    Ok(Measured { paths: timed.into_iter().zip(errors).collect(), dense })
}

/// A row of the table for each path.
///
/// `work` is what has to be computed, in operations.
pub(crate) fn figures(work: f64, reference: &Reference, measured: &Measured, peaks: &Peaks) -> Vec<Row> {
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let sampled = !reference.rows.are_all();
    // The naive path is timed on the rows that are checked, and its time grows as their number does.
    let scale = |method| if sampled && method == Method::Naive { reference.rows.scale() } else { 1.0 };
    let seconds = |timed: &Timed| timed.median().as_secs_f64() * scale(timed.path.method);
    let naive = measured.paths.iter().map(|(timed, _)| timed).find(|timed| timed.path.method == Method::Naive);
    let naive = naive.map(seconds);
    let row = |(timed, errors): &(Timed, Errors)| {
        let (path, time) = (timed.path, seconds(timed));
        let flops = (work > 0.0 && time > 0.0).then(|| work / time);
        let peak = peaks.of(path.method.isa()) * path.threads.min(cores) as f64;
        Row {
            path,
            seconds: time,
            runs: timed.runs(),
            estimated_from: (sampled && path.method == Method::Naive).then_some(reference.rows.checked),
            flops,
            share: flops.map(|flops| flops / peak),
            dense: measured.dense.iter().find(|dense| dense.path == path).map(|dense| dense.median().as_secs_f64()),
            speed_up: naive.filter(|_| time > 0.0).map(|naive| naive / time),
            errors: *errors,
        }
    };
    measured.paths.iter().map(row).collect()
}
