//! Key/value cache: keys and values kept from call to call, in the form that the kernels read.
//!
//! A sequence is a list of blocks of 256 keys, each with its own memory, so growing copies nothing but the first block,
//! which begins with room for 16 keys and doubles when full, up to 256. A block holds, for each key/value head, panels
//! of packed keys `[panel][head_dim / G][16][G]` and the values of its keys, padded to whole vectors, in value panels of
//! columns (`value_panels.rs`); G is 1 for f32 and f16, 2 for bf16. Both are of the cache's element type, or bytes and scales
//! as in `int8.rs` and `int4.rs`. Latent keys are stored as values are, and their first columns are the values. Sequences with
//! a common start share blocks; a write to a shared block copies it first.

mod blocks;
mod changed_keys;
mod exact;
mod exact_tokens;
mod layout;
mod memory;
mod pool;
mod pool_exact;
mod pool_tokens;
mod read;
mod scattered;
mod spare;
mod store;
mod token_part;
mod tokens;
mod write;

use crate::kv::value_panels::ValueOrder;
use crate::simd::aligned::AlignedBuf;
use crate::simd::isa::Isa;
use crate::tensor::any::Tensor;
use crate::tensor::element::Dtype;
use crate::tensor::rows::{KEY_BLOCK, MAX_DIM};
use blocks::Blocks;
use core::ops::Range;
pub(crate) use exact::ExactRows;
pub use layout::MAX_EXACT;
use layout::{Format, KeyOrder, Sizes};
pub use pool::PackedPool;
pub use spare::SpareBlocks;
use std::sync::Arc;
pub(crate) use store::Store;
pub use store::{CacheFormat, KvFormat};
pub use token_part::TokenPart;
pub use tokens::NewTokens;
use write::NewRows;

/// Keys and values of several sequences, packed.
#[derive(Debug)]
pub struct Cache {
    store: Store,
    /// Keys that the cache keeps, if it evicts others.
    sliding: Option<Sliding>,
    /// Blocks of each sequence.
    blocks: Vec<Blocks>,
    /// Exact rows of the first tokens of each sequence, from its first append on, if it has such.
    exact: Vec<Option<Arc<AlignedBuf>>>,
    lens: Vec<usize>,
    /// Blocks that no sequence uses.
    spare: SpareBlocks,
}

impl Clone for Cache {
    /// Shares the memory, as [`Cache::fork`] does.
    fn clone(&self) -> Self {
        let Self { store, sliding, blocks, exact, lens, spare: _ } = self;
        let (store, blocks, exact, lens) = (store.clone(), blocks.clone(), exact.clone(), lens.clone());
        Self { store, sliding: *sliding, blocks, exact, lens, spare: SpareBlocks::default() }
    }
}

/// Keys that a sliding cache keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sliding {
    /// Number of last keys that the next row may see, its own included.
    pub last: usize,
    /// Number of first keys that stay for good.
    pub first: usize,
    /// Number of keys that stay beyond the last, for rows that come after a rollback.
    pub rollback: usize,
}

impl Cache {
    /// Makes an empty cache of `sequences` sequences: keys of `head_dim`, values of `value_dim` elements. `None` if
    /// there is no memory for the sequences.
    pub fn new(
        dtype: Dtype,
        [sequences, kv_heads]: [usize; 2],
        [head_dim, value_dim]: [usize; 2],
        sliding: Option<Sliding>,
    ) -> Option<Self> {
        let last = sliding.is_none_or(|sliding| sliding.last > 0);
        assert!(last && head_dim.max(value_dim) <= MAX_DIM, "a window without keys, or a dimension beyond MAX_DIM");
        let store = Store::new(KEY_BLOCK, kv_heads, [head_dim, value_dim], CacheFormat::Elements(dtype).into());
        store.sizes.bytes().filter(|&bytes| bytes <= isize::MAX as usize)?;
        let (mut blocks, mut exact, mut lens) = (Vec::new(), Vec::new(), Vec::new());
        blocks.try_reserve_exact(sequences).ok()?;
        exact.try_reserve_exact(sequences).ok()?;
        lens.try_reserve_exact(sequences).ok()?;
        blocks.resize(sequences, Blocks::default());
        exact.resize(sequences, None);
        lens.resize(sequences, 0);
        Some(Self { store, sliding, blocks, exact, lens, spare: SpareBlocks::default() })
    }

