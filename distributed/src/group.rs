//! Group: the communicator of a call, and how this rank computes and waits.

use crate::message::Comm;
use crate::timeout::Timeout;
use core::fmt;
use sdpa::Exec;

/// Function that is told how many of how many keys were computed.
pub(crate) type Progress<'c> = &'c dyn Fn(usize, usize);

/// Communicator of a call, and how this rank computes and waits.
#[derive(Clone, Copy)]
pub(crate) struct Group<'c> {
    pub(crate) comm: Comm,
    pub(crate) timeout: Timeout,
    pub(crate) exec: Exec<'c>,
    pub(crate) pool: Option<&'c rayon::ThreadPool>,
    pub(crate) progress: Option<Progress<'c>>,
}

impl fmt::Debug for Group<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Comm { rank, size, .. } = self.comm;
        f.debug_struct("Group").field("rank", &rank).field("size", &size).finish_non_exhaustive()
    }
}
