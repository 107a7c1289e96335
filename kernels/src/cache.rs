//! Keys and values kept from call to call, in the form the kernels read them in.
//!
//! A sequence is a list of blocks of 256 keys, each with its own memory, so growing copies nothing. A block holds, for
//! each key/value head, sixteen panels of packed keys `[panel][head_dim][16]` and 256 rows of values, padded to whole
//! vectors; all of the cache's element type. Sequences that begin alike share blocks; who writes into a shared block gets a copy of it first.

use crate::block::KEY_BLOCK;
use crate::element::{Bf16, Dtype, Element, F16};
use crate::isa::{Isa, Visitor};
use crate::lines::Lines;
use crate::pack::Rows;
use crate::poison::Care;
use crate::simd::LANES;
use crate::steps::Steps;
use crate::tensor::{AnyPanels, AnyRows, Tensor, Typed};
use core::ops::Range;
use std::sync::Arc;

/// Sizes of what a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    dtype: Dtype,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

impl Sizes {
    /// Elements from one row of values to the next.
    fn width(self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Memory of a block, in floats.
    fn floats(self) -> usize {
        KEY_BLOCK * self.kv_heads * (self.head_dim + self.width()) * self.dtype.bytes() / size_of::<f32>()
    }

    /// Where a head's packed keys lie in a block: before its values, which the next head's keys follow, so that a step
    /// reads a block from front to back.
    fn keys(self, head: usize) -> Range<usize> {
        let first = head * KEY_BLOCK * (self.head_dim + self.width());
        first..first + KEY_BLOCK * self.head_dim
    }

    /// Where a head's values lie in a block.
    fn values(self, head: usize) -> Range<usize> {
        let first = self.keys(head).end;
        first..first + KEY_BLOCK * self.width()
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
    pub fn new(
        dtype: Dtype,
        [sequences, kv_heads]: [usize; 2],
        [head_dim, value_dim]: [usize; 2],
        keep: Option<Keep>,
    ) -> Self {
        Self {
            sizes: Sizes { dtype, kv_heads, head_dim, value_dim },
            keep,
            sequences: vec![Vec::new(); sequences],
            lens: vec![0; sequences],
            spare: Vec::new(),
        }
    }

    /// The same, empty, with elements of another type.
    #[must_use]
    pub fn with_dtype(self, dtype: Dtype) -> Self {
        let Sizes { kv_heads, head_dim, value_dim, .. } = self.sizes;
        Self::new(dtype, [self.lens.len(), kv_heads], [head_dim, value_dim], self.keep)
    }

    /// The type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.sizes.dtype
    }

    /// Shapes of keys and values as seen by a call.
    pub fn shapes(&self) -> [[usize; 4]; 2] {
        let Sizes { kv_heads, head_dim, value_dim, .. } = self.sizes;
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
    pub fn append(&mut self, isa: Isa, sequence: usize, b: usize, kv: [Tensor<'_>; 2]) {
        let Sizes { dtype, kv_heads, head_dim, value_dim } = self.sizes;
        let ([kb, kh, n, kd], [vb, vh, vn, vd]) = (kv[0].shape(), kv[1].shape());
        assert!(b < kb && b < vb && (kh, vh) == (kv_heads, kv_heads), "keys and values do not fit the cache");
        assert!(n == vn && (kd, vd) == (head_dim, value_dim), "keys and values do not fit the cache");
        assert!(head_dim > 0 && value_dim > 0, "keys and values need a length");
        self.let_go(sequence);
        let mut done = 0;
        while done < n {
            let (block, row) = (self.lens[sequence] / KEY_BLOCK, self.lens[sequence] % KEY_BLOCK);
            let here = (n - done).min(KEY_BLOCK - row);
            let sizes = self.sizes;
            let lines = self.block_mut(sequence, block);
            let place = Place { sizes, row, kv, b, rows: done..done + here };
            match dtype {
                Dtype::F32 => isa.dispatch(Write(place, lines.floats_mut())),
                Dtype::Bf16 => isa.dispatch(Write(place, lines.elements_mut::<Bf16>())),
                Dtype::F16 => isa.dispatch(Write(place, lines.elements_mut::<F16>())),
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

    /// A head's packed keys of a block that is held: `256 · head_dim` elements.
    pub(crate) fn panels(&self, sequence: usize, head: usize, block: usize) -> AnyPanels {
        let (lines, keys) = (self.held(sequence, block), self.sizes.keys(head));
        match self.sizes.dtype {
            Dtype::F32 => Typed::F32(lines.floats()[keys].as_ptr()),
            Dtype::Bf16 => Typed::Bf16(lines.elements()[keys].as_ptr()),
            Dtype::F16 => Typed::F16(lines.elements()[keys].as_ptr()),
        }
    }

    /// A head's values of a block that is held: 256 rows, and how much of each may be read.
    pub(crate) fn value_rows(&self, sequence: usize, head: usize, block: usize) -> (AnyRows, usize) {
        let (lines, values, width) = (self.held(sequence, block), self.sizes.values(head), self.sizes.width());
        let rows = match self.sizes.dtype {
            Dtype::F32 => Typed::F32(Rows::strided(lines.floats()[values].as_ptr(), width as isize, 1)),
            Dtype::Bf16 => Typed::Bf16(Rows::strided(lines.elements()[values].as_ptr(), width as isize, 1)),
            Dtype::F16 => Typed::F16(Rows::strided(lines.elements()[values].as_ptr(), width as isize, 1)),
        };
        (rows, width)
    }

    fn held(&self, sequence: usize, block: usize) -> &Lines {
        self.block(sequence, block).expect("the block is held")
    }

    pub(crate) fn key(&self, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        let inside = h < self.sizes.kv_heads && d < self.sizes.head_dim;
        self.element([b, j], inside.then(|| self.sizes.keys(h).start + self.sizes.key(j % KEY_BLOCK, d)))
    }

    pub(crate) fn value(&self, [b, h, j, d]: [usize; 4]) -> Option<f32> {
        let inside = h < self.sizes.kv_heads && d < self.sizes.value_dim;
        self.element([b, j], inside.then(|| self.sizes.values(h).start + j % KEY_BLOCK * self.sizes.width() + d))
    }

    fn element(&self, [b, j]: [usize; 2], at: Option<usize>) -> Option<f32> {
        let block = self.block(b, j / KEY_BLOCK).filter(|_| j < self.lens[b])?;
        Some(match self.sizes.dtype {
            Dtype::F32 => block.floats()[at?],
            Dtype::Bf16 => block.elements::<Bf16>()[at?].widen(),
            Dtype::F16 => block.elements::<F16>()[at?].widen(),
        })
    }
}

/// Keeps a block for later, if nobody else has it.
fn spare(spare: &mut Vec<Block>, mut block: Block) {
    if Arc::get_mut(&mut block).is_some() {
        spare.push(block);
    }
}

/// Some rows of keys and values, and where in a block they go.
struct Place<'a> {
    sizes: Sizes,
    /// The first row there.
    row: usize,
    kv: [Tensor<'a>; 2],
    /// Batch and rows here.
    b: usize,
    rows: Range<usize>,
}

/// Writes them to a block's elements.
struct Write<'a, T>(Place<'a>, &'a mut [T]);

impl<T: Element> Visitor for Write<'_, T> {
    type Output = ();
    fn visit<S: Steps>(self, s: S) {
        let Self(Place { sizes, row, kv: [k, v], b, rows }, elements) = self;
        for h in 0..sizes.kv_heads {
            // SAFETY: `append` made sure that the head and the rows are inside both tensors.
            let (k, v) = unsafe { (k.rows(b, h, rows.start), v.rows(b, h, rows.start)) };
            // SAFETY: as above.
            unsafe {
                write_keys(s, k, sizes, row..row + rows.len(), &mut elements[sizes.keys(h)]);
                let values = &mut elements[sizes.values(h)][row * sizes.width()..];
                if let Some(floats) = as_floats(values) {
                    s.pack_rows(v, [rows.len(), sizes.value_dim], Care::Fast, floats);
                    continue;
                }
                for (j, value) in values.chunks_exact_mut(sizes.width()).take(rows.len()).enumerate() {
                    for (d, x) in value[..sizes.value_dim].iter_mut().enumerate() {
                        *x = T::narrow(v.get(j, d));
                    }
                }
            }
        }
    }
}

/// Packs rows of keys into their places among a head's.
///
/// # Safety
/// There are so many rows, of `head_dim` elements.
unsafe fn write_keys<S: Steps, T: Element>(s: S, keys: AnyRows, sizes: Sizes, places: Range<usize>, to: &mut [T]) {
    let d = sizes.head_dim;
    let mut j = places.start;
    while j < places.end {
        let left = places.end - j;
        if j.is_multiple_of(LANES)
            && left >= LANES
            && let Some(floats) = as_floats(&mut to[sizes.key(j, 0)..])
        {
            // Whole panels go through registers, the last one filled up.
            // SAFETY: the caller's promise.
            unsafe { s.pack_keys(keys.rows_from(j - places.start), left, d, floats) };
            return;
        }
        for i in 0..d {
            // SAFETY: the caller's promise.
            to[sizes.key(j, i)] = T::narrow(unsafe { keys.get(j - places.start, i) });
        }
        j += 1;
    }
}

/// The same elements, if they are floats.
fn as_floats<T: Element>(elements: &mut [T]) -> Option<&mut [f32]> {
    // SAFETY: `T` is `f32`: no other type says so.
    (T::DTYPE == Dtype::F32).then(|| unsafe { &mut *(core::ptr::from_mut(elements) as *mut [f32]) })
}
