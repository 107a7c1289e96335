//! Memory between pages that nobody may touch. Slices lie flush against one of the two; every byte around them is known.
//!
//! The only file of the fuzzer with unsafe code.

use core::marker::PhantomData;
use core::mem::size_of;
use map::Map;
use sdpa::{Bf16, F16};
use std::cell::RefCell;

/// Types with a value for any bytes of one kind.
///
/// # Safety
/// A value with bytes that are all [`Plain::FILL`] is valid, and there is nothing to drop.
pub(crate) unsafe trait Plain: Copy {
    /// What is in memory that nobody has written. For numbers 0xff: NaN, or more than there is of anything.
    const FILL: u8 = 0xff;
}

// SAFETY: all bytes 0xff are a NaN.
unsafe impl Plain for f32 {}
// SAFETY: any two bytes are a bfloat16.
unsafe impl Plain for Bf16 {}
// SAFETY: any two bytes are a binary16.
unsafe impl Plain for F16 {}
// SAFETY: any bytes are an integer.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {
    // A number of no key: all bytes 0xff would be −1, a place without one.
    const FILL: u8 = 0x7f;
}
// SAFETY: as above.
unsafe impl Plain for usize {}
// SAFETY: a byte of 1 is true.
unsafe impl Plain for bool {
    const FILL: u8 = 1;
}

/// Which of the two pages without access a slice lies against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flush {
    /// Its first element is right behind one.
    Low,
    /// Its last element is right before one.
    High,
}

/// A slice between two pages without access.
#[derive(Debug)]
pub(crate) struct Memory<T: Plain> {
    /// `None` only while it is dropped.
    map: Option<Map>,
    /// Where the slice begins, in bytes.
    first: usize,
    len: usize,
    elements: PhantomData<T>,
}

thread_local! {
    /// Maps that nobody uses, by the logarithm of their pages.
    static SPARE: RefCell<Vec<Vec<Map>>> = const { RefCell::new(Vec::new()) };
}

impl<T: Plain> Memory<T> {
    /// So many elements, unwritten.
    pub(crate) fn new(len: usize, flush: Flush) -> Self {
        let bytes = len * size_of::<T>();
        let class = bytes.div_ceil(map::page()).max(1).next_power_of_two().ilog2() as usize;
        let spare = SPARE.with_borrow_mut(|spare| spare.get_mut(class).and_then(Vec::pop));
        let mut map = spare.unwrap_or_else(|| Map::new(map::page() << class));
        map.bytes_mut().fill(T::FILL);
        let first = if flush == Flush::Low { 0 } else { map.bytes().len() - bytes };
        Self { map: Some(map), first, len, elements: PhantomData }
    }

    /// The same with these elements.
    pub(crate) fn of(elements: &[T], flush: Flush) -> Self {
        let mut memory = Self::new(elements.len(), flush);
        memory.slice_mut().copy_from_slice(elements);
        memory
    }

    fn bytes(&self) -> &[u8] {
        self.map.as_ref().map_or(&[], Map::bytes)
    }

    pub(crate) fn slice(&self) -> &[T] {
        let bytes = &self.bytes()[self.first..][..self.len * size_of::<T>()];
        // SAFETY: these bytes are a `T` each by the promise of `Plain` or were written as such. Maps begin and end
        // at whole pages, so `first`, which is a whole number of elements from one of the two, is aligned.
        unsafe { core::slice::from_raw_parts(bytes.as_ptr().cast(), self.len) }
    }

    pub(crate) fn slice_mut(&mut self) -> &mut [T] {
        let (first, len) = (self.first, self.len);
        let bytes = self.map.as_mut().map_or(&mut [][..], Map::bytes_mut);
        let bytes = &mut bytes[first..][..len * size_of::<T>()];
        // SAFETY: as above, borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), len) }
    }

    /// Element `i` as if it had never been written.
    pub(crate) fn blank(&mut self, i: usize) {
        let (at, size) = (self.first + i * size_of::<T>(), size_of::<T>());
        if let Some(map) = &mut self.map {
            map.bytes_mut()[at..at + size].fill(T::FILL);
        }
    }

