//! Sixteen-lane vector, and its half, that every kernel is written in, with their few operations.
//!
//! A vector has 16 lanes whatever the machine: one AVX-512 register, two AVX2 registers, four SSE2 or NEON
//! registers. Lanes run over keys in the scores and over value columns in the output, never across `head_dim`, so a
//! result does not depend on the register width. That, and one shared order of operations, is why AVX2, AVX-512 and NEON
//! give the same bits (the portable backend too, where the build has FMA).
//!
//! A backend is a folder: its token and whole vectors, its half vectors, its dot products. `x86` and `aarch64` are intrinsics,
//! `portable` is built on `wide`. Algorithms name no backend; [`dispatch!`](dispatch) hands them its token.
//!
//! Rules (DESIGN.md, "Traps", has the reason for each):
//! 1. A token (`Avx2`, `Avx512`, …) proves that the machine has the instructions; only
//!    [`Isa`](crate::Isa), [`Simd::with_int8_dot`] and [`Simd::with_bf16_dot`] make one, after detection; that of a matrix unit
//!    is part of it ([`Simd::has_matrix_unit`]); [`Simd::half`]
//!    makes that of its half.
//! 2. Functions generic over `S: Simd` that run below the boundary are `#[inline(always)]`. One that is not inlined into its
//!    `#[target_feature]` caller runs a hundred times slower.
//! 3. [`Simd::vectorize`] is the only `#[target_feature]` boundary. It is entered once per kernel step, which covers a
//!    row block times a key block, or per strip of its tiles (one tile, where neighbours need different keys, and for int4 values).
//! 4. Below the boundary: no rayon, no `dyn`, no function pointers, no allocation.
//! 5. The features in an ISA file's `#[target_feature]` are the ones its token's constructor detects.
//! 6. An operation is added where backends implement it differently, not because one caller would like it.

pub(crate) use crate::simd::level::{FIRST, Level, NO_LEVEL, SECOND, SECOND_OR_NONE};
pub(crate) use crate::simd::numbers::{
    F16_BIAS, F16_END, F16_NORMAL, F16_UNIT, INFINITY, QUIET_NAN, SHIFT, TWO_TO_MINUS_64, quiet,
};
pub(crate) use crate::simd::pairs::Bf16x2;
pub(crate) use crate::simd::quads::{Half, Lower, Query4, Upper, Words4};
pub(crate) use crate::simd::vector::{FOUR, Vector};
pub(crate) use crate::simd::width::LANES;
use crate::simd::width::LINE_BYTES;

#[macro_use]
pub(crate) mod dispatch;
#[cfg(target_arch = "aarch64")]
pub(crate) mod aarch64;
pub(crate) mod aligned;
pub(crate) mod exp;
pub(crate) mod isa;
pub(crate) mod lanes;
pub(crate) mod level;
pub(crate) mod numbers;
pub(crate) mod pairs;
pub(crate) mod portable;
pub(crate) mod quads;
pub(crate) mod terms;
pub(crate) mod tiles;
pub(crate) mod unit;
pub(crate) mod vector;
pub(crate) mod width;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

/// Size of the usual page. With larger ones, a few more lines than necessary are prefetched into the first-level cache.
const PAGE_BYTES: usize = 4096;

/// Sixteen `f32` lanes and the operations of the kernels. All operations are lane by lane and IEEE.
///
/// # Safety
/// As [`Vector`], with sixteen [`LANES`](Vector::LANES), and eight for [`Self::Half`]. Register tiles have at least
/// one row and one vector.
pub(crate) unsafe trait Simd: Vector {
    /// Token of vectors of half the lanes.
    type Half: Vector;

    /// Number of rows of a register tile. With [`Self::TILE_VECS`], as large as the register file allows: see each
    /// backend.
    const TILE_ROWS: usize;
    /// Largest number of rows of a tile whose terms are two floats from one load: both are held in registers.
    const TWO_TERM_ROWS: usize = Self::TILE_ROWS;
    /// Number of vectors (sixteen columns each) of a register tile.
    const TILE_VECS: usize;
    /// Number of vectors of a tile of scores of few rows, or of integers: half of [`Self::TILE_VECS`] where two chains of a dot
    /// product run side by side.
    const DOT_VECS: usize;

