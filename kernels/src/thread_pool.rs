//! Pool of threads that stay between calls: spinning for a short time, then asleep.

use crate::sync::pool::thread::{self, JoinHandle};
use crate::sync::pool::{Arc, AtomicBool, AtomicPtr, AtomicUsize, Condvar, Instant, Mutex, MutexGuard};
use core::any::Any;
use core::fmt;
use core::hint::spin_loop;
use core::mem::forget;
use core::sync::atomic::Ordering::SeqCst;
use core::time::Duration;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process;
use std::sync::PoisonError;

/// Calls that other threads help with at the same time; a caller beyond does its work alone.
const CALLS: usize = 8;
/// Time that a thread without work looks for more before it sleeps: several times as long as waking it takes, and short
/// beside the steps of a model.
const SPIN: Duration = Duration::from_micros(100);
/// Looks at memory before a thread offers its core to others, between looks: about a microsecond.
const LOOKS: usize = 32;
/// Threads that one thread wakes, at a system call each; those wake the next.
const FAN_OUT: usize = 2;

/// A number alone in its cache lines: two, since some machines fetch pairs.
#[derive(Default)]
#[repr(align(128))]
struct Apart(AtomicUsize);

/// Task of a call: called with an index.
type Task<'t> = &'t (dyn Fn(usize) + Sync);

/// Threads that wait for calls of [`Self::run`] and share their work with the calling thread.
///
/// Threads start with the pool and end when it is dropped. Without work they look for more for 100 µs, then sleep.
/// Several threads may call at once, tasks may call again, and no call waits for another to end: threads help up to eight
/// calls at a time, and every caller takes whatever no other thread has begun.
///
/// A process that `fork` has made has none of the threads: there each call of [`Self::run`] does all of its tasks on the
/// calling thread, and dropping the pool ends no thread. Make another pool in that process.
pub struct ThreadPool {
    pool: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// Starts a pool of `threads` threads. The calling thread of each call is one of them, so one less is started. 0 counts as 1.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn new(threads: usize) -> io::Result<Self> {
        let shared = Pool { process: current_process(), ..Pool::default() };
        let mut pool = Self { pool: Arc::new(shared), threads: Vec::new() };
        for index in 1..threads {
            let shared = Arc::clone(&pool.pool);
            let thread = thread::Builder::new().name(format!("sdpa-{index}"));
            pool.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(pool)
    }

    /// Number of threads, the calling one included.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `task` once with each index below `tasks`, on this and other threads, and returns when all calls have
    /// returned. The calling thread has at least one of them. Allocates nothing.
    ///
    /// # Panics
    /// If a call does: the first panic is passed on when all calls that began have returned. Indices that were not begun
    /// may be left out. The pool serves later calls as before.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let call = if tasks > 1 && !self.threads.is_empty() { self.pool.claim() } else { None };
        let Some(call) = call else { return (0..tasks).for_each(task) };
        call.begin(tasks, &task);
        self.pool.wake(tasks - 1);
        // The last index is this thread's, which would otherwise wait for others while its core has nothing to do.
        call.run(tasks - 1);
        while let Some(index) = call.take() {
            call.run(index);
        }
        if let Some(panic) = call.end() {
            resume_unwind(panic);
        }
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadPool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Drop for ThreadPool {
    /// Ends the threads. No call is under way: it would have borrowed the pool.
    fn drop(&mut self) {
        if self.pool.is_forked() {
            // The threads are the parent's, and a lock may be held by one of them for ever.
            return self.threads.drain(..).for_each(forget);
        }
        self.pool.stopped.store(true, SeqCst);
        self.pool.wake_some(usize::MAX);
        for thread in self.threads.drain(..) {
            // Tasks' panics are caught, so threads return.
            let _ = thread.join();
        }
    }
}

/// State that the threads of a pool share.
#[derive(Default)]
struct Pool {
    calls: [Call; CALLS],
    /// Threads that look for work.
    looking: Apart,
    /// Threads that sleep and that nobody wakes yet; written under the lock of `woken`.
    asleep: Apart,
    /// Threads among those in `wake.wait` that may go on.
    woken: Mutex<usize>,
    wake: Condvar,
    stopped: AtomicBool,
    /// Process that has the threads.
    process: u32,
}

impl Pool {
    /// Returns a place for a call, which is then the caller's, if there is one.
    fn claim(&self) -> Option<&Call> {
        self.calls.iter().find(|call| !call.claimed.load(SeqCst) && !call.claimed.swap(true, SeqCst))
    }

    /// Number of indices that no thread has begun.
    fn left(&self) -> usize {
        self.calls.iter().map(|call| call.left.0.load(SeqCst)).fold(0, usize::saturating_add)
    }

    /// Work of a thread of the pool, until the pool is dropped.
    fn work(&self) {
        let look = || self.stopped.load(SeqCst) || self.left() > 0;
        while !self.stopped.load(SeqCst) {
            let taken = self.calls.iter().find_map(|call| Some((call, call.take()?)));
            if let Some((call, index)) = taken {
                self.wake(self.left());
                call.run(index);
                continue;
            }
            self.looking.0.fetch_add(1, SeqCst);
            let found = spin_until(look);
            self.looking.0.fetch_sub(1, SeqCst);
            if !found {
                self.sleep(look);
            }
        }
    }

