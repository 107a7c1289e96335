//! What is printed: a table for people, a line of JSON for each path for programs.

use crate::paths::Path;
use crate::reference::{Errors, FREE_ULPS, Reference};
use serde_json::json;
use std::fmt::Write;

/// A path's figures.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) path: Path,
    /// Median time of the whole call.
    pub(crate) seconds: f64,
    /// Runs it is the median of.
    pub(crate) runs: usize,
    /// Rows it was timed on, if not on all: then `seconds` is an estimate.
    pub(crate) estimated_from: Option<usize>,
    /// Useful operations in a second, where there are any.
    pub(crate) flops: Option<f64>,
    /// Part of what its cores could do.
    pub(crate) share: Option<f64>,
    /// How many times as fast as the naive path, if that was timed.
    pub(crate) speed_up: Option<f64>,
    pub(crate) errors: Errors,
}

const HEADINGS: [&str; 9] =
    ["path", "isa", "threads", "median", "GFLOP/s", "of peak", "× naive", "max abs error", "max rel error"];
/// Columns of words stand to the left, those of numbers to the right.
const LEFT: usize = 2;

/// The table and what there is to say about it.
pub(crate) fn table(rows: &[Row], reference: &Reference) -> String {
    let cells: Vec<_> = std::iter::once(HEADINGS.map(str::to_owned)).chain(rows.iter().map(cells)).collect();
    let width = |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for row in &cells {
        let line: Vec<_> = (0..HEADINGS.len())
            .map(|column| match (column < LEFT, &row[column], width(column)) {
                (true, cell, width) => format!("{cell:<width$}"),
                (false, cell, width) => format!("{cell:>width$}"),
            })
            .collect();
        let _ = writeln!(text, "{}", line.join("  "));
    }
    text.push('\n');
    if let Some(n) = rows.iter().find_map(|row| row.estimated_from) {
        let _ = writeln!(text, "~ estimated from {n} of {} rows.", reference.rows.all);
    }
    let _ = writeln!(text, "{}", bound(reference));
    text
}

fn cells(row: &Row) -> [String; 9] {
    let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
    let estimated = if row.estimated_from.is_some() { "~ " } else { "" };
    [
        row.path.method.name().to_owned(),
        or_dash(row.path.method.isa().map(|isa| isa.name().to_owned())),
        row.path.threads.to_string(),
        format!("{estimated}{}", time(row.seconds)),
        or_dash(row.flops.map(|flops| format!("{:.1}", flops / 1e9))),
        or_dash(row.share.map(|share| format!("{:.1} %", 100.0 * share))),
        or_dash(row.speed_up.map(|times| format!("{times:.1}"))),
        format!("{:.2e}", row.errors.out),
        format!("{:.2e}", row.errors.relative),
    ]
}

/// Four digits and a unit.
fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s < 1e-3 => (s * 1e6, "µs"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let decimals = if value < 10.0 {
        3
    } else if value < 100.0 {
        2
    } else {
        1
    };
    format!("{value:.decimals$} {unit}")
}

/// What the errors are, and what they may be.
fn bound(reference: &Reference) -> String {
    let rows = &reference.rows;
    let which = match rows.are_all() {
        true => format!("all {} rows", rows.all),
        false => format!("a fixed random sample of {} of the {} rows", rows.checked, rows.all),
    };
    format!(
        "Errors against f64 sums, over {which}; relative ones to the largest element of the row's answer.\n\
         Bound: {:.2e}, the larger of the naive path's error ({:.2e}) and {FREE_ULPS} f32 epsilons of the largest |v|.",
        reference.bound.out, reference.naive.out
    )
}

/// One object for a path. Every key is always there; null where it does not apply.
pub(crate) fn json(row: &Row, reference: &Reference) -> String {
    json!({
        "path": row.path.method.name(),
        "isa": row.path.method.isa().map(|isa| isa.name()),
        "threads": row.path.threads,
        "median_ms": row.seconds * 1e3,
        "gflops": row.flops.map(|flops| flops / 1e9),
        "share_of_peak": row.share,
        "max_abs_error": row.errors.out,
        "max_rel_error": row.errors.relative,
        "naive_max_abs_error": reference.naive.out,
        "runs": row.runs,
        "rows": reference.rows.all,
        "rows_checked": reference.rows.checked,
        "estimated_from_rows": row.estimated_from,
    })
    .to_string()
}

/// One line for each path whose error exceeds its bound.
pub(crate) fn excesses(rows: &[Row], reference: &Reference) -> Vec<String> {
    let bound = &reference.bound;
    let excess = |row: &&Row| !row.errors.within(bound);
    let line = |row: &Row| {
        let Path { method, threads } = row.path;
        let isa = method.isa().map_or(String::new(), |isa| format!(" {isa}"));
        let (what, error, bound) = match row.errors.out <= bound.out {
            true => ("lse", row.errors.lse, bound.lse),
            false => ("out", row.errors.out, bound.out),
        };
        format!(
            "{}{isa} on {threads} thread(s): error of {what} is {error:.3e}, but may be at most {bound:.3e}",
            method.name()
        )
    };
    rows.iter().filter(excess).map(line).collect()
}
