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
