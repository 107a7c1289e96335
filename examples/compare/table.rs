//! What is printed: a table for people, a line of JSON for each path for programs.

use crate::paths::{Method, Path};
use crate::reference::{Errors, ROUNDED_WEIGHT, Reference};
use crate::timing::Peaks;
use sdpa::Isa;
use serde_json::{Value, json};
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
    /// Median time without the lists of selected keys, if the call has any.
    pub(crate) dense: Option<f64>,
    /// How many times as fast as the naive path, if that was timed.
    pub(crate) speed_up: Option<f64>,
    pub(crate) errors: Errors,
}

impl Row {
    fn is_within(&self, reference: &Reference) -> bool {
        self.errors.within(reference.bound_of(self.path.method))
    }
}

const HEADINGS: [&str; 10] =
    ["path", "isa", "threads", "median", "dense", "GFLOP/s", "of peak", "× naive", "max abs error", "max rel error"];
/// Column that is there if the call has lists of selected keys.
const DENSE: usize = 4;
/// Columns of words stand to the left, those of numbers to the right.
const LEFT: usize = 2;
/// Mark of an error that is beyond its bound.
pub(crate) const BEYOND: &str = "! ";

/// The table and what there is to say about it.
pub(crate) fn table(rows: &[Row], reference: &Reference, peaks: &Peaks) -> String {
    let cells: Vec<_> =
        std::iter::once(HEADINGS.map(str::to_owned)).chain(rows.iter().map(|row| cells(row, reference))).collect();
    let width = |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for row in &cells {
        let line: Vec<_> = (0..HEADINGS.len())
            .filter(|&column| column != DENSE || rows.iter().any(|row| row.dense.is_some()))
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
    if rows.iter().any(|row| row.dense.is_some()) {
        let _ =
            writeln!(text, "Dense: the same call without lists, of which every row sees all that other rules show.");
    }
    let peaks: Vec<_> = peaks.iter().map(|(isa, peak)| format!("{isa} {:.1}", peak / 1e9)).collect();
    let others =
        if rows.iter().any(|row| row.path.method.isa().is_none()) { "; for the others the best of them" } else { "" };
    let _ = writeln!(
        text,
        "Peak: what one core just did in products and sums alone, in GFLOP/s: {}{others}.",
        peaks.join(", ")
    );
    let _ = writeln!(text, "{}", bound(reference));
    if rows.iter().any(|row| reference.rounds_weights(row.path.method)) {
        let _ = writeln!(text, "{}", native_bound(reference));
    }
    if rows.iter().any(|row| !row.is_within(reference)) {
        let _ = writeln!(text, "{BEYOND}beyond the bound of the output or its log-sum-exp.");
    }
    text
}

fn cells(row: &Row, reference: &Reference) -> [String; 10] {
    let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
    let estimated = if row.estimated_from.is_some() { "~ " } else { "" };
    [
        row.path.method.name().to_owned(),
        or_dash(row.path.method.isa().map(|isa| isa.name().to_owned())),
        row.path.threads.to_string(),
        format!("{estimated}{}", time(row.seconds)),
        or_dash(row.dense.map(time)),
        or_dash(row.flops.map(|flops| rate(flops / 1e9))),
        or_dash(row.share.map(|share| format!("{:.1} %", 100.0 * share))),
        or_dash(row.speed_up.map(|times| format!("{times:.1}"))),
        format!("{}{:.2e}", if row.is_within(reference) { "" } else { BEYOND }, row.errors.out),
        format!("{:.2e}", row.errors.relative),
    ]
}

/// One decimal, more of them below 1.
fn rate(gflops: f64) -> String {
    if gflops < 1.0 { format!("{gflops:.3}") } else { format!("{gflops:.1}") }
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
         Bound: {:.2e}, the larger of the naive path's error ({:.2e}) and {:.1} f32 epsilons of the largest |v| seen.",
        reference.bound.out, reference.naive.out, reference.rounding.out
    )
}

/// The bound where weights are rounded, and the peak there.
fn native_bound(reference: &Reference) -> String {
    let sets: Vec<_> = Isa::available().filter(|isa| isa.has_native_bf16()).map(Isa::name).collect();
    format!(
        "Native products ({}) round weights w. Bound: {:.2e}, the one above and {ROUNDED_WEIGHT} of the largest Σ w·|v − o| of an \
         output o.\nTheir share may exceed 100 %: the peak is that of f32.",
        sets.join(", "),
        reference.native.out
    )
}

