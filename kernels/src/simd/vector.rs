//! Vectors of some number of lanes, with the operations that weighted sums of values take.

use crate::simd::width::LANES;

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
    /// Loads as many floats as there are lanes.
    ///
    /// # Safety
    /// `p..p + Self::LANES` is readable. No alignment is needed.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Loads as many bfloat16 as there are lanes, widened exactly: they are the upper halves of `f32`, NaN's payload
    /// included.
    ///
    /// # Safety
    /// `p..p + Self::LANES` is readable. No alignment is needed.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Loads as many IEEE binary16 as there are lanes, widened exactly, subnormal numbers too. NaN keeps its payload and
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
}
