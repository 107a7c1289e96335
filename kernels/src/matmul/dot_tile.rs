//! Register tile of dot products: a few rows against a few panels of sixteen packed columns. It computes scores (rows
//! are queries, columns keys) and projections (rows are tokens, columns the rows of a weight matrix).
//!
//! A dot product is a sum over the depth in one fixed order, whatever the tile: chains of up to 32 FMAs (of pairs, one
//! chain), added up first to last. Lanes run over columns, so no sum is ever taken across lanes, and neither the tile's
//! shape nor the register width can change the bits. The short chains are for accuracy: rounding errors grow with the
//! size of the running sum, and those of large scores dominate an attention output's worst error. One chain would do no
//! better than the naive loop; chains of 32 nearly halve the error at head_dim 64. Chains of 16 would do a little
//! better still, and take more time (docs/experiments.md).
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

use crate::matmul::operands::{MulAdd, Operand};
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::matmul::tile_rows::TileRows;
use crate::matmul::tile_shape::{MAX_TILE_ROWS, MAX_TILE_VECS};
use crate::simd::width::LINE_BYTES;
use crate::simd::{FIRST, LANES, Level, NO_LEVEL, SECOND, SECOND_OR_NONE, Simd};
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Largest number of rows for which the time of a tile with fewer than `TILE_ROWS` rows is that of fetching the panels.
pub(crate) const FETCH_BOUND_ROWS: usize = 4;

/// Memory that a tile of few rows, or of one panel, prefetches while it computes: memory that will later be read as the
/// tile's panels are now, from front to back.
#[derive(Clone, Copy)]
pub(crate) struct Later {
    /// Address that corresponds to the first element of the first panel.
    pub(crate) at: *const u8,
    /// Bytes from the address of one element to that of the next.
    pub(crate) step: usize,
    /// Bytes from the address of one panel to that of the next.
    pub(crate) panel: usize,
}

impl Later {
    /// Describes memory that is read in order by tiles of `vecs` panels, from `at` on; an element of a panel has
    /// `bytes`, a line or less.
    #[inline(always)]
    pub(crate) fn in_order(at: *const u8, bytes: usize, vecs: usize) -> Self {
        Self { at, step: vecs * bytes, panel: bytes }
    }

    /// Returns the cache level that a tile of `rows` rows prefetches into.
    #[inline(always)]
    pub(crate) fn level<S: Simd>(s: S, rows: usize) -> Level {
        if rows <= FETCH_BOUND_ROWS && s.has_large_l1() { Level::First } else { Level::Second }
    }

    /// Returns the distance in bytes at which `rows` rows prefetch memory that is read once, from front to back.
    #[inline(always)]
    pub(crate) fn far<S: Simd>(s: S, rows: usize) -> usize {
        match Self::level(s, rows) {
            Level::First => FAR_IN_FIRST,
            Level::Second => FAR,
        }
    }

    /// Prefetches what lies [far](Self::far) behind the `bytes` bytes of a block's scales, if rows are few: their tiles prefetch
    /// what lies as far behind the keys or values. Scales lie before what they scale: without theirs, each block would leave a gap
    /// in the memory that is prefetched, and the hardware's prefetcher would lose its stream.
    pub(crate) fn prefetch_behind<S: Simd>(s: S, rows: usize, scales: *const u8, bytes: usize) {
        if rows <= MEMORY_BOUND_ROWS {
            let at = scales.wrapping_add(Self::far(s, rows));
            s.prefetch_far(Self::level(s, rows), at.cast(), bytes);
        }
    }

    /// Returns the address that corresponds to an element of a panel. It wraps: a prefetch may have any address.
    #[inline(always)]
    pub(crate) fn of(self, element: usize, panel: usize) -> *const f32 {
        self.at.wrapping_add(element * self.step + panel * self.panel).cast()
    }
}

