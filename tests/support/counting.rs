//! The system's allocator, counting. Whoever includes this runs on it.

use core::cell::Cell;
use std::alloc::{GlobalAlloc, Layout, System};

/// The system's allocator, counting what this thread asks of it.
struct Counting;

thread_local! {
    // Constant and without a destructor, so that counting does not allocate.
    static CALLS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

fn count(bytes: usize) {
    CALLS.set(CALLS.get() + 1);
    BYTES.set(BYTES.get().wrapping_add(bytes)); // Some requests are refused for their size.
}

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(p, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
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
