//! Software prefetch: lines of later memory, with the terms of a large register tile, or a few after each small one.
//!
//! A block's keys and values, and a task's queries and outputs, are read once and come from far away. Prefetching them
//! a block (or a task) ahead hides that latency.

use crate::simd::width::LINE_BYTES;
use crate::simd::{FOUR, LANES, Level, Simd};
use crate::tensor::any::AnyRows;

/// Largest number of rows a key/value head that are memory-bound: tiles then read keys and values from
/// front to back, and workers divide them by key blocks (split-KV).
pub const MEMORY_BOUND_ROWS: usize = 16;

/// Number of keys that a task of at most [`MEMORY_BOUND_ROWS`] rows packs at a time before it computes their scores: 16 KiB of
/// floats at head_dim 128, in the first-level cache. A whole block would be written to the second-level cache and read back.
pub(crate) const READING_KEYS: usize = 2 * LANES;

/// Returns true if this tile of a small row block prefetches for all of its rows: the first tile, where full tiles have
/// room for it; where tiles have one vector, the last, which may be a small one.
#[inline(always)]
pub(crate) fn tile_prefetches<S: Simd>(row: usize, rows: usize, all: usize) -> bool {
    all <= MEMORY_BOUND_ROWS && if S::DOT_VECS > 1 { row == 0 } else { row + rows == all }
}

/// Number of lines prefetched after a tile that does not prefetch as it computes: a kilobyte in the time of 1,500 cycles, a few
/// GB/s.
const LINES: usize = 16;

/// Largest number of stretches of memory in one queue: keys, values, queries, outputs; of a unit, its accumulator,
/// values, keys; of the backward pass, gradients too.
const STRETCHES: usize = 9;

/// Evenly spaced lines, passed over several times: first the first line of each row, then the second.
#[derive(Clone, Copy)]
struct Stretch {
    first: *const u8,
    /// Bytes from one line to the next.
    step: isize,
    lines: usize,
    passes: usize,
}

/// Returns true if tiles of `vecs` vectors prefetch as they compute: full ones of several vectors. There are few of these. A few
/// lines after each would not be enough, and many at once would be waited for.
const fn prefetches_beside<S: Simd>(vecs: usize) -> bool {
    S::TILE_VECS > 1 && vecs == S::TILE_VECS
}

/// Evenly spaced lines that a tile prefetches as it computes, four with each four terms.
#[derive(Clone, Copy)]
pub(crate) struct PrefetchStream {
    at: *const u8,
    /// Bytes from one line to the next.
    step: isize,
    /// Number of lines left, a multiple of four.
    lines: usize,
}

impl PrefetchStream {
    const NONE: Self = Self { at: core::ptr::null(), step: 0, lines: 0 };

    #[inline(always)]
    pub(crate) fn is_empty(self) -> bool {
        self.lines == 0
    }

    /// Prefetches the next four lines, if any are left, beside a tile of `NV` vectors.
    #[inline(always)]
    pub(crate) fn fetch<S: Simd, const NV: usize>(&mut self, s: S) {
        if const { !prefetches_beside::<S>(NV) } || self.lines == 0 {
            return;
        }
        self.lines -= FOUR;
        for _ in 0..FOUR {
            s.prefetch_second(self.at.cast());
            // Wrapping: a prefetch may have any address.
            self.at = self.at.wrapping_offset(self.step);
        }
    }
}

/// Queue of memory to prefetch, with the position reached in it.
pub(crate) struct PrefetchQueue {
    stretches: [Stretch; STRETCHES],
    len: usize,
    at: usize,
    pass: usize,
    line: usize,
}

impl PrefetchQueue {
    #[inline]
    pub(crate) const fn nothing() -> Self {
        let none = Stretch { first: core::ptr::null(), step: 0, lines: 0, passes: 0 };
        Self { stretches: [none; STRETCHES], len: 0, at: 0, pass: 0, line: 0 }
    }

    /// Takes everything out of the queue.
    #[inline(always)]
    pub(crate) fn clear(&mut self) {
        (self.len, self.at, self.pass, self.line) = (0, 0, 0, 0);
    }

    /// Adds `n` rows of `bytes`, `row` bytes apart.
    #[inline]
    pub(crate) fn push(&mut self, first: *const u8, row: isize, n: usize, bytes: usize) {
        if self.len == STRETCHES || n == 0 || bytes == 0 {
            return;
        }
        let dense = row == bytes as isize;
        let (n, bytes) = if dense { (1, n * bytes) } else { (n, bytes) };
        // A row that starts inside a line may end in one more line: its neighbour's, or not worth a prefetch.
        let lines = bytes.div_ceil(LINE_BYTES);
        self.stretches[self.len] = if n == 1 {
            Stretch { first, step: LINE_BYTES as isize, lines, passes: 1 }
        } else {
            Stretch { first, step: row, lines: n, passes: lines }
        };
        self.len += 1;
    }

    /// Returns the next lines for a tile of `NV` vectors that prefetches as it computes, at most `most`: the fours that are
    /// evenly spaced; none if it does not.
    #[inline(always)]
    pub(crate) fn stream<S: Simd, const NV: usize>(&mut self, s: S, most: usize) -> PrefetchStream {
        if const { !prefetches_beside::<S>(NV) } || self.at == self.len {
            return PrefetchStream::NONE;
        }
        let (at, step, lines) = self.take(s, |left| most.min(left) / FOUR * FOUR);
        PrefetchStream { at, step, lines }
    }

    /// Prefetches the next few lines, if any are left.
    #[inline(always)]
    pub(crate) fn fetch<S: Simd>(&mut self, s: S) {
        let mut budget = LINES;
        while budget > 0 && self.at < self.len {
            let (mut line, step, n) = self.take(s, |left| budget.min(left));
            for _ in 0..n {
                s.prefetch_second(line.cast());
                line = line.wrapping_offset(step);
            }
            budget -= n;
        }
    }

    /// Takes `count(left)` of the next lines out of the queue, where `left` are evenly spaced, and prefetches their pages, where
    /// lines are contiguous. Returns the first line, the bytes from one to the next, and the number.
    #[inline(always)]
    fn take<S: Simd>(&mut self, s: S, count: impl FnOnce(usize) -> usize) -> (*const u8, isize, usize) {
        let Stretch { first, step, lines, passes } = self.stretches[self.at];
        let n = count(lines - self.line);
        let first = first.wrapping_byte_add(self.pass * LINE_BYTES);
        // Wrapping: a prefetch may have any address.
        let line = first.wrapping_offset((self.line as isize).wrapping_mul(step));
        if step == LINE_BYTES as isize {
            s.prefetch_pages(Level::Second, line.cast(), n * LINE_BYTES);
        }
        self.line += n;
        if self.line == lines {
            (self.line, self.pass) = (0, self.pass + 1);
            if self.pass == passes {
                (self.pass, self.at) = (0, self.at + 1);
            }
        }
        (line, step, n)
    }

    /// Adds `n` rows of `dim` elements, as far as they are evenly spaced. Rows with elements apart are
    /// not prefetched.
    #[inline]
    pub(crate) fn push_rows(&mut self, rows: AnyRows, n: usize, dim: usize) {
        if rows.element() == 1 && n > 0 {
            // SAFETY: `n > 0`, so row 0 exists.
            let first = unsafe { rows.first() };
            self.push(first.at, first.step, n.min(first.n), dim * first.element);
        }
    }
}
