//! The server's metrics, read.

use std::collections::HashMap;

/// Numbers of the server at some time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Metrics {
    numbers: HashMap<String, f64>,
    /// Bounds of the steps' buckets, in seconds, and the number of steps up to each.
    steps: Vec<(f64, f64)>,
}

impl Metrics {
    pub(crate) fn new(text: &str) -> Self {
        let mut metrics = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, number)) = line.rsplit_once(' ') else { continue };
            let Ok(number) = number.parse() else { continue };
            let bound = name.strip_prefix("serve_step_seconds_bucket{le=\"").and_then(|rest| rest.strip_suffix("\"}"));
            match bound {
                Some(bound) => metrics.steps.push((bound.parse().unwrap_or(f64::INFINITY), number)),
                None => drop(metrics.numbers.insert(name.to_owned(), number)),
            }
        }
        metrics
    }

    /// A number; 0 if there is none of this name.
    pub(crate) fn get(&self, name: &str) -> f64 {
        self.numbers.get(name).copied().unwrap_or(0.0)
    }

    /// Memory of the server's process, in MiB.
    pub(crate) fn mebibytes(&self) -> f64 {
        self.get("process_resident_memory_bytes") / f64::from(1 << 20)
    }

    /// Time that this share of the steps since `before` did not exceed, in seconds: between the bounds of a bucket, evenly.
    pub(crate) fn step(&self, share: f64, before: &Self) -> f64 {
        let counts = self
            .steps
            .iter()
            .enumerate()
            .map(|(n, &(bound, count))| (bound, count - before.steps.get(n).map_or(0.0, |&(_, count)| count)));
        let counts: Vec<(f64, f64)> = counts.collect();
        let wanted = share * counts.last().map_or(0.0, |&(_, count)| count);
        let (mut low, mut below) = (0.0, 0.0);
        for (bound, count) in counts {
            if count >= wanted && count > below {
                let high = if bound.is_finite() { bound } else { low };
                return low + (high - low) * (wanted - below) / (count - below);
            }
            (low, below) = (bound, count);
        }
        f64::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_steps_lie_within_their_bucket() {
        let text = |counts: [u32; 3]| {
            let [a, b, c] = counts;
            Metrics::new(&format!(
                "# TYPE serve_step_seconds histogram\nserve_step_seconds_bucket{{le=\"0.001\"}} {a}\n\
                 serve_step_seconds_bucket{{le=\"0.002\"}} {b}\nserve_step_seconds_bucket{{le=\"+Inf\"}} {c}\nserve_x 7\n"
            ))
        };
        let (before, after) = (text([5, 5, 5]), text([15, 35, 35]));
        assert_eq!(after.get("serve_x"), 7.0);
        for (share, expected) in [(0.0, 0.0), (1.0 / 3.0, 0.001), (2.0 / 3.0, 0.0015), (1.0, 0.002)] {
            assert!((after.step(share, &before) - expected).abs() < 1e-9, "{share}");
        }
        assert!(before.step(0.5, &before).is_nan());
    }
}
