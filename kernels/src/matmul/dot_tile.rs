//! The register tile of dot products: a few rows against a few panels of sixteen packed columns. Scores are made of it
//! (rows are queries, columns keys), and projections (rows are tokens, columns the rows of a weight matrix).
//!
//! A dot product is a sum over the depth in one fixed order, whatever the tile: chains of up to 32 FMAs (of pairs, one
//! chain), added up first to last. Lanes run over columns, so no sum is ever taken across lanes, and neither the tile's
//! shape nor the register width can show in the bits. The short chains are for accuracy: rounding errors grow with the
//! size of the running sum, and those of large scores are what an attention output's worst error is made of. One chain
//! would do no better than the naive loop; chains of 32 nearly halve the error at head_dim 64. Chains of 16 would do a
//! little better still, for 3 % of the time.
//!
//! ```text
//! for each 6 × 64 tile:                 registers (AVX-512): 24 sums, 4 columns, 1 element of a row
//!     for each chain of the depth:
//!         sum[6][4] = 0
//!         for each i of the chain:
//!             column[4] = panels[..][i]         16 columns each, contiguous
//!             for each row: sum[row] += rows[row][i] · column
//!         total += sum                          where the result goes, in first-level cache
//!     result = finish(total)
//! ```

use crate::matmul::operands::{Bf16Pairs, Floats, MulAdd};
use crate::matmul::prefetch::PrefetchStream;
use crate::matmul::prefetch::READING_ROWS;
use crate::simd::width::LINE_BYTES;
use crate::simd::{Bf16Dot, Bf16x2, LANES, Level, Simd};
use crate::tensor::element::Load;

/// Rows up to which the time of a tile that is not full is that of fetching the panels.
pub(crate) const FEW_ROWS: usize = 4;

/// What a tile of few rows, or of one panel, asks for as it computes: memory that will be gone through later as its panels are
/// now, from front to back.
#[derive(Clone, Copy)]
pub(crate) struct Later {
    /// What belongs to the first element of the first panel.
    pub(crate) at: *const u8,
    /// Bytes from one element's to the next's.
    pub(crate) step: usize,
    /// Bytes from one panel's to the next's.
    pub(crate) panel: usize,
    /// Where few rows ask for it.
    pub(crate) level: Level,
}

impl Later {
    /// In the order of memory, of which an element of a panel has `bytes`, a line or less: for tiles of `vecs` panels.
    #[inline(always)]
    pub(crate) fn in_order<S: Simd>(s: S, at: *const u8, bytes: usize, vecs: usize) -> Self {
        let level = if s.has_large_l1() { Level::First } else { Level::Second };
        Self { at, step: vecs * bytes, panel: bytes, level }
    }

    /// Where a tile of so many rows asks.
    #[inline(always)]
    pub(crate) fn level(self, rows: usize) -> Level {
        if rows <= FEW_ROWS { self.level } else { Level::Second }
    }

    /// What belongs to an element of a panel. Wrapping: a hint may point anywhere.
    #[inline(always)]
    pub(crate) fn of(self, element: usize, panel: usize) -> *const f32 {
        self.at.wrapping_add(element * self.step + panel * self.panel).cast()
    }
}

/// Bytes prefetch of which memory that is read once, from front to back, is asked for.
pub(crate) const FAR: usize = 16 << 10;

/// What columns are made of: elements, or pairs of them.
pub(crate) trait KeyOperand<S: Simd>: Copy {
    /// Vectors of a tile.
    const VECS: usize;
    /// Of a tile of few rows, where the first-level cache is roomy.
    const FEW_VECS: usize;
    /// How much of the depth one chain runs over.
    fn chain(depth: usize) -> usize;
    /// How they meet those of rows.
    type By: MulAdd<S>;

    /// An element of each of sixteen columns.
    ///
    /// # Safety
    /// `p..p + 16` is readable.
    unsafe fn y(s: S, p: *const Self) -> <Self::By as MulAdd<S>>::Y;
}

impl<S: Simd, T: Load> KeyOperand<S> for T {
    const VECS: usize = S::DOT_VECS;
    const FEW_VECS: usize = S::DOT_VECS;
    type By = Floats;

    /// At least two chains, of about equal length, none longer than 32. Half of that where products are rounded before
    /// they are added, which makes up for it. Part of what a result's bits mean.
    #[inline(always)]
    fn chain(depth: usize) -> usize {
        let chains = depth.div_ceil(32).max(2);
        depth.div_ceil(if S::FUSED { chains } else { 2 * chains })
    }

