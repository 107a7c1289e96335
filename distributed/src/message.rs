//! Messages on their way: requests of MPI, with the memory that they read or write. The only unsafe code of the package.
//!
//! A request reads or writes memory until it is complete, and a rank that died may leave it incomplete for ever. So a
//! [`Transfer`] owns its memory, and gives up the memory of requests that are not complete: it is never freed.
#![allow(
    unsafe_code,
    reason = "MPI is a C library; requests of the crate mpi abort the program if they cannot complete"
)]

use core::cell::{Cell, RefCell};
use core::ops::Range;
use mpi::datatype::Equivalence;
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::Communicator;

/// Bytes of a piece, at most: the unit in which a transfer is passed on.
pub(crate) const PIECE: usize = 1 << 20;

/// Communicator of the caller's, who lends it for the whole call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Comm {
    raw: ffi::MPI_Comm,
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl Comm {
    pub(crate) fn of(communicator: &impl Communicator) -> Self {
        let number = |n: i32| usize::try_from(n).expect("ranks are counted from 0");
        Self { raw: communicator.as_raw(), rank: number(communicator.rank()), size: number(communicator.size()) }
    }
}

/// Elements that travel.
pub(crate) trait Element: Equivalence + Copy + Default + 'static {}
impl Element for f32 {}
impl Element for u64 {}
impl Element for u16 {}
impl Element for u8 {}

/// One request, with the rank at its other end.
#[derive(Debug)]
struct Request {
    raw: ffi::MPI_Request,
    peer: usize,
    receives: bool,
    done: bool,
}

impl Request {
    /// Asks MPI whether the request is complete. Any request that is asked lets all others advance.
    fn poll(&mut self) -> bool {
        if !self.done {
            let mut flag = 0;
            // SAFETY: `raw` is an active request: it was made by `MPI_Isend` or `MPI_Irecv`, and is not tested again
            // once it is complete. The memory it uses belongs to the transfer that owns the request.
            unsafe { ffi::MPI_Test(&raw mut self.raw, &raw mut flag, ffi::RSMPI_STATUS_IGNORE) };
            self.done = flag != 0;
        }
        self.done
    }
}

/// Ranks that elements come from and go to, and the tag they travel under.
#[derive(Debug, Clone)]
pub(crate) struct Way {
    /// `None` where the elements are this rank's own.
    pub(crate) from: Option<usize>,
    pub(crate) to: Vec<usize>,
    pub(crate) tag: u16,
}

/// Elements that come from a rank in pieces, go on to other ranks piece by piece, or both.
#[derive(Debug)]
pub(crate) struct Transfer<T: Element> {
    /// Nobody makes a reference to the elements before all have arrived.
    memory: Vec<T>,
    /// Address of the first element, by which all requests reach the memory.
    first: *mut T,
    comm: Comm,
    way: Way,
    arrivals: RefCell<Vec<Request>>,
    /// Number of pieces that were sent on.
    passed: Cell<usize>,
    departures: RefCell<Vec<Request>>,
}

impl<T: Element> Transfer<T> {
    const ELEMENTS: usize = PIECE / size_of::<T>();

    /// Begins a transfer of `memory`: of its elements if they are this rank's own, otherwise into it.
    pub(crate) fn begin(comm: Comm, mut memory: Vec<T>, way: Way) -> Self {
        let (first, from) = (memory.as_mut_ptr(), way.from);
        let (arrivals, passed, departures) = Default::default();
        let transfer = Self { memory, first, comm, way, arrivals, passed, departures };
        if let Some(from) = from {
            transfer.arrivals.borrow_mut().extend((0..transfer.pieces()).map(|piece| transfer.receive(piece, from)));
        }
        transfer.poll();
        transfer
    }

    fn pieces(&self) -> usize {
        self.memory.len().div_ceil(Self::ELEMENTS)
    }

    fn elements_of(&self, piece: usize) -> Range<usize> {
        piece * Self::ELEMENTS..self.memory.len().min((piece + 1) * Self::ELEMENTS)
    }

