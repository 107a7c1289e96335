//! Chunked form: one chunk of tokens at a time, in blocks of four.
//!
//! With `a[i..j]` the product of the decays of tokens i to j − 1, and u the row that a token writes (its value, or the
//! delta rule's correction of it), a row x at token i of a chunk that began with state S reads
//!
//! ```text
//! look(x, i) = Sᵀ(x ⊙ a[0..i + 1]) + Σ over j ≤ i: (x · (k[j] ⊙ a[j + 1..i + 1])) u[j]
//! out[i]     = look(scale · q[i], i)
//! u[i]       = β v[i] + look(−β k[i], i), its sum over j < i
//! S          ← Diag(a[0..n]) S + Σ over j: (k[j] ⊙ a[j + 1..n]) u[j]ᵀ        once, at the end
//! ```
//!
//! Keys are stored with the decays up to the current block multiplied in: one pass over the keys of the chunk every
//! four tokens. Nothing is ever divided by a decay, so a decay that underflows affects only its own terms.

use super::call::Call;
use super::head::Head;
use super::product::{Matrix, MatrixMut, ROWS, add_product, dot};
use sdpa::Isa;
use sdpa_kernels::HeadsMut;

/// Floats of scratch: keys and written rows of a chunk, and two dozen rows for the current block.
pub(super) fn scratch_len(call: &Call<'_>) -> usize {
    let (d, width, n) = (call.head_dim, call.width, call.chunk());
    let block = (1 + 6 * ROWS).saturating_mul(d).saturating_add(ROWS.saturating_mul(width));
    n.saturating_mul(d + width + ROWS).saturating_add(block)
}

/// Chunk in progress. Rows of the current block are `d` or `width` apart.
struct Chunk<'s> {
    isa: Isa,
    n: usize,
    d: usize,
    width: usize,
    decays: bool,
    /// `[d][n]`: keys; those before the current block are decayed up to it.
    keys: &'s mut [f32],
    /// `[n][width]`: the row that each token writes.
    written: &'s mut [f32],
    /// `[ROWS][n]`: the score of each reader and token.
    scores: &'s mut [f32],
    /// Factor that is left, at the current block, of each row of the state at the start of the chunk.
    left: &'s mut [f32],
    block_keys: &'s mut [f32],
    block_decays: &'s mut [f32],
    /// Decays from the start of the block to each of its tokens.
    since_block: &'s mut [f32],
    /// Rows that read earlier tokens: undecayed (and then decayed step by step), decayed since the start of the block,
    /// and decayed since the start of the chunk.
    readers: &'s mut [f32],
    block_readers: &'s mut [f32],
    chunk_readers: &'s mut [f32],
    /// Results of the queries.
    rows: &'s mut [f32],
}

/// Tokens `at..at + rows` of a chunk that starts at token `first`.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    at: usize,
    rows: usize,
}

impl Block {
    /// Iterates over the blocks of the `n` tokens from `first` on.
    #[inline(always)]
    fn all(first: usize, n: usize) -> impl Iterator<Item = Self> {
        (0..n).step_by(ROWS).map(move |at| Self { first, at, rows: ROWS.min(n - at) })
    }

    /// Iterates over (row of the block, token).
    #[inline(always)]
    fn tokens(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.rows).map(move |r| (r, self.first + self.at + r))
    }

    /// Number of columns up to the last token of the block, rounded up to whole vectors where there is room.
    #[inline(always)]
    fn columns(self, n: usize) -> usize {
        (self.at + self.rows).next_multiple_of(16).min(n)
    }
}

#[inline(always)]
pub(super) fn causal(head: &Head<'_>, state: &mut [f32], out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
    let mut chunk = Chunk::new(head, scratch);
    for first in (head.first..head.len).step_by(chunk.n) {
        let n = chunk.n.min(head.len - first);
        chunk.left.fill(1.0);
        for block in Block::all(first, n) {
            chunk.load(head, block);
            if head.corrects() {
                chunk.correct(head, block, state);
            }
            for h in 0..head.call.group {
                chunk.answer(head, h, block, state);
                for (r, t) in block.tokens() {
                    head.write(out, [h, t], row_mut(chunk.rows, r, chunk.width));
                }
            }
            chunk.pass(block);
        }
        chunk.store(n, state);
    }
}

