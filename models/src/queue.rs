//! The queue, and the request to stop.

use crate::work_queue::{Queue, Stop};
use crate::{Memory, in_every_order, memories, on_workers};

/// Work of a launch: each number has memory that only the worker that has taken it may touch.
struct Launch {
    queue: Queue,
    stop: Stop<'static>,
    rows: Vec<Memory>,
    most: usize,
}

impl Launch {
    fn new(len: usize, most: usize) -> Self {
        Self { queue: Queue::new(len), stop: Stop::when(None), rows: memories(len), most }
    }

    /// Takes runs until none is left, as `Launch::work_on` does.
    fn work(&self) {
        let mut run = 0..0;
        loop {
            if run.is_empty() {
                run = self.queue.take_run(self.most);
            }
            let Some(number) = run.next_back().filter(|_| !self.stop.leaves()) else { break };
            self.rows[number].push(number);
        }
    }
}

fn each_number_is_taken_once(workers: usize, len: usize, most: usize) {
    in_every_order(workers, move || {
        let launch = on_workers(workers, Launch::new(len, most), Launch::work);
        assert!(launch.rows.iter().enumerate().all(|(number, rows)| rows.read() == [number]));
        // A worker that comes late finds nothing.
        assert_eq!(launch.queue.take_run(most), 0..0);
    });
}

#[test]
fn two_workers_take_each_number_once() {
    for (len, most) in [(0, 1), (1, 1), (3, 1), (3, 2), (5, 4)] {
        each_number_is_taken_once(2, len, most);
    }
}

#[test]
fn three_workers_take_each_number_once() {
    each_number_is_taken_once(3, 3, 1);
    each_number_is_taken_once(3, 3, 2);
}

/// Rows are whole or untouched, and rows that are left are no secret.
#[test]
fn a_stop_leaves_rows_whole_or_untouched() {
    in_every_order(2, || {
        let launch = on_workers(2, Launch::new(3, 1), |launch| {
            while let Some(number) = launch.queue.take_unless(&launch.stop) {
                launch.rows[number].push(number);
                if number == 1 {
                    launch.stop.now();
                }
            }
        });
        let whole = launch.rows.iter().enumerate().filter(|(number, rows)| rows.read() == [*number]).count();
        let untouched = launch.rows.iter().filter(|rows| rows.read().is_empty()).count();
        assert_eq!(whole + untouched, 3);
        assert!(launch.stop.is_stopped() && whole >= 2);
    });
}

/// The flag is for good: the caller's function is not asked again after it was true.
#[test]
fn a_stop_is_for_good() {
    static TRUE_FOR_ONE_THREAD: fn() -> bool = || {
        use loom::sync::atomic::{AtomicUsize, Ordering};
        loom::lazy_static! {
            static ref ASKED: AtomicUsize = AtomicUsize::new(0);
        }
        ASKED.fetch_add(1, Ordering::Relaxed) == 1
    };
    in_every_order(2, || {
        let launch = Launch { stop: Stop::when(Some(&TRUE_FOR_ONE_THREAD)), ..Launch::new(4, 1) };
        let launch = on_workers(2, launch, Launch::work);
        let begun = launch.rows.iter().filter(|rows| !rows.read().is_empty()).count();
        assert!(launch.stop.is_stopped() && launch.stop.leaves());
        // The worker that was asked first may do its number; each may do one more, taken before it saw the flag.
        assert!(begun < 4, "{begun}");
    });
}