    #[inline(always)]
    unsafe fn y(s: S, p: *const T) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { T::load(s, p) }
    }
}

/// A column's part of sixteen pairs' memory: two elements of the depth, side by side if `ORDER` is [`BESIDE`]; if it is
/// [`APART`], sixteen first ones lie before their sixteen seconds.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct PairColumns<const ORDER: u8>(Bf16x2);

pub(crate) const BESIDE: u8 = 0;
pub(crate) const APART: u8 = 1;

impl<S: Bf16Dot, const ORDER: u8> KeyOperand<S> for PairColumns<ORDER> {
    const VECS: usize = S::TILE_VECS;
    // Two took 8 % more from memory.
    const FEW_VECS: usize = 1;
    type By = Bf16Pairs;

    /// One chain: sums of half as many terms, of operands that were rounded.
    #[inline(always)]
    fn chain(depth: usize) -> usize {
        depth
    }

    #[inline(always)]
    unsafe fn y(s: S, p: *const Self) -> S::P {
        let first = p.cast::<u16>();
        // SAFETY: the caller vouches for sixteen pairs.
        unsafe { if ORDER == APART { s.zip(first, first.add(LANES)) } else { s.load_bf16x2(p.cast()) } }
    }
}

/// Where a tile's operands lie, and where its results go.
#[derive(Clone, Copy)]
pub(crate) struct Tile<T = f32> {
    /// Pointers to the rows.
    pub(crate) rows: *const *const f32,
    /// Packed columns, `[panel][depth][16]`.
    pub(crate) panels: *const T,
    pub(crate) depth: usize,
    pub(crate) out: *mut f32,
    /// Floats from one row of results to the next.
    pub(crate) stride: usize,
    /// Unless others ask, or have.
    pub(crate) later: Option<Later>,
    /// What a tile that asks as it computes asks for: see [`asked`].
    pub(crate) stream: PrefetchStream,
}

/// How many panels a group of so many rows takes at a time, of at most `most`. Where time is that of reading them, one, since
/// memory likes to be read in order; but `few` for a few rows on a core that is quicker than that: with one they would wait for
/// their own sums, and for elements of queries, of which two panels share one.
#[inline(always)]
pub(crate) fn panels<S: Simd>(s: S, rows: usize, [few, most]: [usize; 2]) -> usize {
    match rows {
        ..=FEW_ROWS if s.has_large_l1() => few,
        ..=READING_ROWS => 1,
        _ => most,
    }
}

/// Panels that the last of a row of tiles of so many may have: one more, if it is not for one alone, and registers hold that.
#[inline(always)]
pub(crate) const fn widest<S: Simd>(vecs: usize) -> usize {
    if 1 < vecs && vecs < S::TILE_VECS { vecs + 1 } else { vecs }
}

/// Whether a tile of such a shape asks for what comes later while it computes: a full one, of several vectors.
#[inline(always)]
pub(crate) const fn asks<S: Simd>(rows: usize, vecs: usize) -> bool {
    rows == S::TILE_ROWS && vecs > 1
}

/// Whether the time of a tile of such a shape is that of reading its panels.
#[inline(always)]
const fn reads<S: Simd>(rows: usize, vecs: usize) -> bool {
    vecs < S::DOT_VECS || rows <= FEW_ROWS && rows < S::TILE_ROWS
}

/// Whether a tile of such a shape runs two chains side by side: where registers hold twice the sums. Few rows wait for memory,
/// which likes to be read in order: they do without, but for one panel, whose one chain a row would wait for its own sums.
#[inline(always)]
const fn paired<S: Simd>(rows: usize, vecs: usize) -> bool {
    (rows > FEW_ROWS || vecs == 1) && 2 * rows * vecs <= S::TILE_ROWS * S::TILE_VECS
}

/// How many lines a full tile of so many vectors asks for: one for each element of two chains side by side.
pub(crate) fn asked<S: Simd, T: KeyOperand<S>>(vecs: usize, depth: usize) -> usize {
    if !asks::<S>(S::TILE_ROWS, vecs) || !paired::<S>(S::TILE_ROWS, vecs) {
        return 0;
    }
    let chain = T::chain(depth).max(1);
    (0..depth).step_by(2 * chain).map(|first| (depth - first).saturating_sub(chain).min(chain)).sum()
}