/// One object for a path. Every key is always there; null where it does not apply.
pub(crate) fn json(row: &Row, reference: &Reference) -> String {
    let (dtype, precision) = reference.numbers.of(row.path.method);
    let pairs: [(&str, Value); 17] = [
        ("path", json!(row.path.method.name())),
        ("isa", json!(row.path.method.isa().map(|isa| isa.name()))),
        ("dtype", json!(dtype.to_string())),
        ("precision", json!(precision.map(|precision| precision.to_string()))),
        ("threads", json!(row.path.threads)),
        ("median_ms", json!(row.seconds * 1e3)),
        ("dense_median_ms", json!(row.dense.map(|seconds| seconds * 1e3))),
        ("gflops", json!(row.flops.map(|flops| flops / 1e9))),
        ("share_of_peak", json!(row.share)),
        ("max_abs_error", json!(row.errors.out)),
        ("max_rel_error", json!(row.errors.relative)),
        ("naive_max_abs_error", json!(reference.naive.out)),
        ("within_bounds", json!(row.is_within(reference))),
        ("runs", json!(row.runs)),
        ("rows", json!(reference.rows.all)),
        ("rows_checked", json!(reference.rows.checked)),
        ("estimated_from_rows", json!(row.estimated_from)),
    ];
    let pairs: Vec<_> = pairs.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
    format!("{{{}}}", pairs.join(","))
}

/// Returns true if an error of a fused path exceeds its bound. The others are there to be compared with.
pub(crate) fn fused_exceeds(rows: &[Row], reference: &Reference) -> bool {
    rows.iter().any(|row| matches!(row.path.method, Method::Fused(_)) && !row.is_within(reference))
}

/// One line for each path with an error beyond its bound.
pub(crate) fn excesses(rows: &[Row], reference: &Reference) -> Vec<String> {
    let excess = |row: &&Row| !row.is_within(reference);
    let line = |row: &Row| {
        let Path { method, threads } = row.path;
        let bound = reference.bound_of(method);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Source;
    use crate::paths::Method;
    use crate::settings::Settings;
    use crate::strips::{Cut, Rows};
    use indicatif::ProgressBar;
    use sdpa::Shape;

    fn reference() -> Reference {
        let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 3, kv_len: 4, head_dim: 2, value_dim: 2 };
        let tensors = crate::data::load(&Source::Random(shape)).unwrap();
        let settings = Settings::default();
        let cut = Cut::new(&tensors, settings, shape);
        Reference::compute(&cut, Rows::choose(&shape), &ProgressBar::hidden()).unwrap()
    }

    fn row(method: Method, error: f64) -> Row {
        Row {
            path: Path { method, threads: 2 },
            seconds: 0.0125,
            runs: 3,
            estimated_from: None,
            flops: Some(5e9),
            share: None,
            dense: None,
            speed_up: None,
            errors: Errors { out: error, ..Errors::default() },
        }
    }

    #[test]
    fn every_key_is_there() {
        let reference = reference();
        for method in Isa::available().map(Method::Fused).chain([Method::Naive, Method::Unfused]) {
            let value: Value = serde_json::from_str(&json(&row(method, 0.0), &reference)).unwrap();
            for key in [
                "path",
                "isa",
                "dtype",
                "precision",
                "threads",
                "median_ms",
                "gflops",
                "share_of_peak",
                "dense_median_ms",
            ] {
                assert!(value.get(key).is_some(), "{key}");
            }
            for key in ["max_abs_error", "max_rel_error", "naive_max_abs_error"] {
                assert!(value[key].is_f64(), "{key}");
            }
            assert_eq!((&value["median_ms"], &value["gflops"]), (&json!(12.5), &json!(5.0)));
            assert_eq!(value["isa"], json!(method.isa().map(Isa::name)));
            assert_eq!((&value["dtype"], &value["precision"]), (&json!("f32"), &json!(method.isa().map(|_| "exact"))));
            assert!(value["share_of_peak"].is_null());
        }
    }

    #[test]
    fn tables_line_up() {
        let reference = reference();
        let rows = [row(Method::Naive, 0.0), row(Method::Fused(Isa::detect()), 1e-300)];
        let paths = rows.each_ref().map(|row| row.path);
        let text = table(&rows, &reference, &Peaks::measure(&paths));
        let widths: Vec<_> = text.lines().take(3).map(|line| line.chars().count()).collect();
        assert!(widths.windows(2).all(|pair| pair[0] == pair[1]), "{text}");
        assert!(text.contains("12.50 ms") && text.contains("over all 3 rows"), "{text}");
        assert!(!text.contains("dense"), "{text}");
        let [naive, fused] = rows;
        let text = table(&[naive, Row { dense: Some(0.25), ..fused }], &reference, &Peaks::measure(&paths));
        let widths: Vec<_> = text.lines().take(3).map(|line| line.chars().count()).collect();
        assert!(widths.windows(2).all(|pair| pair[0] == pair[1]) && text.contains("250.0 ms"), "{text}");
    }

    #[test]
    fn excesses_are_named() {
        let reference = reference();
        let rows = [row(Method::Naive, 0.0), row(Method::Unfused, 1.0), row(Method::Unfused, f64::INFINITY)];
        let lines = excesses(&rows, &reference);
        assert_eq!(lines.len(), 2);
        let start = "unfused on 2 thread(s): error of out is 1.000e0, but may be at most ";
        assert!(lines[0].starts_with(start), "{}", lines[0]);
    }

    #[test]
    fn times_have_four_digits() {
        let times = [2.5e-8, 1.2346e-5, 0.25, 9.9876, 33.314].map(time);
        assert_eq!(times, ["0.025 µs", "12.35 µs", "250.0 ms", "9.988 s", "33.31 s"]);
    }
}
