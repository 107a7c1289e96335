//! Memory that starts on a cache line, so that whole vectors never straddle two.

use crate::simd::width::{LANES, LINE_BYTES};
use core::alloc::Layout;

/// Types that the memory of floats can be used as.
///
/// # Safety
/// Every pattern of bits is a value; no larger than an `f32`, its size a power of two, aligned to no more than that size.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: numbers of at most four bytes.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}

/// A cache line of floats.
type Line = [f32; LANES];
const _: () = assert!(LINE_BYTES == size_of::<Line>());

/// Floats that start on a cache line. Grows on request, never shrinks. Not to be cloned: a copy would start elsewhere.
#[derive(Default)]
pub(crate) struct AlignedBuf {
    /// One line more than asked for.
    lines: Vec<Line>,
}

impl AlignedBuf {
    pub(crate) const fn new() -> Self {
        Self { lines: Vec::new() }
    }

    /// Makes room for `floats`. Allocates, and forgets what it held, only if there is less. False if there is no memory: then
    /// it is as it was.
    #[inline]
    #[must_use]
    pub(crate) fn try_reserve(&mut self, floats: usize) -> bool {
        if !self.holds(floats) {
            // Not `resize`: the old contents are worth nothing. Fresh zeros come from the system untouched.
            // SAFETY: zeros are floats.
            let Some(fresh) = (unsafe { zeroed(floats.div_ceil(LANES) + 1) }) else { return false };
            self.lines = fresh;
        }
        true
    }

    /// True if there is room for `floats`.
    #[inline]
    pub(crate) fn holds(&self, floats: usize) -> bool {
        self.lines.len() > floats.div_ceil(LANES)
    }

    /// Makes room for `floats`, as [`Self::try_reserve`] does.
    ///
    /// # Panics
    /// If there is no memory.
    #[inline]
    pub(crate) fn reserve(&mut self, floats: usize) {
        assert!(self.try_reserve(floats), "no memory for {floats} floats");
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.lines.len() * LINE_BYTES
    }

    #[inline]
    fn start(&self) -> usize {
        self.lines.as_ptr().cast::<f32>().align_offset(LINE_BYTES)
    }

    pub(crate) fn floats(&self) -> &[f32] {
        &self.lines.as_flattened()[self.start()..]
    }

    #[inline]
    pub(crate) fn floats_mut(&mut self) -> &mut [f32] {
        let start = self.start();
        &mut self.lines.as_flattened_mut()[start..]
    }

    /// As shorter elements.
    pub(crate) fn elements<T: Plain>(&self) -> &[T] {
        let floats = self.floats();
        // SAFETY: as many bytes as the floats are, aligned for them: `Plain`.
        unsafe { core::slice::from_raw_parts(floats.as_ptr().cast(), size_of_val(floats) / size_of::<T>()) }
    }

    pub(crate) fn elements_mut<T: Plain>(&mut self) -> &mut [T] {
        let floats = self.floats_mut();
        // SAFETY: as above, borrowed exclusively; every pattern of four bytes is a valid f32.
        unsafe { core::slice::from_raw_parts_mut(floats.as_mut_ptr().cast(), size_of_val(floats) / size_of::<T>()) }
    }
}

/// So many zeros, untouched until they are used; `None` if there is no memory for them.
pub fn zeros(len: usize) -> Option<Vec<f32>> {
    // SAFETY: zero is a float.
    unsafe { zeroed(len) }
}

/// True if there is memory for so many floats at once.
pub fn has_memory(floats: usize) -> bool {
    // An allocation that is not looked at is optimised away.
    core::hint::black_box(zeros(floats)).is_some()
}

/// A vector of values whose bytes are all zero. `None` if there is no memory for it.
///
/// # Safety
/// Zero bytes are a `T`.
unsafe fn zeroed<T>(len: usize) -> Option<Vec<T>> {
    let layout = Layout::array::<T>(len).ok()?;
    if layout.size() == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the size is not zero.
    let first = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<T>();
    // SAFETY: allocated here by the global allocator, with the layout of `len` values, which zeros are by the caller's promise.
    (!first.is_null()).then(|| unsafe { Vec::from_raw_parts(first, len, len) })
}

impl core::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("AlignedBuf").field("bytes", &self.bytes()).finish()
    }
}
