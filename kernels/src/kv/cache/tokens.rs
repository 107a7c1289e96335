//! Tokens: new ones to append; and stored ones, moved within a sequence, read and written bit for bit.

use super::blocks::{Block, Blocks, is_shared};
use super::layout::{Format, KeyOrder, Parts, Sizes};
use super::spare::{Counts, size_for};
use super::token_part::TokenPart;
use super::{Cache, Sliding};
use crate::matmul::e4m3::{E4m3, row_scale};
use crate::matmul::int4;
use crate::simd::aligned::{elements, elements_mut};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;
use std::sync::Arc;

/// Tokens to append to a sequence: rows of batch `b` of two tensors.
#[derive(Debug, Clone)]
pub struct NewTokens {
    /// Sequence to append to.
    pub sequence: usize,
    /// Batch of the tensors.
    pub b: usize,
    /// Rows of the tensors.
    pub rows: Range<usize>,
}

impl Format {
    /// Returns the first element that is stored in element `i` of a row; in int4 that is a byte of two elements.
    fn first_element(self, i: usize) -> usize {
        match self {
            Self::Int4(_) => i / (int4::BLOCK / 2) * int4::BLOCK + i % (int4::BLOCK / 2),
            _ => i,
        }
    }
}

impl Sizes {
    /// Returns the number of elements of a part of a token, 0 if the format lacks it; and the bytes of each.
    pub(super) fn elements(self, part: TokenPart) -> [usize; 2] {
        if self.key_order == KeyOrder::Latent && matches!(part, TokenPart::Value | TokenPart::ValueScale) {
            return [0, 1];
        }
        let (format, dim) = if part.is_of_key() { (self.keys, self.head_dim) } else { (self.values, self.value_dim) };
        match (part, format) {
            (TokenPart::ExactKey | TokenPart::ExactValue, _) => {
                let none = self.exact_row(part, [0, 0]).is_empty();
                [if none { 0 } else { dim }, size_of::<f32>()]
            }
            (TokenPart::KeyScale | TokenPart::ValueScale, _) => format.numbers(dim),
            (_, Format::Int4(_)) => [int4::blocks(dim) * int4::BLOCK / 2, 1],
            _ => [dim, format.element_bytes()],
        }
    }

    /// Returns the part that gives a part its place: latent keys lie where the values of other caches do.
    fn stored_as(self, part: TokenPart) -> TokenPart {
        match (self.key_order, part) {
            (KeyOrder::Latent, TokenPart::Key) => TokenPart::Value,
            (KeyOrder::Latent, TokenPart::KeyScale) => TokenPart::ValueScale,
            _ => part,
        }
    }

    /// Iterates over the elements of a part of a token, in ranges that lie together in a block.
    pub(super) fn runs(self, part: TokenPart) -> impl Iterator<Item = Range<usize>> {
        let [elements, _] = self.elements(part);
        let next = move |first: usize| {
            let end = match self.stored_as(part) {
                TokenPart::Value if self.value_group() == 1 => self.value_layout().panel(first).end,
                TokenPart::Value => first + 1,
                TokenPart::Key => first + self.key_group(),
                _ => first + 1,
            };
            first..end.min(elements)
        };
        core::iter::successors((elements > 0).then(|| next(0)), move |run| (run.end < elements).then(|| next(run.end)))
    }

    /// Returns the bytes, in a block, of a range of elements of a part of token `row`.
    pub(super) fn run_bytes(self, part: TokenPart, [head, row]: [usize; 2], run: Range<usize>) -> Range<usize> {
        let Parts { key_scales, keys, value_scales, values } = self.parts(head);
        let [_, bytes] = self.elements(part);
        let part = self.stored_as(part);
        let start = match part {
            TokenPart::Key => keys.start,
            TokenPart::KeyScale => key_scales.start,
            TokenPart::Value => values.start,
            TokenPart::ValueScale => value_scales.start,
            TokenPart::ExactKey | TokenPart::ExactValue => unreachable!("exact rows are in no block"),
        };
        let index = match part {
            TokenPart::Key => self.key(row, self.keys.first_element(run.start)),
            TokenPart::Value => self.value(row, self.values.first_element(run.start)),
            _ => self.scale(part, row, run.start),
        };
        let start = start + index * bytes;
        start..start + run.len() * bytes
    }

