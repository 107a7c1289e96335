//! Types of tensor elements. Arithmetic is in `f32`: shorter elements are widened in registers when they are read, and
//! rounded when they are written.
//!
//! Widening is exact. Narrowing rounds to nearest even, once: numbers beyond the largest become ±∞; subnormal numbers
//! are rounded like any other. NaN stays NaN, and becomes quiet. The bits, also of NaN, are the same on every
//! instruction set.

use crate::simd::aligned::Plain;
use crate::simd::isa::Isa;
use crate::simd::lanes::{load, load_part, store, store_part};
use crate::simd::{F16_BIAS, F16_END, F16_NORMAL, F16_UNIT, INFINITY, LANES, Simd, Vector};
use core::fmt;

/// Type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// bfloat16: the upper half of an `f32`. 8 bits of exponent, 7 of fraction.
    Bf16,
    /// IEEE binary16: 5 bits of exponent, 10 of fraction. The largest number is 65,504.
    F16,
}

impl Dtype {
    /// Returns the number of bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// Prints `f32`, `bf16` or `f16`.
impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

/// Prints `exact`, `native` or `accurate`.
impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Exact => "exact",
            Self::Native => "native",
            Self::Accurate => "accurate",
        })
    }
}

/// Precision shortcuts that the kernels may take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Precision {
    /// Widens elements and computes everything in `f32`: the bits of the same call over `f32` tensors.
    #[default]
    Exact,
    /// Uses the machine's own products of bfloat16, if it has them and keys or values are bfloat16: a matrix unit (AMX of Intel,
    /// sixteen times the arithmetic of FMAs in the same time), AVX512_BF16 of AMD or FEAT_BF16 of AArch64 (twice). The matrix unit
    /// needs both keys and values to be bfloat16.
    ///
    /// Queries of other types are rounded to bfloat16 if keys are bfloat16. If values are, weights are rounded to
    /// bfloat16, by up to 2⁻⁸ of themselves, after an exponential that is off by up to 2⁻¹³. Outputs are divided by the
    /// sum of the rounded weights, so a mean error of the weights cancels. Sums are `f32`. Rounding is to nearest even,
    /// and subnormal numbers count as 0. So, besides the rounding of any `f32` sum: a score differs by at most
    /// scale·2⁻⁸·Σ|q·k| from that of an unrounded query (not at all if the query was bfloat16 already); because of its
    /// weights w, an output o differs by at most 0.0041·Σ w·|v − o|, and the log-sum-exp by at most 0.0041. Weights
    /// that are written out are exp(score − log-sum-exp), so off by at most 0.0041 of themselves; key weight sums are
    /// exact. With dropout or a weight function, weights are divided by an exact sum and rounded last: an output is
    /// then off by at most 2⁻⁸·Σ|w·v|.
    ///
    /// This is [`Precision::Exact`] if the instruction set lacks the products or has slow ones, as Intel's AVX512_BF16 is
    /// ([`Isa::has_native_bf16`](crate::Isa::has_native_bf16) tells), or if neither keys nor values are bfloat16. On one machine and
    /// instruction set, results have the same bits for any thread count, batch, chunking, layout, mask form, prefill or decode,
    /// tensors or cache, as with `Exact`; other products may round sums differently. A matrix unit takes 32 products of a sum in one
    /// step: those of even elements are one chain of FMAs from 0, those of odd ones another, and the sum of both is added once (Intel
    /// 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS). Steps begin at multiples of 32 elements of a
    /// query, and at multiples of 32 keys.
    Native,
    /// Multiplies tensors of any type on a matrix unit, with errors of the size of [`Precision::Exact`]'s: a number is the sum of up to
    /// three bfloat16, each the rounded rest of those before, and a product is the sum of the products of such parts that count: six
    /// where both numbers are `f32`, four and five where queries, keys and values are binary16, one and three where they are bfloat16
    /// (Henry, Tang and Heinecke 2019, arXiv:1904.06376). Weights, and gradients of scores, have three parts.
    ///
    /// In one step of the unit, of 32 products of a sum as in [`Precision::Native`], the products of the smallest parts are added
    /// first. Sums are `f32`. Numbers and parts below 2⁻¹²⁶ count as 0. An infinite query, key or weight may make NaN where an exact
    /// product is infinite, and so may a weight or a gradient of a score from 3.39·10³⁸ on.
    ///
    /// This is [`Precision::Exact`] where there is no such unit ([`Isa::matrix_unit`](crate::Isa::matrix_unit) tells), and for caches
    /// of integers. Results have the same bits as far as those of [`Precision::Native`] have. Few rows take longer than with `Exact`:
    /// all they read is split first.
    Accurate,
}

