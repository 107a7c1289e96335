//! What the program and its workers say to each other: one JSON object a line, an answer to each question.
//!
//! Every peer computes in a separate process, started anew for each number of threads. Several of them take their
//! number of threads from the environment, once; one that crashes takes nothing with it; and no allocator, pool or
//! register state of one meets another.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// To a worker. `T` says what to compute.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Request<T> {
    /// Forget the last task and get ready for this one.
    Prepare(T),
    /// Compute this number of times, one after the other.
    Burst { runs: usize },
    /// Write the last result to a file.
    Output { file: PathBuf },
}

/// From a worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Reply {
    /// The first line, unasked for.
    Ready {
        version: String,
    },
    /// How it will be computed.
    Prepared {
        how: String,
    },
    /// This peer does not do that; as the first line, it does nothing on this machine.
    Unsupported {
        why: String,
    },
    /// How long each run took.
    Seconds(Vec<f64>),
    Written,
    /// It should have, but did not.
    Failed {
        why: String,
    },
}
