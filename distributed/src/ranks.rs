//! Ranks: the processes of a communicator, and how a call over them runs.

use crate::backward;
use crate::backward::share::BackwardShare;
use crate::choice;
use crate::costs::{self, Costs};
use crate::error::Error;
use crate::forecast::Forecast;
use crate::group::Group;
use crate::heads;
use crate::memory::Memory;
use crate::message::Comm;
use crate::prompt::Call;
use crate::report::Report;
use crate::share::Share;
use crate::split::Split;
use crate::step::{self, Step};
use crate::timeout::Timeout;
use core::cell::{Cell, RefCell};
use core::marker::PhantomData;
use mpi::topology::Communicator;
use sdpa::{Attention, Exec, MaskMod, Mods, ScoreMod, WeightMod};
use std::time::{Duration, Instant};

/// Ranks of a communicator of yours, which compute attention together.
///
/// All ranks of the communicator make the same calls in the same order. MPI is called by the calling thread alone
/// (`MPI_THREAD_FUNNELED` is enough), under tags from 8000 to 24999: use others, or duplicate the communicator.
///
/// ```no_run
/// use mpi::traits::*;
/// use sdpa::{Attention, Inputs, Outputs, View, ViewMut};
/// use sdpa_mpi::{Ranks, Share};
/// use std::time::Duration;
///
/// let universe = mpi::initialize().expect("MPI");
/// let world = universe.world();
/// let ranks = Ranks::new(&world, Duration::from_secs(60));
/// // 1000 rows and keys of each rank, of 8 heads of 64.
/// let (shape, len) = ([1, 8, 1000, 64], 8 * 1000 * 64);
/// let (q, k, v, mut out) = (vec![0.5f32; len], vec![0.25f32; len], vec![1.0f32; len], vec![0.0f32; len]);
/// let (q, k, v) = (View::bhld(&q, shape)?, View::bhld(&k, shape)?, View::bhld(&v, shape)?);
/// let first = 1000 * world.rank() as usize;
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, shape)?);
/// let share = Share::new().rows(first, Inputs::new(q, k, v), outputs).keys(first, k, v);
/// let report = ranks.attention(&Attention::new().causal(), share)?;
/// println!("rank {}: {report}", world.rank());
/// # Ok::<(), sdpa_mpi::Error>(())
/// ```
#[derive(Debug)]
pub struct Ranks<'c> {
    group: Group<'c>,
    split: Split,
    /// Calls that have begun.
    calls: Cell<u64>,
    /// True while a call runs, and for ever if it did not end together with the others'.
    broken: Cell<bool>,
    memory: RefCell<Memory>,
    communicator: PhantomData<&'c ()>,
}

impl<'c> Ranks<'c> {
    /// Takes a communicator, and the time after which a call is given up in which nothing comes from the ranks that it
    /// waits for. The time in which this rank computes does not count; that in which another one does, does.
    pub fn new(communicator: &'c impl Communicator, timeout: Duration) -> Self {
        let group = Group {
            comm: Comm::of(communicator),
            timeout: Timeout(timeout),
            exec: Exec::default(),
            pool: None,
            progress: None,
        };
        let (calls, broken, memory) = Default::default();
        Self { group, split: Split::Rows, calls, broken, memory, communicator: PhantomData }
    }

    /// Sets instruction set and threads; by default the widest one, and all threads of rayon's pool.
    #[must_use]
    pub fn exec(self, exec: Exec<'c>) -> Self {
        Self { group: Group { exec, ..self.group }, ..self }
    }

    /// Sets the pool that computes, with all its threads; by default rayon's global one. While it computes, the
    /// calling thread sees to messages; called from inside a pool, it does one after the other.
    #[must_use]
    pub fn pool(self, pool: &'c rayon::ThreadPool) -> Self {
        let exec = self.group.exec.threads(pool.current_num_threads());
        Self { group: Group { exec, pool: Some(pool), ..self.group }, ..self }
    }

    /// Sets how calls are cut: by rows, as by default, by heads, or as a cost model chooses. Bits do not depend on it.
    #[must_use]
    pub fn split(self, split: Split) -> Self {
        Self { split, ..self }
    }

    /// Sets a function that is told how many of how many keys are done: after each parcel of them; by heads before each message,
    /// and after each key/value head of this rank's, which are then computed one after the other; and in a step when this rank's
    /// keys are.
    #[must_use]
    pub fn progress(self, progress: &'c dyn Fn(usize, usize)) -> Self {
        Self { group: Group { progress: Some(progress), ..self.group }, ..self }
    }

    /// Computes attention of all ranks' rows over all ranks' keys, with the bits that one call on one machine has,
    /// however rows and keys are shared out.
    ///
    /// Every option of a call that can be cut by rows and keys has its place in the settings and the share's inputs.
    /// Dropout is refused; weight functions, positions of rows or keys, and biases and masks over the last keys need
    /// [`Split::Heads`]; biases and masks by key/value head or with a period need [`Split::Rows`].
    ///
    /// # Errors
    /// [`Error`]; the outputs are then untouched. After [`Error::TimedOut`] messages may still be on their way, so
    /// later calls are refused: take another communicator, or end the program. So they are after an error of this rank alone
    /// while keys and values were on their way.
    pub fn attention(&self, attention: &Attention, share: Share<'_>) -> Result<Report, Error> {
        self.attention_with(attention, share, &Mods::new())
    }

