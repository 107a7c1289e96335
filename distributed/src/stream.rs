//! Stream of keys and values: parcels in key order, the next on its way while one is computed.

use crate::error::Error;
use crate::group::Group;
use crate::layout::{PARCEL, Parcel, rows_of};
use crate::memory::Memory;
use crate::message::Way;
use crate::parcel::{Sizes, Travelling};
use crate::parts::Parts;
use crate::report::Report;
use crate::share::Keys;
use crate::timeout::{Advance, Awaited};
use sdpa::{Outputs, Tensor};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Parcels on their way at once: two of the largest, or more that together hold no more, up to this number. So a rank that takes
/// long over its first parcels still sends later ones to those that are ahead of it.
const WINDOW: usize = 16;
/// First tag of parcels, and their number: each parcel takes two, and they come again after `TAGS`.
const TAG: u16 = 8192;
const TAGS: usize = 8192;
/// Sleep between polls while others of this rank's threads compute.
const NAP: Duration = Duration::from_micros(200);

/// Parcel, and the task of a rank with it.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) parcel: Parcel,
    /// Number of the parcel in the call.
    pub(crate) number: usize,
    /// Whether some row of this rank may see its keys.
    pub(crate) needed: bool,
    /// The rank that it comes from, if any, and those it goes to; `None` if it does not travel through this rank.
    pub(crate) way: Option<(Option<usize>, Vec<usize>)>,
}

/// Keys and values as they come, and the parts of the rows that take them.
pub(crate) struct Stream<'r, 'c, 'a> {
    group: &'r Group<'c>,
    parts: Parts<'a>,
    own: &'r [Keys<'a>],
    memory: &'r mut Memory,
    window: VecDeque<Travelling>,
    /// Number of parcels of the window that were computed, and stay until all others have taken them.
    computed: usize,
    report: Report,
}

/// Event that a rank waits for.
#[derive(Debug, Clone, Copy)]
enum Until {
    /// A parcel of the window is here.
    Here(usize),
    /// The first one was taken wherever it goes.
    Taken,
}

/// Wait for a parcel of the window, while all advance.
struct Wait<'w> {
    window: &'w VecDeque<Travelling>,
    until: Until,
}

impl Advance for Wait<'_> {
    fn poll(&mut self) -> bool {
        self.window.poll()
    }

    fn is_done(&self) -> bool {
        match self.until {
            Until::Here(at) => self.window.get(at).is_none_or(|parcel| parcel.tensors().is_some()),
            Until::Taken => self.window.front().is_none_or(Travelling::is_done),
        }
    }

    fn awaited(&self) -> Awaited {
        let (at, what) = match self.until {
            Until::Here(at) => (at, "its keys and values"),
            Until::Taken => (0, "that it takes keys and values"),
        };
        (self.window.get(at).map(Travelling::peers).unwrap_or_default(), what)
    }
}