    /// Sleeps until woken, unless there is something to do.
    fn sleep(&self, look: impl Fn() -> bool) {
        let mut woken = locked(&self.woken);
        self.asleep.0.fetch_add(1, SeqCst);
        // All orders are sequential: either this look sees what a caller left to do, or that caller sees this thread asleep.
        if look() {
            self.asleep.0.fetch_sub(1, SeqCst);
            return;
        }
        while *woken == 0 {
            woken = self.wake.wait(woken).unwrap_or_else(PoisonError::into_inner);
        }
        *woken -= 1;
    }

    /// Returns true in a process that was forked from the one that has the threads.
    fn is_forked(&self) -> bool {
        self.process != current_process()
    }

    /// Wakes threads for this many indices, if fewer are looking for work; they wake more.
    fn wake(&self, indices: usize) {
        // A thread that stops looking looks once more before it sleeps.
        let wanted = indices.saturating_sub(self.looking.0.load(SeqCst)).min(FAN_OUT);
        // In a forked process the lock of `woken` may be held for ever. Asking for the process is a system call, as waking is.
        if wanted > 0 && self.asleep.0.load(SeqCst) > 0 && !self.is_forked() {
            self.wake_some(wanted);
        }
    }

    /// Wakes this many threads, or all that sleep if they are fewer.
    fn wake_some(&self, wanted: usize) {
        let some = {
            let mut woken = locked(&self.woken);
            let some = self.asleep.0.load(SeqCst).min(wanted);
            self.asleep.0.fetch_sub(some, SeqCst);
            *woken += some;
            some
        };
        (0..some).for_each(|_| self.wake.notify_one());
    }
}

/// Place for a call: its task, and how far it is.
#[derive(Default)]
struct Call {
    /// True from [`Pool::claim`] to the end of the call.
    claimed: AtomicBool,
    /// Address of the caller's reference to the task.
    task: AtomicPtr<()>,
    /// Indices that no thread has begun: those below.
    left: Apart,
    /// Number of indices that are not done.
    open: Apart,
    /// First panic of a task.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// True while the caller sleeps until all is done.
    sleeps: AtomicBool,
    sleep: Mutex<()>,
    done: Condvar,
}

impl Call {
    /// Hands out all indices but the last, which is the caller's, to be [run](Self::run) too. The caller keeps `task` where
    /// it is until [`Self::end`] has returned.
    fn begin(&self, tasks: usize, task: &Task<'_>) {
        self.task.store((&raw const *task).cast_mut().cast(), SeqCst);
        self.open.0.store(tasks, SeqCst);
        self.left.0.store(tasks - 1, SeqCst);
    }

    /// Takes an index, which must then be [run](Self::run).
    fn take(&self) -> Option<usize> {
        let mut left = self.left.0.load(SeqCst);
        while left > 0 {
            match self.left.0.compare_exchange_weak(left, left - 1, SeqCst, SeqCst) {
                Ok(_) => return Some(left - 1),
                Err(now) => left = now,
            }
        }
        None
    }

    /// Calls the task with an index that was taken from this call, or with the caller's.
    fn run(&self, index: usize) {
        // SAFETY: the index was taken or is the caller's, so `begin` had stored the address before, and nobody stores
        // another before the caller has seen in `end` that no index is open. This one is open until the subtraction below.
        // Till then the caller is in `ThreadPool::run`, which nothing unwinds before `end` (tasks' panics are caught here),
        // so the reference is still in its frame, and what it borrows is still borrowed.
        let task: Task<'_> = unsafe { *self.task.load(SeqCst).cast::<Task<'_>>() };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(index))) {
            self.keep_first(panic);
        }
        if self.open.0.fetch_sub(1, SeqCst) == 1 && self.sleeps.load(SeqCst) {
            // The caller is in `wait` once the lock is to be had. If it is another call's by now, it looks and waits on.
            drop(locked(&self.sleep));
            self.done.notify_one();
        }
    }

    /// Keeps a panic for the caller, unless there was one before.
    fn keep_first(&self, panic: Box<dyn Any + Send>) {
        let mut first = locked(&self.panic);
        if first.is_none() {
            *first = Some(panic);
            return;
        }
        drop(first);
        // Dropping a payload can panic; the payload of that panic is never dropped.
        if let Err(next) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            forget(next);
        }
    }

    /// Waits until no index is open, gives up the place, and returns the first panic.
    fn end(&self) -> Option<Box<dyn Any + Send>> {
        let done = || self.open.0.load(SeqCst) == 0;
        if !spin_until(done) {
            let mut sleep = locked(&self.sleep);
            self.sleeps.store(true, SeqCst);
            while !done() {
                sleep = self.done.wait(sleep).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleeps.store(false, SeqCst);
        }
        let panic = locked(&self.panic).take();
        self.claimed.store(false, SeqCst);
        panic
    }
}

/// Looks until `done` is true or [`SPIN`] is over; returns whether it is.
fn spin_until(done: impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..LOOKS {
            if done() {
                return true;
            }
            spin_loop();
        }
        // Others may need this core to finish what is waited for.
        thread::yield_now();
        if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
            return done();
        }
    }
}

/// Returns the number of this process where processes can fork, otherwise 0.
fn current_process() -> u32 {
    if cfg!(unix) { process::id() } else { 0 }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
