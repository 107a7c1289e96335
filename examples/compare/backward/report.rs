//! Errors of gradients, and what is printed of a backward call.

use super::call::{Call, Gradient};
use crate::failure::Result;
use crate::paths::Path;
use crate::timing::Peaks;
use serde_json::{Value, json};
use std::fmt::Write;

/// Roundings, of the largest terms that a gradient is a sum of, that any path may err by. Terms may cancel: with one
/// visible key they are equal, and a gradient is 0.
const ROUNDINGS: f64 = 4.0;

/// The gradients in f64, and how far each may be off.
#[derive(Debug)]
pub(super) struct Bounds {
    exact: Gradient<f64>,
    /// Errors of the plain passes in f32.
    pub(super) naive: [f64; 6],
    bounds: [f64; 6],
}

impl Bounds {
    pub(super) fn compute(call: &Call<'_>) -> Result<Self> {
        let (exact, naive) = (call.naive::<f64>()?, call.naive::<f32>()?);
        let mut all = Self { exact, naive: [0.0; 6], bounds: [0.0; 6] };
        all.naive = all.errors(&naive);
        for ((bound, naive), terms) in all.bounds.iter_mut().zip(all.naive).zip(call.largest_terms()) {
            *bound = naive.max(ROUNDINGS * f64::from(f32::EPSILON) * terms);
        }
        Ok(all)
    }

    /// The largest error of each gradient; 0 for those that are not there.
    pub(super) fn errors(&self, gradient: &Gradient) -> [f64; 6] {
        let (got, exact) = (gradient.parts(), self.exact.parts());
        core::array::from_fn(|i| {
            let pairs = got[i].1.iter().zip(&exact[i].1);
            pairs.map(|(got, exact)| if got.is_nan() { f64::INFINITY } else { (got - exact).abs() }).fold(0.0, f64::max)
        })
    }

    /// Names of the gradients that are there, and the index of each.
    fn there(&self) -> Vec<(usize, &'static str)> {
        let parts = self.exact.parts();
        parts.iter().enumerate().filter(|(_, (_, x))| !x.is_empty()).map(|(i, (name, _))| (i, *name)).collect()
    }
}

/// A path's figures.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) path: Path,
    /// Median times of forward and backward together, and of backward alone.
    pub(super) seconds: [f64; 2],
    pub(super) runs: usize,
    /// Part of what its cores could do, forward and backward.
    pub(super) share: f64,
    pub(super) errors: Option<[f64; 6]>,
}

/// The table and what there is to say about it.
pub(super) fn table(rows: &[Row], bounds: Option<&Bounds>, peaks: &Peaks) -> String {
    let there = bounds.map_or_else(Vec::new, Bounds::there);
    let mut text = format!(
        "{:<9}{:<10}{:>8}{:>20}{:>12}{:>9}",
        "path", "isa", "threads", "forward + backward", "backward", "of peak"
    );
    there.iter().for_each(|(_, name)| _ = write!(text, "{:>16}", format!("error of {name}")));
    text.push('\n');
    for Row { path, seconds: [both, back], share, errors, .. } in rows {
        let isa = path.method.isa().map_or("-", |isa| isa.name());
        let share = format!("{:.1} %", 100.0 * share);
        let _ = write!(
            text,
            "{:<9}{isa:<10}{:>8}{:>17.3} ms{:>9.3} ms{share:>9}",
            path.method.name(),
            path.threads,
            both * 1e3,
            back * 1e3
        );
        for (i, _) in &there {
            let _ = write!(text, "{:>16.2e}", errors.map_or(f64::NAN, |errors| errors[*i]));
        }
        text.push('\n');
    }
    text.push('\n');
    let peaks: Vec<_> = peaks.iter().map(|(isa, peak)| format!("{isa} {:.1}", peak / 1e9)).collect();
    let _ =
        writeln!(text, "Peak: what one core just did in products and sums alone, in GFLOP/s: {}.", peaks.join(", "));
    let _ = writeln!(
        text,
        "Work: 3.5 times the forward pass's operations; the naive path computes forward in its backward."
    );
    match bounds {
        Some(bounds) => {
            let bounds = there.iter().map(|&(i, name)| format!("{name} {:.2e}", bounds.bounds[i])).collect::<Vec<_>>();
            let _ = writeln!(
                text,
                "Errors against f64. Bounds: {}; the larger of the naive path's error and {ROUNDINGS} f32 epsilons of the \
                 largest terms.",
                bounds.join(", ")
            );
        }
        None => text.push_str("Not checked: the oracle holds every pair of row and key, and these are too many.\n"),
    }
    text
}

/// One object for a path. Every key is always there; null where it does not apply.
pub(super) fn json(row: &Row, bounds: Option<&Bounds>) -> String {
    let largest = |errors: [f64; 6]| errors.into_iter().fold(0.0, f64::max);
    let by_name = row.errors.zip(bounds).map(|(errors, bounds)| {
        let pairs = bounds.there().into_iter().map(|(i, name)| (name.to_owned(), json!(errors[i])));
        Value::Object(pairs.collect())
    });
    let pairs: [(&str, Value); 9] = [
        ("path", json!(row.path.method.name())),
        ("isa", json!(row.path.method.isa().map(|isa| isa.name()))),
        ("threads", json!(row.path.threads)),
        ("median_ms", json!(row.seconds[0] * 1e3)),
        ("backward_ms", json!(row.seconds[1] * 1e3)),
        ("share_of_peak", json!(row.share)),
        ("max_abs_error", json!(row.errors.map(largest))),
        ("max_abs_errors", json!(by_name)),
        ("runs", json!(row.runs)),
    ];
    let pairs: Vec<_> = pairs.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
    format!("{{{}}}", pairs.join(","))
}

/// A line for a path with an error that exceeds its bound.
pub(super) fn excess(row: &Row, bounds: Option<&Bounds>) -> Option<String> {
    let (errors, bounds) = (row.errors?, bounds?);
    let (i, name) = bounds.there().into_iter().find(|&(i, _)| errors[i] > bounds.bounds[i])?;
    let (Path { method, threads }, isa) = (row.path, row.path.method.isa().map_or("", |isa| isa.name()));
    let (error, bound) = (errors[i], bounds.bounds[i]);
    Some(format!(
        "{} {isa} on {threads} thread(s): error of {name} is {error:.3e}, but may be at most {bound:.3e}",
        method.name()
    ))
}