/// Address `far` bytes after panel `n`; there are `all` panels of `bytes` each. The table of scattered panels has two entries for
/// each panel.
///
/// # Safety
/// There is such a panel.
#[inline(always)]
pub(crate) unsafe fn behind<T>(keys: Rows<T>, [n, all]: [usize; 2], bytes: usize, far: usize) -> *const T {
    // SAFETY: the caller guarantees panel `n`, and so the entries of a table that are read.
    unsafe {
        match keys.are_scattered() {
            true => keys.at((n + far.div_ceil(bytes.max(1))).min(2 * all - 1)),
            false => keys.at(n).wrapping_byte_add(far),
        }
    }
}

/// Distance in bytes at which memory that is read once, from front to back, is prefetched into the second-level cache.
pub(crate) const FAR: usize = 16 << 10;

/// Distance for the first-level cache, of 48 KiB: lines from further away push out what tiles use again.
const FAR_IN_FIRST: usize = 10 << 10;

/// Elements of packed keys, with products that are floats.
pub(crate) trait KeyOperand<S: Simd>: Operand<S, By: MulAdd<S, Sum = S::V>> {}
impl<S: Simd, T: Operand<S, By: MulAdd<S, Sum = S::V>>> KeyOperand<S> for T {}

/// Operands and results of a tile.
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
    /// Memory to prefetch, unless another tile prefetches it, or has done so.
    pub(crate) later: Option<Later>,
}

/// Returns how many panels a row block of `rows` rows takes at a time, at most `most`. One panel where the time is that
/// of reading them, since memory is faster in order; but `in_first` for a few rows on a core with a large first-level cache,
/// which is faster than that: with one panel the rows would wait for their own sums, and for elements of queries, which
/// two panels share.
#[inline(always)]
pub(crate) fn panels<S: Simd>(s: S, rows: usize, [in_first, most]: [usize; 2]) -> usize {
    match rows {
        ..=FETCH_BOUND_ROWS if s.has_large_l1() => in_first,
        ..=MEMORY_BOUND_ROWS => 1,
        _ => most,
    }
}

/// Returns what stands for the level that `rows` rows prefetch panels into, or for none if they are many or memory cannot be
/// prefetched. [`panels`] says how many panels such rows take at a time: `in_first` at most into the first level, one
/// into the second.
#[inline(always)]
pub(crate) fn level<S: Simd>(s: S, rows: usize) -> u8 {
    match Later::level(s, rows) {
        _ if rows > MEMORY_BOUND_ROWS || const { !S::PREFETCHES } => NO_LEVEL,
        Level::First => FIRST,
        Level::Second => SECOND,
    }
}

/// Returns the largest number of rows of a tile that prefetches into `level`, at most `most`: those that do into the first have
/// few.
pub(crate) const fn most_rows(most: usize, level: u8) -> usize {
    if level == FIRST && FETCH_BOUND_ROWS < most { FETCH_BOUND_ROWS } else { most }
}

/// Returns true if the time of a tile of this shape is that of reading its panels.
#[inline(always)]
const fn reads<S: Simd>(rows: usize, vecs: usize) -> bool {
    vecs < S::DOT_VECS || rows <= FETCH_BOUND_ROWS && rows < S::TILE_ROWS
}

/// Returns true if a tile of this shape runs two chains side by side: where registers hold twice the sums. Tiles of few
/// rows wait for memory, which is faster in order, and run one chain at a time; a tile of one panel is the exception,
/// since with one chain a row would wait for its own sums.
#[inline(always)]
const fn paired<S: Simd, T: Operand<S>>(rows: usize, vecs: usize) -> bool {
    (rows > FETCH_BOUND_ROWS || vecs == 1) && 2 * rows * vecs <= T::TILE_ROWS * S::TILE_VECS
}

/// Adds the sums of one chain to those of another.
#[inline(always)]
fn add_chain<S: Simd, const MR: usize, const NV: usize>(s: S, sums: &mut [[S::V; NV]; MR], chain: &[[S::V; NV]; MR]) {
    for r in 0..MR {
        for n in 0..NV {
            sums[r][n] = s.add(sums[r][n], chain[r][n]);
        }
    }
}

