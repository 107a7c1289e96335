//! Stream of keys and values: parcels in key order, the next on its way while one is computed.

use crate::error::Error;
use crate::group::Group;
use crate::layout::Parcel;
use crate::message::Way;
use crate::parcel::{Sizes, Travelling};
use crate::report::Report;
use crate::share::Keys;
use crate::timeout::{Advance, Awaited};
use sdpa::{AttnState, Outputs, Tensor};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Parcels on their way at once.
const WINDOW: usize = 2;
/// First tag of parcels, and their number: each parcel takes two, and they come again after so many.
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

/// Keys and values as they come, and the states that take them.
pub(crate) struct Stream<'r, 'c, 'a> {
    group: &'r Group<'c>,
    states: Vec<AttnState<'a>>,
    own: &'r [Keys<'a>],
    window: VecDeque<Travelling>,
    report: Report,
}

/// Wait for the first parcel of the window.
struct First<'w> {
    window: &'w VecDeque<Travelling>,
    /// Also until it was taken wherever it goes.
    taken: bool,
}

impl Advance for First<'_> {
    fn poll(&mut self) -> bool {
        self.window.poll()
    }

    fn is_done(&self) -> bool {
        let first = self.window.front();
        first.is_none_or(|first| if self.taken { first.is_done() } else { first.tensors().is_some() })
    }

    fn awaited(&self) -> Awaited {
        let what = if self.taken { "that it takes keys and values" } else { "its keys and values" };
        (self.window.front().map(Travelling::peers).unwrap_or_default(), what)
    }
}

impl<'r, 'c, 'a> Stream<'r, 'c, 'a> {
    pub(crate) fn new(group: &'r Group<'c>, states: Vec<AttnState<'a>>, own: &'r [Keys<'a>]) -> Self {
        Self { group, states, own, window: VecDeque::new(), report: Report::default() }
    }

    /// Takes all steps, in order.
    pub(crate) fn run(&mut self, steps: &[Step], sizes: &Sizes) -> Result<(), Error> {
        let keys = steps.last().map_or(0, |last| last.parcel.keys.end);
        let mut next = steps.iter().filter(|step| step.way.is_some());
        for step in steps {
            if step.way.is_some() {
                while self.window.len() < WINDOW
                    && let Some(step) = next.next()
                {
                    self.begin(step, sizes)?;
                }
                self.wait(false)?;
            }
            self.compute(step)?;
            if step.way.is_some() {
                self.wait(true)?;
                self.window.pop_front();
            }
            if let Some(progress) = self.group.progress {
                progress(step.parcel.keys.end, keys);
            }
        }
        Ok(())
    }

    /// Returns the keys and values of a parcel, if they are this rank's own.
    fn own(&self, parcel: &Parcel) -> Option<[Tensor<'a>; 2]> {
        let keys = self.own.get(parcel.stretch).filter(|_| parcel.owner == self.group.comm.rank)?;
        Some([keys.k.rows_in(parcel.rows.clone())?, keys.v.rows_in(parcel.rows.clone())?])
    }

    /// Sets a parcel on its way.
    fn begin(&mut self, step: &Step, sizes: &Sizes) -> Result<(), Error> {
        let Some((from, to)) = &step.way else { return Ok(()) };
        let way =
            |part: usize| Way { from: *from, to: to.clone(), tag: TAG + (2 * (step.number % TAGS) + part) as u16 };
        let own = self.own(&step.parcel);
        let travelling =
            Travelling::begin(self.group.comm, sizes, (own.as_slice(), step.parcel.keys.len()), [way(0), way(1)])?;
        let [_, sent, received] = travelling.bytes();
        self.window.push_back(travelling);
        let held = self.window.iter().map(|parcel| parcel.bytes()[0]).sum();
        let report = &mut self.report;
        (report.sent, report.received) = (report.sent + sent, report.received + received);
        report.held = report.held.max(held);
        Ok(())
    }

    fn wait(&mut self, taken: bool) -> Result<(), Error> {
        let mut first = First { window: &self.window, taken };
        self.report.waiting += self.group.timeout.wait(&mut first)?;
        Ok(())
    }

    /// Computes the keys of a step, or passes over them if no row sees them, while messages advance.
    fn compute(&mut self, step: &Step) -> Result<(), Error> {
        let n = step.parcel.keys.len();
        if !step.needed {
            self.report.hidden += n;
            return self.states.iter_mut().try_for_each(|state| Ok(state.skip(n)?));
        }
        self.report.computed += n;
        let begin = Instant::now();
        let own = self.own(&step.parcel);
        let kv = own.or_else(|| self.window.front().and_then(Travelling::tensors));
        let Some([k, v]) = kv else { unreachable!("the parcel was waited for") };
        let states = &mut self.states;
        let push = || {
            states.iter_mut().try_for_each(|state| {
                if state.sees(step.parcel.keys.clone()) { state.push(k, v) } else { state.skip(n) }
            })
        };
        beside(self.group.pool, &self.window, push)?;
        self.report.computing += begin.elapsed();
        Ok(())
    }

    /// Writes the outputs of all rows.
    pub(crate) fn read(mut self, outputs: Vec<Outputs<'_>>) -> Result<Report, Error> {
        let begin = Instant::now();
        for (state, outputs) in self.states.iter_mut().zip(outputs) {
            state.read(outputs)?;
        }
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

/// Does work on a pool, while this thread lets messages advance: MPI moves nothing by itself.
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