/// `MR` rows against `NV` panels; `finish(n, total)` makes results of the totals of panel `n`.
///
/// # Safety
/// `rows` holds `MR` pointers to `depth` floats each, or pairs where columns are, `panels` holds `NV × depth × 16`, and
/// `out` has `MR` rows of `NV × 16` writable floats, `stride` apart.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, T: KeyOperand<S>, const MR: usize, const NV: usize>(
    s: S,
    tile: Tile<T>,
    finish: impl Fn(usize, S::V) -> S::V,
) {
    let Tile { rows, panels, depth, out, stride, later, mut stream } = tile;
    let later = if const { reads::<S>(MR, NV) } { later } else { None };
    // SAFETY: the caller vouches for `MR` pointers.
    let rows: [*const f32; MR] = unsafe { rows.cast::<[*const f32; MR]>().read() };
    let (mut first, chain) = (0, T::chain(depth));
    let paired = const { paired::<S>(MR, NV) };
    loop {
        // If paired, two chains side by side, `first..middle` and `middle..last`, the second no longer than the first: their totals
        // meet in registers, where one chain at a time would meet in memory.
        let middle = depth.min(first + chain);
        let last = if paired { depth.min(middle + chain) } else { middle };
        let both = last - middle;
        if let Some(later) = later {
            // Panels whose lines alternate have the same pages.
            for n in 0..if later.panel < later.step { 1 } else { NV } {
                s.prefetch_pages(later.level(MR), later.of(first, n), (last - first) * later.step);
            }
        }
        let mut sums = [[[s.splat(0.0); NV]; MR]; 2];
        let [one, two] = &mut sums;
        for i in 0..both {
            if const { asks::<S>(MR, NV) } {
                stream.ask(s);
            }
            // SAFETY: `first + i < middle + i < last ≤ depth`, and the caller's promise.
            unsafe {
                add::<S, T, MR, NV>(s, &rows, (panels, depth, later), first + i, one);
                add::<S, T, MR, NV>(s, &rows, (panels, depth, later), middle + i, two);
            }
        }
        for i in first + both..middle {
            // SAFETY: `i < depth`, and the caller's promise.
            unsafe { add::<S, T, MR, NV>(s, &rows, (panels, depth, later), i, one) };
        }
        // SAFETY: here and below, row `r < MR`, vector `n < NV` of the tile.
        let at = |r: usize, n: usize| unsafe { out.add(r * stride + n * LANES) };
        if paired {
            // All of it in registers first: measured 2 % faster than one element after the other.
            if first > 0 {
                for (r, one) in one.iter_mut().enumerate() {
                    for (n, one) in one.iter_mut().enumerate() {
                        // SAFETY: as above.
                        *one = s.add(unsafe { s.load(at(r, n)) }, *one);
                    }
                }
            }
            if both > 0 {
                for (one, two) in one.iter_mut().zip(&*two) {
                    for (one, &two) in one.iter_mut().zip(two) {
                        *one = s.add(*one, two);
                    }
                }
            }
        }
        for (r, one) in one.iter().enumerate() {
            for (n, &one) in one.iter().enumerate() {
                // SAFETY: as above.
                unsafe {
                    let add_here = !paired && first > 0;
                    let total = if add_here { s.add(s.load(at(r, n)), one) } else { one };
                    s.store(at(r, n), if last == depth { finish(n, total) } else { total });
                }
            }
        }
        if last == depth {
            return;
        }
        first = last;
    }
}

/// `sums[row][panel] += rows[row][i] · panels[panel][i]`.
///
/// # Safety
/// As for [`tile`]; `i < depth`.
#[inline(always)]
unsafe fn add<S: Simd, T: KeyOperand<S>, const MR: usize, const NV: usize>(
    s: S,
    rows: &[*const f32; MR],
    (panels, depth, later): (*const T, usize, Option<Later>),
    i: usize,
    sums: &mut [[S::V; NV]; MR],
) {
    // SAFETY: panel `n < NV` is `depth × 16` elements; `i < depth`.
    let at = |n: usize| unsafe { panels.add((n * depth + i) * LANES) };
    let mut column = [T::By::zero(s); NV];
    for (n, column) in column.iter_mut().enumerate() {
        let at = at(n);
        // A line once, where elements share one.
        if let Some(later) = later
            && (NV * i + n).is_multiple_of(const { LINE_BYTES.div_ceil(LANES * size_of::<T>()) })
        {
            s.prefetch_line(later.level(MR), later.of(i, n));
        }
        // SAFETY: as above.
        *column = unsafe { T::y(s, at) };
    }
    for (r, sums) in sums.iter_mut().enumerate() {
        // SAFETY: `i < depth`.
        let x = unsafe { T::By::x(s, rows[r], i) };
        for (sum, &column) in sums.iter_mut().zip(&column) {
            *sum = T::By::fma(s, x, column, *sum);
        }
    }
}