    /// Number of rows with exponentials that are computed side by side, at most 3: registers hold each twice, begun and ended.
    const SIDE_ROWS: usize = 1;
    /// True if the softmax begins a panel's exponentials before it ends those of the panel before.
    const BEGINS_AHEAD: bool = true;
    /// True if P·V tiles end (finish) rows to which no later key block is added.
    const ENDS_ROWS: bool = true;

    /// True if [`Vector::fma`] rounds once.
    const FUSED: bool;

    /// Power of two by which the second factor of [`Self::one_plus_scaled`] is multiplied beforehand, in its polynomial: exact, and
    /// no bits depend on it.
    const FACTOR_UNIT: f32 = 1.0;

    /// True if a machine with this instruction set may have dot products of bfloat16 pairs: [`Self::has_bf16_dot`].
    const MAY_HAVE_BF16_DOT: bool = false;
    /// True if one may have a matrix unit: [`Self::has_matrix_unit`].
    const MAY_HAVE_UNIT: bool = cfg!(matrix_unit_model);

    /// Returns vectors of half the lanes, for code in the same [`Self::vectorize`], if one takes half the time of a whole
    /// one.
    fn half(self) -> Option<Self::Half>;

    /// Runs `f` compiled for this instruction set. `f` must be inlinable into it: pass a closure marked
    /// `#[inline(always)]` that calls `#[inline(always)]` functions.
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R;

    /// Runs `work` with the best dot products of bytes that come with this instruction set. The token handed to `work` may
    /// be of another type, with the same [`Self::TILE_ROWS`]; the work enters its [`Self::vectorize`].
    ///
    /// # Safety
    /// The caller guarantees what [`Int8DotWork::run`] of this work requires.
    unsafe fn with_int8_dot<W: Int8DotWork>(self, work: W) -> W::Output;

    /// Returns true if the machine has dot products of bfloat16 pairs that go with this instruction set.
    fn has_bf16_dot(self) -> bool {
        false
    }

    /// Runs `work` with dot products of bfloat16 pairs. The token handed to `work` is of another type, with the same tile
    /// shape; the work enters its [`Self::vectorize`].
    ///
    /// # Panics
    /// If [`Self::has_bf16_dot`] is false.
    ///
    /// # Safety
    /// The caller guarantees what [`Bf16DotWork::run`] of this work requires.
    unsafe fn with_bf16_dot<W: Bf16DotWork>(self, work: W) -> W::Output {
        let _ = work;
        unreachable!("no products of pairs")
    }

    /// Returns true if a matrix unit goes with the vectors, and this process may use it. A model of one goes with every set.
    #[inline(always)]
    fn has_matrix_unit(self) -> bool {
        cfg!(matrix_unit_model)
    }

    /// Stores as bfloat16, rounded to nearest even: numbers beyond the largest become ±∞, subnormal numbers are rounded
    /// like all others. NaN becomes quiet and keeps the part of its payload that fits.
    ///
    /// # Safety
    /// `p..p + 16` is writable. No alignment is needed.
    unsafe fn store_bf16(self, p: *mut u16, v: Self::V);
    /// Stores as IEEE binary16, rounded like [`Self::store_bf16`].
    ///
    /// # Safety
    /// `p..p + 16` is writable. No alignment is needed.
    unsafe fn store_f16(self, p: *mut u16, v: Self::V);
    /// Loads element `i` of each of sixteen pairs of bfloat16, 0 or 1, widened exactly.
    ///
    /// # Safety
    /// `p..p + 16` is readable. No alignment is needed.
    unsafe fn load_of_pairs(self, p: *const Bf16x2, i: usize) -> Self::V;
    /// Selects `zero` where the byte at `p` is 0, `other` where it is not.
    ///
    /// # Safety
    /// `p..p + 16` is readable.
    unsafe fn select_bytes(self, p: *const u8, zero: Self::V, other: Self::V) -> Self::V;
    /// Selects `zero` in lane `i` where bit `i` is 0, `other` where it is not.
    fn select_bits(self, bits: u16, zero: Self::V, other: Self::V) -> Self::V;
    /// Compares the low halves of the lanes of four words with `least`: bit `4·i + t` of the first result is 1 where lane
    /// `2·i` of word `t` is `least` or greater, of the second where lane `2·i + 1` is.
    fn bits_at_least(self, words: [&[u64; LANES / 2]; 4], least: u32) -> [u16; 2];

