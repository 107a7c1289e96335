//! Buffers aligned to a cache line, so that whole vectors never straddle two lines.

use crate::simd::width::{LANES, LINE_BYTES};
use core::alloc::Layout;
use core::marker::PhantomData;
use core::ops::Range;

/// Element types that a buffer of floats can be reinterpreted as.
///
/// # Safety
/// Every bit pattern is a valid value. The type is no larger than an `f32`, its size is a power of two, and its
/// alignment is no more than that size.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: a four-byte number; every bit pattern is valid.
unsafe impl Plain for f32 {}
// SAFETY: a one-byte number; every bit pattern is valid.
unsafe impl Plain for i8 {}
// SAFETY: a one-byte number; every bit pattern is valid.
unsafe impl Plain for u8 {}

/// A cache line of floats.
type Line = [f32; LANES];
const _: () = assert!(LINE_BYTES == size_of::<Line>());

/// Buffer of floats that starts on a cache line. It grows on request and never shrinks. It is not
/// `Clone`: a copy would start elsewhere.
#[derive(Default)]
pub(crate) struct AlignedBuf {
    /// Cache lines: one more than requested, so that an aligned start fits.
    lines: Vec<Line>,
}

impl AlignedBuf {
    pub(crate) const fn new() -> Self {
        Self { lines: Vec::new() }
    }

    /// Makes a buffer of `floats` zeros. `None` if there is no memory.
    pub(crate) fn try_new(floats: usize) -> Option<Self> {
        let mut buffer = Self::new();
        buffer.try_reserve(floats).then_some(buffer)
    }

    /// Makes room for `floats`. Allocates, and discards the contents, only if there is less. Returns false if there is
    /// no memory; the buffer is then unchanged.
    #[inline]
    #[must_use]
    pub(crate) fn try_reserve(&mut self, floats: usize) -> bool {
        if !self.holds(floats) {
            // Not `resize`: the old contents are not needed, and fresh zeros come from the system untouched.
            // SAFETY: zero bytes are valid floats.
            let Some(fresh) = (unsafe { zeroed(Self::lines_for(floats)) }) else { return false };
            self.lines = fresh;
        }
        true
    }

    /// Returns true if there is room for `floats`.
    #[inline]
    pub(crate) fn holds(&self, floats: usize) -> bool {
        self.lines.len() >= Self::lines_for(floats)
    }

    /// Number of cache lines that a new buffer of `floats` has.
    #[inline]
    const fn lines_for(floats: usize) -> usize {
        floats.div_ceil(LANES) + 1
    }

    /// Number of bytes that a new buffer of `floats` holds; `usize::MAX` if it overflows.
    pub(crate) const fn bytes_for(floats: usize) -> usize {
        Self::lines_for(floats).saturating_mul(LINE_BYTES)
    }

    /// Number of bytes held.
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

    /// Returns the buffer as elements of another type.
    pub(crate) fn elements<T: Plain>(&self) -> &[T] {
        elements(self.floats())
    }

    pub(crate) fn elements_mut<T: Plain>(&mut self) -> &mut [T] {
        elements_mut(self.floats_mut())
    }
}

/// Exclusive borrow of floats that workers share, each with access to its own alone.
pub(crate) struct SharedFloats<'a> {
    first: *mut f32,
    len: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: an exclusive borrow of floats.
unsafe impl Send for SharedFloats<'_> {}
// SAFETY: shared access alone gives no access to a float; whoever takes a part guarantees that nobody else has it.
unsafe impl Sync for SharedFloats<'_> {}

impl<'a> SharedFloats<'a> {
    pub(crate) fn new(floats: &'a mut [f32]) -> Self {
        Self { first: floats.as_mut_ptr(), len: floats.len(), borrow: PhantomData }
    }

    /// Returns some of the floats.
    ///
    /// # Panics
    /// If there are no such floats.
    ///
    /// # Safety
    /// Nobody else accesses them meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees sole access")]
    pub(crate) unsafe fn part(&self, floats: Range<usize>) -> &mut [f32] {
        assert!(floats.start <= floats.end && floats.end <= self.len, "floats {floats:?} of {}", self.len);
        // SAFETY: floats of the borrow, as asserted; the caller guarantees sole access.
        unsafe { core::slice::from_raw_parts_mut(self.first.add(floats.start), floats.len()) }
    }

    /// Returns the address of a float, to prefetch it.
    pub(crate) fn address(&self, float: usize) -> *const f32 {
        self.first.cast_const().wrapping_add(float)
    }
}

/// Returns floats as elements of another type.
pub(crate) fn elements<T: Plain>(floats: &[f32]) -> &[T] {
    // SAFETY: the bytes of the floats, aligned for the elements: `Plain`.
    unsafe { core::slice::from_raw_parts(floats.as_ptr().cast(), size_of_val(floats) / size_of::<T>()) }
}

/// Returns floats as elements of another type, to write to.
pub(crate) fn elements_mut<T: Plain>(floats: &mut [f32]) -> &mut [T] {
    // SAFETY: the bytes of the floats, aligned for the elements (`Plain`), borrowed exclusively; every pattern of four
    // bytes is a valid f32.
    unsafe { core::slice::from_raw_parts_mut(floats.as_mut_ptr().cast(), size_of_val(floats) / size_of::<T>()) }
}

/// Returns the product of the sizes, if that many floats fit the address space.
pub fn floats(sizes: [usize; 4]) -> Option<usize> {
    let len = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    // A Vec holds at most isize::MAX bytes.
    len.filter(|&n| n <= isize::MAX as usize / size_of::<f32>())
}

/// Allocates `len` zeros, untouched until they are used. Returns `None` if there is no memory for them.
pub fn zeros(len: usize) -> Option<Vec<f32>> {
    // SAFETY: zero bytes are valid floats.
    unsafe { zeroed(len) }
}

/// Returns true if there is memory for `floats` floats at once.
pub fn has_memory(floats: usize) -> bool {
    // The compiler optimises an allocation away if nothing inspects its result.
    core::hint::black_box(zeros(floats)).is_some()
}

/// Allocates a vector of values with bytes that are all zero. Returns `None` if there is no memory for it.
///
/// # Safety
/// A `T` of zero bytes is valid.
unsafe fn zeroed<T>(len: usize) -> Option<Vec<T>> {
    let layout = Layout::array::<T>(len).ok()?;
    if layout.size() == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the size is not zero.
    let first = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<T>();
    // SAFETY: allocated here by the global allocator, with the layout of `len` values; the caller guarantees that zero
    // bytes are valid values.
    (!first.is_null()).then(|| unsafe { Vec::from_raw_parts(first, len, len) })
}

impl core::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("AlignedBuf").field("bytes", &self.bytes()).finish()
    }
}