    /// Number of bytes of an empty sequence.
    pub const SEQUENCE_BYTES: usize = size_of::<Blocks>() + size_of::<Option<Arc<AlignedBuf>>>() + size_of::<usize>();

    /// Empties the cache and sets another format. The scratch for appending bytes is not allocated yet.
    ///
    /// # Panics
    /// For integer keys longer than [`MAX_INT8_HEAD_DIM`](crate::MAX_INT8_HEAD_DIM). If there is not one scale for each channel of
    /// keys, or values have such. If the cache is latent, and keys have another format or basis than values' channels. For floats
    /// in another basis.
    #[must_use]
    pub fn with_format(self, format: KvFormat<'_>) -> Self {
        let emptied = self.emptied();
        Self { store: emptied.store.with_format(format), ..emptied }
    }

    /// Empties the cache and stores its keys as values: the first columns of keys are the values.
    ///
    /// # Panics
    /// If values are longer than keys or have another format, or the channels of keys have scales, or a basis is not the channels.
    #[must_use]
    pub fn with_latent(self) -> Self {
        let mut emptied = self.emptied();
        let format = emptied.store.format();
        assert!(format == KvFormat::from(format.values), "latent keys are the values");
        assert!(emptied.store.sizes.keys != Format::E4m3, "latent keys are floats or integers");
        let sizes = &mut emptied.store.sizes;
        assert!(sizes.value_dim <= sizes.head_dim, "values are columns of the keys");
        (sizes.key_order, sizes.value_order) = (KeyOrder::Latent, ValueOrder::Rows);
        emptied
    }

    /// Returns true if values are the first columns of the keys.
    pub fn is_latent(&self) -> bool {
        self.store.sizes.key_order == KeyOrder::Latent
    }

    /// Empties the cache and sets room for rollbacks of `tokens` tokens. `None` if the cache keeps all keys.
    #[must_use]
    pub fn with_rollback(self, tokens: usize) -> Option<Self> {
        let sliding = self.sliding.map(|sliding| Sliding { rollback: tokens, ..sliding })?;
        Some(Self { sliding: Some(sliding), ..self.emptied() })
    }

    /// Returns the cache without keys and memory.
    fn emptied(mut self) -> Self {
        self.blocks.fill(Blocks::default());
        self.exact.fill(None);
        self.lens.fill(0);
        self.spare.clear();
        self
    }

    /// Allocates the scratch that appending needs, unless it is there already.
    pub fn reserve_scratch(&mut self) {
        self.store.reserve_scratch();
    }

