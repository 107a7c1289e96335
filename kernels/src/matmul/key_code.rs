//! Packed keys as integers: what the tile of integer QKᵀ has to know of their code.

use crate::matmul::int4::{BLOCK_QUADS, Int4};
use crate::matmul::int8::QuerySize;
use crate::simd::{Int8Dot, LANES, Query4};
use crate::tensor::element::F16;
use crate::tensor::rows::Rows;

/// Code of keys: how many bits their elements have, and what turns integer sums into scores.
pub(crate) trait KeyCode: Copy {
    /// Number of groups of four elements of each key in 64 bytes of sixteen keys: 1 of eight bits, 2 of four.
    const HALVES: usize;
    /// Number of such 64 bytes of a block, where the block is not the whole key: scores are then float sums over blocks.
    const BLOCK_LOADS: Option<usize>;
    /// Elements of sixteen keys as they are multiplied.
    type Keys<S: Int8Dot>: Copy;

    /// Panics unless queries are cut for such keys, and what is a slice has the numbers of `panels` panels.
    fn check(self, size: QuerySize, panels: usize);
    /// Returns the scale of a key, where it has one.
    fn scale(self, key: usize) -> Option<f32>;
    /// Returns the numbers of the panels from this one on.
    ///
    /// # Safety
    /// There is the panel.
    unsafe fn panel(self, panel: usize) -> Self;
    /// Returns the integer sums that a block begins with, given the sum of the query's bytes.
    fn start<S: Int8Dot>(s: S, total: i32) -> S::Sums;
    /// Loads 64 bytes of sixteen keys.
    ///
    /// # Safety
    /// `p..p + 64` is readable.
    unsafe fn keys<S: Int8Dot>(s: S, p: *const i8) -> Self::Keys<S>;
    /// Adds the products of such keys and a query's quads. `query` is the first quad; of four bits, the second is one of the
    /// upper half of the block, further on by the loads of a block.
    ///
    /// # Safety
    /// These quads are readable.
    unsafe fn dot<S: Int8Dot>(s: S, sums: S::Sums, query: *const Query4, keys: Self::Keys<S>) -> S::Sums;
    /// Adds a block's integer sums to the scores' of panel `n`, which begin as zeros.
    ///
    /// # Safety
    /// There are the numbers of the panel and the block.
    unsafe fn add<S: Int8Dot>(self, s: S, at: BlockAt, sums: S::Sums, to: S::V) -> S::V;
    /// Returns the scores of panel `n`.
    ///
    /// # Safety
    /// There are the numbers of the panel.
    unsafe fn score<S: Int8Dot>(self, s: S, factor: S::V, n: usize, sum: S::V) -> S::V;
}

/// Block of a panel, and the sum of the query's bytes in it.
#[derive(Clone, Copy)]
pub(crate) struct BlockAt {
    pub(crate) n: usize,
    pub(crate) block: usize,
    pub(crate) total: i32,
}

/// Int8 keys, with their scales in whole panels, if they have scales.
#[derive(Clone, Copy)]
pub(crate) struct Int8Keys<'a>(pub(crate) Option<&'a [f32]>);

impl KeyCode for Int8Keys<'_> {
    const HALVES: usize = 1;
    const BLOCK_LOADS: Option<usize> = None;
    type Keys<S: Int8Dot> = S::Keys;

    fn check(self, size: QuerySize, panels: usize) {
        assert!(size.sums == 1 && self.0.is_none_or(|scales| scales.len() >= panels * LANES));
    }

    fn scale(self, key: usize) -> Option<f32> {
        self.0.map(|scales| scales.get(key).copied().unwrap_or(0.0))
    }

    #[inline(always)]
    unsafe fn panel(self, panel: usize) -> Self {
        Self(self.0.map(|scales| &scales[panel * LANES..]))
    }

    #[inline(always)]
    fn start<S: Int8Dot>(s: S, total: i32) -> S::Sums {
        s.start(total)
    }

    #[inline(always)]
    unsafe fn keys<S: Int8Dot>(s: S, p: *const i8) -> S::Keys {
        // SAFETY: same contract: the caller guarantees the range at `p`.
        unsafe { s.keys(p) }
    }

    #[inline(always)]
    unsafe fn dot<S: Int8Dot>(s: S, sums: S::Sums, query: *const Query4, keys: S::Keys) -> S::Sums {
        // SAFETY: the caller guarantees the quad.
        s.dot4(sums, unsafe { &*query }, keys)
    }

    #[inline(always)]
    unsafe fn add<S: Int8Dot>(self, s: S, _: BlockAt, sums: S::Sums, _: S::V) -> S::V {
        s.to_f32(sums)
    }

    #[inline(always)]
    unsafe fn score<S: Int8Dot>(self, s: S, factor: S::V, n: usize, sum: S::V) -> S::V {
        let factor = match self.0 {
            // SAFETY: the caller guarantees sixteen scales of panel `n`.
            Some(scales) => s.mul(factor, unsafe { s.load(scales.as_ptr().add(n * LANES)) }),
            None => factor,
        };
        s.mul(factor, sum)
    }
}

/// Int4 keys: the scales, and centres, of their blocks.
#[derive(Clone, Copy)]
pub(crate) struct Int4Keys {
    pub(crate) kind: Int4,
    /// Numbers of each panel, `[block][scale, centre][16]`.
    pub(crate) numbers: Rows<F16>,
}

impl KeyCode for Int4Keys {
    const HALVES: usize = 2;
    const BLOCK_LOADS: Option<usize> = Some(BLOCK_QUADS / 2);
    type Keys<S: Int8Dot> = S::Nibbles;

    fn check(self, size: QuerySize, _: usize) {
        assert!(size.quads == size.sums * BLOCK_QUADS);
    }

    fn scale(self, _: usize) -> Option<f32> {
        None
    }

    #[inline(always)]
    unsafe fn panel(self, panel: usize) -> Self {
        // SAFETY: the caller guarantees the panel.
        Self { numbers: unsafe { self.numbers.rows_from(panel) }, ..self }
    }

    #[inline(always)]
    fn start<S: Int8Dot>(s: S, total: i32) -> S::Sums {
        s.start_nibbles(total)
    }

    #[inline(always)]
    unsafe fn keys<S: Int8Dot>(s: S, p: *const i8) -> S::Nibbles {
        // SAFETY: same contract: the caller guarantees the range at `p`.
        unsafe { s.nibbles(p) }
    }

    #[inline(always)]
    unsafe fn dot<S: Int8Dot>(s: S, sums: S::Sums, query: *const Query4, keys: S::Nibbles) -> S::Sums {
        // SAFETY: the caller guarantees both quads.
        unsafe { s.dot8(sums, &*query, &*query.add(BLOCK_QUADS / 2), keys) }
    }

    #[inline(always)]
    unsafe fn add<S: Int8Dot>(self, s: S, at: BlockAt, sums: S::Sums, to: S::V) -> S::V {
        // SAFETY: the caller guarantees the numbers of the panel and the block.
        unsafe {
            let numbers = self.numbers.at(at.n).cast::<u16>().add(at.block * self.kind.numbers() * LANES);
            let sum = s.fma(s.to_f32(sums), s.load_f16(numbers), to);
            match self.kind {
                Int4::Symmetric => sum,
                Int4::Centred => s.fma(s.splat(at.total as f32), s.load_f16(numbers.add(LANES)), sum),
            }
        }
    }

    #[inline(always)]
    unsafe fn score<S: Int8Dot>(self, s: S, factor: S::V, _: usize, sum: S::V) -> S::V {
        s.mul(factor, sum)
    }
}