/// Bits of a bfloat16. With the feature `half`, views of `half::bf16` convert to views of this type.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// Bits of an IEEE binary16. With the feature `half`, views of `half::f16` convert to views of this type.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub struct F16(pub u16);

// SAFETY: a two-byte number; every bit pattern is valid.
unsafe impl Plain for Bf16 {}
// SAFETY: a two-byte number; every bit pattern is valid.
unsafe impl Plain for F16 {}

impl Bf16 {
    /// Rounds to nearest even, to the bits of a result that is written in this type.
    pub fn from_f32(x: f32) -> Self {
        Self::narrow(x)
    }

    /// Converts to `f32`, exactly.
    pub fn to_f32(self) -> f32 {
        self.widen()
    }
}

impl F16 {
    /// Smallest number that rounds to ∞: half a step above the largest, 65504.
    pub const LEAST_INFINITE: f32 = 65520.0;

    /// Rounds to nearest even, to the bits of a result that is written in this type.
    pub fn from_f32(x: f32) -> Self {
        Self::narrow(x)
    }

    /// Converts to `f32`, exactly.
    pub fn to_f32(self) -> f32 {
        self.widen()
    }
}

/// Types that keys and values are stored in.
///
/// # Safety
/// The implementation's `load` reads an element for each lane of the vector, and nothing else.
pub(crate) unsafe trait Load: Plain + Send + Sync + 'static {
    /// Loads an element for each lane of the vector, widened.
    ///
    /// # Safety
    /// So many elements are readable at `p`. No alignment is needed.
    unsafe fn load<W: Vector>(w: W, p: *const Self) -> W::V;
}

/// Types of tensor elements.
///
/// # Safety
/// The implementation's `DTYPE` is that of no other type; its `store` writes sixteen elements and nothing else.
pub(crate) unsafe trait Element: Load {
    const DTYPE: Dtype;

    /// Stores sixteen elements, rounded.
    ///
    /// # Safety
    /// The [`Dtype::bytes`] of sixteen elements are writable at `p`. No alignment is needed.
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V);
    /// Widens one element, with the bits of [`Load::load`].
    fn widen(self) -> f32;
    /// Rounds one element, with the bits of [`Self::store`].
    fn narrow(x: f32) -> Self;
}

// SAFETY: the vector load reads an element for each lane.
unsafe impl Load for f32 {
    #[inline(always)]
    unsafe fn load<W: Vector>(w: W, p: *const Self) -> W::V {
        // SAFETY: the caller guarantees a readable element for each lane at `p`.
        unsafe { w.load(p) }
    }
}

// SAFETY: no other type has this `DTYPE`; the vector store writes sixteen elements.
unsafe impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V) {
        // SAFETY: the caller guarantees sixteen writable elements at `p`.
        unsafe { s.store(p, v) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
}

// SAFETY: the vector load reads an element for each lane.
unsafe impl Load for Bf16 {
    #[inline(always)]
    unsafe fn load<W: Vector>(w: W, p: *const Self) -> W::V {
        // SAFETY: the caller guarantees a readable element for each lane at `p`.
        unsafe { w.load_bf16(p.cast()) }
    }
}

// SAFETY: no other type has this `DTYPE`; the vector store writes sixteen elements.
unsafe impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V) {
        // SAFETY: the caller guarantees sixteen writable elements at `p`.
        unsafe { s.store_bf16(p.cast(), v) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        // Ties go to even; carries into the exponent are right, up to infinity.
        let rounded = if x.is_nan() { bits | 0x0040_0000 } else { bits + 0x7FFF + (bits >> 16 & 1) };
        Self((rounded >> 16) as u16)
    }
}

// SAFETY: the vector load reads an element for each lane.
unsafe impl Load for F16 {
    #[inline(always)]
    unsafe fn load<W: Vector>(w: W, p: *const Self) -> W::V {
        // SAFETY: the caller guarantees a readable element for each lane at `p`.
        unsafe { w.load_f16(p.cast()) }
    }
}

