//! Work shared by the threads of an executor: products with weights, loops over rows, parts of a call.

use sdpa::Exec;
use sdpa_kernels::{Packed, Product};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Returns the number of available threads worth waking for `flops` operations.
pub(crate) fn workers(exec: Exec<'_>, flops: f64) -> usize {
    let workers = exec.workers(flops);
    // One thread needs no pool, and querying the size of rayon's would start it.
    if workers > 1 { workers.min(exec.executor().threads()).max(1) } else { 1 }
}

/// Multiplies rows with weights: several products side by side, each `(x, weights, out)`, in one fork and one join.
pub(crate) fn multiply<const N: usize>(exec: Exec<'_>, products: [(&[f32], &Packed, &mut [f32]); N]) {
    let cost: f64 = products.iter().map(|(x, weights, _)| weights.cost(x.len() / weights.inputs())).sum();
    let (workers, isa) = (workers(exec, cost), exec.instruction_set());
    let products = products.map(|(x, weights, out)| Product::new(x, weights, out, workers));
    let work = || products.iter().for_each(|product| product.work(isa));
    if workers > 1 {
        exec.executor().run(workers, &|_| work());
    }
    // The calling thread alone, or what an executor that broke its promise left undone.
    work();
}

/// A slice as rows of this width.
pub(crate) struct RowSlice<T>(pub(crate) T, pub(crate) usize);

/// Operands of row-wise work that can be divided before any row. For more than two operands, nest pairs.
pub(crate) trait Split: Send + Sized {
    fn split(self, row: usize) -> (Self, Self);
}

impl Split for RowSlice<&[f32]> {
    fn split(self, row: usize) -> (Self, Self) {
        let (before, after) = self.0.split_at(row * self.1);
        (RowSlice(before, self.1), RowSlice(after, self.1))
    }
}

impl Split for RowSlice<&mut [f32]> {
    fn split(self, row: usize) -> (Self, Self) {
        let (before, after) = self.0.split_at_mut(row * self.1);
        (RowSlice(before, self.1), RowSlice(after, self.1))
    }
}

impl<A: Split, B: Split> Split for (A, B) {
    fn split(self, row: usize) -> (Self, Self) {
        let ((a, c), (b, d)) = (self.0.split(row), self.1.split(row));
        ((a, b), (c, d))
    }
}

/// Calls `work(first row, operands from that row on)` for ranges of rows that together cover all `count` rows, on as
/// many threads as `flops` operations are worth. Allocates nothing on one thread.
pub(crate) fn rows<T: Split>(exec: Exec<'_>, count: usize, flops: f64, operands: T, work: impl Fn(usize, T) + Sync) {
    let ranges = workers(exec, flops).min(count);
    if ranges <= 1 {
        return work(0, operands);
    }
    // Ranges not yet begun, as the number of those that are, and the operands from their first row on.
    let rest = Mutex::new((0, Some(operands)));
    let first_row = |range: usize| count / ranges * range + count % ranges * range / ranges;
    // Returns false if no range is left.
    let one = || {
        let (first, operands) = {
            let mut rest = locked(&rest);
            let (begun, Some(operands)) = (rest.0, rest.1.take()) else { return false };
            let first = first_row(begun);
            if begun + 1 == ranges {
                (first, operands)
            } else {
                let (mine, others) = operands.split(first_row(begun + 1) - first);
                *rest = (begun + 1, Some(others));
                (first, mine)
            }
        };
        work(first, operands);
        true
    };
    exec.executor().run(ranges, &|_| _ = one());
    // What an executor that broke its promise left undone.
    while one() {}
}

/// Calls `work` on every part. Each piece of `each` floats of `scratch` gives one worker; workers take the next part until none
/// is left.
pub(crate) fn parts<P: Send>(
    exec: Exec<'_>,
    scratch: &mut [f32],
    each: usize,
    parts: impl Iterator<Item = P> + Send,
    work: impl Fn(&mut [f32], P) + Sync,
) {
    let (workers, parts) = (scratch.len() / each.max(1), Mutex::new(parts));
    let pieces = Mutex::new(scratch.chunks_exact_mut(each.max(1)));
    let worker = |_| {
        let piece = locked(&pieces).next();
        let Some(scratch) = piece else { return };
        loop {
            let part = locked(&parts).next();
            let Some(part) = part else { return };
            work(scratch, part);
        }
    };
    if workers > 1 {
        exec.executor().run(workers, &worker);
    }
    // The calling thread alone, or what an executor that broke its promise left undone.
    worker(0);
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