/// Adds all keys to the state, then reads the state for all rows.
#[inline(always)]
pub(super) fn whole(head: &Head<'_>, state: &mut [f32], out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
    let mut chunk = Chunk::new(head, scratch);
    for first in (0..head.len).step_by(chunk.n) {
        let n = chunk.n.min(head.len - first);
        for block in Block::all(first, n) {
            chunk.load(head, block);
        }
        chunk.store(n, state);
    }
    let Chunk { isa, d, width, .. } = chunk;
    for block in Block::all(0, head.call.q.shape()[2]) {
        for h in 0..head.call.group {
            for (r, t) in block.tokens() {
                head.query(h, t, row_mut(chunk.readers, r, d));
            }
            chunk.rows.fill(0.0);
            let (rows, readers) = (matrix_mut(chunk.rows, width), matrix(chunk.readers, d));
            add_product(isa, rows, readers, matrix(state, width), [block.rows, d, width]);
            for (r, t) in block.tokens() {
                head.write(out, [h, t], row_mut(chunk.rows, r, width));
            }
        }
    }
}

impl<'s> Chunk<'s> {
    #[inline(always)]
    fn new(head: &Head<'_>, mut scratch: &'s mut [f32]) -> Self {
        let (n, d, width) = (head.call.chunk(), head.call.head_dim, head.call.width);
        let mut take = |len: usize| {
            let (some, rest) = core::mem::take(&mut scratch).split_at_mut(len);
            scratch = rest;
            some
        };
        Self {
            isa: head.call.isa,
            n,
            d,
            width,
            decays: head.decays(),
            keys: take(n * d),
            written: take(n * width),
            scores: take(n * ROWS),
            left: take(d),
            block_keys: take(ROWS * d),
            block_decays: take(ROWS * d),
            since_block: take(ROWS * d),
            readers: take(ROWS * d),
            block_readers: take(ROWS * d),
            chunk_readers: take(ROWS * d),
            rows: take(ROWS * width),
        }
    }

    /// Loads keys, values and decays of the block.
    #[inline(always)]
    fn load(&mut self, head: &Head<'_>, block: Block) {
        let d = self.d;
        for (r, t) in block.tokens() {
            head.key(t, row_mut(self.block_keys, r, d));
            head.value(t, row_mut(self.written, block.at + r, self.width));
            if self.decays {
                let decay = row_mut(self.block_decays, r, d);
                head.decay(t, decay);
                let (before, since) = self.since_block.split_at_mut(r * d);
                since[..d].copy_from_slice(decay);
                if r > 0 {
                    scale(&mut since[..d], &before[(r - 1) * d..]);
                }
            }
        }
        for (i, keys) in self.keys.chunks_exact_mut(self.n).enumerate() {
            for r in 0..block.rows {
                keys[block.at + r] = self.block_keys[r * d + i];
            }
        }
    }

    /// Computes the scores of the block's readers, and prepares [`Self::state_readers`], the rows that read the state.
    #[inline(always)]
    fn look_back(&mut self, block: Block) {
        let (d, n, rows) = (self.d, self.n, block.rows);
        if self.decays {
            self.block_readers.copy_from_slice(self.readers);
            scale(&mut self.block_readers[..rows * d], self.since_block);
        }
        let readers = if self.decays { &*self.block_readers } else { &*self.readers };
        // Without decays the block's own columns are correct; with decays they are overwritten below. Later columns
        // hold leftovers that are never read.
        self.scores.fill(0.0);
        let columns = block.columns(n);
        add_product(self.isa, matrix_mut(self.scores, n), matrix(readers, d), matrix(self.keys, n), [rows, d, columns]);
        if !self.decays {
            return;
        }
        for r in 0..rows {
            let from_chunk = row_mut(self.chunk_readers, r, d);
            from_chunk.copy_from_slice(row(self.block_readers, r, d));
            scale(from_chunk, self.left);
            // Go back from the row's own token, multiplying by the decay of each token passed.
            let reader = row_mut(self.readers, r, d);
            for j in (0..=r).rev() {
                self.scores[r * n + block.at + j] = dot(reader, row(self.block_keys, j, d));
                scale(reader, row(self.block_decays, j, d));
            }
        }
    }

