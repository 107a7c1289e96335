//! Times the paths alternately, each round in another order, so that other work of the machine affects all alike.

use crate::failure::Result;
use crate::paths::Path;
use indicatif::ProgressBar;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;
use sdpa::{Isa, Plan, probe};
use std::num::NonZeroUsize;
use std::time::Duration;

/// Time that the runs of one path may take together, unless the user says how many they are.
pub(crate) const PER_PATH: Duration = Duration::from_secs(1);
/// Fewest and most runs in that time.
const RUNS: [f64; 2] = [3.0, 5000.0];

/// A path, how it is run, and how long that took.
#[derive(Debug)]
pub(crate) struct Timed {
    pub(crate) path: Path,
    pub(crate) plan: Option<Plan>,
    runs: usize,
    times: Vec<Duration>,
}

impl Timed {
    /// `first` is how long one run took.
    pub(crate) fn new(path: Path, plan: Option<Plan>, first: Duration, repeat: Option<NonZeroUsize>) -> Self {
        let fit = PER_PATH.as_secs_f64() / first.as_secs_f64().max(1e-9);
        let runs = repeat.map_or(fit.clamp(RUNS[0], RUNS[1]) as usize, NonZeroUsize::get);
        Self { path, plan, runs, times: Vec::new() }
    }

    /// Counts a first run: one that was long needs no warming.
    pub(crate) fn counting(mut self, first: Duration) -> Self {
        self.runs = self.runs.saturating_sub(1);
        self.times.push(first);
        self
    }

    /// The time in the middle.
    pub(crate) fn median(&self) -> Duration {
        median(&self.times)
    }

    /// Runs timed.
    pub(crate) fn runs(&self) -> usize {
        self.times.len()
    }

    /// True if it is this path's turn in a round: its runs are spread evenly over all rounds.
    fn is_due(&self, round: usize, rounds: usize) -> bool {
        let done_by = |round: usize| round as u128 * self.runs as u128 / rounds as u128;
        done_by(round + 1) > done_by(round)
    }
}

/// Returns the time in the middle, or the mean of the two there.
pub(crate) fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    match times.len() {
        0 => Duration::ZERO,
        n => (times[(n - 1) / 2] + times[n / 2]) / 2,
    }
}

/// Runs every path as often as it should, alternately; `run` is told the index of the path in `paths`.
pub(crate) fn time(
    paths: &mut [Timed],
    progress: &ProgressBar,
    mut run: impl FnMut(usize, &Timed) -> Result<Duration>,
) -> Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let rounds = paths.iter().map(|path| path.runs).max().unwrap_or(0);
    progress.reset();
    progress.set_length(paths.iter().map(|path| path.runs as u64).sum());
    progress.set_message("timing");
    for round in 0..rounds {
        let mut due: Vec<_> = (0..paths.len()).filter(|&path| paths[path].is_due(round, rounds)).collect();
        due.shuffle(&mut rng);
        for path in due {
            let time = run(path, &paths[path])?;
            paths[path].times.push(time);
            progress.inc(1);
        }
    }
    Ok(())
}

/// What one core of this machine can do in each instruction set, in FLOP/s.
#[derive(Debug)]
pub(crate) struct Peaks(Vec<(Isa, f64)>);

impl Peaks {
    /// Measures; takes about 50 ms for each instruction set. Those that none of the paths is held against are left out.
    pub(crate) fn measure(paths: &[Path]) -> Self {
        let all = paths.iter().any(|path| path.method.isa().is_none());
        let used = |isa: &Isa| all || paths.iter().any(|path| path.method.isa() == Some(*isa));
        Self(Isa::available().filter(used).map(|isa| (isa, probe::peak_flops(isa))).collect())
    }

    /// The better of two measurements: a machine that does other things now and then shows its peak at one time or
    /// another.
    pub(crate) fn or(self, other: Self) -> Self {
        Self(self.0.into_iter().zip(other.0).map(|((isa, a), (_, b))| (isa, a.max(b))).collect())
    }

    /// One core's peak; without an instruction set, that of the best one.
    pub(crate) fn of(&self, isa: Option<Isa>) -> f64 {
        let mine = self.0.iter().filter(|(known, _)| isa.is_none_or(|isa| isa == *known));
        mine.fold(0.0, |best, &(_, peak)| best.max(peak))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Isa, f64)> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::Method;

    fn timed(runs: usize) -> Timed {
        let path = Path { method: Method::Naive, threads: 1 };
        Timed::new(path, None, Duration::from_millis(1), NonZeroUsize::new(runs))
    }

    #[test]
    fn runs_are_as_many_as_asked_for_and_spread_evenly() {
        for runs in [1, 2, 3, 7, 99, 100] {
            let due: Vec<_> = (0..100).filter(|&round| timed(runs).is_due(round, 100)).collect();
            assert_eq!(due.len(), runs);
            assert!(due.windows(2).all(|pair| pair[1] - pair[0] <= 100usize.div_ceil(runs)));
        }
        assert_eq!(timed(0).runs, 1000);
        let path = Path { method: Method::Naive, threads: 1 };
        assert_eq!(Timed::new(path, None, Duration::from_secs(9), None).runs, 3);
        assert_eq!(Timed::new(path, None, Duration::ZERO, None).runs, 5000);
        let counting = timed(3).counting(Duration::from_millis(1));
        assert_eq!((counting.runs, counting.runs()), (2, 1));
    }

    #[test]
    fn turns_are_shuffled() {
        let (mut paths, mut order) = ([timed(50), timed(50)], Vec::new());
        let run = |path, _: &Timed| {
            order.push(path);
            Ok(Duration::from_millis(1))
        };
        time(&mut paths, &ProgressBar::hidden(), run).unwrap();
        assert!(paths.iter().all(|path| path.runs() == 50));
        let first = order.chunks(2).filter(|round| round[0] == 0).count();
        assert!((10..40).contains(&first) && order.chunks(2).all(|round| round[0] != round[1]), "{order:?}");
    }

    #[test]
    fn medians() {
        let of = |times: &[u64]| {
            let times = times.iter().map(|&t| Duration::from_nanos(t)).collect();
            Timed { times, ..timed(1) }.median().as_nanos()
        };
        assert_eq!((of(&[]), of(&[7]), of(&[9, 1]), of(&[5, 100, 1])), (0, 7, 5, 5));
    }
}