    /// True if memory can be prefetched.
    const PREFETCHES: bool = true;

    /// Prefetches the cache line at `p` into the first-level cache. The address need not exist.
    fn prefetch(self, p: *const f32);
    /// Prefetches the cache line at `p` into the second-level cache. Zen 4 drops this prefetch where the page is not in
    /// the TLB.
    fn prefetch_second(self, p: *const f32);

    /// True if [`Self::has_large_l1`] may be.
    const MAY_HAVE_LARGE_L1: bool = false;

    /// Returns true if the first-level cache has room, and buffers for misses, to prefetch the next keys and values of
    /// a small row block into it.
    #[inline(always)]
    fn has_large_l1(self) -> bool {
        false
    }

    /// Prefetches `bytes` bytes of memory that will be needed later, and looks up their pages.
    #[inline(always)]
    fn prefetch_far(self, level: Level, p: *const f32, bytes: usize) {
        self.prefetch_pages(level, p, bytes);
        for offset in (0..bytes).step_by(LINE_BYTES) {
            self.prefetch_line(level, p.wrapping_byte_add(offset));
        }
    }

    /// Prefetches one line of such memory.
    #[inline(always)]
    fn prefetch_line(self, level: Level, p: *const f32) {
        match level {
            Level::First => self.prefetch(p),
            Level::Second => self.prefetch_second(p),
        }
    }

    /// Prepares prefetches into the second-level cache: prefetches the first line of each page into the first-level
    /// cache, which looks up the page for all of them.
    #[inline(always)]
    fn prefetch_pages(self, level: Level, p: *const f32, bytes: usize) {
        if level == Level::First {
            return;
        }
        let mut offset = p.addr().wrapping_neg() % PAGE_BYTES;
        while offset < bytes {
            self.prefetch(p.wrapping_byte_add(offset));
            offset += PAGE_BYTES;
        }
    }

