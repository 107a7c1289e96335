//! A pool of threads; none is started without memory to begin with.

use crate::failure::{Refused, Result};
use rayon::{ThreadBuilder, ThreadPool, ThreadPoolBuilder};
use std::io::{Error, ErrorKind};
use std::sync::mpsc;
use std::thread::Builder;

/// Stack of a thread.
const STACK: usize = 2 << 20;
/// What else has to be had when a thread is started, and stays for the call: where nothing is left, a thread that
/// begins ends the whole process, and so does the first allocation after the last.
const SPARE: usize = 64 << 20;

/// Returns a pool of `threads` threads.
///
/// # Errors
/// If memory, or what else the system gives a process, ends before. Says how many could be started.
pub(crate) fn pool(threads: usize) -> Result<ThreadPool> {
    let mut started = 0;
    let pool = ThreadPoolBuilder::new().num_threads(threads).spawn_handler(|thread| {
        start(thread)?;
        started += 1;
        Ok(())
    });
    pool.build().map_err(|e| {
        Refused::new(format_args!("--threads: {threads}, but only {started} could be started: {}", reason(&e)))
    })
}

/// Starts a thread, and waits until it runs: what it allocates to begin with is then there.
fn start(thread: ThreadBuilder) -> std::io::Result<()> {
    Vec::<u8>::new().try_reserve_exact(STACK + SPARE).map_err(|e| Error::new(ErrorKind::OutOfMemory, e))?;
    let (runs, wait) = mpsc::sync_channel(1);
    Builder::new().stack_size(STACK).spawn(move || {
        let _ = runs.send(());
        thread.run();
    })?;
    // A thread that ends before it says so is missed by the pool.
    let _ = wait.recv();
    Ok(())
}

/// Returns the reason in the system's words, which rayon's own leave out.
fn reason(e: &rayon::ThreadPoolBuildError) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), ToString::to_string)
}
