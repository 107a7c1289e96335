//! Runs of units of split-KV: neighbours in memory, which a worker takes at once.

use core::ops::Range;

/// Sequences that are split into units, and how the units are handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FewRows {
    /// Largest number of rows a key/value head of a sequence that is split.
    pub few: usize,
    /// Number of runs that the units are handed out in, about.
    pub runs: usize,
}

/// Equal runs of units.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Runs {
    /// Number of units of all runs.
    units: usize,
    /// Number of units of a run.
    run: usize,
}

impl Runs {
    /// Cuts units into at most `runs` runs.
    pub(crate) const fn new(units: usize, runs: usize) -> Self {
        let run = units.div_ceil(if runs == 0 { 1 } else { runs });
        Self { units, run: if run == 0 { 1 } else { run } }
    }

    /// Number of runs.
    pub(crate) fn len(self) -> usize {
        self.units.div_ceil(self.run)
    }

    /// Returns the numbers of a run's units.
    pub(crate) fn units(self, run: usize) -> Range<usize> {
        run * self.run..self.units.min((run + 1) * self.run)
    }

    /// Returns true if one run has all of these units.
    pub(crate) fn together(self, units: Range<usize>) -> bool {
        units.is_empty() || units.start / self.run == (units.end - 1) / self.run
    }
}
