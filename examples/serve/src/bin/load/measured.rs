//! Results of a run: shares of times, a row of the table, the judgement of a long run.

use crate::Result;
use crate::client::Outcome;
use crate::metrics::Metrics;
use std::collections::BTreeMap;
use std::time::Duration;

/// Head of the table.
pub(crate) const HEAD: &str = "\
| load | asked/s | done/s | letters/s | first letter, ms: p50 | p90 | p99 | whole text, ms: p50 | p90 | p99 | step, ms: p50 | p99 \
| refused | late | failed | MiB |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|";

/// Outcomes of a run.
pub(crate) struct Measured {
    /// Fraction of the capacity, and requests a second.
    pub(crate) load: f64,
    pub(crate) offered: f64,
    pub(crate) seconds: f64,
    pub(crate) outcomes: Vec<Outcome>,
    /// The server's numbers before and after.
    pub(crate) steps: [Metrics; 2],
}

/// A long run, and the server's memory in MiB in its course.
pub(crate) struct Long {
    pub(crate) measured: Measured,
    pub(crate) memory: Vec<(Duration, f64)>,
}

impl Measured {
    fn count(&self, which: impl Fn(&Outcome) -> bool) -> usize {
        self.outcomes.iter().filter(|outcome| which(outcome)).count()
    }

    fn share(&self, which: impl Fn(&Outcome) -> bool) -> f64 {
        self.count(which) as f64 / (self.outcomes.len() as f64).max(1.0)
    }

    pub(crate) fn refused(&self) -> f64 {
        self.share(|outcome| *outcome == Outcome::Refused)
    }

    pub(crate) fn done_per_second(&self) -> f64 {
        let done = |outcome: &Outcome| matches!(outcome, Outcome::Written { .. } | Outcome::Embedded { .. });
        self.count(done) as f64 / self.seconds
    }

    pub(crate) fn letters_per_second(&self) -> f64 {
        let letters = |outcome: &Outcome| if let Outcome::Written { letters, .. } = outcome { *letters } else { 0 };
        self.outcomes.iter().map(letters).sum::<usize>() as f64 / self.seconds
    }

    /// Milliseconds to the first letter that this share of the texts did not exceed.
    pub(crate) fn first(&self, share: f64) -> f64 {
        let first = |outcome: &Outcome| if let Outcome::Written { first, .. } = outcome { Some(*first) } else { None };
        quantile(self.outcomes.iter().filter_map(first), share)
    }

    /// Milliseconds to the last letter that this share of the texts did not exceed.
    pub(crate) fn whole(&self, share: f64) -> f64 {
        let whole = |outcome: &Outcome| if let Outcome::Written { whole, .. } = outcome { Some(*whole) } else { None };
        quantile(self.outcomes.iter().filter_map(whole), share)
    }

    /// Milliseconds to embeddings that this share of their requests did not exceed.
    pub(crate) fn embedded(&self, share: f64) -> f64 {
        let whole = |outcome: &Outcome| if let Outcome::Embedded { whole } = outcome { Some(*whole) } else { None };
        quantile(self.outcomes.iter().filter_map(whole), share)
    }

    /// Milliseconds that this share of the steps did not exceed.
    pub(crate) fn step(&self, share: f64) -> f64 {
        1e3 * self.steps[1].step(share, &self.steps[0])
    }

    /// Row of the table.
    pub(crate) fn row(&self) -> String {
        let times: Vec<String> = [0.5, 0.9, 0.99]
            .iter()
            .map(|&share| format!("{:.1}", self.first(share)))
            .chain([0.5, 0.9, 0.99].iter().map(|&share| format!("{:.1}", self.whole(share))))
            .chain([0.5, 0.99].iter().map(|&share| format!("{:.2}", self.step(share))))
            .collect();
        format!(
            "| {:.2} | {:.1} | {:.1} | {:.0} | {} | {:.0} % | {} | {} | {:.0} |",
            self.load,
            self.offered,
            self.done_per_second(),
            self.letters_per_second(),
            times.join(" | "),
            100.0 * self.refused(),
            self.count(|outcome| *outcome == Outcome::Late),
            self.count(|outcome| matches!(outcome, Outcome::Failed(_))),
            self.steps[1].mebibytes(),
        )
    }
}

impl Long {
    /// Prints the run, and its bars: no error, no growth of memory after the first minute, no slow step.
    ///
    /// # Errors
    /// If one of them is not met.
    pub(crate) fn judge(&self) -> Result<()> {
        let measured = &self.measured;
        println!("\n{HEAD}\n{}\n", measured.row());
        let times = [0.5, 0.9, 0.99].map(|share| format!("{:.1}", measured.embedded(share)));
        println!("embeddings, ms: p50, p90, p99: {}", times.join(", "));
        let mut failures: BTreeMap<&str, usize> = BTreeMap::new();
        for outcome in &measured.outcomes {
            if let Outcome::Failed(why) = outcome {
                *failures.entry(why).or_default() += 1;
            }
        }
        failures.iter().for_each(|(why, count)| println!("failed, {count} times: {why}"));
        let failed = measured.count(|outcome| matches!(outcome, Outcome::Failed(_) | Outcome::Late));
        let (first, later) = self.memory.split_at(self.memory.partition_point(|(time, _)| time.as_secs() <= 60));
        let most = |memory: &[(Duration, f64)]| memory.iter().map(|&(_, mebibytes)| mebibytes).fold(0.0, f64::max);
        let (first, later) = (most(first), most(later));
        let ratio = measured.step(0.99) / measured.step(0.5);
        println!("memory, MiB: at most {first:.1} in the first minute, {later:.1} later");
        println!("steps: p99 / p50 = {ratio:.2}");
        let bars = [
            (failed == 0, "a request failed or was late"),
            // A page here and there is no growth.
            (later <= first + 1.0, "memory grew after the first minute"),
            (ratio <= 3.0, "p99 of a step is more than three times its median"),
        ];
        match bars.iter().find(|(met, _)| !met) {
            Some((_, missed)) => Err((*missed).into()),
            None => {
                println!("all bars are met");
                Ok(())
            }
        }
    }
}

/// Milliseconds that this share of the times does not exceed.
fn quantile(times: impl Iterator<Item = Duration>, share: f64) -> f64 {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let last = times.len().saturating_sub(1);
    times.get((share * last as f64).round() as usize).map_or(f64::NAN, |time| 1e3 * time.as_secs_f64())
}
