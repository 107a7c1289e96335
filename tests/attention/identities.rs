//! What attention must do whatever the numbers are, up to rounding or to the bit.

mod bits;
mod numbers;
