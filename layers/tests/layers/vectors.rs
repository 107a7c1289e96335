//! Vectors of floats.

use crate::support::{Rng, UNWRITTEN};

/// Normal numbers of a seed.
pub(crate) fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.normal()).collect()
}

/// Memory that nothing was written to.
pub(crate) fn unwritten(n: usize) -> Vec<f32> {
    vec![f32::from_bits(UNWRITTEN); n]
}

/// Bits of floats, to compare NaN and zeros too.
pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
