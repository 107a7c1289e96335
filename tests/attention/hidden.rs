//! Hidden memory changes no bit of anything; visible NaN and ∞ reach the outputs that arithmetic says.

mod causal;
mod options;
mod visible;

use crate::support::Sizes;
use sdpa::{Alignment, Attention};

const POISONS: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38];

/// Rows and keys of different lengths, tiles and blocks cut by the diagonal, shared heads, dims of no whole vector.
const CASES: [(Sizes, Alignment); 9] = [
    ([1, 1, 1, 1, 3, 1, 1], Alignment::TopLeft),
    ([1, 1, 1, 7, 7, 4, 5], Alignment::TopLeft),
    ([2, 2, 1, 5, 40, 16, 16], Alignment::TopLeft),
    ([1, 6, 2, 33, 65, 20, 33], Alignment::Offset(10)),
    ([1, 1, 1, 20, 600, 16, 16], Alignment::Offset(250)),
    ([1, 2, 1, 100, 300, 40, 17], Alignment::TopLeft),
    ([1, 1, 1, 300, 270, 16, 48], Alignment::BottomRight),
    ([1, 1, 1, 12, 257, 257, 8], Alignment::Offset(-4)),
    ([1, 1, 1, 9, 30, 8, 300], Alignment::Offset(3)),
];

fn causal_at(alignment: Alignment) -> Attention {
    Attention::new().causal().align(alignment)
}
