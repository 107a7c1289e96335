//! Vectors of some number of lanes, with the operations that weighted sums of values take.

use crate::simd::terms::{Columns, TermRows};
use crate::simd::width::LANES;
use core::sync::atomic::{Ordering, compiler_fence};

/// Number of terms that [`Vector::add_four_terms`] adds.
pub(crate) const FOUR: usize = 4;

/// `f32` lanes, sixteen or eight, and what a tile of P·V does with them: the last columns of values may fill no more than
/// half a vector. All operations are lane by lane and IEEE, so that a lane has the same bits in a vector of either width.
///
/// # Safety
/// A value of the type exists only where the machine has the instructions. Loads and stores touch the elements that
/// their contracts name and no others. The number of lanes is one of the two.
pub(crate) unsafe trait Vector: Copy + Send + Sync + 'static {
    /// Vector of [`Self::LANES`] lanes.
    type V: Copy;
    /// Number of lanes: sixteen or eight.
    const LANES: usize;

    /// Returns a vector with `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// Loads a float for each lane.
    ///
    /// # Safety
    /// `p..p + Self::LANES` is readable. No alignment is needed.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Loads a bfloat16 for each lane, widened exactly: they are the upper halves of `f32`, NaN's payload
    /// included.
    ///
    /// # Safety
    /// `p..p + Self::LANES` is readable. No alignment is needed.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Loads an IEEE binary16 for each lane, widened exactly, subnormal numbers too. NaN keeps its payload and
    /// becomes quiet.
    ///
    /// # Safety
    /// `p..p + Self::LANES` is readable. No alignment is needed.
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// Stores all lanes as floats.
    ///
    /// # Safety
    /// `p..p + Self::LANES` is writable. No alignment is needed.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Stores the first `n` lanes.
    ///
    /// # Safety
    /// `p..p + n` is writable, `n ≤ Self::LANES`. No alignment is needed.
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: Self::V, n: usize) {
        let mut lanes = [0.0; LANES];
        // SAFETY: `lanes` holds sixteen floats, which no vector exceeds; the caller guarantees `n ≤ Self::LANES` writable ones
        // at `p`.
        unsafe {
            self.store(lanes.as_mut_ptr(), v);
            core::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }

    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a·b + c`, rounded once where the machine can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Returns the lanes in pairs exchanged: lane `i` is lane `i ^ APART`, a power of two below their number.
    #[inline(always)]
    fn exchange<const APART: usize>(self, v: Self::V) -> Self::V {
        let [mut lanes, mut exchanged] = [[0.0; LANES]; 2];
        // SAFETY: sixteen floats, which no vector exceeds.
        unsafe { self.store(lanes.as_mut_ptr(), v) };
        for i in 0..Self::LANES {
            exchanged[i] = lanes[i ^ APART];
        }
        // SAFETY: as above.
        unsafe { self.load(exchanged.as_ptr()) }
    }

    /// Adds the products of term `i` of the rows and the first term of `columns` to sums.
    ///
    /// # Safety
    /// The term is readable in each of `rows`, and that of `columns` has `NV` vectors.
    #[inline(always)]
    unsafe fn add_term<const MR: usize, const NV: usize>(
        self,
        rows: TermRows<MR>,
        columns: Columns,
        i: usize,
        sums: &mut [[Self::V; NV]; MR],
    ) {
        let mut column = [self.splat(0.0); NV];
        for n in 0..NV {
            // SAFETY: vector `n < NV` of the term, which the caller guarantees.
            column[n] = unsafe { self.load(columns.first.add(n * columns.apart)) };
        }
        for r in 0..MR {
            // SAFETY: term `i` of row `r < MR`, which the caller guarantees.
            let x = self.splat(unsafe { *rows.at[r].add(i * rows.step) });
            for n in 0..NV {
                sums[r][n] = self.fma(x, column[n], sums[r][n]);
            }
        }
    }

    /// Adds the products of terms `i` to `i + 3` of the rows and the first four of `columns`, in order, to sums. Returns the
    /// columns from the next term on.
    ///
    /// # Safety
    /// The terms are readable in each of `rows`, and those of `columns` have `NV` vectors.
    #[inline(always)]
    unsafe fn add_four_terms<const MR: usize, const NV: usize>(
        self,
        rows: TermRows<MR>,
        columns: Columns,
        i: usize,
        sums: &mut [[Self::V; NV]; MR],
    ) -> Columns {
        // SAFETY: same contract.
        unsafe { self.add_one_by_one(rows, columns, i, sums) }
    }

    /// Adds four terms as [`Self::add_four_terms`] does, one after the other.
    ///
    /// # Safety
    /// As [`Self::add_four_terms`].
    #[inline(always)]
    unsafe fn add_one_by_one<const MR: usize, const NV: usize>(
        self,
        rows: TermRows<MR>,
        mut columns: Columns,
        i: usize,
        sums: &mut [[Self::V; NV]; MR],
    ) -> Columns {
        for term in 0..FOUR {
            // No column of the next term is loaded ahead: in builds for some machines (`target-cpu=native`) that took a
            // register too many, and a sum went to memory and back with each term. Where its place lay across two
            // pages, in 1 process of 50, prompts took 2.5 times as long.
            compiler_fence(Ordering::SeqCst);
            // SAFETY: same contract.
            unsafe { self.add_term(rows, columns, i + term, sums) };
            columns = columns.next();
        }
        columns
    }
}
