//! Keys of a cache that are changed where they are stored: rotated to other positions, for example.

use super::Cache;
use super::blocks::Packed;
use super::layout::Sizes;
use super::spare::{Counts, SpareBlocks, size_for};
use super::token_part::TokenPart;
use super::write::NewRows;
use crate::simd::LANES;
use crate::simd::aligned::AlignedBuf;
use crate::simd::isa::Isa;
use crate::tensor::any::Tensor;
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::View;
use core::ops::Range;
use std::sync::Arc;

/// Function that changes keys, or refuses them: called with the positions of some, which lie in one key block, and their
/// elements `[kv_heads, keys, head_dim]`.
type ChangeKeys<'f, E> = &'f mut dyn FnMut(&Cache, Range<usize>, &mut [f32]) -> Result<(), E>;

impl Cache {
    /// Replaces some keys of a sequence by what `change` makes of them, in copies of their blocks, which take the place of
    /// these at the end. Evicted keys are passed over. Values stay as they are, but for those of a latent cache, which
    /// are columns of the keys. `None` if there is no memory for the copies. The cache is then unchanged, and if `change`
    /// refuses or panics.
    ///
    /// # Panics
    /// If the sequence has no such keys. Keys of an int8 or int4 cache must be finite, or scores are wrong.
    pub fn change_keys<E>(
        &mut self,
        isa: Isa,
        sequence: usize,
        keys: Range<usize>,
        change: ChangeKeys<'_, E>,
    ) -> Option<Result<(), E>> {
        assert!(keys.start <= keys.end && keys.end <= self.lens[sequence], "keys that are not there");
        let held = keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK);
        let held: Vec<_> = held.filter_map(|at| Some((at, self.blocks[sequence].get(at)?.clone()))).collect();
        let mut copies = Counts::default();
        held.iter().for_each(|(_, block)| copies[size_for(block.rows)] += 1);
        let mut copies = SpareBlocks::default().try_allocate(self.store.sizes, copies, Counts::default(), 0)?;
        let (mut changed, mut floats) = (Vec::new(), Vec::new());
        let mut exact = None;
        for (at, block) in held {
            let first = at * KEY_BLOCK;
            let here = keys.start.max(first)..keys.end.min(first + KEY_BLOCK);
            self.widen_keys(sequence, here.clone(), &mut floats)?;
            if let Err(refused) = change(self, here.clone(), &mut floats) {
                return Some(Err(refused));
            }
            let mut copy = copies.pop(block.rows).expect("allocated above");
            let packed = Arc::get_mut(&mut copy).expect("a new block has one owner");
            self.store.sizes.copy_keys(&block, packed);
            self.write_keys(isa, packed, here.start - first, &floats);
            if here.start < self.store.sizes.exact {
                exact = Some(self.changed_exact(isa, [sequence, here.start], &floats)?);
            }
            changed.push((at, copy));
        }
        for (at, block) in changed {
            *self.blocks[sequence].get_mut(at).expect("the block is held") = block;
        }
        if exact.is_some() {
            self.exact[sequence] = exact;
        }
        Some(Ok(()))
    }

    /// Returns a copy of the exact rows of a sequence with other keys from token `first` on. `None` if there is no memory for it.
    fn changed_exact(&self, isa: Isa, [sequence, first]: [usize; 2], floats: &[f32]) -> Option<Arc<AlignedBuf>> {
        let (sizes, all) = (self.store.sizes, self.store.sizes.exact_floats());
        let mut copy = AlignedBuf::try_new(all)?;
        let (rows, to) = (self.exact[sequence].as_ref()?.floats(), copy.floats_mut());
        to[..all].copy_from_slice(&rows[..all]);
        let (k, n) = keys_of(sizes, floats);
        NewRows { sizes, row: first, k, v: None, b: 0, rows: 0..n }.write_exact(isa, to);
        Some(Arc::new(copy))
    }

    /// Widens some keys of a block of a sequence, `[kv_heads, keys, head_dim]`. `None` if there is no memory for them.
    fn widen_keys(&self, sequence: usize, keys: Range<usize>, floats: &mut Vec<f32>) -> Option<()> {
        let sizes = self.store.sizes;
        floats.clear();
        floats.try_reserve(sizes.kv_heads * keys.len() * sizes.head_dim).ok()?;
        for (head, key) in (0..sizes.kv_heads).flat_map(|head| keys.clone().map(move |key| (head, key))) {
            floats.extend(self.elements(TokenPart::Key, [sequence, head, key], 0..sizes.head_dim)?);
        }
        Some(())
    }

    /// Writes keys `[kv_heads, keys, head_dim]` to a block, from a row on.
    fn write_keys(&mut self, isa: Isa, block: &mut Packed, row: usize, floats: &[f32]) {
        let sizes = self.store.sizes.with_rows(block.rows);
        let (k, n) = keys_of(sizes, floats);
        self.reserve_scratch();
        // Whole panels are written together, and the last one filled up, in which other keys may follow.
        let whole = ((row + n) / LANES * LANES).max(row) - row;
        for rows in [0..whole, whole..n].into_iter().filter(|rows| !rows.is_empty()) {
            let new = NewRows { sizes, row: row + rows.start, k, v: None, b: 0, rows };
            new.write(isa, block.memory.floats_mut(), self.store.int8.as_mut());
        }
    }
}

/// Returns keys `[kv_heads, keys, head_dim]` as a tensor, and their number.
fn keys_of(sizes: Sizes, floats: &[f32]) -> (Tensor<'_>, usize) {
    let n = floats.len().checked_div(sizes.kv_heads * sizes.head_dim).unwrap_or(0);
    (View::bhld(floats, [1, sizes.kv_heads, n, sizes.head_dim]).expect("all of the keys").into(), n)
}