    /// Begins to receive a piece.
    fn receive(&self, piece: usize, from: usize) -> Request {
        let mut raw = core::mem::MaybeUninit::uninit();
        let elements = self.elements_of(piece);
        let (n, kind) = (elements.len() as i32, T::equivalent_datatype().as_raw());
        // SAFETY: the elements lie in the transfer's memory, which is not moved, freed or read before the request is
        // complete (`Drop`, `elements`); no other receive writes them. `kind` is the type of an element, the
        // communicator is valid while its borrow lives, and MPI sets `raw`.
        let raw = unsafe {
            let at = self.first.add(elements.start).cast();
            ffi::MPI_Irecv(at, n, kind, from as i32, self.way.tag.into(), self.comm.raw, raw.as_mut_ptr());
            raw.assume_init()
        };
        Request { raw, peer: from, receives: true, done: false }
    }

    /// Begins to send a piece, which has arrived.
    fn send(&self, piece: usize, to: usize) -> Request {
        let mut raw = core::mem::MaybeUninit::uninit();
        let elements = self.elements_of(piece);
        let (n, kind) = (elements.len() as i32, T::equivalent_datatype().as_raw());
        // SAFETY: the elements lie in the transfer's memory, which is not moved or freed before the request is complete
        // (`Drop`), and nobody writes them: they have arrived. The rest as for `receive`.
        let raw = unsafe {
            let at = self.first.add(elements.start).cast_const().cast();
            ffi::MPI_Isend(at, n, kind, to as i32, self.way.tag.into(), self.comm.raw, raw.as_mut_ptr());
            raw.assume_init()
        };
        Request { raw, peer: to, receives: false, done: false }
    }

    /// Lets the transfer advance, and passes on pieces that have arrived, in order. Returns true if anything was done.
    pub(crate) fn poll(&self) -> bool {
        let (mut arrivals, mut departures) = (self.arrivals.borrow_mut(), self.departures.borrow_mut());
        let mut progress = false;
        for request in arrivals.iter_mut().chain(departures.iter_mut()).filter(|request| !request.done) {
            progress |= request.poll();
        }
        while self.passed.get() < self.pieces() && arrivals.get(self.passed.get()).is_none_or(|piece| piece.done) {
            departures.extend(self.way.to.iter().map(|&to| self.send(self.passed.get(), to)));
            self.passed.set(self.passed.get() + 1);
            progress = true;
        }
        progress
    }

    /// Returns true if all elements are here.
    pub(crate) fn has_arrived(&self) -> bool {
        self.arrivals.borrow().iter().all(|request| request.done)
    }

    /// Returns true if all elements are here, and where they go.
    pub(crate) fn is_done(&self) -> bool {
        let taken = self.departures.borrow().iter().all(|request| request.done);
        self.has_arrived() && self.passed.get() == self.pieces() && taken
    }

    /// Returns the elements, if all are here.
    pub(crate) fn elements(&self) -> Option<&[T]> {
        // From then on nobody writes them: requests that send them only read.
        self.has_arrived().then_some(&self.memory)
    }

    /// Returns the memory, if all is done.
    pub(crate) fn into_memory(mut self) -> Option<Vec<T>> {
        self.is_done().then(|| core::mem::take(&mut self.memory))
    }

    /// Returns the ranks that the transfer waits for; some may occur more than once.
    pub(crate) fn peers(&self) -> Vec<usize> {
        let (arrivals, departures) = (self.arrivals.borrow(), self.departures.borrow());
        arrivals.iter().chain(departures.iter()).filter(|request| !request.done).map(|request| request.peer).collect()
    }

    /// Returns the bytes of the memory, and those that this rank sends and receives.
    pub(crate) fn bytes(&self) -> [usize; 3] {
        let all = self.memory.len() * size_of::<T>();
        [
            self.memory.capacity() * size_of::<T>(),
            all * self.way.to.len(),
            if self.way.from.is_some() { all } else { 0 },
        ]
    }
}

impl<T: Element> Drop for Transfer<T> {
    fn drop(&mut self) {
        let mut leaks = false;
        let requests = self.arrivals.get_mut().iter_mut().chain(self.departures.get_mut());
        for request in requests.filter(|request| !request.done) {
            leaks = true;
            // SAFETY: the request is active. MPI may go on using its memory, which is given up below.
            unsafe {
                if request.receives {
                    ffi::MPI_Cancel(&raw mut request.raw);
                }
                ffi::MPI_Request_free(&raw mut request.raw);
            }
        }
        if leaks {
            core::mem::forget(core::mem::take(&mut self.memory));
        }
    }
}