    /// Returns the readers, decayed since the start of the chunk.
    #[inline(always)]
    fn state_readers(&self) -> Matrix<'_> {
        matrix(if self.decays { self.chunk_readers } else { self.readers }, self.d)
    }

    /// Replaces values by the rows that the delta rule writes.
    #[inline(always)]
    fn correct(&mut self, head: &Head<'_>, block: Block, state: &[f32]) {
        let (d, n, width, rows) = (self.d, self.n, self.width, block.rows);
        for (r, t) in block.tokens() {
            let beta = head.beta(t);
            row_mut(self.written, block.at + r, width).iter_mut().for_each(|x| *x *= beta);
            let reader = row_mut(self.readers, r, d);
            reader.iter_mut().zip(row(self.block_keys, r, d)).for_each(|(x, k)| *x = -beta * k);
        }
        self.look_back(block);
        let written = core::mem::take(&mut self.written);
        let (before, own) = written.split_at_mut(block.at * width);
        let (scores, before) = (matrix(self.scores, n), matrix(before, width));
        add_product(self.isa, matrix_mut(own, width), self.state_readers(), matrix(state, width), [rows, d, width]);
        add_product(self.isa, matrix_mut(own, width), scores, before, [rows, block.at, width]);
        for r in 1..rows {
            let (earlier, this) = own.split_at_mut(r * width);
            for j in 0..r {
                add_scaled(&mut this[..width], self.scores[r * n + block.at + j], row(earlier, j, width));
            }
        }
        self.written = written;
    }

    /// Computes the results of the block's queries of one head.
    #[inline(always)]
    fn answer(&mut self, head: &Head<'_>, h: usize, block: Block, state: &[f32]) {
        let (d, n, width, rows) = (self.d, self.n, self.width, block.rows);
        for (r, t) in block.tokens() {
            head.query(h, t, row_mut(self.readers, r, d));
        }
        self.look_back(block);
        self.rows.fill(0.0);
        let out = core::mem::take(&mut self.rows);
        let (scores, before) = (matrix(self.scores, n), matrix(self.written, width));
        add_product(self.isa, matrix_mut(out, width), self.state_readers(), matrix(state, width), [rows, d, width]);
        add_product(self.isa, matrix_mut(out, width), scores, before, [rows, block.at, width]);
        // Go row by row: a value that a row does not see is left out, not multiplied by 0.
        for r in 0..rows {
            for j in 0..=r {
                let (score, written) = (self.scores[r * n + block.at + j], row(self.written, block.at + j, width));
                add_scaled(row_mut(out, r, width), score, written);
            }
        }
        self.rows = out;
    }

    /// Applies the decays of the block to the earlier keys and to the factor left of the state.
    #[inline(always)]
    fn pass(&mut self, block: Block) {
        if !self.decays {
            return;
        }
        let columns = block.columns(self.n);
        for (i, keys) in self.keys.chunks_exact_mut(self.n).enumerate() {
            let all = self.since_block[(block.rows - 1) * self.d + i];
            self.left[i] *= all;
            // Scale whole vectors; the block's own columns are overwritten below.
            keys[..columns].iter_mut().for_each(|k| *k *= all);
            let mut since = 1.0;
            for r in (0..block.rows).rev() {
                keys[block.at + r] = self.block_keys[r * self.d + i] * since;
                since *= self.block_decays[r * self.d + i];
            }
        }
    }

    /// Adds the `n` tokens of the chunk to the state.
    #[inline(always)]
    fn store(&mut self, n: usize, state: &mut [f32]) {
        if self.decays {
            for (row, &left) in state.chunks_exact_mut(self.width).zip(&*self.left) {
                row.iter_mut().for_each(|s| *s *= left);
            }
        }
        let (keys, written) = (matrix(self.keys, self.n), matrix(self.written, self.width));
        add_product(self.isa, matrix_mut(state, self.width), keys, written, [self.d, n, self.width]);
    }
}

#[inline(always)]
fn matrix(data: &[f32], stride: usize) -> Matrix<'_> {
    Matrix { data, stride }
}

#[inline(always)]
fn matrix_mut(data: &mut [f32], stride: usize) -> MatrixMut<'_> {
    MatrixMut { data, stride }
}

#[inline(always)]
fn row(rows: &[f32], r: usize, len: usize) -> &[f32] {
    &rows[r * len..][..len]
}

#[inline(always)]
fn row_mut(rows: &mut [f32], r: usize, len: usize) -> &mut [f32] {
    &mut rows[r * len..][..len]
}

/// Adds `x·other` to `row`.
#[inline(always)]
fn add_scaled(row: &mut [f32], x: f32, other: &[f32]) {
    row.iter_mut().zip(other).for_each(|(row, other)| *row += x * other);
}

/// Multiplies `row` by `factors`, element by element.
#[inline(always)]
fn scale(row: &mut [f32], factors: &[f32]) {
    row.iter_mut().zip(factors).for_each(|(x, f)| *x *= f);
}
