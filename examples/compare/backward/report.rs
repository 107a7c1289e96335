//! Errors of gradients, and what is printed of a backward call.

use super::call::{Call, Gradient};
use crate::failure::Result;
use crate::paths::{Method, Path};
use crate::reference;
use crate::table::BEYOND;
use crate::timing::Peaks;
use indicatif::ProgressBar;
use sdpa::Dtype;
use serde_json::{Value, json};
use std::fmt::Write;

/// Roundings, of the largest terms that a gradient is a sum of, that any path may err by. Terms may cancel: with one
/// visible key they are equal, and a gradient is 0.
const ROUNDINGS: f64 = 4.0;

/// The gradients in f64, and how far each may be off.
#[derive(Debug)]
pub(super) struct Bounds {
    exact: Gradient<f64>,
    /// Elements of each gradient that are numbers or not together: those of a key's row, since a query or output gradient
    /// that is not finite makes NaN of all of them.
    together: [usize; 6],
    /// Errors of the plain passes in f32.
    pub(super) naive: [f64; 6],
    bounds: [f64; 6],
}

impl Bounds {
    /// Number of steps by which the bar moves.
    pub(super) const STEPS: u64 = 2;

    pub(super) fn compute(call: &Call<'_>, progress: &ProgressBar) -> Result<Self> {
        progress.set_message("the gradients in f64");
        let exact = call.naive::<f64>()?;
        progress.inc(1);
        let [key, value] = call.dims();
        let mut all = Self { exact, together: [1, key, value, 1, 1, 1], naive: [0.0; 6], bounds: [0.0; 6] };
        progress.set_message("the naive path's error");
        all.naive = all.errors(&call.naive::<f32>()?);
        progress.inc(1);
        for ((bound, naive), terms) in all.bounds.iter_mut().zip(all.naive).zip(call.largest_terms()) {
            *bound = naive.max(ROUNDINGS * f64::from(f32::EPSILON) * terms);
        }
        Ok(all)
    }

    /// The largest error of each gradient; 0 for those that are not there.
    pub(super) fn errors(&self, gradient: &Gradient) -> [f64; 6] {
        let (got, exact) = (gradient.parts(), self.exact.parts());
        core::array::from_fn(|i| {
            let rows = got[i].1.chunks(self.together[i]).zip(exact[i].1.chunks(self.together[i]));
            rows.map(|(got, exact)| error(got, exact)).fold(0.0, f64::max)
        })
    }

    /// Returns true if an error of a path, the one at `i`, is beyond its bound.
    fn exceeds(&self, row: &Row, i: usize) -> bool {
        // One that is no number exceeds every bound.
        row.errors.is_some_and(|errors| errors[i].is_nan() || errors[i] > self.bounds[i])
    }

    /// Names of the gradients that are there, and the index of each.
    fn there(&self) -> Vec<(usize, &'static str)> {
        let parts = self.exact.parts();
        parts.iter().enumerate().filter(|(_, (_, x))| !x.is_empty()).map(|(i, (name, _))| (i, *name)).collect()
    }
}

/// Returns the largest error of elements that are numbers or not together: of these NaN is right where the answer of any is not
/// finite.
fn error(got: &[f64], exact: &[f64]) -> f64 {
    let broken = exact.iter().any(|x| !x.is_finite());
    let right = |got: f64| broken && got.is_nan();
    let errors = got.iter().zip(exact).filter(|(got, _)| !right(**got));
    errors.map(|(&got, &exact)| reference::error(got as f32, exact)).fold(0.0, f64::max)
}

/// A path's figures.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) path: Path,
    /// Element type that the path reads.
    pub(super) dtype: Dtype,
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
    for row in rows {
        let Row { path, seconds: [both, back], share, errors, .. } = row;
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
            let mark = if bounds.is_some_and(|bounds| bounds.exceeds(row, *i)) { BEYOND } else { "" };
            let error = errors.map_or(f64::NAN, |errors| errors[*i]);
            let _ = write!(text, "{:>16}", format!("{mark}{error:.2e}"));
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
            let limits = there.iter().map(|&(i, name)| format!("{name} {:.2e}", bounds.bounds[i])).collect::<Vec<_>>();
            let _ = writeln!(
                text,
                "Errors against f64. Bounds: {}; the larger of the naive path's error and {ROUNDINGS} f32 epsilons of the \
                 largest terms.",
                limits.join(", ")
            );
            if rows.iter().any(|row| !within(row, bounds)) {
                let _ = writeln!(text, "{BEYOND}beyond the bound.");
            }
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
    let pairs: [(&str, Value); 11] = [
        ("path", json!(row.path.method.name())),
        ("isa", json!(row.path.method.isa().map(|isa| isa.name()))),
        ("dtype", json!(row.dtype.to_string())),
        ("threads", json!(row.path.threads)),
        ("median_ms", json!(row.seconds[0] * 1e3)),
        ("backward_ms", json!(row.seconds[1] * 1e3)),
        ("share_of_peak", json!(row.share)),
        ("max_abs_error", json!(row.errors.map(largest))),
        ("max_abs_errors", json!(by_name)),
        ("within_bounds", json!(row.errors.and(bounds).map(|bounds| within(row, bounds)))),
        ("runs", json!(row.runs)),
    ];
    let pairs: Vec<_> = pairs.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
    format!("{{{}}}", pairs.join(","))
}

