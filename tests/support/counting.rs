//! The system's allocator, counting, and refusing a request if it is told to. Whoever includes this runs on it.

use core::cell::Cell;
use std::alloc::{GlobalAlloc, Layout, System};

/// The system's allocator, counting what this thread asks of it.
struct Counting;

thread_local! {
    // Constant and without a destructor, so that counting does not allocate.
    static CALLS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
    /// Number of the request that is refused, of those for `least` bytes or more, counted from the next one.
    static REFUSED: Cell<Option<[usize; 2]>> = const { Cell::new(None) };
    /// Bytes of the last request that might have been.
    static REFUSED_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Counts a request, and returns true if it is to be refused.
fn count(bytes: usize) -> bool {
    CALLS.set(CALLS.get() + 1);
    BYTES.set(BYTES.get().wrapping_add(bytes)); // Some requests are refused for their size.
    let Some([number, least]) = REFUSED.get().filter(|&[_, least]| bytes >= least) else { return false };
    REFUSED.set(number.checked_sub(1).map(|number| [number, least]));
    REFUSED_BYTES.set(bytes);
    number == 0
}

// SAFETY: every call is passed on to the system's allocator as it came, or refused.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if count(layout.size()) {
            return core::ptr::null_mut();
        }
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(p, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if count(layout.size()) {
            return core::ptr::null_mut();
        }
        // SAFETY: passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if count(size) {
            return core::ptr::null_mut();
        }
        // SAFETY: passed on.
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations, and bytes asked for, while `f` runs on this thread.
pub(crate) fn counted(f: impl FnOnce()) -> (usize, usize) {
    let before = (CALLS.get(), BYTES.get());
    f();
    (CALLS.get() - before.0, BYTES.get().wrapping_sub(before.1))
}

/// Returns the result of `f`, on this thread, of whose requests for memory, of `least` bytes or more, one is refused, by its number;
/// and the bytes that it was for, if there was such a request. (There is no stable way to go on without memory for an `Arc` or an
/// error's words.)
#[allow(dead_code, reason = "not every program that counts refuses")]
pub(crate) fn refusing<T>(number: usize, least: usize, f: impl FnOnce() -> T) -> (T, Option<usize>) {
    REFUSED.set(Some([number, least]));
    let result = f();
    (result, REFUSED.take().is_none().then(|| REFUSED_BYTES.get()))
}
