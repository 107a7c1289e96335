//! Metrics: counters, gauges and histograms, as Prometheus reads them.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bound of the first bucket, in seconds.
const FIRST: f64 = 50e-6;
/// Buckets between a bound and its double.
const PER_DOUBLING: f64 = 4.0;
/// Buckets up to 10 s; the last has no bound.
const BUCKETS: usize = 72;

/// A number that several threads change.
#[derive(Debug, Default)]
pub(crate) struct Number(AtomicU64);

impl Number {
    pub(crate) fn add(&self, n: usize) {
        self.0.fetch_add(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, n: usize) {
        self.0.store(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Times, in buckets whose bounds grow by a fourth root of 2.
#[derive(Debug)]
pub(crate) struct Histogram {
    counts: [Number; BUCKETS],
    nanoseconds: Number,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [const { Number(AtomicU64::new(0)) }; BUCKETS], nanoseconds: Number::default() }
    }
}

impl Histogram {
    pub(crate) fn add(&self, time: Duration) {
        let bucket = ((time.as_secs_f64() / FIRST).log2() * PER_DOUBLING).ceil().max(0.0) as usize;
        self.counts[bucket.min(BUCKETS - 1)].add(1);
        self.nanoseconds.add(time.as_nanos() as usize);
    }

    fn write(&self, name: &str, text: &mut String) {
        let (mut sum, mut bound) = (0, FIRST);
        let _ = writeln!(text, "# TYPE {name} histogram");
        for count in &self.counts[..BUCKETS - 1] {
            sum += count.get();
            let _ = writeln!(text, "{name}_bucket{{le=\"{bound:.9}\"}} {sum}");
            bound *= 2f64.powf(1.0 / PER_DOUBLING);
        }
        sum += self.counts[BUCKETS - 1].get();
        let _ = writeln!(text, "{name}_bucket{{le=\"+Inf\"}} {sum}");
        let _ = writeln!(text, "{name}_sum {}\n{name}_count {sum}", self.nanoseconds.get() as f64 / 1e9);
    }
}

/// What the server counts.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// Requests that were taken.
    pub(crate) accepted: Number,
    /// Requests refused because too much waits, or was promised.
    pub(crate) refused: Number,
    /// Requests that came to their end.
    pub(crate) finished: Number,
    /// Requests given up: their client went away, or their deadline passed.
    pub(crate) given_up: Number,
    /// Requests that ended by an error of the engine.
    pub(crate) failed: Number,
    /// Tokens of prompts whose keys were computed, and those that a fork has spared.
    pub(crate) prompt_tokens: Number,
    pub(crate) forked_tokens: Number,
    pub(crate) written_tokens: Number,
    pub(crate) embedded_tokens: Number,
    /// Texts that lost their place for want of memory.
    pub(crate) preempted: Number,
    /// Calls stopped because those who asked had gone.
    pub(crate) stopped: Number,
    /// Gauges.
    pub(crate) running: Number,
    pub(crate) waiting: Number,
    pub(crate) waiting_tokens: Number,
    pub(crate) cache_bytes: Number,
    pub(crate) promised_bytes: Number,
    /// Time of a step of the decoder, and of a batch of embeddings.
    pub(crate) step: Histogram,
    pub(crate) batch: Histogram,
}

impl Metrics {
    /// Text in the exposition format of Prometheus.
    pub(crate) fn text(&self) -> String {
        let counters = [
            ("serve_accepted_total", &self.accepted),
            ("serve_refused_total", &self.refused),
            ("serve_finished_total", &self.finished),
            ("serve_given_up_total", &self.given_up),
            ("serve_failed_total", &self.failed),
            ("serve_prompt_tokens_total", &self.prompt_tokens),
            ("serve_forked_tokens_total", &self.forked_tokens),
            ("serve_written_tokens_total", &self.written_tokens),
            ("serve_embedded_tokens_total", &self.embedded_tokens),
            ("serve_preempted_total", &self.preempted),
            ("serve_stopped_calls_total", &self.stopped),
        ];
        let gauges = [
            ("serve_running", &self.running),
            ("serve_waiting", &self.waiting),
            ("serve_waiting_tokens", &self.waiting_tokens),
            ("serve_cache_bytes", &self.cache_bytes),
            ("serve_promised_bytes", &self.promised_bytes),
        ];
        let mut text = String::new();
        for (kind, numbers) in [("counter", &counters[..]), ("gauge", &gauges[..])] {
            for (name, number) in numbers {
                let _ = writeln!(text, "# TYPE {name} {kind}\n{name} {}", number.get());
            }
        }
        if let Some(bytes) = resident_bytes() {
            let name = "process_resident_memory_bytes";
            let _ = writeln!(text, "# TYPE {name} gauge\n{name} {bytes}");
        }
        self.step.write("serve_step_seconds", &mut text);
        self.batch.write("serve_batch_seconds", &mut text);
        text
    }
}

/// Bytes of memory that the process holds, where the system says so (Linux).
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_the_bucket_whose_bound_they_do_not_exceed() {
        let histogram = Histogram::default();
        let times = [0, 50, 51, 100, 1_000_000, 3_600_000_000];
        times.iter().for_each(|&micros| histogram.add(Duration::from_micros(micros)));
        let mut text = String::new();
        histogram.write("x", &mut text);
        let count = |bound: &str| -> u64 {
            let line = text.lines().find(|line| line.contains(bound)).unwrap();
            line.rsplit(' ').next().unwrap().parse().unwrap()
        };
        assert_eq!([count("0.000050000"), count("0.000059460"), count("0.000100000"), count("+Inf")], [2, 3, 4, 6]);
        assert_eq!((count("x_count"), text.lines().count()), (6, 3 + BUCKETS));
        assert!(text.contains("x_sum 3601.000201\n"), "{text}");
    }
}