    /// Returns `v` and pins the order of operations: those on the result stay behind those that made the arguments of
    /// earlier calls. Otherwise the compiler, which minimises registers, puts independent chains that were side by side
    /// one after the other.
    #[inline(always)]
    fn pin_order(self, v: Self::V) -> Self::V {
        v
    }

    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a > b ? a : b`: the second operand wherever either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns the larger of `x` and a negative number; NaN where `x` is NaN.
    #[inline(always)]
    fn at_least(self, least: f32, x: Self::V) -> Self::V {
        self.max(self.splat(least), x)
    }
    /// Returns the larger of `x` and `most`; `most` where `x` is NaN. Of two zeros, either.
    #[inline(always)]
    fn raise(self, most: Self::V, x: Self::V) -> Self::V {
        self.max(x, most)
    }
    /// Returns `a·b + c` as by [`Vector::fma`], for a constant in memory: a machine with few registers, or with products that are
    /// added to a register in place, can read it anew for each, rather than keep or copy it.
    #[inline(always)]
    fn fma_constant(self, a: Self::V, b: Self::V, c: &'static numbers::Constant) -> Self::V {
        self.fma(a, b, self.splat(c.0[0]))
    }
    /// Returns `a == b ? then : otherwise`; NaN equals nothing.
    fn select_eq(self, a: Self::V, b: Self::V, then: Self::V, otherwise: Self::V) -> Self::V;
    /// Returns a bit for each lane: 1 where `a ≥ b`, 0 where either is NaN.
    #[inline(always)]
    fn reaches(self, a: Self::V, b: Self::V) -> u16 {
        let [mut x, mut y] = [[0.0; LANES]; 2];
        lanes::store(self, &mut x, a);
        lanes::store(self, &mut y, b);
        (0..LANES).fold(0, |bits, i| bits | u16::from(x[i] >= y[i]) << i)
    }
    /// Returns `(1 + a·b)·2ⁿ`, given `b` times [`Self::FACTOR_UNIT`]: the sum as by [`Vector::fma`], then the product, exact
    /// unless subnormal. `n` is integral, [`LOWEST_EXPONENT`](numbers::LOWEST_EXPONENT) ..= 1, and at the lowest 2ⁿ counts as 0;
    /// `shifted` is `n` + [`SHIFT`]: its lowest bits are an exponent field. NaN stays NaN.
    fn one_plus_scaled(self, ab: (Self::V, Self::V), n: Self::V, shifted: Self::V) -> Self::V;

    /// Returns the largest lane; NaN lanes are skipped (unless all are NaN).
    fn reduce_max(self, v: Self::V) -> f32;
    /// Returns the sum of the lanes by the tree that every backend shares: lane *i* + lane *i + 8*, then 4, 2, 1 apart.
    fn reduce_sum(self, v: Self::V) -> f32;
    /// Transposes a square: `out` receives 16 rows of 16, row `i` holding element `i` of all sixteen input rows, which
    /// are `step` bytes apart.
    ///
    /// # Safety
    /// The caller guarantees that every row is readable for 16 floats, which need not be aligned, and `out` writable
    /// for 256.
    unsafe fn transpose(self, first: *const f32, step: isize, out: *mut f32);
}

/// Dot products of integers, four or eight elements at a time: of int8 rows with sixteen keys of eight or four bits, and of
/// weights, of 16 bits or bytes, with sixteen columns of values of eight or four bits. Sums are 32-bit integers that wrap, so a
/// result that fits is exact and every instruction set gives the same. Lanes are keys or columns, as everywhere.
///
/// # Safety
/// As [`Simd`].
pub(crate) unsafe trait Int8Dot: Simd {
    /// Number of rows of a register tile of int8 rows, at most [`Simd::TILE_ROWS`].
    const INT8_DOT_ROWS: usize;
    /// Number of rows of a register tile of weights, at most [`Simd::TILE_ROWS`].
    const WEIGHT_ROWS: usize;
    /// Sixteen integer sums, one for each key or column.
    type Sums: Copy;
    /// Four elements of each key, in the form that the instruction takes.
    type Keys: Copy;
    /// Eight elements of each key, in the form that the instruction takes.
    type Nibbles: Copy;
    /// Four elements of each column, widened to 16 bits.
    type Words: Copy;
    /// Four elements of each column, of four bits, in the form that products with bytes take.
    type NibbleColumns: Copy;

    /// Returns the initial sums of a row, given the sum `total` of its elements: 0, or the correction for keys that are
    /// offset (see `Keys` of the backend).
    fn start(self, total: i32) -> Self::Sums;
    /// Returns the same for keys of [four bits](Self::nibbles).
    #[inline(always)]
    fn start_nibbles(self, total: i32) -> Self::Sums {
        self.start(total)
    }
    /// Loads four elements of each of sixteen keys.
    ///
    /// # Safety
    /// `p..p + 64` is readable: four elements of a key, then four of the next.
    unsafe fn keys(self, p: *const i8) -> Self::Keys;
    /// Loads eight elements of each of sixteen keys, of four bits with a sign: four in the lower halves of bytes, four in the
    /// upper ones.
    ///
    /// # Safety
    /// `p..p + 64` is readable: four bytes of a key, then four of the next.
    unsafe fn nibbles(self, p: *const i8) -> Self::Nibbles;
    /// Returns the sums with the products of such keys: `lower` with the lower halves, `upper` with the upper ones.
    fn dot8(self, sums: Self::Sums, lower: &Query4, upper: &Query4, keys: Self::Nibbles) -> Self::Sums;
    /// Returns `sums[l] + Σ q[e]·keys[4·l + e]` in lane `l`.
    fn dot4(self, sums: Self::Sums, q: &Query4, keys: Self::Keys) -> Self::Sums;
    /// Loads four elements of each of sixteen columns.
    ///
    /// # Safety
    /// `p..p + 64` is readable: four elements of a column, then four of the next.
    unsafe fn words(self, p: *const i8) -> Self::Words;
    /// Loads four elements of each of sixteen columns, of four bits with a sign: one half of bytes.
    ///
    /// # Safety
    /// `p..p + 64` is readable: four bytes of a column, then four of the next.
    unsafe fn nibble_columns<H: Half>(self, p: *const i8) -> Self::NibbleColumns;
    /// Returns `sums[l] + Σ x[e]·columns[4·l + e]` in lane `l`.
    fn dot4_words(self, sums: Self::Sums, x: Words4, columns: Self::Words) -> Self::Sums;
    /// Returns the sums with the products of such columns and four bytes without a sign, the first in the lowest.
    fn dot4_bytes(self, sums: Self::Sums, x: u32, columns: Self::NibbleColumns) -> Self::Sums;
    /// Converts sums of such products, below 2²⁰, to `f32`.
    #[inline(always)]
    fn nibble_sums(self, sums: Self::Sums) -> Self::V {
        self.to_f32(sums)
    }
    /// Converts the sums to `f32`, each rounded once.
    fn to_f32(self, sums: Self::Sums) -> Self::V;
    /// Returns the larger of `|a|` and `b` (its sign bit is 0), by the order of their bits: NaN is the largest.
    fn max_magnitude(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns eight bits of each lane, from bit `SHIFT` on, at most 24.
    fn bytes<const SHIFT: u32>(self, v: Self::V) -> [u8; LANES];
}

/// Dot products of bfloat16 pairs, as the machine computes them: subnormal inputs and outputs count as 0.
///
/// # Safety
/// As [`Simd`].
pub(crate) unsafe trait Bf16Dot: Simd {
    /// Vector of sixteen pairs.
    type P: Copy;
    /// One pair for all lanes.
    type Pair: Copy;

    fn splat_bf16x2(self, x: Bf16x2) -> Self::Pair;
    /// Loads sixteen pairs.
    ///
    /// # Safety
    /// `p..p + 16` is readable.
    unsafe fn load_bf16x2(self, p: *const Bf16x2) -> Self::P;
    /// Loads sixteen pairs: each element at `a` with its neighbour at `b`.
    ///
    /// # Safety
    /// `a..a + 16` and `b..b + 16` are readable.
    unsafe fn zip(self, a: *const u16, b: *const u16) -> Self::P;
    /// Returns `sum` plus both products of each pair of `y` with `x`.
    fn dot2(self, sum: Self::V, x: Self::Pair, y: Self::P) -> Self::V;
    /// Stores sixteen numbers as eight pairs, rounded to nearest even; subnormal numbers become 0. Returns them as they
    /// are stored.
    ///
    /// # Safety
    /// `p..p + 8` is writable.
    unsafe fn store_bf16x2(self, p: *mut Bf16x2, v: Self::V) -> Self::V;
}

/// Work that uses dot products of bfloat16 pairs: see [`Simd::with_bf16_dot`].
pub(crate) trait Bf16DotWork {
    type Output;
    /// Runs the work. Implementations are marked `#[inline(always)]`.
    ///
    /// # Safety
    /// What the work points at is readable, and writable where it is written, in the sizes that the work states: each
    /// implementation names the function with the same contract.
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        expect(dead_code, reason = "no such products")
    )]
    unsafe fn run<S: Bf16Dot>(self, s: S) -> Self::Output;
}

/// Work that uses dot products of bytes: see [`Simd::with_int8_dot`].
pub(crate) trait Int8DotWork {
    type Output;
    /// Runs the work. Implementations are marked `#[inline(always)]`.
    ///
    /// # Safety
    /// What the work points at is readable, and writable where it is written, in the sizes that the work states.
    unsafe fn run<S: Int8Dot>(self, s: S) -> Self::Output;
}
