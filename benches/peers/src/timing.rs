//! Times the workers alternately, so that other work of the machine affects all alike.

use crate::failure::Result;
use crate::worker::Worker;
use std::time::Duration;

/// Times that everyone's turn comes, unless a single run takes long.
const ROUNDS: usize = 5;
/// Fewest and most runs of one peer.
const RUNS: [f64; 2] = [3.0, 5000.0];
/// Before each burst. Threads of the last peer that spin in wait for more work give up in this time; without it, figures
/// on all cores are up to twice what they should be.
const PAUSE: Duration = Duration::from_millis(100);
/// Runs that take longer than this need none before them to warm up.
const WARM: f64 = 0.25;

/// One peer's runs of one task.
#[derive(Debug, Clone)]
pub(crate) struct Timed {
    /// What the second run took; the first one may compile, allocate, and wake threads.
    first: f64,
    runs: usize,
    seconds: Vec<f64>,
}

impl Timed {
    /// Runs once or twice and decides how often to run later; `budget` is in seconds.
    pub(crate) fn start(worker: &mut Worker, budget: f64) -> Result<Self> {
        worker.burst(1)?;
        let first = if budget > 0.0 { worker.burst(1)?[0] } else { 0.0 };
        let runs = if budget > 0.0 { (budget / first.max(1e-9)).clamp(RUNS[0], RUNS[1]) as usize } else { 0 };
        Ok(Self { first, runs, seconds: Vec::new() })
    }

    /// Runs of this round: all of them are spread evenly over the rounds.
    fn due(&self, round: usize) -> usize {
        (round + 1) * self.runs / ROUNDS - round * self.runs / ROUNDS
    }

    /// The median of the times.
    pub(crate) fn median(&self) -> Option<f64> {
        let mut seconds = self.seconds.clone();
        seconds.sort_unstable_by(f64::total_cmp);
        match seconds.len() {
            0 => None,
            n => Some((seconds[(n - 1) / 2] + seconds[n / 2]) / 2.0),
        }
    }

    /// The shortest.
    pub(crate) fn least(&self) -> Option<f64> {
        self.seconds.iter().copied().min_by(f64::total_cmp)
    }

    pub(crate) fn runs(&self) -> usize {
        self.seconds.len()
    }
}

/// Runs all workers as often as decided, alternately. One that fails is left out, and `failed` is told.
pub(crate) fn time<'a>(
    contenders: impl Iterator<Item = (&'a mut Worker, &'a mut Timed)>,
    mut failed: impl FnMut(usize, Box<dyn std::error::Error + Send + Sync>),
) {
    let mut contenders: Vec<_> = contenders.enumerate().collect();
    for round in 0..ROUNDS {
        contenders.retain_mut(|(index, (worker, timed))| {
            let due = timed.due(round);
            if due == 0 {
                return true;
            }
            std::thread::sleep(PAUSE);
            let warm = usize::from(timed.first < WARM);
            match worker.burst(warm + due) {
                Ok(seconds) => timed.seconds.extend(&seconds[warm..]),
                Err(e) => {
                    failed(*index, e);
                    return false;
                }
            }
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_spread_over_the_rounds() {
        for runs in [0, 1, 3, 5, 7, 5000] {
            let timed = Timed { first: 0.0, runs, seconds: Vec::new() };
            let due: Vec<_> = (0..ROUNDS).map(|round| timed.due(round)).collect();
            assert_eq!(due.iter().sum::<usize>(), runs);
            assert!(due.iter().max().unwrap() - due.iter().min().unwrap() <= 1);
        }
    }

    #[test]
    fn medians() {
        let of = |seconds: &[f64]| Timed { first: 0.0, runs: 0, seconds: seconds.to_vec() }.median();
        assert_eq!(
            (of(&[]), of(&[7.0]), of(&[9.0, 1.0]), of(&[5.0, 100.0, 1.0])),
            (None, Some(7.0), Some(5.0), Some(5.0))
        );
    }
}
