//! Memory that will be needed soon: asked for while other memory is computed on, by tiles as they go or a few lines after each.
//!
//! A block's keys and values, and a task's queries and outputs, are touched once and come from far away. Asking for them a
//! block (or a task) ahead hides that: measured 16 % at 128 rows and keys of 64, 2 % at 512.

use crate::block::KEY_BLOCK;
use crate::int8;
use crate::launch::Task;
use crate::lines::LINE_BYTES;
use crate::options::{MaskMod, Mods, ProbMod, ScoreMod};
use crate::rows::Table;
use crate::simd::{LANES, Level, Simd};
use crate::source::{BlockValues, Keys};
use crate::steps::Steps;
use crate::strips::{Strips, strip};
use crate::tensor::AnyRows;
use crate::tile::{Fused, Next, Row};
use core::ops::Range;

/// Lines asked for after a tile that does not ask as it computes: a kilobyte in the time of 1,500 cycles, a few GB/s.
const LINES: usize = 16;

/// Rows of a unit that nothing before them asks for, a panel's: packing asks for the next panel, tiles for later values.
const FIRST: usize = LANES;

/// Most stretches of memory in one list: keys, values, queries, outputs; of a unit, what it gathers, values, keys.
const STRETCHES: usize = 4;

/// Lines that lie evenly, passed over several times: first the first line of each row, then the second.
#[derive(Clone, Copy)]
struct Stretch {
    first: *const u8,
    /// Bytes from one line to the next.
    step: isize,
    lines: usize,
    passes: usize,
}

/// Lines that a tile asks for while it computes, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Trail {
    at: *const u8,
    step: isize,
}

impl Trail {
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
pub(crate) struct Ahead {
    stretches: [Stretch; STRETCHES],
    len: usize,
    at: usize,
    pass: usize,
    line: usize,
}

impl Ahead {
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
    fn next<S: Simd>(&mut self, s: S, most: usize) -> (Trail, usize) {
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
        (Trail { at, step }, n)
    }

    /// Runs a tile that asks for `n` lines as it computes: the next ones, if so many lie evenly. If not, or if it asks for none, the
    /// next few are asked for after it.
    #[inline(always)]
    pub(crate) fn beside<S: Simd>(&mut self, s: S, n: usize, tile: impl FnOnce(Trail)) {
        let asks = n > 0 && self.at < self.len && self.stretches[self.at].lines - self.line >= n;
        let trail = if asks { self.next(s, n).0 } else { Trail::none(core::ptr::from_ref(self).cast()) };
        // Called in one place: all shapes of tiles are compiled there.
        tile(trail);
        if !asks {
            self.fetch(s);
        }
    }

    /// Asks for the next few lines, if any are left.
    #[inline(always)]
    fn fetch<S: Simd>(&mut self, s: S) {
        let mut budget = LINES;
        while budget > 0 && self.at < self.len {
            let (mut trail, n) = self.next(s, budget);
            for _ in 0..n {
                trail.ask(s);
            }
            budget -= n;
        }
    }
}

impl<'t, 'a, S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Fused<'t, 'a, S, Mods<A, B, C>> {
    /// What will be needed once a block is done: the next block; after the last one the task's outputs, and what the
    /// next task begins with. Of a unit, where it will gather, and what its values and the next unit's keys begin with: the rest is
    /// asked for as they are read, and all of it where they lie one behind the other, in a cache.
    ///
    /// # Safety
    /// As for [`Self::run`]; the block is one of the task's, of `len` keys from `first` on.
    pub(crate) unsafe fn ahead(&self, [first, len]: [usize; 2], values: BlockValues) -> Ahead {
        let mut ahead = Ahead::nothing();
        if let Next::Near = self.next {
            return ahead;
        }
        // SAFETY: passed on.
        unsafe {
            if let Next::Unit { gathered: (at, bytes), next } = &self.next {
                ahead.push(*at, 0, 1, *bytes);
                if let BlockValues::Rows { rows, .. } = values {
                    push_rows(&mut ahead, rows, len.min(FIRST), self.geometry.value_dim);
                    if let Some((task, first)) = next {
                        self.with_task(task).push_first_keys(*first, &mut ahead);
                    }
                }
                return ahead;
            }
            match self.blocks().next_back().filter(|&last| first < last) {
                Some(_) => self.push_block(first + KEY_BLOCK, &mut ahead),
                None => {
                    if let Some(out) = &self.outputs.out {
                        self.push_rows(&mut ahead, self.geometry.value_dim, |row| {
                            out.rows(self.seq.batch, row.head, self.seq.first_row + row.i)
                        });
                    }
                    if let Next::Task(task) = &self.next {
                        self.with_task(task).push_opening(&mut ahead);
                    }
                }
            }
        }
        ahead
    }

    /// This call's work for another task.
    fn with_task(&self, task: &Task) -> Self {
        Self::new(self.s, self.mods, self.call, self.outputs, task.clone(), self.geometry)
    }

    /// The first keys of a block, if there is such.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn push_first_keys(&self, first: usize, ahead: &mut Ahead) {
        let len = self.seq.kv_len.saturating_sub(first).min(FIRST);
        if len == 0 || !self.call.kv.holds(self.seq.batch, first) {
            return;
        }
        let (at, table) = (self.place(first), &mut Table::new());
        // SAFETY: so many keys exist, and their block is held.
        if let Keys::Rows(rows) = unsafe { self.call.kv.keys(at, len, table) } {
            push_rows(ahead, rows, len, self.geometry.head_dim);
        }
    }

