//! Attention over several machines by MPI, with the bits of one: [`sdpa`](https://docs.rs/sdpa) for sequences with keys and
//! values that do not fit one machine, or that take too long on it.
//!
//! Every rank of a communicator has a share of the query rows and of the keys and values ([`Share`]). Keys and values
//! travel from rank to rank in key order, the next while one is computed, and each rank pushes them into the states of
//! its rows: so a result has the bits of one call on one machine, on any number of ranks and however they share. Calls can be cut
//! by heads instead ([`Split`]), and there are gradients ([`BackwardShare`]) and decode steps over a cut cache ([`Step`]).
//!
//! The repository's [docs/distributed.md](https://github.com/sdpa-rs/sdpa/blob/HEAD/docs/distributed.md) says how to run it.
#![deny(unsafe_code)]

mod agreement;
mod all_to_all;
mod backward;
mod choice;
mod costs;
mod cut;
mod description;
mod error;
mod exchange;
mod forecast;
mod forms;
mod functions;
mod group;
mod heads;
mod layout;
mod memory;
mod merges;
mod message;
mod parcel;
mod parts;
mod prompt;
mod ranks;
mod report;
mod sequences;
mod share;
mod split;
mod step;
mod stream;
mod timeout;
mod whole;
mod workload;

pub use backward::share::BackwardShare;
pub use costs::Costs;
pub use error::Error;
pub use forecast::{Forecast, Times};
pub use layout::zigzag;
pub use merges::Merges;
pub use ranks::Ranks;
pub use report::Report;
pub use share::Share;
pub use split::Split;
pub use step::Step;
pub use workload::Workload;