    /// True if every byte between the two pages is as if it had never been written.
    pub(crate) fn is_blank(&self) -> bool {
        // Eight at a time: this looks at a page or more for each output of each call.
        let (words, rest) = self.bytes().as_chunks::<8>();
        let blank = u64::from_ne_bytes([T::FILL; 8]);
        words.iter().all(|word| u64::from_ne_bytes(*word) == blank) && rest.iter().all(|&byte| byte == T::FILL)
    }
}

impl<T: Plain> Drop for Memory<T> {
    fn drop(&mut self) {
        let Some(map) = self.map.take() else { return };
        let class = (map.bytes().len() / map::page()).ilog2() as usize;
        // When the thread ends there may be no list any more: the map then goes as well.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() <= class {
                spare.resize_with(class + 1, Vec::new);
            }
            spare[class].push(map);
        });
    }
}

#[cfg(all(unix, not(miri)))]
mod map {
    use core::ptr::NonNull;

    /// Pages between two that nobody may touch.
    #[derive(Debug)]
    pub(super) struct Map {
        /// The first that may be touched.
        first: NonNull<u8>,
        bytes: usize,
    }

    // SAFETY: it owns its pages, as a vector does.
    unsafe impl Send for Map {}
    // SAFETY: as above.
    unsafe impl Sync for Map {}

    /// Bytes of a page.
    pub(super) fn page() -> usize {
        // SAFETY: a question.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(bytes).expect("pages have a size")
    }

    impl Map {
        /// So many bytes, whole pages.
        pub(super) fn new(bytes: usize) -> Self {
            let (page, flags) = (page(), libc::MAP_PRIVATE | libc::MAP_ANON);
            // SAFETY: fresh pages, wherever there is room for them; nobody else's are touched.
            let all = unsafe { libc::mmap(core::ptr::null_mut(), bytes + 2 * page, libc::PROT_NONE, flags, -1, 0) };
            assert!(all != libc::MAP_FAILED, "no memory for {bytes} bytes: {}", std::io::Error::last_os_error());
            let first = all.cast::<u8>().wrapping_add(page);
            // SAFETY: all but the first and the last of the pages just mapped.
            let done = unsafe { libc::mprotect(first.cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) };
            assert!(done == 0, "pages stay without access: {}", std::io::Error::last_os_error());
            Self { first: NonNull::new(first).expect("a mapping is somewhere"), bytes }
        }

        pub(super) fn bytes(&self) -> &[u8] {
            // SAFETY: these pages are mapped, zeros at first, and borrowed with `self`.
            unsafe { core::slice::from_raw_parts(self.first.as_ptr(), self.bytes) }
        }

        pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: as above, exclusively.
            unsafe { core::slice::from_raw_parts_mut(self.first.as_ptr(), self.bytes) }
        }
    }

    impl Drop for Map {
        fn drop(&mut self) {
            let page = page();
            // SAFETY: what `new` mapped; no borrow of it is left.
            unsafe { libc::munmap(self.first.as_ptr().wrapping_sub(page).cast(), self.bytes + 2 * page) };
        }
    }
}

/// Where pages cannot be protected: memory like any other; only the bytes around a slice are looked at.
#[cfg(not(all(unix, not(miri))))]
mod map {
    #[derive(Debug)]
    pub(super) struct Map(Vec<u64>);

    pub(super) const fn page() -> usize {
        4096
    }

    impl Map {
        pub(super) fn new(bytes: usize) -> Self {
            Self(vec![0; bytes / 8])
        }

        pub(super) fn bytes(&self) -> &[u8] {
            // SAFETY: eight bytes each.
            unsafe { core::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 8) }
        }

        pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: as above, exclusively.
            unsafe { core::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 8) }
        }
    }
}

pub(crate) use fault::{begin, watch};

/// Reads what is right behind a slice that is flush against a page without access.
#[cfg(all(test, unix, not(miri)))]
pub(crate) fn touch() -> u8 {
    let memory = Memory::<u8>::new(5, Flush::High);
    let end = memory.slice().as_ptr_range().end;
    // SAFETY: none: nothing may be read there. The program ends.
    unsafe { end.read_volatile() }
}

