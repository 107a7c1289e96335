//! Backward pass: the gradients of a row block's queries are added up over the key blocks in order, in shared memory.

use crate::work_queue::{Progress, Queue, Stop};
use crate::{Memory, in_every_order, memories, on_workers};

/// Columns, key blocks of all heads, and the row blocks that each adds to.
struct Launch {
    columns: Queue,
    heads: usize,
    row_blocks: usize,
    stop: Stop<'static>,
    /// `[head][key block]`
    progress: Vec<Vec<Progress>>,
    /// Gradients of queries, `[head][row block]`: which key blocks have added to them.
    rows: Vec<Vec<Memory>>,
    bias: Option<Bias>,
    /// Key block that no row sees, between others: a column of it neither waits nor adds.
    hidden: Option<usize>,
    /// Column of the worker that stops the work, as one that panics does.
    stops_at: Option<usize>,
}

/// Gradient of a bias that all heads share.
enum Bias {
    /// By key blocks: which heads have added to it.
    Heads(Vec<Memory>),
    /// Shared by key blocks, too: which of them, counted as they are taken, have added to it.
    Blocks(Memory),
}

impl Launch {
    fn new(heads: usize, key_blocks: usize, row_blocks: usize) -> Self {
        Self {
            columns: Queue::new(heads * key_blocks),
            heads,
            row_blocks,
            stop: Stop::when(None),
            progress: (0..heads).map(|_| (0..key_blocks).map(|_| Progress::default()).collect()).collect(),
            rows: (0..heads).map(|_| memories(row_blocks)).collect(),
            bias: None,
            hidden: None,
            stops_at: None,
        }
    }

    fn work(&self) {
        while let Some(number) = self.columns.take_unless(&self.stop) {
            if self.stops_at == Some(number) {
                return self.stop.now();
            }
            // The same key block of all heads before the next.
            self.column(number % self.heads, number / self.heads);
        }
    }

    fn column(&self, head: usize, number: usize) {
        let place = number * self.heads + head;
        let before = match &self.bias {
            Some(Bias::Heads(_)) if head > 0 => Some([head - 1, number]),
            Some(Bias::Blocks(_)) if place > 0 => Some([(place - 1) % self.heads, (place - 1) / self.heads]),
            _ => None,
        };
        if before.is_some_and(|[head, number]| !self.progress[head][number].wait(self.row_blocks, &self.stop)) {
            return;
        }
        for block in 0..self.row_blocks {
            if self.hidden == Some(number) {
                self.progress[head][number].set(block + 1);
                continue;
            }
            let before = (0..number).rev().find(|&before| self.hidden != Some(before));
            if before.is_some_and(|before| !self.progress[head][before].wait(block + 1, &self.stop)) {
                return;
            }
            self.rows[head][block].push(number);
            match &self.bias {
                Some(Bias::Heads(bias)) => bias[number].push(head),
                Some(Bias::Blocks(bias)) => bias.push(place),
                None => {}
            }
            self.progress[head][number].set(block + 1);
        }
    }
}

fn gradients_are_added_in_order(workers: usize, [heads, key_blocks, row_blocks]: [usize; 3]) {
    in_every_order(workers, move || {
        let launch = on_workers(workers, Launch::new(heads, key_blocks, row_blocks), Launch::work);
        let in_order: Vec<_> = (0..key_blocks).collect();
        assert!(launch.rows.iter().flatten().all(|rows| rows.read() == in_order), "{:?}", launch.rows);
    });
}

#[test]
fn two_workers_add_in_order() {
    for sizes in [[1, 2, 1], [1, 2, 2], [1, 3, 2], [2, 2, 1]] {
        gradients_are_added_in_order(2, sizes);
    }
}

#[test]
fn three_workers_add_in_order() {
    gradients_are_added_in_order(3, [2, 2, 1]);
}

/// Rows wait for the last key block that they see, not for one between that they do not.
#[test]
fn a_hidden_key_block_between_others_keeps_their_order() {
    in_every_order(3, || {
        let launch = on_workers(3, Launch { hidden: Some(1), ..Launch::new(1, 3, 1) }, Launch::work);
        assert_eq!(launch.rows[0][0].read(), [0, 2]);
    });
}

#[test]
fn heads_add_to_a_shared_bias_in_order() {
    in_every_order(2, || {
        let launch = Launch { bias: Some(Bias::Heads(memories(2))), ..Launch::new(2, 2, 1) };
        let launch = on_workers(2, launch, Launch::work);
        let Some(Bias::Heads(bias)) = &launch.bias else { unreachable!("there is one") };
        assert!(bias.iter().all(|bias| bias.read() == [0, 1]), "{bias:?}");
    });
}

#[test]
fn key_blocks_add_to_a_bias_that_they_share_in_order() {
    in_every_order(2, || {
        let launch = Launch { bias: memories(1).pop().map(Bias::Blocks), ..Launch::new(2, 2, 1) };
        let launch = on_workers(2, launch, Launch::work);
        let Some(Bias::Blocks(bias)) = &launch.bias else { unreachable!("there is one") };
        assert_eq!(bias.read(), [0, 1, 2, 3]);
    });
}

/// A worker that gives up does not leave others waiting; what was added was added in order.
#[test]
fn nobody_waits_after_a_stop() {
    in_every_order(2, || {
        let launch = Launch { stops_at: Some(1), ..Launch::new(1, 3, 1) };
        let launch = on_workers(2, launch, Launch::work);
        assert!(launch.stop.is_stopped() && launch.rows[0][0].read().len() <= 1);
    });
}