/// Returns true if no error of a path is beyond its bound.
fn within(row: &Row, bounds: &Bounds) -> bool {
    bounds.there().into_iter().all(|(i, _)| !bounds.exceeds(row, i))
}

/// Returns true if an error of a fused path is beyond its bound. The others are there to be compared with.
pub(super) fn fused_exceeds(rows: &[Row], bounds: Option<&Bounds>) -> bool {
    let fused = rows.iter().filter(|row| matches!(row.path.method, Method::Fused(_)));
    bounds.is_some_and(|bounds| fused.clone().any(|row| !within(row, bounds)))
}

/// A line for a path with an error that exceeds its bound.
pub(super) fn excess(row: &Row, bounds: Option<&Bounds>) -> Option<String> {
    let (errors, bounds) = (row.errors?, bounds?);
    let (i, name) = bounds.there().into_iter().find(|&(i, _)| bounds.exceeds(row, i))?;
    let (Path { method, threads }, isa) = (row.path, row.path.method.isa().map_or("", |isa| isa.name()));
    let (error, bound) = (errors[i], bounds.bounds[i]);
    Some(format!(
        "{} {isa} on {threads} thread(s): error of {name} is {error:.3e}, but may be at most {bound:.3e}",
        method.name()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Source;
    use crate::data;
    use crate::elements::Elements;
    use crate::settings::Settings;
    use sdpa::{Isa, Shape};

    const SHAPE: Shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 3, kv_len: 3, head_dim: 4, value_dim: 2 };

    /// Calls with the bounds of a small call, and a bar that they moved.
    fn with_bounds(work: impl FnOnce(&Bounds, &ProgressBar)) {
        let mut tensors = data::load(&Source::Random(SHAPE)).unwrap();
        tensors.d_out = Some(data::made_up_gradient([1, 2, 3, 2]).unwrap());
        let progress = ProgressBar::hidden();
        let call = Call::new(&tensors, &Elements::F32, Settings::default(), SHAPE).unwrap();
        work(&Bounds::compute(&call, &progress).unwrap(), &progress);
    }

    fn row(method: Method, errors: [f64; 6]) -> Row {
        let path = Path { method, threads: 2 };
        Row { path, dtype: Dtype::F32, seconds: [0.01, 0.005], runs: 3, share: 0.5, errors: Some(errors) }
    }

    #[test]
    fn a_baseline_beyond_its_bound_is_marked_and_a_fused_path_fails() {
        with_bounds(|bounds, _| {
            let fused = Method::Fused(Isa::detect());
            for error in [1.0, f64::INFINITY, f64::NAN] {
                let far = [0.0, error, 0.0, 0.0, 0.0, 0.0];
                let rows = [row(Method::Unfused, far), row(fused, bounds.bounds)];
                assert!(!fused_exceeds(&rows, Some(bounds)));
                let text = table(&rows, Some(bounds), &Peaks::measure(&[rows[1].path]));
                let mark = format!("! {error:.2e}");
                assert!(text.contains(&mark) && text.ends_with("! beyond the bound.\n"), "{text}");
                assert!(
                    excess(&rows[0], Some(bounds)).unwrap().starts_with("unfused  on 2 thread(s): error of dk is ")
                );
                assert!(fused_exceeds(&[row(fused, far)], Some(bounds)));
                assert!(json(&rows[0], Some(bounds)).contains("\"within_bounds\":false"));
            }
            let text = table(&[row(fused, bounds.bounds)], Some(bounds), &Peaks::measure(&[]));
            assert!(!text.contains('!') && !fused_exceeds(&[], None), "{text}");
        });
    }

    #[test]
    fn the_bar_moves_while_the_answer_is_computed() {
        with_bounds(|_, progress| {
            assert_eq!((progress.position(), progress.message().as_str()), (Bounds::STEPS, "the naive path's error"));
        });
    }

    /// Of elements that are broken together NaN is right, ∞ if it is the answer, and nothing else.
    #[test]
    fn what_is_not_finite_has_no_error_where_it_should_not_be() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        assert_eq!(error(&[nan, nan], &[inf, 1.0]), 0.0);
        assert_eq!(error(&[inf, 1.0], &[inf, 1.0]), 0.0);
        assert_eq!(error(&[1.0, 1.0], &[inf, 1.0]), inf);
        assert_eq!(error(&[-inf, 1.0], &[inf, 1.0]), inf);
        assert_eq!(error(&[nan, 1.0], &[2.0, 1.0]), inf);
        assert_eq!(error(&[1.0, 1.0], &[nan, 1.0]), inf);
        assert_eq!(error(&[1.5, 1.0], &[1.25, 1.0]), 0.25);
    }
}
