//! Int8 format of keys and values: quantisation of rows, and the layout of the bytes.
//!
//! A row x is stored as bytes b, ±127 at most, and a scale s, so that x ≈ s·b with an error of half of s. Keys may have
//! one scale a channel instead, which is then multiplied into the query before that is quantised. A score is (scale of
//! the query row)·(scale of the key)·Σ q·k with the sum an exact integer; an output is Σ (w·t)·v, where the scale t of
//! a value is multiplied into its weight. In each block of keys, a row's weights w·t are rounded to 16 bits: integers of
//! ±32767 at most, times a 32767th of the largest, so each is off by 2⁻¹⁶ of the largest at most, and the block's sum is
//! an exact integer, too.
//!
//! ```text
//! keys     [panel of 16 keys][head_dim / 4, rounded up][16][4]     zeros past head_dim
//! values   [value panel][four keys][columns of the value panel][4] see value_panels.rs; zeros past value_dim
//! scales   one f32 a key, filled up to whole panels
//! ```
//!
//! Every function here is a plain loop over a row, made of operations that are the same on every machine; the compiler
//! vectorises it inside [`Simd::vectorize`].

use crate::simd::aligned::Plain;
use crate::simd::{LANES, Query4, Simd, Words4};
use crate::tensor::rows::KEY_BLOCK;

/// Largest byte. One less than the negative limit, so that bytes are symmetric.
const MOST: f32 = 127.0;

/// Unit of 16-bit weights, as a part of a row's largest weight.
pub(crate) const WEIGHT_UNIT: f32 = 1.0 / MOST_WEIGHT;

/// Place of its largest weight, in floats, in a row of 16-bit weights: behind all keys of a block.
pub(crate) const LARGEST_WEIGHT: usize = KEY_BLOCK;

/// Largest 16-bit weight.
const MOST_WEIGHT: f32 = 32767.0;
const _: () = assert!(127 * 32767 * (KEY_BLOCK as u64) < 1 << 31, "a block's sums fit 32 bits");

/// Values of four keys in one column.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct ValueQuad(pub(crate) [i8; QUAD]);

// SAFETY: four bytes; every bit pattern is valid, and a byte's alignment is enough.
unsafe impl Plain for ValueQuad {}

/// Number of keys of a [`ValueQuad`].
pub(crate) const QUAD: usize = 4;
const _: () = assert!(LANES.is_multiple_of(QUAD));

/// Longest key: sums of this many products of bytes still fit 32 bits.
pub const MAX_HEAD_DIM: usize = 1 << 17;
const _: () = assert!(128 * 128 * MAX_HEAD_DIM as u64 <= 1 << 31 && 128 * 127 * (MAX_HEAD_DIM as u64) < 1 << 31);

/// Largest scale: with the next one, 127 would become ∞.
const MAX_SCALE: f32 = f32::from_bits((f32::MAX / MOST).to_bits() - 1);

/// Constant that rounds a number below 2²² to an integer when added to it, ties to even, and leaves the integer in the
/// lowest bits.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// Number of bytes of a row that are computed before they are stored.
const CHUNK: usize = 64;

/// Returns the number of groups of four elements in a key.
pub(crate) const fn quads(head_dim: usize) -> usize {
    head_dim.div_ceil(4)
}

/// Returns the number of bytes of a packed panel of sixteen keys.
pub(crate) const fn panel_bytes(head_dim: usize) -> usize {
    quads(head_dim) * 4 * LANES
}

/// Sum and factor of an int8 query row, or of a block of it, stored beside its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Row {
    /// Sum of its bytes.
    pub(crate) total: i32,
    /// Factor of its integer sums: its scale times that of the softmax.
    pub(crate) factor: f32,
}

/// Sizes of a query row as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuerySize {
    /// Number of groups of four elements.
    pub(crate) quads: usize,
    /// Number of integer sums that make a score, each with its [`Row`].
    pub(crate) sums: usize,
}

impl QuerySize {
    /// Returns the sizes of a row that meets int8 keys.
    pub(crate) const fn int8(head_dim: usize) -> Self {
        Self { quads: quads(head_dim), sums: 1 }
    }

    /// Returns the number of floats of scratch that a row takes.
    pub(crate) const fn floats(self) -> usize {
        (self.quads * size_of::<Query4>() + self.sums * size_of::<Row>()) / size_of::<f32>()
    }
}