    /// Returns the index of scale `i` of token `row` among the head's scales; in int4, the index of a block's number.
    fn scale(self, part: TokenPart, row: usize, i: usize) -> usize {
        let of_keys = part == TokenPart::KeyScale;
        let Format::Int4(kind) = (if of_keys { self.keys } else { self.values }) else { return row };
        let at = [row, i / kind.numbers() * int4::BLOCK];
        let place = if of_keys { self.int4_key(kind, at) } else { self.int4_value(kind, at) };
        place.numbers()[i % kind.numbers()]
    }

    /// Copies the elements of a part of token `[head, row]` of a block.
    pub(super) fn read_token(self, part: TokenPart, at: [usize; 2], block: &[u8], to: &mut [u8]) {
        let [_, bytes] = self.elements(part);
        for run in self.runs(part) {
            to[run.start * bytes..run.end * bytes].copy_from_slice(&block[self.run_bytes(part, at, run)]);
        }
        if let (Some(_), Some(scale)) = (self.codes_of(part), to.first_chunk_mut()) {
            *scale = f32::from_ne_bytes(*scale).abs().to_ne_bytes();
        }
    }

    /// Returns the part with the codes that a part has the scale of, if these are E4M3.
    fn codes_of(self, part: TokenPart) -> Option<TokenPart> {
        match (part, self.keys, self.values) {
            (TokenPart::KeyScale, Format::E4m3, _) => Some(TokenPart::Key),
            (TokenPart::ValueScale, _, Format::E4m3) => Some(TokenPart::Value),
            _ => None,
        }
    }

    /// Writes the elements of a part of token `[head, row]` of a block; the scale of E4M3 codes after these.
    pub(super) fn write_token(self, part: TokenPart, at: [usize; 2], from: &[u8], block: &mut [u8]) {
        let [_, bytes] = self.elements(part);
        for run in self.runs(part) {
            block[self.run_bytes(part, at, run.clone())].copy_from_slice(&from[run.start * bytes..run.end * bytes]);
        }
        if let (Some(codes), Some(&scale)) = (self.codes_of(part), from.first_chunk()) {
            let places = self.runs(codes).flat_map(|run| self.run_bytes(codes, at, run));
            let scale = row_scale(f32::from_ne_bytes(scale), places.map(|place| E4m3(block[place])));
            block[self.run_bytes(part, at, 0..1)].copy_from_slice(&scale.to_ne_bytes());
        }
    }

    /// Calls `copy` with the bytes of two tokens in their blocks, range by range.
    pub(super) fn for_each_run(self, [to, from]: [usize; 2], mut copy: impl FnMut(Range<usize>, Range<usize>)) {
        for head in 0..self.kv_heads {
            for part in TokenPart::IN_BLOCKS {
                for run in self.runs(part) {
                    copy(self.run_bytes(part, [head, to], run.clone()), self.run_bytes(part, [head, from], run));
                }
            }
        }
    }
}

/// Returns the places to which kept tokens move: those behind the ones that stay where they are.
pub(super) fn moved(from: usize, accepted: &[usize]) -> Range<usize> {
    let in_place = accepted.iter().enumerate().take_while(|&(i, &token)| i == token).count();
    from + in_place..from + accepted.len()
}

/// Returns the bytes of a block that is not shared.
fn bytes_mut(block: &mut Block) -> &mut [u8] {
    Arc::get_mut(block).expect("the block has one owner").memory.elements_mut()
}

impl Cache {
    /// Returns the number of elements of a part of a token in one head, 0 if the cache's format lacks it; and the bytes
    /// of each.
    pub fn token_elements(&self, part: TokenPart) -> [usize; 2] {
        self.store.sizes.elements(part)
    }