/// Computes the tile of `MR` rows against `NV` panels; `finish(n, total)` turns the totals of panel `n` into results.
/// `LEVEL` stands for the [`Level`] that later memory is prefetched into: as a constant, since a test inside the loops
/// takes registers that they have not.
///
/// # Safety
/// `rows` holds `MR` pointers to `depth` floats each (pairs, if the columns are pairs), `panels` holds `NV` panels that deep,
/// [`Operand::panel`] elements each, and `out` has `MR` rows of `NV × 16` writable floats, `stride` apart.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, T: KeyOperand<S>, const MR: usize, const NV: usize, const LEVEL: u8>(
    s: S,
    tile: Tile<T>,
    finish: impl Fn(usize, S::V) -> S::V,
) {
    const { assert!(MR <= MAX_TILE_ROWS && NV <= MAX_TILE_VECS) };
    let Tile { rows, panels, depth, out, stride, later } = tile;
    debug_assert!(!rows.is_null() && !panels.is_null() && !out.is_null(), "an operand is missing");
    debug_assert!(MR == 1 || stride >= NV * LANES, "rows overlap");
    let later = match LEVEL {
        NO_LEVEL => None,
        _ if const { !reads::<S>(MR, NV) } => None,
        SECOND_OR_NONE => later,
        _ => Some(later.expect("memory to prefetch")),
    };
    // SAFETY: the caller guarantees `MR` pointers.
    let rows: [*const f32; MR] = unsafe { rows.cast::<[*const f32; MR]>().read() };
    let (panels, totals) = (Panels { first: panels, panel: T::panel(depth), later }, TileRows { out, stride });
    let (mut first, chain) = (0, T::By::chain(depth));
    loop {
        // If paired, runs two chains side by side, `first..middle` and `middle..last`, the second no longer than the
        // first: their totals are added in registers, where one chain at a time would add them in memory.
        let middle = depth.min(first + chain);
        let last = if const { paired::<S, T>(MR, NV) } { depth.min(middle + chain) } else { middle };
        panels.prefetch_pages::<S, NV, LEVEL>(s, first..last);
        let mut sums = [[[s.splat(0.0); NV]; MR]; 2];
        let [one, two] = &mut sums;
        // SAFETY: elements below `depth`, inside the rows and panels that the caller guarantees.
        unsafe {
            let chains = [panels.begin(s, &rows, first..middle, one), panels.begin(s, &rows, middle..last, two)];
            // The second chain is no longer than the first, but may have a load more.
            let both = if const { T::TERMS == 1 } { last - middle } else { chains[0].len().min(chains[1].len()) };
            for i in 0..both {
                panels.multiply_load::<S, MR, NV, LEVEL>(s, &rows, chains[0].start + i, one);
                panels.multiply_load::<S, MR, NV, LEVEL>(s, &rows, chains[1].start + i, two);
            }
            for load in chains[0].start + both..chains[0].end {
                panels.multiply_load::<S, MR, NV, LEVEL>(s, &rows, load, one);
            }
            if const { T::TERMS > 1 } {
                for load in chains[1].start + both..chains[1].end {
                    panels.multiply_load::<S, MR, NV, LEVEL>(s, &rows, load, two);
                }
            }
            panels.end(s, &rows, first..middle, one);
            panels.end(s, &rows, middle..last, two);
        }
        if first > 0 {
            // SAFETY: the caller guarantees `out`, and an earlier turn of this loop has written it.
            unsafe { totals.add_to(s, one) };
        }
        if middle < last {
            add_chain(s, one, two);
        }
        // SAFETY: the caller guarantees `out`.
        unsafe { totals.store_as(s, one, |n, total| if last == depth { finish(n, total) } else { total }) };
        if last == depth {
            return;
        }
        first = last;
    }
}

/// Packed columns of a tile.
#[derive(Clone, Copy)]
struct Panels<T> {
    first: *const T,
    /// Number of elements of a panel.
    panel: usize,
    later: Option<Later>,
}