/// Splits scratch for a query into its bytes, in quads, and its [`Row`]s behind them.
///
/// # Panics
/// If the scratch has another size.
pub(crate) fn cut_query(scratch: &mut [f32], size: QuerySize) -> (&mut [Query4], &mut [Row]) {
    const { assert!(align_of::<Query4>() <= align_of::<f32>() && align_of::<Row>() <= align_of::<f32>()) }
    assert!(scratch.len() == size.floats());
    let (bytes, rows) = scratch.split_at_mut(size.quads * size_of::<Query4>() / size_of::<f32>());
    // SAFETY: the floats' bytes, aligned as floats are; both types are made of four-byte numbers without
    // gaps, so every bit pattern is valid for them and for floats.
    unsafe {
        (
            core::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), size.quads),
            core::slice::from_raw_parts_mut(rows.as_mut_ptr().cast(), size.sums),
        )
    }
}

/// Returns the scale of a row: a 127th of its largest magnitude. 0 for zeros, NaN if an element is not finite. Never
/// subnormal: the quotients by it have to be right.
#[inline(always)]
pub(crate) fn scale(xs: &[f32]) -> f32 {
    let most = largest(xs);
    if most == 0.0 {
        0.0
    } else if most < f32::INFINITY {
        (most / MOST).clamp(f32::MIN_POSITIVE, MAX_SCALE)
    } else {
        f32::NAN
    }
}

/// Returns true if a number is the scale of some finite row.
pub fn is_int8_scale(scale: f32) -> bool {
    scale.to_bits() == 0 || (f32::MIN_POSITIVE..=MAX_SCALE).contains(&scale)
}

/// Returns the largest magnitude; ∞ or NaN if an element is not finite.
#[inline(always)]
fn largest(xs: &[f32]) -> f32 {
    // Magnitudes have the order of their bits, NaN last.
    let mut most = 0;
    for x in xs {
        most = most.max(x.to_bits() & 0x7FFF_FFFF);
    }
    f32::from_bits(most)
}

/// Quantises a row by its [`scale`]. Writes zeros if that is 0 or NaN: with a scale of NaN, all their products are NaN.
#[inline(always)]
fn to_bytes(xs: &[f32], scale: f32, out: &mut [i8]) {
    if scale > 0.0 {
        for (byte, x) in out.iter_mut().zip(xs) {
            *byte = (x / scale + ROUND).to_bits() as i8;
        }
    } else {
        out.fill(0);
    }
}

/// Quantises a row and returns its [`scale`]; the rest of `out` becomes zeros.
pub(crate) fn quantise<S: Simd>(s: S, xs: &[f32], out: &mut [i8]) -> f32 {
    s.vectorize(
        #[inline(always)]
        move || {
            let scale = scale(xs);
            let (bytes, padding) = out.split_at_mut(xs.len());
            to_bytes(xs, scale, bytes);
            padding.fill(0);
            scale
        },
    )
}

/// Quantises a row, each channel by its own given scale: values that are too large become ±127, NaN becomes 0. Returns
/// false if an element was not finite, which bytes cannot express. The rest of `out` becomes zeros.
pub(crate) fn quantise_by_channel<S: Simd>(s: S, xs: &[f32], scales: &[f32], out: &mut [i8]) -> bool {
    s.vectorize(
        #[inline(always)]
        move || {
            assert!(scales.len() == xs.len());
            let (bytes, padding) = out.split_at_mut(xs.len());
            for ((byte, x), scale) in bytes.iter_mut().zip(xs).zip(scales) {
                let b = x / scale;
                let b = if b > MOST { MOST } else { b };
                let b = if b < -MOST { -MOST } else { b };
                let b = if b.is_nan() { 0.0 } else { b };
                *byte = (b + ROUND).to_bits() as i8;
            }
            padding.fill(0);
            largest(xs) < f32::INFINITY
        },
    )
}

/// Quantises a query row; the rest of `out` becomes zeros. `scale` is that of the softmax.
pub(crate) fn quantise_query<S: Simd>(s: S, xs: &[f32], scale: f32, out: &mut [Query4]) -> Row {
    s.vectorize(
        #[inline(always)]
        move || {
            let (out, padding) = out.split_at_mut(quads(xs.len()));
            padding.fill(Query4::ZERO);
            // Sums run lane by lane: integers have the same sum in any order.
            let mut totals = [0i32; LANES];
            let own = self::scale(xs);
            for (xs, out) in xs.chunks(CHUNK).zip(out.chunks_mut(CHUNK / 4)) {
                let mut bytes = [0; CHUNK];
                to_bytes(xs, own, &mut bytes[..xs.len()]);
                for bytes in bytes.as_chunks::<LANES>().0 {
                    for (total, &byte) in totals.iter_mut().zip(bytes) {
                        *total += i32::from(byte);
                    }
                }
                for (four, out) in bytes.as_chunks().0.iter().zip(out) {
                    *out = Query4::new(*four);
                }
            }
            Row { total: totals.iter().sum(), factor: own * scale }
        },
    )
}

