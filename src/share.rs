//! Rows shared out over threads: products with weights, and loops over rows.

use crate::exec::Exec;
use crate::threads::{current_threads, join, workers_do};
use sdpa_kernels::{Packed, Product};

/// Rows times weights, several such products side by side: `(x, weights, out)` each. One fork and one join for all.
pub(crate) fn multiply<const N: usize>(exec: Exec, products: [(&[f32], &Packed, &mut [f32]); N]) {
    let cost: f64 = products.iter().map(|(x, weights, _)| weights.cost(x.len() / weights.inputs())).sum();
    let workers = exec.workers(cost).min(if exec.threads > 1 { current_threads() } else { 1 });
    let products = products.map(|(x, weights, out)| Product::new(x, weights, out, workers));
    let work = || products.iter().for_each(|product| product.work(exec.isa));
    workers_do(workers, work);
}

/// A slice as rows of this width.
pub(crate) struct Rows<T>(pub(crate) T, pub(crate) usize);

/// Operands that go by row: cut before a row, both parts go their own way. More than two are pairs of pairs.
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

/// Calls `work(first row, operands from there on)` for runs of rows that together are all `count` of them, on as many
/// threads as `flops` operations are worth. Nothing is allocated.
pub(crate) fn rows<T: Split>(exec: Exec, count: usize, flops: f64, operands: T, work: impl Fn(usize, T) + Sync) {
    let workers = exec.workers(flops).min(count);
    let workers = if workers > 1 { workers.min(current_threads()) } else { 1 };
    share(workers, 0..count, operands, &work);
}

/// Halves the workers and the rows until a worker is alone.
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