/// Says which cases are being made when a fault ends the program, or when nothing ends one of them.
#[cfg(all(unix, not(miri)))]
mod fault {
    use core::ptr;
    use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::SeqCst};
    use std::io::Write;

    /// A case that is being made, or none.
    struct Slot {
        /// Name of its kind; null if there is no case.
        kind: AtomicPtr<&'static str>,
        seed: AtomicU64,
        number: AtomicU64,
    }

    static SLOTS: [Slot; 256] =
        [const { Slot { kind: AtomicPtr::new(ptr::null_mut()), seed: AtomicU64::new(0), number: AtomicU64::new(0) } };
            256];

    /// Seconds without the begin or end of a case after which one is taken not to end. The longest take one.
    const PATIENCE: u32 = 300;

    /// A case that is being made, until this is dropped.
    pub(crate) struct Running(Option<&'static Slot>);

    /// The case that is made from here on.
    pub(crate) fn begin(kind: &'static &'static str, seed: u64, number: u64) -> Running {
        let name = ptr::from_ref(kind).cast_mut();
        let free = |slot: &&Slot| slot.kind.compare_exchange(ptr::null_mut(), name, SeqCst, SeqCst).is_ok();
        let slot = SLOTS.iter().find(free);
        if let Some(slot) = slot {
            slot.seed.store(seed, SeqCst);
            slot.number.store(number, SeqCst);
        }
        // SAFETY: a number. Where nobody watches, the signal ends the program by itself.
        unsafe { libc::alarm(PATIENCE) };
        Running(slot)
    }

    impl Drop for Running {
        fn drop(&mut self) {
            if let Some(slot) = self.0 {
                slot.kind.store(ptr::null_mut(), SeqCst);
            }
            let none = SLOTS.iter().all(|slot| slot.kind.load(SeqCst).is_null());
            // SAFETY: a number.
            unsafe { libc::alarm(if none { 0 } else { PATIENCE }) };
        }
    }

    /// Faults from here on, and calls that do not end, are reported, and end the program with status 1.
    pub(crate) fn watch() {
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGALRM] {
            // SAFETY: a handler of the right type, on the stack that the runtime has for handlers.
            unsafe {
                let mut action: libc::sigaction = core::mem::zeroed();
                action.sa_sigaction = report as *const () as usize;
                action.sa_flags = libc::SA_ONSTACK | libc::SA_RESETHAND;
                libc::sigaction(signal, &action, core::ptr::null_mut());
            }
        }
    }

    /// What AddressSanitizer calls, where there is one, before it ends the program.
    // SAFETY: nobody else has a function of this name, which the sanitizer leaves to programs.
    #[unsafe(no_mangle)]
    extern "C" fn __asan_on_error() {
        say("the sanitizer found something");
    }

    extern "C" fn report(signal: libc::c_int) {
        say(if signal == libc::SIGALRM { "does not end" } else { "memory without access was touched" });
        // SAFETY: nothing more happens.
        unsafe { libc::_exit(1) };
    }

    fn say(what: &str) {
        for slot in &SLOTS {
            // SAFETY: null, or the address of a static.
            let Some(kind) = (unsafe { slot.kind.load(SeqCst).as_ref() }) else { continue };
            let (seed, number) = (slot.seed.load(SeqCst), slot.number.load(SeqCst));
            let mut line = [0; 160];
            let room = line.len();
            let mut left = &mut line[..];
            // No lock and no allocation: this is called by signal handlers.
            let _ = writeln!(left, "fuzz: {what}: --kind {kind} --seed {seed} --only {number}");
            let len = room - left.len();
            // SAFETY: bytes inside the line.
            unsafe { libc::write(2, line.as_ptr().cast(), len) };
        }
    }
}

#[cfg(not(all(unix, not(miri))))]
mod fault {
    pub(crate) struct Running;
    pub(crate) fn begin(_: &'static &'static str, _: u64, _: u64) -> Running {
        Running
    }
    pub(crate) fn watch() {}
}
