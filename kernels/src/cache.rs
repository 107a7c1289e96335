//! Keys and values kept from call to call, in the form the kernels read them in.
//!
//! A sequence is a list of blocks of 256 keys, each with its own memory, so growing copies nothing. A block holds, for
//! each key/value head, sixteen panels of packed keys `[panel][head_dim][16]` and 256 rows of values, padded to whole
//! vectors. Sequences that begin alike share blocks; who writes into a shared block gets a copy of it first.

use crate::block::KEY_BLOCK;
use crate::isa::{Isa, Visitor};
use crate::lines::Lines;
use crate::pack::{Rows, copy_row};
use crate::simd::LANES;
use crate::steps::Steps;
use crate::view::View;
use core::ops::Range;
use std::sync::Arc;

/// Sizes of what a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

impl Sizes {
    /// Floats from one row of values to the next.
    fn width(self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Floats of a block.
    fn floats(self) -> usize {
        KEY_BLOCK * self.kv_heads * (self.head_dim + self.width())
    }

    /// Where a head's packed keys lie in a block.
    fn keys(self, head: usize) -> Range<usize> {
        let size = KEY_BLOCK * self.head_dim;
        head * size..(head + 1) * size
    }

    /// Where a head's values lie in a block.
    fn values(self, head: usize) -> Range<usize> {
        let (before, size) = (self.keys(self.kv_heads).start, KEY_BLOCK * self.width());
        before + head * size..before + (head + 1) * size
    }

    /// Where element `d` of key `row` of a head lies among the head's packed keys.
    fn key(self, row: usize, d: usize) -> usize {
        (row / LANES * self.head_dim + d) * LANES + row % LANES
    }
}

/// The keys and values of several sequences, packed.
#[derive(Debug)]
pub struct Cache {
    sizes: Sizes,
    /// If keys are let go: how many of the last and of the first stay.
    keep: Option<Keep>,
    /// Blocks of each sequence; `None` where they were let go.
    sequences: Vec<Vec<Option<Block>>>,
    lens: Vec<usize>,
    /// Blocks that nobody uses.
    spare: Vec<Block>,
}

impl Clone for Cache {
    /// Shares the memory, as [`Cache::fork`] does.
    fn clone(&self) -> Self {
        let Self { sizes, keep, sequences, lens, spare: _ } = self;
        Self { sizes: *sizes, keep: *keep, sequences: sequences.clone(), lens: lens.clone(), spare: Vec::new() }
    }
}

/// Memory of a block.
type Block = Arc<Lines>;

/// Which keys a sliding cache keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// Keys that the next row may see, its own included.
    pub last: usize,
    /// First keys that stay for good.
    pub first: usize,
}

impl Cache {
    /// An empty cache of so many sequences: keys of `head_dim`, values of `value_dim` elements.
    pub fn new(sequences: usize, kv_heads: usize, [head_dim, value_dim]: [usize; 2], keep: Option<Keep>) -> Self {
        Self {
            sizes: Sizes { kv_heads, head_dim, value_dim },
            keep,
            sequences: vec![Vec::new(); sequences],
            lens: vec![0; sequences],
            spare: Vec::new(),
        }
    }

    /// Shapes of keys and values as seen by a call.
    pub fn shapes(&self) -> [[usize; 4]; 2] {
        let Sizes { kv_heads, head_dim, value_dim } = self.sizes;
        let longest = self.lens.iter().copied().max().unwrap_or(0);
        [head_dim, value_dim].map(|dim| [self.lens.len(), kv_heads, longest, dim])
    }

    pub(crate) fn kv_heads(&self) -> usize {
        self.sizes.kv_heads
    }

    /// Keys of each sequence, those that were let go included.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Bytes held, shared blocks counted once, spare ones too.
    pub fn bytes(&self) -> usize {
        let mut held: Vec<_> = self.sequences.iter().flatten().flatten().chain(&self.spare).map(Arc::as_ptr).collect();
        held.sort_unstable();
        held.dedup();
        held.len() * (self.sizes.floats() * size_of::<f32>())
    }

