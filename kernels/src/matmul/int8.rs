//! Keys and values in bytes: how rows become bytes, and where the bytes lie.
//!
//! A row x is narrow_by_mask as bytes b, ±127 at most, and a scale s, so that x ≈ s·b with an error of half of s. Keys may have
//! one scale a channel instead, which then belongs into the query before that becomes bytes. A score is
//! (scale of the query row)·(scale of the key)·Σ q·k with the sum an exact integer; an output is Σ (w·t)·v, where the
//! scale t of a value is taken into its weight.
//!
//! ```text
//! keys     [panel of 16 keys][head_dim / 4, rounded up][16][4]     zeros past head_dim
//! values   [value panel][key][columns of the value panel]                      see value_panels.rs; zeros past value_dim
//! scales   one f32 a key, filled up to whole panels
//! ```
//!
//! Everything here is a plain loop over a row, made of operations that are the same everywhere; the compiler makes
//! vectors of it inside [`Simd::vectorize`](crate::simd::Simd::vectorize).

use crate::simd::{LANES, Query4};

/// Largest byte. One less than fits, so that bytes are symmetric.
const MOST: f32 = 127.0;

/// The longest key: sums of this many products of bytes still fit 32 bits.
pub const MAX_HEAD_DIM: usize = 1 << 17;
const _: () = assert!(128 * 128 * MAX_HEAD_DIM as u64 <= 1 << 31 && 128 * 127 * (MAX_HEAD_DIM as u64) < 1 << 31);

/// The largest scale: the next would make ∞ of 127.
const MAX_SCALE: f32 = f32::from_bits((f32::MAX / MOST).to_bits() - 1);

/// Adding it rounds what is smaller than 2²² to an integer, ties to even, and leaves that in the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// Bytes of a row that are made before they are put in their places.
const CHUNK: usize = 64;

/// Groups of four elements in a key.
pub(crate) const fn quads(head_dim: usize) -> usize {
    head_dim.div_ceil(4)
}

/// Bytes of a packed panel of sixteen keys.
pub(crate) const fn panel_bytes(head_dim: usize) -> usize {
    quads(head_dim) * 4 * LANES
}

/// What a query row of bytes needs besides them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Row {
    /// What its bytes add up to.
    pub(crate) total: i32,
    /// What its sums are to be multiplied by: its scale times that of the softmax.
    pub(crate) factor: f32,
}

/// Floats of scratch that a query row takes as bytes, its [`Row`] included.
pub(crate) const fn query_floats(head_dim: usize) -> usize {
    (quads(head_dim) * size_of::<Query4>() + size_of::<Row>()) / size_of::<f32>()
}

/// Scratch for query rows, [`query_floats`] each: their bytes, `[row][quads]`, and what they need besides.
pub(crate) fn cut_queries(scratch: &mut [f32], rows: usize, head_dim: usize) -> (&mut [Query4], &mut [Row]) {
    const { assert!(align_of::<Query4>() <= align_of::<f32>() && align_of::<Row>() <= align_of::<f32>()) }
    let (n, scratch) = (rows * quads(head_dim), &mut scratch[..rows * query_floats(head_dim)]);
    let (bytes, besides) = scratch.split_at_mut(n * size_of::<Query4>() / size_of::<f32>());
    // SAFETY: as many bytes, aligned as floats are; both types are made of four-byte numbers without gaps, of which every
    // pattern is one, as it is of floats.
    unsafe {
        (
            core::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), n),
            core::slice::from_raw_parts_mut(besides.as_mut_ptr().cast(), rows),
        )
    }
}

/// The scale of a row: a 127th of its largest magnitude. 0 for zeros, NaN if anything is not finite. Never subnormal:
/// the quotients by it have to be right.
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

/// The largest magnitude; ∞ or NaN if anything is not finite.
#[inline(always)]
fn largest(xs: &[f32]) -> f32 {
    // Magnitudes are in the order of their bits, NaN last.
    let mut most = 0;
    for x in xs {
        most = most.max(x.to_bits() & 0x7FFF_FFFF);
    }
    f32::from_bits(most)
}

/// Bytes of a row by its [`scale`]. Zeros if that is 0 or NaN: with a scale of NaN, all that is made of them is NaN.
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

/// Turns a row into bytes and returns its [`scale`]; what is left of `out` becomes zeros.
#[inline(always)]
pub(crate) fn quantise(xs: &[f32], out: &mut [i8]) -> f32 {
    let scale = scale(xs);
    let (bytes, padding) = out.split_at_mut(xs.len());
    to_bytes(xs, scale, bytes);
    padding.fill(0);
    scale
}

/// Turns a row into bytes, each channel by its own scale, known beforehand: what is too large becomes ±127, NaN becomes
/// 0. False if anything was not finite, which bytes cannot say. What is left of `out` becomes zeros.
#[inline(always)]
pub(crate) fn quantise_by_channel(xs: &[f32], scales: &[f32], out: &mut [i8]) -> bool {
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
}

/// Turns a query row into bytes. `scale` is that of the softmax.
#[inline(always)]
pub(crate) fn quantise_query(xs: &[f32], scale: f32, out: &mut [Query4]) -> Row {
    // Lane by lane: integers add up alike in any order.
    let mut totals = [0i32; LANES];
    let own = self::scale(xs);
    assert!(out.len() == quads(xs.len()));
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
}

/// Where element `d` of key `j` lies among packed keys.
pub(crate) const fn key_at(head_dim: usize, j: usize, d: usize) -> usize {
    j / LANES * panel_bytes(head_dim) + (d / 4 * LANES + j % LANES) * 4 + d % 4
}

/// Puts the bytes of key `j` into their places. Its whole groups of four: past the row's end they are zeros. Nothing else
/// of the panel is touched, so in memory that began as zeros, keys appended one by one lie as keys packed at once.
pub(crate) fn place_key(row: &[i8], j: usize, keys: &mut [i8]) {
    let panel = &mut keys[j / LANES * panel_bytes(row.len())..][..panel_bytes(row.len())];
    let places = panel.as_chunks_mut::<4>().0.chunks_exact_mut(LANES);
    for (four, places) in row.chunks(4).zip(places) {
        let mut bytes = [0; 4];
        bytes[..four.len()].copy_from_slice(four);
        places[j % LANES] = bytes;
    }
}

/// Packs dense rows of `head_dim` bytes; the last panel is filled up with zeros.
pub(crate) fn pack_keys(rows: &[i8], head_dim: usize, keys: &mut [i8]) {
    let (keys, _) = keys.split_at_mut((rows.len() / head_dim).div_ceil(LANES) * panel_bytes(head_dim));
    for (rows, panel) in rows.chunks(LANES * head_dim).zip(keys.chunks_exact_mut(panel_bytes(head_dim))) {
        if rows.len() < LANES * head_dim {
            panel.fill(0);
        }
        for (j, row) in rows.chunks_exact(head_dim).enumerate() {
            place_key(row, j, panel);
        }
    }
}
