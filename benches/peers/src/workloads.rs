//! Workloads by name: those that all benchmarks share, and latent steps.

use crate::support::{LENGTHS, WORKLOADS, Workload};
use sdpa::Shape;
use serde::{Deserialize, Serialize};

/// Steps of multi-head latent attention in its absorbed form, with the sizes of DeepSeek-V2 and V3: 128 query heads share one
/// key. Its first 512 elements are the value, its last 64 the position.
const LATENT: &[Workload] = &[Workload {
    name: "mla-4k",
    shape: Shape { batch: 1, heads: 128, kv_heads: 1, q_len: 1, kv_len: 4096, head_dim: 576, value_dim: 512 },
    causal: false,
    window: None,
    softcap: None,
}];

/// Place of the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Values {
    /// A tensor of their own.
    Separate,
    /// The first `value_dim` elements of the keys.
    InKeys,
}

impl Values {
    pub(crate) fn of(workload: &Workload) -> Self {
        let latent = LATENT.iter().any(|latent| latent.name == workload.name);
        if latent { Self::InKeys } else { Self::Separate }
    }
}

/// Every workload but the lengths of `sweep`.
pub(crate) fn named() -> impl Iterator<Item = Workload> {
    WORKLOADS.iter().chain(LATENT).copied()
}

/// Every workload that `--workload` knows.
pub(crate) fn all() -> impl Iterator<Item = Workload> {
    named().chain(LENGTHS.iter().copied())
}

/// The workload of that name.
pub(crate) fn by_name(name: &str) -> Option<Workload> {
    all().find(|workload| workload.name == name)
}
