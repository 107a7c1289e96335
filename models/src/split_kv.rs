//! Split-KV: units are accumulated into parts, and merged when all are.

use crate::work_queue::{Progress, Queue, Stop};
use crate::{Memory, in_every_order, memories, on_workers};

/// Number of times that a worker looks if the others are done; many more times in the kernels.
const LOOKS: usize = 2;

/// Runs of units, and merges: a merge reads and rewrites its element of each part.
struct Launch {
    units: Queue,
    merges: Queue,
    accumulated: Progress,
    stop: Stop<'static>,
    /// `[unit][merge]`
    parts: Vec<Vec<Memory>>,
    outputs: Vec<Memory>,
    /// Unit of the worker that stops the work, as one that panics does.
    stops_at: Option<usize>,
}

impl Launch {
    fn new(units: usize, merges: usize) -> Self {
        let parts = (0..units).map(|_| memories(merges)).collect();
        let (stop, accumulated) = (Stop::when(None), Progress::default());
        let outputs = memories(merges);
        Self { units: Queue::new(units), merges: Queue::new(merges), accumulated, stop, parts, outputs, stops_at: None }
    }

    fn work(&self) {
        while let Some(unit) = self.units.take_unless(&self.stop) {
            if self.stops_at == Some(unit) {
                return self.stop.now();
            }
            self.parts[unit].iter().for_each(|part| part.push(unit));
            self.accumulated.add_one();
        }
        if self.stop.is_stopped() || !self.accumulated.wait_briefly(self.parts.len(), LOOKS, &self.stop) {
            return;
        }
        while let Some(merge) = self.merges.take_unless(&self.stop) {
            for part in &self.parts {
                self.outputs[merge].push(part[merge].read()[0]);
                part[merge].push(merge);
            }
        }
    }
}

fn parts_are_merged_in_order(workers: usize, units: usize, merges: usize) {
    in_every_order(workers, move || {
        let launch = on_workers(workers, Launch::new(units, merges), Launch::work);
        let in_order: Vec<_> = (0..units).collect();
        assert!(launch.outputs.iter().all(|output| output.read() == in_order), "{:?}", launch.outputs);
    });
}

#[test]
fn two_workers_merge_each_part_once_and_in_order() {
    for (units, merges) in [(1, 1), (2, 1), (3, 1), (2, 2)] {
        parts_are_merged_in_order(2, units, merges);
    }
}

#[test]
fn three_workers_merge_each_part_once_and_in_order() {
    parts_are_merged_in_order(3, 3, 1);
}

/// Nothing is merged if a part of it is missing.
#[test]
fn nothing_is_merged_after_a_stop() {
    in_every_order(2, || {
        let launch = Launch { stops_at: Some(1), ..Launch::new(3, 1) };
        let launch = on_workers(2, launch, Launch::work);
        assert!(launch.stop.is_stopped() && launch.outputs[0].read().is_empty());
    });
}
