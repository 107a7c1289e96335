//! Memory: what a plan says it takes, whatever the options and lengths; that warm runs take none, and what is
//! said where there is no more.

mod held;
mod partials;
mod refused;
mod scratch;
mod steps;
mod warm;

use sdpa::{Alignment, Attention};

fn rules() -> [Attention; 3] {
    let causal = Attention::new().causal();
    [Attention::new(), causal.align(Alignment::BottomRight), causal.align(Alignment::Offset(-3))]
}

/// Bytes that a workspace holds for `bytes` of partial results of a number of sequences: room for half as much again, in cache
/// lines, one more to begin with a whole one, and a list of the sequences and its end.
pub(crate) fn held(bytes: usize, sequences: usize) -> usize {
    64 * ((bytes / 4 * 3 / 2).div_ceil(16) + 1) + 72 * (sequences + 1)
}
