//! Kinds of cases of `sdpa-layers`: histories that its tests make, too.
//!
//! | kind | what is random | checked by |
//! |---|---|---|
//! | state-caches | histories of caches of states: calls over several sequences, rollbacks, forks, files, refused calls | plain states, at each length that can be gone back to; the bits of one call |
//! | hybrid-caches | histories of the caches of a hybrid model's layers: steps, whole or cut off, rollbacks, forks, files, refused calls | the same changes of each alone, or none; the bits of one step |

#[path = "../../layers/tests/layers/state_histories/mod.rs"]
mod state_histories;

use crate::fuzzer::{Kind, kind};
use crate::support::Rng;

/// Steps of a history.
const STEPS: usize = 25;

/// Every kind there is. A few cases of each run with the tests of the layers, none with those of `sdpa`.
pub(crate) static KINDS: [Kind; 2] = [
    kind("state-caches", 0, |rng| state_histories::check(&mut Rng::new(rng.bits()), STEPS)),
    kind("hybrid-caches", 0, |rng| state_histories::check_hybrid(&mut Rng::new(rng.bits()), STEPS)),
];