impl<T> Panels<T> {
    /// Prefetches the pages that hold what will be read later as these elements are now.
    #[inline(always)]
    fn prefetch_pages<S: Simd, const NV: usize, const LEVEL: u8>(self, s: S, elements: Range<usize>)
    where
        T: KeyOperand<S>,
    {
        let Some(later) = self.later else { return };
        let loads = elements.start / T::TERMS..elements.end.div_ceil(T::TERMS);
        // Panels with alternating lines share their pages.
        for n in 0..if later.panel < later.step { 1 } else { NV } {
            s.prefetch_pages(const { Level::of(LEVEL) }, later.of(loads.start, n), loads.len() * later.step);
        }
    }

    /// Multiplies the element of a chain before its first whole load, if there is one. Returns the whole loads.
    ///
    /// # Safety
    /// As [`Self::multiply`], for the elements of the chain.
    #[inline(always)]
    unsafe fn begin<S: Simd, const MR: usize, const NV: usize>(
        self,
        s: S,
        rows: &[*const f32; MR],
        chain: Range<usize>,
        sums: &mut [[S::V; NV]; MR],
    ) -> Range<usize>
    where
        T: KeyOperand<S>,
    {
        if const { T::TERMS == 1 } {
            return chain;
        }
        let first = chain.start.div_ceil(T::TERMS);
        if chain.start < chain.end.min(first * T::TERMS) {
            // SAFETY: same contract.
            unsafe { self.multiply(s, rows, [first - 1, 1], sums) };
        }
        first..(chain.end / T::TERMS).max(first)
    }

    /// Multiplies the element of a chain after its last whole load, if there is one.
    ///
    /// # Safety
    /// As [`Self::multiply`], for the elements of the chain.
    #[inline(always)]
    unsafe fn end<S: Simd, const MR: usize, const NV: usize>(
        self,
        s: S,
        rows: &[*const f32; MR],
        chain: Range<usize>,
        sums: &mut [[S::V; NV]; MR],
    ) where
        T: KeyOperand<S>,
    {
        if const { T::TERMS > 1 } && chain.start < chain.end && !chain.end.is_multiple_of(T::TERMS) {
            // SAFETY: same contract.
            unsafe { self.multiply(s, rows, [chain.end / T::TERMS, 0], sums) };
        }
    }

    /// Multiplies the elements of a load, and prefetches later memory.
    ///
    /// # Safety
    /// As [`Self::multiply`], for all elements of the load.
    #[inline(always)]
    unsafe fn multiply_load<S: Simd, const MR: usize, const NV: usize, const LEVEL: u8>(
        self,
        s: S,
        rows: &[*const f32; MR],
        load: usize,
        sums: &mut [[S::V; NV]; MR],
    ) where
        T: KeyOperand<S>,
    {
        for n in 0..NV {
            // Each line is prefetched once, where loads share one.
            if let Some(later) = self.later
                && (NV * load + n).is_multiple_of(const { LINE_BYTES.div_ceil(LANES * T::TERMS * size_of::<T>()) })
            {
                s.prefetch_line(const { Level::of(LEVEL) }, later.of(load, n));
            }
        }
        for e in 0..T::TERMS {
            // SAFETY: same contract.
            unsafe { self.multiply(s, rows, [load, e], sums) };
        }
    }

    /// `sums[row][panel] += rows[row][i] · panels[panel][i]` for element `e` of a load.
    ///
    /// # Safety
    /// `rows` point to `depth` elements each, there are `NV` panels that deep, and the element is one of these.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const MR: usize, const NV: usize>(
        self,
        s: S,
        rows: &[*const f32; MR],
        [load, e]: [usize; 2],
        sums: &mut [[S::V; NV]; MR],
    ) where
        T: KeyOperand<S>,
    {
        // SAFETY: panel `n < NV` has the element of sixteen keys.
        let columns = |n: usize| unsafe { T::of_panel(s, self.first.add(n * self.panel), load, e) };
        let mut column = [columns(0); NV];
        for n in 0..NV {
            column[n] = columns(n);
        }
        for r in 0..MR {
            // SAFETY: row `r < MR` has the element.
            let x = unsafe { T::By::x(s, rows[r], load * T::TERMS + e) };
            for n in 0..NV {
                sums[r][n] = T::By::fma(s, x, column[n], sums[r][n]);
            }
        }
    }
}