    /// # Safety
    /// As for [`Self::run`]; `first < kv_len`.
    unsafe fn push_block(&self, first: usize, ahead: &mut Ahead) {
        let at = self.place(first);
        let len = KEY_BLOCK.min(self.seq.kv_len - first);
        let (d, kv) = (self.geometry.head_dim, &self.call.kv);
        // Pages are left to themselves: their rows are many short stretches.
        if !kv.holds(at[0], first) || kv.is_paged() {
            return;
        }
        let table = &mut Table::new();
        // SAFETY: key `first` exists, and its block is held.
        let (keys, values) = unsafe { (kv.keys(at, len, table), kv.values(at, len, table)) };
        match keys {
            Keys::Rows(rows) => push_rows(ahead, rows, len, d),
            Keys::Packed(panels) => {
                let (first, bytes) = panels.bytes();
                ahead.push(first, 0, 1, len.next_multiple_of(LANES) * d * bytes);
            }
            // Scales are left to themselves: a thirtieth of the memory.
            Keys::Int8 { keys, .. } => ahead.push(keys.cast(), 0, 1, len.div_ceil(LANES) * int8::panel_bytes(d)),
        }
        match values {
            BlockValues::Rows { rows, .. } => push_rows(ahead, rows, len, self.geometry.value_dim),
            BlockValues::Strips(strips) => push_strips(ahead, strips.bytes(), len),
            BlockValues::Int8 { strips, .. } => push_strips(ahead, strips.bytes(), len),
        }
    }

    /// # Safety
    /// As for [`Self::run`].
    unsafe fn push_opening(&self, ahead: &mut Ahead) {
        if self.task.rows.is_empty() {
            return;
        }
        // SAFETY: passed on.
        unsafe {
            if let Some(first) = self.blocks().next() {
                self.push_block(first, ahead);
            }
            self.push_rows(ahead, self.geometry.head_dim, |row| {
                self.call.q.rows(self.seq.batch, row.head, self.seq.first_row + row.i)
            });
        }
    }

    /// The task's rows of q or of the output, as far as they belong to the head of the first.
    #[inline]
    fn push_rows(&self, ahead: &mut Ahead, dim: usize, at: impl Fn(Row) -> AnyRows) {
        if let Some(row) = self.rows(0..1).next() {
            push_rows(ahead, at(row), self.task.rows.len().min(self.seq.q_len - row.i), dim);
        }
    }

    /// The first keys of the blocks of which some row may see something, by the rules that are ranges.
    pub(crate) fn blocks(&self) -> impl DoubleEndedIterator<Item = usize> + use<'t, 'a, S, A, B, C> {
        let keys = self.needed();
        let (kv, batch) = (&self.call.kv, self.seq.batch);
        numbers(keys).map(|block| block * KEY_BLOCK).filter(move |&first| kv.holds(batch, first))
    }

    /// Whether [`Self::blocks`] has this one.
    pub(crate) fn holds(&self, first: usize) -> bool {
        numbers(self.needed()).contains(&(first / KEY_BLOCK)) && self.call.kv.holds(self.seq.batch, first)
    }

    fn needed(&self) -> Range<usize> {
        if self.outputs.wants_all_keys() { 0..self.seq.kv_len } else { self.visible() }
    }

    /// A range that holds every key that any row of the task may see by the rules that are ranges.
    fn visible(&self) -> Range<usize> {
        if !self.call.visible.uses_position() {
            return 0..self.seq.kv_len;
        }
        let (rows, q_len) = (&self.task.rows, self.seq.q_len);
        // Rows of one head stand in order; a task that runs over several heads may hold any row.
        let one_head = rows.start / q_len == (rows.end - 1) / q_len;
        let (first, last) = if one_head { (rows.start % q_len, (rows.end - 1) % q_len) } else { (0, q_len - 1) };
        let position = |i: usize| self.seq.offset.saturating_add_unsigned(i);
        self.call.visible.hull(position(first), position(last), self.seq.kv_len)
    }
}

/// The numbers of the blocks that hold these keys.
#[inline]
fn numbers(keys: Range<usize>) -> Range<usize> {
    keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK)
}

/// Adds `n` rows of strips whose elements have so many bytes. Where strips are not all of a width, nearly those rows.
fn push_strips(ahead: &mut Ahead, (strips, bytes): (Strips<u8>, usize), n: usize) {
    let cols = strip(0, strips.width).len() * bytes;
    ahead.push(strips.first, (KEY_BLOCK * cols) as isize, (strips.width * bytes).div_ceil(cols), n * cols);
}

/// Adds `n` rows of `dim` elements, as far as they lie evenly. Rows whose elements are not contiguous are left to themselves.
#[inline]
fn push_rows(ahead: &mut Ahead, rows: AnyRows, n: usize, dim: usize) {
    if rows.element() == 1 && n > 0 {
        // SAFETY: there is a row 0.
        let first = unsafe { rows.first() };
        ahead.push(first.at, first.step, n.min(first.n), dim * first.element);
    }
}