impl<'r, 'c, 'a> Stream<'r, 'c, 'a> {
    pub(crate) fn new(group: &'r Group<'c>, parts: Parts<'a>, own: &'r [Keys<'a>], memory: &'r mut Memory) -> Self {
        Self { group, parts, own, memory, window: VecDeque::new(), computed: 0, report: Report::default() }
    }

    /// Takes all steps, in order.
    pub(crate) fn run(&mut self, steps: &[Step], sizes: &Sizes) -> Result<(), Error> {
        let keys = steps.last().map_or(0, |last| last.parcel.keys.end);
        let mut next = steps.iter().filter(|step| step.way.is_some()).peekable();
        for step in steps {
            loop {
                self.leave();
                while let Some(step) = next.next_if(|step| self.has_room(step, sizes)) {
                    self.begin(step, sizes)?;
                }
                if step.way.is_none() || self.window.len() > self.computed {
                    break;
                }
                // All of the window were computed here; this step's parcel begins when others have taken the first of them.
                self.wait(Until::Taken)?;
            }
            if step.way.is_some() {
                self.wait(Until::Here(self.computed))?;
            }
            self.compute(step)?;
            self.computed += usize::from(step.way.is_some());
            if let Some(progress) = self.group.progress {
                progress(step.parcel.keys.end, keys);
            }
        }
        while !self.window.is_empty() {
            self.wait(Until::Taken)?;
            self.leave();
        }
        Ok(())
    }

    /// Returns whether there is room in the window for a parcel.
    fn has_room(&self, step: &Step, sizes: &Sizes) -> bool {
        let held: usize = self.window.iter().map(|parcel| parcel.bytes()[0]).sum();
        let more = step.parcel.keys.len().saturating_mul(sizes.bytes());
        self.window.len() < 2 || self.window.len() < WINDOW && held.saturating_add(more) <= 2 * PARCEL
    }

    /// Takes leave of parcels that were computed here, and taken wherever they go.
    fn leave(&mut self) {
        while self.computed > 0 && self.window.front().is_some_and(Travelling::is_done) {
            self.computed -= 1;
            self.window.pop_front().into_iter().for_each(|parcel| parcel.leave(self.memory));
        }
    }

    /// Returns the keys and values of a parcel, if they are this rank's own.
    fn own(&self, parcel: &Parcel) -> Option<[Tensor<'a>; 2]> {
        let keys = self.own.get(parcel.stretch).filter(|_| parcel.owner == self.group.comm.rank)?;
        let rows = |tensor| rows_of(tensor, parcel.batch, parcel.rows.clone());
        Some([rows(keys.k)?, rows(keys.v)?])
    }

    /// Sets a parcel on its way.
    fn begin(&mut self, step: &Step, sizes: &Sizes) -> Result<(), Error> {
        let Some((from, to)) = &step.way else { return Ok(()) };
        let way =
            |part: usize| Way { from: *from, to: to.clone(), tag: TAG + (2 * (step.number % TAGS) + part) as u16 };
        let own = self.own(&step.parcel);
        let (begin, keys) = (Instant::now(), step.parcel.keys.len());
        let travelling =
            Travelling::begin(self.group.comm, self.memory, sizes, own.as_slice(), keys, [way(0), way(1)])?;
        let [_, sent, received] = travelling.bytes();
        self.window.push_back(travelling);
        let held = self.window.iter().map(|parcel| parcel.bytes()[0]).sum();
        let report = &mut self.report;
        (report.sent, report.received) = (report.sent + sent, report.received + received);
        report.held = report.held.max(held);
        report.copying += begin.elapsed();
        Ok(())
    }

    fn wait(&mut self, until: Until) -> Result<(), Error> {
        let mut wait = Wait { window: &self.window, until };
        self.report.waiting += self.group.timeout.wait(&mut wait)?;
        Ok(())
    }

    /// Computes the keys of a step, or passes over them if no row sees them, while messages advance.
    fn compute(&mut self, step: &Step) -> Result<(), Error> {
        let (n, keys) = (step.parcel.keys.len(), &step.parcel.keys);
        let begin = Instant::now();
        let own = self.own(&step.parcel);
        let mut states = self.parts.of_keys(keys)?;
        if step.needed {
            let kv = own.or_else(|| self.window.get(self.computed).and_then(Travelling::tensors));
            let Some([k, v]) = kv else { unreachable!("the parcel was waited for") };
            let push =
                || {
                    states.iter_mut().try_for_each(|(state, keys)| {
                        if state.sees(keys.clone()) { state.push(k, v) } else { state.skip(n) }
                    })
                };
            beside(self.group.pool, &self.window, push)?;
            self.report.computed += n;
            self.report.computing += begin.elapsed();
        } else {
            states.into_iter().try_for_each(|(state, _)| state.skip(n))?;
            self.report.hidden += n;
        }
        self.parts.after(keys)
    }

    /// Writes the outputs of all rows.
    pub(crate) fn finish(mut self, outputs: Vec<Outputs<'_>>) -> Result<Report, Error> {
        let begin = Instant::now();
        self.memory.states = self.parts.finish(outputs)?;
        self.report.computing += begin.elapsed();
        Ok(self.report)
    }
}

/// Messages on their way.
pub(crate) trait InFlight {
    /// Lets all advance. Returns true if one did.
    fn poll(&self) -> bool;
    /// Returns true if all are where they go.
    fn is_done(&self) -> bool;
}

impl InFlight for VecDeque<Travelling> {
    fn poll(&self) -> bool {
        self.iter().fold(false, |progress, parcel| progress | parcel.poll())
    }

    fn is_done(&self) -> bool {
        self.iter().all(Travelling::is_done)
    }
}

/// Sets a flag when it is dropped, also by a panic.
struct Done<'f>(&'f AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Does work on a pool, while this thread lets messages advance: MPI moves nothing on its own.
pub(crate) fn beside<R: Send>(
    pool: Option<&rayon::ThreadPool>,
    messages: &impl InFlight,
    work: impl FnOnce() -> R + Send,
) -> R {
    // From inside a pool, its other threads may never come for the work.
    if rayon::current_thread_index().is_some() || messages.is_done() {
        return match pool {
            Some(pool) => pool.install(work),
            None => work(),
        };
    }
    let (done, mut result) = (AtomicBool::new(false), None);
    let job = || {
        let _done = Done(&done);
        result = Some(work());
    };
    let wait = || {
        while !done.load(Ordering::Acquire) && !messages.is_done() {
            if !messages.poll() {
                thread::sleep(NAP);
            }
        }
    };
    match pool {
        Some(pool) => pool.in_place_scope(|scope| both(scope, job, wait)),
        None => rayon::in_place_scope(|scope| both(scope, job, wait)),
    }
    result.expect("a scope ends when its work is done, or passes on its panic")
}

/// Gives a job to a pool's threads, and waits.
fn both<'s>(scope: &rayon::Scope<'s>, job: impl FnOnce() + Send + 's, wait: impl FnOnce()) {
    scope.spawn(|_| job());
    wait();
}