    /// Computes attention with score and mask functions, otherwise as [`Self::attention`]. They see the rows and keys of
    /// the whole call. That they do the same on every rank cannot be checked.
    ///
    /// # Errors
    /// As [`Self::attention`].
    ///
    /// # Panics
    /// If one of the functions does; the other ranks then time out.
    pub fn attention_with<S: ScoreMod, M: MaskMod, P: WeightMod>(
        &self,
        attention: &Attention,
        share: Share<'_>,
        mods: &Mods<S, M, P>,
    ) -> Result<Report, Error> {
        let given = mods.weight.is_given();
        self.timed(|number, streams| {
            match choice::chosen(&self.group, number, (self.split, attention), &share, given)? {
                Split::Heads => {
                    heads::Call { group: &self.group, attention: *attention, number, streams }.run(share, mods)
                }
                _ => Call { group: &self.group, attention: *attention, number, streams, memory: &self.memory }
                    .run(share, mods),
            }
        })
    }

    /// Computes the gradients of attention of all ranks' rows over all ranks' keys, with the bits that one call on one machine has,
    /// however rows and keys are shared out: of queries, keys and values. Settings and options are those of the forward pass.
    ///
    /// Keys, values and the sums of their gradients go from rank to rank in the order of the rows: while one rank computes, those
    /// before and after it are at other keys. The sums are `f32`, for each query head.
    ///
    /// # Errors
    /// As [`Self::attention`]; the gradients are then untouched.
    pub fn attention_backward(&self, attention: &Attention, share: BackwardShare<'_>) -> Result<Report, Error> {
        self.attention_backward_with(attention, share, &Mods::new())
    }

    /// Computes the gradients of attention with score and mask functions, otherwise as [`Self::attention_backward`]. A score function
    /// needs its derivative.
    ///
    /// # Errors
    /// As [`Self::attention_backward`].
    ///
    /// # Panics
    /// If one of the functions does; the other ranks then time out.
    pub fn attention_backward_with<S: ScoreMod, M: MaskMod, P: WeightMod>(
        &self,
        attention: &Attention,
        share: BackwardShare<'_>,
        mods: &Mods<S, M, P>,
    ) -> Result<Report, Error> {
        self.timed(|number, streams| {
            backward::run(
                &Call { group: &self.group, attention: *attention, number, streams, memory: &self.memory },
                share,
                mods,
            )
        })
    }

    /// Measures what moving and computing cost on these ranks, in some tenths of a second. Every rank gets the same figures.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; later calls are then refused.
    pub fn measure(&self) -> Result<Costs, Error> {
        self.all(|_, _| costs::measure(&self.group))
    }

    /// Forecasts how long a call takes, cut by rows and by heads, and so explains what [`Split::Chosen`] chooses. All ranks call
    /// it, with the share of each.
    ///
    /// # Errors
    /// As [`Self::attention`], as far as the sizes of the call are concerned.
    pub fn forecast(&self, attention: &Attention, share: &Share<'_>, costs: Costs) -> Result<Forecast, Error> {
        self.all(|number, _| Ok(choice::forecast(&self.group, number, attention, share, costs)?.1))
    }

    /// Does what all ranks do together, told the number of calls before it and where to say that messages are on their way. Keeps
    /// in mind if it was given up, or ended while they were.
    fn all<R>(&self, run: impl FnOnce(u64, &Cell<bool>) -> Result<R, Error>) -> Result<R, Error> {
        if self.broken.replace(true) {
            return Err(Error::Broken);
        }
        let streams = Cell::new(false);
        let result = run(self.calls.replace(self.calls.get() + 1), &streams);
        self.broken.set(streams.get() || matches!(result, Err(Error::TimedOut { .. })));
        result
    }

    /// Does what all ranks do together, and adds to its report how long it took.
    fn timed(&self, run: impl FnOnce(u64, &Cell<bool>) -> Result<Report, Error>) -> Result<Report, Error> {
        let begin = Instant::now();
        let report = self.all(run)?;
        Ok(Report { total: begin.elapsed(), ..report })
    }

    /// Computes a decode step: a few rows, the same on every rank, over keys that the ranks have in blocks of 256, with the bits
    /// that one call over all keys has. Every rank gets the results.
    ///
    /// What travels is a state for each row: 130 numbers for values of 128, once along the keys, then to all ranks.
    ///
    /// # Errors
    /// [`Error`]; the outputs are then untouched. After [`Error::TimedOut`] later calls are refused.
    pub fn step(&self, attention: &Attention, step: Step<'_>) -> Result<Report, Error> {
        self.timed(|number, _| step::run(&self.group, number, attention, step))
    }
}