/// Multiplies weights by the scales of their values and returns the largest magnitude; ∞ or NaN if a product is not
/// finite. A weight of 0 stays 0, whatever the scale: its key is hidden, or adds nothing either way.
#[inline(always)]
pub(crate) fn scale_weights(weights: &mut [f32], scales: &[f32]) -> f32 {
    // Magnitudes have the order of their bits, NaN last.
    let mut most = 0;
    for (weight, scale) in weights.iter_mut().zip(scales) {
        *weight = if *weight == 0.0 { 0.0 } else { *weight * scale };
        most = most.max(weight.to_bits() & 0x7FFF_FFFF);
    }
    f32::from_bits(most)
}

/// Divisor of weights as they are rounded to 16 bits: two factors, because the reciprocal of a small one is infinite.
#[derive(Clone, Copy)]
pub(crate) struct WeightFactors(f32, f32);

impl WeightFactors {
    /// Makes the factors that turn the largest weight into [`MOST_WEIGHT`]; 0 if it is 0 or not finite.
    #[inline(always)]
    pub(crate) fn new(largest: f32) -> Self {
        // A power of two, so the first product is exact.
        let first = if largest < SMALL_WEIGHT { 1.0 / SMALL_WEIGHT } else { 1.0 };
        let known = largest > 0.0 && largest < f32::INFINITY;
        Self(first, if known { MOST_WEIGHT / (largest * first) } else { 0.0 })
    }

    /// Rounds a panel of weights to 16 bits. Those that are not finite become any number.
    #[inline(always)]
    pub(crate) fn round(self, weights: &[f32; LANES]) -> [Words4; LANES / QUAD] {
        let word = |i: usize| (weights[i] * self.0 * self.1 + ROUND).to_bits();
        core::array::from_fn(|four| {
            let pair = |i: usize| (word(QUAD * four + i) & 0xFFFF | word(QUAD * four + i + 2) << 16).cast_signed();
            Words4 { even: pair(0), odd: pair(1) }
        })
    }
}

/// Limit below which a weight is small: its reciprocal times [`MOST_WEIGHT`] may be infinite.
const SMALL_WEIGHT: f32 = f32::from_bits((127 - 64) << 23);

/// Stores the bytes of key `j` at their places, in whole groups of four: past the row's end they are zeros. It touches
/// nothing else of the panel, so in memory that began as zeros, keys have the same bytes in whatever order they come.
pub(crate) fn place_key(row: &[i8], j: usize, keys: &mut [i8]) {
    let panel = &mut keys[j / LANES * panel_bytes(row.len())..][..panel_bytes(row.len())];
    let places = panel.as_chunks_mut::<4>().0.chunks_exact_mut(LANES);
    for (four, places) in row.chunks(4).zip(places) {
        let mut bytes = [0; 4];
        bytes[..four.len()].copy_from_slice(four);
        places[j % LANES] = bytes;
    }
}

/// Packs keys that are stored as values, four keys together column by column, into whole panels of `quads` quads, four columns
/// together; `at` is the address of a quad of four keys.
///
/// # Safety
/// Sixteen bytes are readable at the address of each quad of the panels that `keys` has room for.
pub(crate) unsafe fn pack_fours<S: Simd>(
    s: S,
    quads: usize,
    at: impl Fn(usize, usize) -> *const [[i8; QUAD]; QUAD],
    keys: &mut [i8],
) {
    s.vectorize(
        #[inline(always)]
        move || {
            let panels =
                keys.as_chunks_mut::<QUAD>().0.as_chunks_mut::<QUAD>().0.chunks_exact_mut(quads * (LANES / QUAD));
            for (panel, keys) in panels.enumerate() {
                for four in 0..LANES / QUAD {
                    for (quad, keys) in keys.iter_mut().skip(four).step_by(LANES / QUAD).enumerate() {
                        // SAFETY: the caller guarantees the quad.
                        let columns = unsafe { *at(panel * (LANES / QUAD) + four, quad) };
                        *keys = core::array::from_fn(|key| core::array::from_fn(|column| columns[column][key]));
                    }
                }
            }
        },
    )
}
