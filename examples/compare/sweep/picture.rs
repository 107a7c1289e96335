//! The page of a sweep: a panel for every head size and number of threads.

use super::{Sample, Sweep, cores};
use crate::paths::Method;
use crate::pictures::{Axis, Level, LineChart, Picture, Scale, Series, page as panels};
use crate::timing::Peaks;

/// Of the frame of a panel.
const SIZE: (f64, f64) = (310.0, 140.0);
/// Peaks closer than this are one line.
const ONE_LINE: f64 = 0.05;

/// Draws everything: head sizes downwards, threads to the right.
pub(super) fn page(samples: &[Sample], peaks: &Peaks, sweep: &Sweep) -> Picture {
    let counts = distinct(samples.iter().map(|sample| sample.threads));
    let methods = distinct(samples.iter().map(|sample| sample.path.method));
    let names: Vec<String> = methods.iter().map(|&method| name(method)).collect();
    let all = sweep.dims.len() * counts.len();
    let mut plots = Vec::new();
    let mut legend = None;
    let per_row = if counts.len() == 1 { 2 } else { counts.len() };
    for &dim in &sweep.dims {
        for &threads in &counts {
            let points = |method: &Method| {
                let mine = |s: &&Sample| (s.shape.head_dim, s.threads, s.path.method) == (dim, threads, *method);
                let at = |length| samples.iter().filter(mine).find(|s| s.shape.q_len == length);
                // What was left out has no rate, but a place: all panels have the same lengths.
                let rate = |length| at(length).map_or(f64::NAN, |s| s.flops / 1e9);
                sweep.lengths.iter().map(|&length| (length as f64, rate(length))).collect::<Vec<_>>()
            };
            let points: Vec<_> = methods.iter().map(points).collect();
            let series: Vec<_> = names.iter().zip(&points).map(|(name, points)| Series { name, points }).collect();
            let levels = levels(peaks, threads);
            let levels: Vec<_> = levels.iter().map(|(name, y)| Level { name, y: *y }).collect();
            let chart = LineChart {
                title: &format!("head_dim {dim}, {threads} thread{}", if threads == 1 { "" } else { "s" }),
                x: Axis {
                    title: if plots.len() + per_row >= all { "length (rows and keys)" } else { "" },
                    scale: Scale::Log2,
                },
                y: Axis { title: if plots.len() % per_row == 0 { "GFLOP/s" } else { "" }, scale: Scale::Linear },
                series: &series,
                levels: &levels,
                size: SIZE,
            };
            plots.push(chart.plot());
            legend = Some(chart.legend());
        }
    }
    let note = "As many keys as rows, nothing masked; 12 heads, fewer where sequences are long. Medians, measured alternately; \
                a line ends where\none run would take more than some seconds. naive is on one thread. Dashed: what the \
                cores do in products and sums alone.";
    let numbers = samples.iter().find_map(|sample| sample.numbers.in_words());
    let title = numbers
        .into_iter()
        .fold("Attention: GFLOP/s against length".to_owned(), |title, numbers| title + ", " + &numbers);
    panels(&title, note, per_row, &plots, legend)
}

fn name(method: Method) -> String {
    method.isa().map_or(method.name().to_owned(), |isa| format!("fused {isa}"))
}

/// Peaks of all cores in use, by name; those too close to be told apart share a line.
fn levels(peaks: &Peaks, threads: usize) -> Vec<(String, f64)> {
    let mut levels: Vec<(String, f64)> = Vec::new();
    for (isa, peak) in peaks.iter() {
        let peak = peak * cores(threads) as f64 / 1e9;
        match levels.iter_mut().find(|(_, y)| (peak / *y - 1.0).abs() < ONE_LINE) {
            Some((name, y)) => {
                *name += &format!(", {isa}");
                *y = y.max(peak);
            }
            None => levels.push((format!("peak {isa}"), peak)),
        }
    }
    levels
}

/// Each once, in order of appearance.
fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for x in all {
        if !seen.contains(&x) {
            seen.push(x);
        }
    }
    seen
}