    /// Copies the elements of a part of token `[sequence, head, token]`, which is held.
    pub fn read_token(&self, part: TokenPart, [sequence, head, token]: [usize; 3], to: &mut [u8]) {
        if part.is_exact() {
            let rows = self.exact[sequence].as_ref().expect("the token is held").floats();
            return to.copy_from_slice(&elements(&rows[self.store.sizes.exact_row(part, [head, token])])[..to.len()]);
        }
        let block = self.blocks[sequence].get(token / KEY_BLOCK).expect("the token is held");
        let sizes = self.store.sizes.with_rows(block.rows);
        sizes.read_token(part, [head, token % KEY_BLOCK], block.memory.elements(), to);
    }

    /// Writes the elements of a part of token `[sequence, head, token]`, which is held, in a block that is not shared.
    /// Elements of an int8 cache must be at least −127, and scales must be those of rows
    /// ([`is_int8_scale`](crate::is_int8_scale)); elements of an int4 cache must be at least −7, and numbers of blocks
    /// finite.
    pub fn write_token(&mut self, part: TokenPart, [sequence, head, token]: [usize; 3], from: &[u8]) {
        if part.is_exact() {
            let place = self.store.sizes.exact_row(part, [head, token]);
            return elements_mut(&mut self.exact_mut(sequence)[place])[..from.len()].copy_from_slice(from);
        }
        let block = self.blocks[sequence].get_mut(token / KEY_BLOCK).expect("the token is held");
        let sizes = self.store.sizes.with_rows(block.rows);
        sizes.write_token(part, [head, token % KEY_BLOCK], from, bytes_mut(block));
    }

    /// Returns true if a sequence of this cache could have `len` keys, those in `evicted` evicted.
    pub fn could_have(&self, len: usize, evicted: &Range<usize>) -> bool {
        if evicted == &(0..0) {
            return true;
        }
        let Some(Sliding { last, first, .. }) = self.sliding else { return false };
        let whole = evicted.start.is_multiple_of(KEY_BLOCK) && evicted.end.is_multiple_of(KEY_BLOCK);
        let starts = evicted.start / KEY_BLOCK == first.div_ceil(KEY_BLOCK);
        let seen = !evicted.is_empty() && (evicted.end - 1).checked_add(last).is_some_and(|shortest| len >= shortest);
        whole && starts && seen && len <= isize::MAX as usize
    }

    /// Makes an empty sequence one of `len` keys, those in `evicted` evicted; the others must then be written.
    /// Returns false, and changes nothing, if there is no memory for them.
    ///
    /// # Panics
    /// If the sequence is not empty, or could not come to have these keys.
    #[must_use]
    pub fn try_restore(&mut self, sequence: usize, len: usize, evicted: Range<usize>) -> bool {
        assert!(self.lens[sequence] == 0 && self.could_have(len, &evicted), "{len} keys without {evicted:?}");
        let gap = evicted.start / KEY_BLOCK..evicted.end / KEY_BLOCK;
        let rows = (0..len.div_ceil(KEY_BLOCK)).filter(|block| !gap.contains(block));
        let rows = rows.map(|block| Self::rows_up_to(block, len));
        let mut needed = Counts::default();
        rows.clone().for_each(|rows| needed[size_for(rows)] += 1);
        let exact = usize::from(len > 0 && self.lacks_exact(sequence));
        let Some(new) = self.spare.try_allocate(self.store.sizes, needed, Counts::default(), exact) else {
            return false;
        };
        self.spare.append(new);
        if exact > 0 {
            self.exact_mut(sequence);
        }
        let blocks = rows.map(|rows| self.spare.pop(rows).expect("allocated above")).collect();
        self.blocks[sequence] = Blocks::with_gap(blocks, gap);
        self.lens[sequence] = len;
        true
    }