    /// Returns the format of its elements.
    pub fn format(&self) -> KvFormat<'_> {
        self.store.format()
    }

    /// Returns the sizes and the format of what is stored.
    #[inline]
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the keys that the cache keeps, if it evicts others.
    pub fn sliding(&self) -> Option<Sliding> {
        self.sliding
    }

    /// Returns the shapes of keys and values in a call.
    ///
    /// Complexity: the number of sequences.
    pub(crate) fn shapes(&self) -> [[usize; 4]; 2] {
        let longest = self.lens.iter().copied().max().unwrap_or(0);
        self.dims().map(|dim| [self.lens.len(), self.kv_heads(), longest, dim])
    }

    /// Returns the lengths of a key and of a value.
    pub fn dims(&self) -> [usize; 2] {
        let Sizes { head_dim, value_dim, .. } = self.store.sizes;
        [head_dim, value_dim]
    }

    /// Returns the number of key/value heads.
    pub fn kv_heads(&self) -> usize {
        self.store.sizes.kv_heads
    }

    /// Returns the number of keys of each sequence, evicted ones included.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Adds an empty sequence and returns its number.
    pub fn add_sequence(&mut self) -> usize {
        self.blocks.push(Blocks::default());
        self.exact.push(None);
        self.lens.push(0);
        self.lens.len() - 1
    }

    /// Returns the keys of a sequence that were evicted.
    pub fn evicted(&self, sequence: usize) -> Range<usize> {
        let blocks = self.blocks[sequence].evicted();
        blocks.start * KEY_BLOCK..blocks.end * KEY_BLOCK
    }

    /// Returns the shortest length, beyond the kept first keys, to which a sequence can be truncated so that the next
    /// row sees no evicted key.
    pub fn shortest(&self, sequence: usize) -> usize {
        let evicted = self.evicted(sequence);
        match self.sliding {
            Some(Sliding { last, .. }) if !evicted.is_empty() => (evicted.end - 1).saturating_add(last),
            _ => 0,
        }
    }

    /// Appends tokens of head-first tensors `[_, kv_heads, _, dim]` to several sequences, each at most once, and evicts
    /// keys that none of their later rows will see. `new` is the memory that [`Self::try_allocate`] allocated for the
    /// tokens.
    ///
    /// # Panics
    /// If the shapes do not fit. Tokens for an int8 or int4 cache must be finite, or scores and outputs are wrong.
    pub fn append(
        &mut self,
        isa: Isa,
        tokens: impl Iterator<Item = NewTokens> + Clone,
        kv: [Tensor<'_>; 2],
        new: SpareBlocks,
    ) {
        self.spare.append(new);
        // Without a new row, the last one may still attend.
        let tokens = tokens.filter(|tokens| !tokens.rows.is_empty());
        // Evicted blocks of one sequence are memory for another.
        tokens.clone().for_each(|tokens| self.evict(tokens.sequence));
        tokens.for_each(|tokens| self.append_to(isa, tokens, kv));
    }

    /// Appends some tokens to a sequence.
    fn append_to(&mut self, isa: Isa, tokens: NewTokens, [k, v]: [Tensor<'_>; 2]) {
        let (sizes, NewTokens { sequence, b, rows }) = (self.store.sizes, tokens);
        assert!(sizes.head_dim > 0 && sizes.value_dim > 0, "keys and values need a length");
        self.reserve_scratch();
        let mut int8 = self.store.int8.take();
        let (mut done, end) = (rows.start, self.lens[sequence] + rows.len());
        while done < rows.end {
            let (number, row) = (self.lens[sequence] / KEY_BLOCK, self.lens[sequence] % KEY_BLOCK);
            let here = (rows.end - done).min(KEY_BLOCK - row);
            let (rows, tokens) = (done..done + here, self.lens[sequence]);
            if tokens < sizes.exact {
                let new = NewRows { sizes, row, k, v: Some(v), b, rows: rows.clone() };
                new.write_exact(isa, self.exact_mut(sequence));
            }
            let block = self.block_mut(sequence, number, Self::rows_up_to(number, end));
            let new = NewRows { sizes: sizes.with_rows(block.rows), row, k, v: Some(v), b, rows };
            new.write(isa, block.memory.floats_mut(), int8.as_mut());
            self.lens[sequence] += here;
            done += here;
        }
        self.store.int8 = int8;
    }

    /// Drops the keys of a sequence from `len` on. Keeps their memory for later tokens.
    pub fn truncate(&mut self, sequence: usize, len: usize) {
        if len < self.lens[sequence] {
            self.lens[sequence] = len;
            self.blocks[sequence].truncate(len.div_ceil(KEY_BLOCK)).for_each(|block| self.spare.push(block));
            if len == 0 {
                self.spare_exact(sequence);
            }
        }
    }

    /// Makes `to` a copy of `from`, sharing its memory.
    pub fn fork(&mut self, from: usize, to: usize) {
        assert!(from.max(to) < self.lens.len(), "no such sequence");
        if from == to {
            return;
        }
        self.truncate(to, 0);
        let [source, target] = self.blocks.get_disjoint_mut([from, to]).expect("two sequences");
        target.share(source);
        self.exact[to] = self.exact[from].clone();
        self.lens[to] = self.lens[from];
    }
}
