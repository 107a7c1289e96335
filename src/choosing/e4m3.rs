//! Numbers of eight bits with four bits of exponent (OCP FP8 E4M3FN), as bfloat16.

use crate::error::{Error, same};
use sdpa_kernels::{Bf16, e4m3};

/// Widens numbers of eight bits, OCP FP8 E4M3FN (`float8_e4m3fn`), to bfloat16, exactly: sign, four bits of exponent (bias 7), three
/// of fraction; no infinities. The codes 0x7f and 0xff become NaN. Scales of keys are [factors](crate::Indexer::key_factors) of an indexer.
///
/// ```
/// use sdpa::{Bf16, widen_e4m3};
/// let mut wide = [Bf16::default(); 4];
/// widen_e4m3(&[0x38, 0xc0, 0x7e, 0x01], &mut wide)?;
/// assert_eq!(wide.map(Bf16::to_f32), [1.0, -2.0, 448.0, 2f32.powi(-9)]);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// [`Error::Mismatch`] if the lengths differ.
pub fn widen_e4m3(codes: &[u8], to: &mut [Bf16]) -> Result<(), Error> {
    same("widened numbers", "length", to.len(), codes.len(), "codes")?;
    for (to, &code) in to.iter_mut().zip(codes) {
        *to = e4m3(code);
    }
    Ok(())
}
