//! Row-wise work divided among threads: products with weights, and loops over rows.

use crate::threads::exec::Exec;
use crate::threads::executor::Executor;
use crate::threads::{CurrentPool, current_threads, join};
use sdpa_kernels::{Packed, Product};

/// Multiplies rows with weights, several such products side by side, each `(x, weights, out)`. One fork and one join
/// for all.
pub(crate) fn multiply<const N: usize>(exec: Exec, products: [(&[f32], &Packed, &mut [f32]); N]) {
    let cost: f64 = products.iter().map(|(x, weights, _)| weights.cost(x.len() / weights.inputs())).sum();
    let workers = exec.workers(cost).min(if exec.threads > 1 { current_threads() } else { 1 });
    let products = products.map(|(x, weights, out)| Product::new(x, weights, out, workers));
    CurrentPool.run(workers, &|_| products.iter().for_each(|product| product.work(exec.isa)));
}

/// A slice as rows of this width.
pub(crate) struct Rows<T>(pub(crate) T, pub(crate) usize);

/// Operands of row-wise work, which can be split before any row. For more than two operands, nest pairs.
pub(crate) trait Split: Send + Sized {
    fn split(self, row: usize) -> (Self, Self);
}

impl Split for Rows<&[f32]> {
    fn split(self, row: usize) -> (Self, Self) {
        let (before, after) = self.0.split_at(row * self.1);
        (Rows(before, self.1), Rows(after, self.1))
    }
}

impl Split for Rows<&mut [f32]> {
    fn split(self, row: usize) -> (Self, Self) {
        let (before, after) = self.0.split_at_mut(row * self.1);
        (Rows(before, self.1), Rows(after, self.1))
    }
}

impl<A: Split, B: Split> Split for (A, B) {
    fn split(self, row: usize) -> (Self, Self) {
        let ((a, c), (b, d)) = (self.0.split(row), self.1.split(row));
        ((a, b), (c, d))
    }
}

/// Calls `work(first row, operands from that row on)` for ranges of rows that together cover all `count` rows, on as
/// many threads as `flops` operations are worth. Allocates nothing.
pub(crate) fn rows<T: Split>(exec: Exec, count: usize, flops: f64, operands: T, work: impl Fn(usize, T) + Sync) {
    let workers = exec.workers(flops).min(count);
    let workers = if workers > 1 { workers.min(current_threads()) } else { 1 };
    share(workers, 0..count, operands, &work);
}

/// Halves workers and rows recursively until one worker is left, which calls `work`.
fn share<T: Split>(workers: usize, rows: core::ops::Range<usize>, operands: T, work: &(impl Fn(usize, T) + Sync)) {
    if workers <= 1 {
        return work(rows.start, operands);
    }
    let half = workers / 2;
    let before = rows.len() * half / workers;
    let (left, right) = operands.split(before);
    let middle = rows.start + before;
    join(|| share(half, rows.start..middle, left, work), || share(workers - half, middle..rows.end, right, work));
}