// SAFETY: no other type has this `DTYPE`; the vector store writes sixteen elements.
unsafe impl Element for F16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V) {
        // SAFETY: the caller guarantees sixteen writable elements at `p`.
        unsafe { s.store_f16(p.cast(), v) }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        let unsigned = u32::from(self.0 & 0x7FFF);
        let placed = unsigned << 13;
        let bits = match unsigned {
            0..0x0400 => (unsigned as f32 * F16_UNIT).to_bits(),
            0x0400..0x7C00 => placed + F16_BIAS,
            0x7C00 => INFINITY,
            _ => placed | INFINITY | 0x0040_0000,
        };
        f32::from_bits(bits | u32::from(self.0 & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let unsigned = x.to_bits() & 0x7FFF_FFFF;
        let half = if unsigned < F16_NORMAL {
            // The sum is rounded to the unit of subnormal numbers; its lowest bits then count those units.
            (f32::from_bits(unsigned) + 0.5).to_bits() - 0.5f32.to_bits()
        } else if unsigned < F16_END {
            (unsigned - F16_BIAS + 0x0FFF + (unsigned >> 13 & 1)) >> 13
        } else if unsigned <= INFINITY {
            0x7C00
        } else {
            unsigned >> 13 & 0x03FF | 0x7E00
        };
        Self((half | x.to_bits() >> 16 & 0x8000) as u16)
    }
}

/// Widens elements of a 16-bit type, given as their bits.
///
/// # Panics
/// If the lengths differ, or the type is [`Dtype::F32`].
pub fn widen(isa: Isa, dtype: Dtype, from: &[u16], to: &mut [f32]) {
    check(dtype, from.len(), to.len());
    dispatch!(isa, |s| s.vectorize(
        #[inline(always)]
        || widen_slice(s, dtype, from, to),
    ));
}

/// Rounds numbers to the nearest elements of a 16-bit type, ties to even, and writes their bits.
///
/// # Panics
/// If the lengths differ, or the type is [`Dtype::F32`].
pub fn narrow(isa: Isa, dtype: Dtype, from: &[f32], to: &mut [u16]) {
    check(dtype, from.len(), to.len());
    dispatch!(isa, |s| s.vectorize(
        #[inline(always)]
        || narrow_slice(s, dtype, from, to),
    ));
}

fn check(dtype: Dtype, from: usize, to: usize) {
    assert!(dtype.bytes() == size_of::<u16>(), "{dtype} is not a 16-bit type");
    assert!(from == to, "inputs and outputs of one length");
}

/// Implements [`widen`] for one instruction set.
#[inline(always)]
pub(crate) fn widen_slice<S: Simd>(s: S, dtype: Dtype, from: &[u16], to: &mut [f32]) {
    match dtype {
        Dtype::F32 => unreachable!("checked by the caller"),
        Dtype::Bf16 => widen_as::<S, Bf16>(s, from, to),
        Dtype::F16 => widen_as::<S, F16>(s, from, to),
    }
}

/// Implements [`narrow`] for one instruction set.
#[inline(always)]
pub(crate) fn narrow_slice<S: Simd>(s: S, dtype: Dtype, from: &[f32], to: &mut [u16]) {
    match dtype {
        Dtype::F32 => unreachable!("checked by the caller"),
        Dtype::Bf16 => narrow_as::<S, Bf16>(s, from, to),
        Dtype::F16 => narrow_as::<S, F16>(s, from, to),
    }
}

#[inline(always)]
fn widen_as<S: Simd, E: Element>(s: S, from: &[u16], to: &mut [f32]) {
    let ((vectors, from), (outs, out)) = (from.as_chunks::<LANES>(), to.as_chunks_mut::<LANES>());
    for (vector, out) in vectors.iter().zip(outs) {
        store(s, out, load_bits::<S, E>(s, vector));
    }
    if !from.is_empty() {
        let mut lanes = [0; LANES];
        lanes[..from.len()].copy_from_slice(from);
        store_part(s, out, load_bits::<S, E>(s, &lanes));
    }
}

#[inline(always)]
fn narrow_as<S: Simd, E: Element>(s: S, from: &[f32], to: &mut [u16]) {
    let ((vectors, from), (outs, out)) = (from.as_chunks::<LANES>(), to.as_chunks_mut::<LANES>());
    for (vector, out) in vectors.iter().zip(outs) {
        store_bits::<S, E>(s, out, load(s, vector));
    }
    if !out.is_empty() {
        let mut lanes = [0; LANES];
        store_bits::<S, E>(s, &mut lanes, load_part(s, from, 0.0));
        out.copy_from_slice(&lanes[..out.len()]);
    }
}

#[inline(always)]
fn load_bits<S: Simd, E: Element>(s: S, from: &[u16; LANES]) -> S::V {
    const { assert!(E::DTYPE.bytes() == size_of::<u16>()) }
    // SAFETY: `from` holds the bytes of sixteen elements.
    unsafe { E::load(s, from.as_ptr().cast()) }
}

#[inline(always)]
fn store_bits<S: Simd, E: Element>(s: S, to: &mut [u16; LANES], v: S::V) {
    const { assert!(E::DTYPE.bytes() == size_of::<u16>()) }
    // SAFETY: `to` holds the bytes of sixteen elements and is borrowed exclusively.
    unsafe { E::store(s, to.as_mut_ptr().cast(), v) }
}
