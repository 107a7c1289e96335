//! Memory that will be needed soon: asked for while other memory is computed on, by tiles as they go or a few lines after each.
//!
//! A block's keys and values, and a task's queries and outputs, are touched once and come from far away. Asking for them a
//! block (or a task) prefetch hides that: measured 16 % at 128 rows and keys of 64, 2 % at 512.

use crate::simd::width::LINE_BYTES;
use crate::simd::{LANES, Level, Simd};
use crate::tensor::any::AnyRows;

/// Rows of a group up to which time is that of reading keys and values, which tiles then do from front to back.
pub(crate) const READING_ROWS: usize = 16;

/// Keys that a task of so few rows packs before it meets them: 16 KiB of floats at head_dim 128, in the first-level cache.
/// A whole block would go out to the second and come back: 5 to 10 % of the time.
pub(crate) const READING_KEYS: usize = 2 * LANES;

/// Whether a tile of such a group asks prefetch for all of its rows: the first, where full tiles can afford to; where they
/// have one vector, the last, which may be a small one.
#[inline(always)]
pub(crate) fn asks_ahead<S: Simd>(row: usize, rows: usize, all: usize) -> bool {
    all <= READING_ROWS && if S::DOT_VECS > 1 { row == 0 } else { row + rows == all }
}

/// AlignedBuf asked for after a tile that does not ask as it computes: a kilobyte in the time of 1,500 cycles, a few GB/s.
const LINES: usize = 16;

/// Most stretches of memory in one list: keys, values, queries, outputs; of a unit, what it gathers, values, keys.
const STRETCHES: usize = 4;

/// AlignedBuf that lie evenly, passed over several times: first the first line of each row, then the second.
#[derive(Clone, Copy)]
struct Stretch {
    first: *const u8,
    /// Bytes from one line to the next.
    step: isize,
    lines: usize,
    passes: usize,
}

/// AlignedBuf that a tile asks for while it computes, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct PrefetchStream {
    at: *const u8,
    step: isize,
}

impl PrefetchStream {
    /// Nothing worth asking for: over and over a line that is near.
    pub(crate) fn none(near: *const f32) -> Self {
        Self { at: near.cast(), step: 0 }
    }

    /// Asks for the next.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(&mut self, s: S) {
        s.prefetch_second(self.at.cast());
        // Wrapping: a hint may point anywhere.
        self.at = self.at.wrapping_offset(self.step);
    }
}

/// A list of what will be needed, and how far along it the asking is.
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

    /// Adds `n` rows of `bytes`, `row` apart.
    #[inline]
    pub(crate) fn push(&mut self, first: *const u8, row: isize, n: usize, bytes: usize) {
        if self.len == STRETCHES || n == 0 || bytes == 0 {
            return;
        }
        let dense = row == bytes as isize;
        let (n, bytes) = if dense { (1, n * bytes) } else { (n, bytes) };
        // A row that starts inside a line may end in one more: its neighbour's, or not worth asking for.
        let lines = bytes.div_ceil(LINE_BYTES);
        self.stretches[self.len] = if n == 1 {
            Stretch { first, step: LINE_BYTES as isize, lines, passes: 1 }
        } else {
            Stretch { first, step: row, lines: n, passes: lines }
        };
        self.len += 1;
    }

    /// The next lines, as many of `most` as lie evenly, and their pages, if they are whole.
    #[inline(always)]
    fn next<S: Simd>(&mut self, s: S, most: usize) -> (PrefetchStream, usize) {
        let Stretch { first, step, lines, passes } = self.stretches[self.at];
        let n = most.min(lines - self.line);
        let first = first.wrapping_byte_add(self.pass * LINE_BYTES);
        let at = first.wrapping_offset((self.line as isize).wrapping_mul(step));
        self.line += n;
        if self.line == lines {
            (self.line, self.pass) = (0, self.pass + 1);
            if self.pass == passes {
                (self.pass, self.at) = (0, self.at + 1);
            }
        }
        if step == LINE_BYTES as isize {
            s.prefetch_pages(Level::Second, at.cast(), n * LINE_BYTES);
        }
        (PrefetchStream { at, step }, n)
    }

    /// Runs a tile that asks for `n` lines as it computes: the next ones, if so many lie evenly. If not, or if it asks for none, the
    /// next few are asked for after it.
    #[inline(always)]
    pub(crate) fn beside<S: Simd>(&mut self, s: S, n: usize, tile: impl FnOnce(PrefetchStream)) {
        let asks = n > 0 && self.at < self.len && self.stretches[self.at].lines - self.line >= n;
        let stream = if asks { self.next(s, n).0 } else { PrefetchStream::none(core::ptr::from_ref(self).cast()) };
        // Called in one place: all shapes of tiles are compiled there.
        tile(stream);
        if !asks {
            self.fetch(s);
        }
    }

    /// Asks for the next few lines, if any are left.
    #[inline(always)]
    fn fetch<S: Simd>(&mut self, s: S) {
        let mut budget = LINES;
        while budget > 0 && self.at < self.len {
            let (mut stream, n) = self.next(s, budget);
            for _ in 0..n {
                stream.ask(s);
            }
            budget -= n;
        }
    }
}

impl PrefetchQueue {
    /// Adds `n` rows of `dim` elements, as far as they lie evenly. Rows whose elements are not contiguous are left to themselves.
    #[inline]
    pub(crate) fn push_rows(&mut self, rows: AnyRows, n: usize, dim: usize) {
        if rows.element() == 1 && n > 0 {
            // SAFETY: there is a row 0.
            let first = unsafe { rows.first() };
            self.push(first.at, first.step, n.min(first.n), dim * first.element);
        }
    }
}