    /// One more sequence, empty. Its number.
    pub fn add_sequence(&mut self) -> usize {
        self.sequences.push(Vec::new());
        self.lens.push(0);
        self.lens.len() - 1
    }

    /// The keys of a sequence that were let go.
    pub fn gone(&self, sequence: usize) -> Range<usize> {
        let blocks = &self.sequences[sequence];
        let first = blocks.iter().position(Option::is_none).unwrap_or(0);
        let end = blocks.iter().rposition(Option::is_none).map_or(first, |last| last + 1);
        first * KEY_BLOCK..end * KEY_BLOCK
    }

    /// Appends the rows of head-first tensors `[_, kv_heads, n, dim]`, batch `b` of them, to a sequence.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn append(&mut self, isa: Isa, sequence: usize, b: usize, [k, v]: [View<'_>; 2]) {
        let Sizes { kv_heads, head_dim, value_dim } = self.sizes;
        let ([kb, kh, n, kd], [vb, vh, vn, vd]) = (k.shape(), v.shape());
        assert!(b < kb && b < vb && (kh, vh) == (kv_heads, kv_heads), "keys and values do not fit the cache");
        assert!(n == vn && (kd, vd) == (head_dim, value_dim), "keys and values do not fit the cache");
        assert!(head_dim > 0 && value_dim > 0, "keys and values need a length");
        self.let_go(sequence);
        let mut done = 0;
        while done < n {
            let (block, row) = (self.lens[sequence] / KEY_BLOCK, self.lens[sequence] % KEY_BLOCK);
            // Whole panels through registers; what comes before and after them token by token.
            let room = (n - done).min(KEY_BLOCK - row);
            let bulk = row.is_multiple_of(LANES) && room >= LANES;
            let here = if bulk { room } else { 1 };
            let sizes = self.sizes;
            let floats = self.block_mut(sequence, block).floats_mut();
            for h in 0..if here > 0 { kv_heads } else { 0 } {
                let keys = &mut floats[sizes.keys(h)];
                // SAFETY: head `h` and rows `done .. done + here` are inside both tensors.
                unsafe {
                    let (first, element) = k.row(b, h, done);
                    if bulk {
                        let rows = Rows::strided(first, k.strides()[2], element);
                        isa.dispatch(Pack { rows, n: here, d: head_dim, out: &mut keys[sizes.key(row, 0)..] });
                    } else {
                        for d in 0..head_dim {
                            keys[sizes.key(row, d)] = *first.offset(d as isize * element);
                        }
                    }
                }
                let values = &mut floats[sizes.values(h)][row * sizes.width()..];
                for (j, value) in values.chunks_exact_mut(sizes.width()).take(here).enumerate() {
                    // SAFETY: as above.
                    unsafe {
                        let (first, element) = v.row(b, h, done + j);
                        copy_row(first, element, &mut value[..value_dim]);
                    }
                }
            }
            self.lens[sequence] += here;
            done += here;
        }
    }

    /// Forgets the keys of a sequence from `len` on. Its memory is kept for later.
    pub fn truncate(&mut self, sequence: usize, len: usize) {
        if len < self.lens[sequence] {
            self.lens[sequence] = len;
            for block in self.sequences[sequence].drain(len.div_ceil(KEY_BLOCK)..).flatten() {
                spare(&mut self.spare, block);
            }
        }
    }

    /// Makes `to` what `from` is, sharing its memory.
    pub fn fork(&mut self, from: usize, to: usize) {
        if from == to {
            return;
        }
        self.truncate(to, 0);
        let (source, target) = if from < to {
            let (low, high) = self.sequences.split_at_mut(to);
            (&low[from], &mut high[0])
        } else {
            let (low, high) = self.sequences.split_at_mut(from);
            (&high[0], &mut low[to])
        };
        target.extend_from_slice(source);
        self.lens[to] = self.lens[from];
    }

    /// Lets go what no row to come will see.
    fn let_go(&mut self, sequence: usize) {
        let Some(Keep { last, first }) = self.keep else { return };
        // The next row is its own last key, which is not here yet.
        let from = first.div_ceil(KEY_BLOCK);
        let to = (self.lens[sequence] + 1).saturating_sub(last) / KEY_BLOCK;
        let blocks = &mut self.sequences[sequence];
        let to = to.min(blocks.len());
        // Those before them are gone already.
        for block in blocks[from.min(to)..to].iter_mut().rev().map_while(Option::take) {
            spare(&mut self.spare, block);
        }
    }

    /// A block to write to: there, and not shared.
    fn block_mut(&mut self, sequence: usize, block: usize) -> &mut Lines {
        let floats = self.sizes.floats();
        let mut fresh = || {
            self.spare.pop().unwrap_or_else(|| {
                let mut lines = Lines::new();
                lines.reserve(floats);
                Arc::new(lines)
            })
        };
        let blocks = &mut self.sequences[sequence];
        if block == blocks.len() {
            blocks.push(Some(fresh()));
        }
        let block = blocks[block].as_mut().expect("keys are appended behind the last one, which is never let go");
        if Arc::get_mut(block).is_none() {
            let mut copy = fresh();
            let lines = Arc::get_mut(&mut copy).expect("spare blocks are nobody's");
            lines.floats_mut()[..floats].copy_from_slice(&block.floats()[..floats]);
            *block = copy;
        }
        Arc::get_mut(block).expect("it is nobody else's")
    }

    fn block(&self, sequence: usize, block: usize) -> Option<&Lines> {
        self.sequences.get(sequence)?.get(block)?.as_deref()
    }

    /// True if the block is there.
    pub(crate) fn holds(&self, sequence: usize, block: usize) -> bool {
        self.block(sequence, block).is_some()
    }

    /// A head's packed keys of a block that is held: `256 · head_dim` floats.
    pub(crate) fn panels(&self, sequence: usize, head: usize, block: usize) -> *const f32 {
        self.held(sequence, block)[self.sizes.keys(head)].as_ptr()
    }

    /// A head's values of a block that is held: 256 rows, and the floats from one to the next.
    pub(crate) fn value_rows(&self, sequence: usize, head: usize, block: usize) -> (*const f32, usize) {
        (self.held(sequence, block)[self.sizes.values(head)].as_ptr(), self.sizes.width())
    }

    fn held(&self, sequence: usize, block: usize) -> &[f32] {
        self.block(sequence, block).expect("the block is held").floats()
    }

    pub(crate) fn key(&self, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        let Sizes { kv_heads, head_dim, .. } = self.sizes;
        let inside = j < *self.lens.get(b)? && h < kv_heads && d < head_dim;
        let block = self.block(b, j / KEY_BLOCK).filter(|_| inside)?;
        Some(block.floats()[self.sizes.keys(h)][self.sizes.key(j % KEY_BLOCK, d)])
    }

    pub(crate) fn value(&self, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        let Sizes { kv_heads, value_dim, .. } = self.sizes;
        let inside = j < *self.lens.get(b)? && h < kv_heads && d < value_dim;
        let block = self.block(b, j / KEY_BLOCK).filter(|_| inside)?;
        Some(block.floats()[self.sizes.values(h)][j % KEY_BLOCK * self.sizes.width() + d])
    }
}

/// Keeps a block for later, if nobody else has it.
fn spare(spare: &mut Vec<Block>, mut block: Block) {
    if Arc::get_mut(&mut block).is_some() {
        spare.push(block);
    }
}

struct Pack<'a> {
    rows: Rows,
    n: usize,
    d: usize,
    out: &'a mut [f32],
}

impl Visitor for Pack<'_> {
    type Output = ();
    fn visit<S: Steps>(self, s: S) {
        // SAFETY: `append` vouches for the rows.
        unsafe { s.pack_keys(self.rows, self.n, self.d, self.out) }
    }
}