    /// Allocates what [`Self::keep`] takes for these tokens. Returns false, and changes nothing, if there is no memory.
    #[must_use]
    pub fn reserve_to_keep(&mut self, sequence: usize, from: usize, accepted: &[usize]) -> bool {
        let moved = moved(from, accepted);
        let mut copies = Counts::default();
        for block in moved.start / KEY_BLOCK..moved.end.div_ceil(KEY_BLOCK) {
            if let Some(block) = self.blocks[sequence].get(block).filter(|_| !moved.is_empty()) {
                copies[size_for(block.rows)] += usize::from(is_shared(block));
            }
        }
        let exact = usize::from(moved.start < self.store.sizes.exact.min(moved.end) && self.lacks_exact(sequence));
        let new = self.spare.try_allocate(self.store.sizes, copies, Counts::default(), exact);
        new.map(|new| self.spare.append(new)).is_some()
    }

    /// Keeps the first `from` tokens of a sequence and some later ones: token `from + accepted[i]` becomes token `from
    /// + i`, with its bits. Returns false, and changes nothing, if there is no memory to copy shared blocks.
    ///
    /// # Panics
    /// If `accepted` does not increase, names a token that is missing or evicted, or a token would move to an evicted
    /// block.
    #[must_use]
    pub fn keep(&mut self, sequence: usize, from: usize, accepted: &[usize]) -> bool {
        if !self.reserve_to_keep(sequence, from, accepted) {
            return false;
        }
        let (len, moved) = (from + accepted.len(), moved(from, accepted));
        let in_place = moved.start - from;
        if !moved.is_empty() {
            for block in moved.start / KEY_BLOCK..len.div_ceil(KEY_BLOCK) {
                let rows = self.blocks[sequence].get(block).expect("the block is held").rows;
                self.block_mut(sequence, block, rows);
            }
            for (to, &token) in moved.zip(&accepted[in_place..]) {
                assert!(to < from + token && from + token < self.lens[sequence], "token {token} behind {from}");
                self.move_exact(sequence, [to, from + token]);
                self.move_token(sequence, [to, from + token]);
            }
        }
        self.truncate(sequence, len);
        true
    }

    /// Copies a token of a sequence over another one in a block that is not shared.
    fn move_token(&mut self, sequence: usize, at @ [to, from]: [usize; 2]) {
        let (rows, blocks) = (at.map(|at| at % KEY_BLOCK), &mut self.blocks[sequence]);
        if to / KEY_BLOCK == from / KEY_BLOCK {
            let block = blocks.get_mut(to / KEY_BLOCK).expect("the block is held");
            let (sizes, block) = (self.store.sizes.with_rows(block.rows), bytes_mut(block));
            sizes.for_each_run(rows, |to, from| block.copy_within(from, to.start));
        } else {
            let [to, from] = blocks.get_two(at.map(|at| at / KEY_BLOCK)).expect("both blocks are held");
            assert!(to.rows == from.rows, "a block behind the first one, beside one that is smaller");
            let (to, from) = (bytes_mut(to), from.memory.elements());
            self.store.sizes.for_each_run(rows, |place, source| to[place].copy_from_slice(&from[source]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::element::Dtype;

    /// Blocks that are shared, and no others, are allocated before tokens move in them.
    #[test]
    fn shared_blocks_are_reserved_for_tokens_that_move() {
        let mut cache = Cache::new(Dtype::F32, [2, 1], [4, 4], None).expect("memory");
        assert!(cache.try_restore(0, 700, 0..0));
        let alone = cache.bytes();
        assert!(cache.reserve_to_keep(0, 300, &[1]) && cache.bytes() == alone, "nothing is shared");
        cache.fork(0, 1);
        assert!(cache.reserve_to_keep(0, 300, &[0, 1]) && cache.bytes() == alone, "nothing moves");
        // Tokens 300 and 512 move, in two blocks of 256.
        assert!(cache.reserve_to_keep(0, 300, &(1..214).collect::<Vec<_>>()));
        assert_eq!(cache.bytes(), alone / 3 * 5);
        let reserved = cache.bytes();
        assert!(cache.keep(0, 300, &(1..214).collect::<Vec<_>>()) && cache.bytes() == reserved);
    }
}
