//! Numbers that backends compute exponentials and conversions with.

/// Constant, once for each lane of a register of 256 bits: an operand in memory of its vectors, and of shorter ones.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct Constant(pub(crate) [f32; 8]);

impl Constant {
    pub(crate) const fn new(x: f32) -> Self {
        Self([x; 8])
    }
}

/// Constant that rounds a number of moderate size to an integer when added to it (1.5·2²³ does), and leaves the integer
/// plus 127 + 64 in the lowest bits: shifted into place, the exponent field of 2^(n + 64), which is normal for all n in
/// question but [`LOWEST_EXPONENT`].
pub(crate) const SHIFT: f32 = 12_582_912.0 - LOWEST_EXPONENT;

/// −127 − 64, which [`SHIFT`] turns into an exponent field of 0.
pub(crate) const LOWEST_EXPONENT: f32 = -191.0;

/// 2⁻⁶⁴: cancels the 64 in [`SHIFT`].
pub(crate) const TWO_TO_MINUS_64: f32 = f32::from_bits((127 - 64) << 23);

/// Infinity as bits of an `f32`. Larger bits, without the sign, are NaN.
pub(crate) const INFINITY: u32 = f32::INFINITY.to_bits();

/// 2¹⁶ as bits of an `f32`: from here on an `f16` is infinite; rounding a number just below reaches infinity by its own
/// carry.
pub(crate) const F16_END: u32 = (127 + 16) << 23;

/// 2⁻¹⁴ as bits of an `f32`: a smaller number is subnormal as an `f16`.
pub(crate) const F16_NORMAL: u32 = (127 - 14) << 23;

/// Difference between the exponent field of an `f32` and that of the same number as an `f16`, shifted into place.
pub(crate) const F16_BIAS: u32 = (127 - 15) << 23;

/// 2⁻²⁴, the unit of subnormal `f16`, and of an `f32` from 0.5 to 1: adding 0.5 to such a number rounds it as `f16`
/// does.
pub(crate) const F16_UNIT: f32 = f32::from_bits((127 - 24) << 23);

/// The only NaN that results are written with, whatever payload arithmetic left.
pub(crate) const QUIET_NAN: f32 = f32::from_bits(0x7fc0_0000);

/// Returns a number as it is written: any NaN as [`QUIET_NAN`].
#[inline(always)]
pub(crate) fn quiet(x: f32) -> f32 {
    if x.is_nan() { QUIET_NAN } else { x }
}
