//! Numbers as sums of bfloat16, for a unit that multiplies those: each part is the rounded rest of the parts before.
//!
//! Three parts hold an `f32`, two an `f16`, one a bfloat16, but for what is below the smallest normal number: units count that as 0.
//! A first part never becomes infinite where the number is not; what is not finite has no further parts, only zeros.
//! (Henry, Tang and Heinecke 2019, arXiv:1904.06376.)
//!
//! Parts are stored as pairs, filled up with zeros to whole [steps](STEP) of the unit: queries `[part][pair]`, keys
//! `[panel][part][pair][16]`, values `[part][pair of keys][columns]`.

use crate::matmul::pack::{self, NonFinite, copy_row};
use crate::simd::tiles::{MAX_PAIRS, PartPair, TILE};
use crate::simd::{Bf16x2, LANES, Simd};
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::element::{Bf16, Dtype, Element};
use crate::tensor::rows::Rows;

/// Largest number of parts of a number.
pub const MAX_PARTS: usize = 3;
/// Number of elements, or of keys, of a step.
const STEP: usize = 2 * TILE;

/// Operand in parts: rows of the first parts, as pairs, and the bytes from each part to the next.
#[derive(Clone, Copy)]
pub(crate) struct Parts {
    pub(crate) first: Rows<Bf16x2>,
    pub(crate) count: usize,
    pub(crate) bytes: usize,
}

/// Pairs of parts of two operands that are multiplied: all whose product is not below the rounding error of an `f32`, the smallest
/// first.
pub(crate) struct PartPairs {
    pairs: [PartPair; MAX_PAIRS],
    len: usize,
}

impl PartPairs {
    /// Returns the pairs of operands whose parts lie so many bytes from the first.
    pub(crate) fn of(a: &[usize], b: &[usize]) -> Self {
        let (mut pairs, mut len) = ([PartPair::default(); MAX_PAIRS], 0);
        for both in (0..MAX_PARTS).rev() {
            for (i, &a) in a.iter().enumerate().take(both + 1) {
                if let Some(&b) = b.get(both - i) {
                    pairs[len] = PartPair { a, b };
                    len += 1;
                }
            }
        }
        Self { pairs, len }
    }

    pub(crate) fn as_slice(&self) -> &[PartPair] {
        &self.pairs[..self.len]
    }
}

/// Returns the bytes from the first part to each, of parts that lie evenly.
pub(crate) fn evenly(bytes: usize) -> [usize; MAX_PARTS] {
    core::array::from_fn(|part| part * bytes)
}

/// Returns the number of parts of a type's numbers.
pub(crate) const fn count(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => MAX_PARTS,
        Dtype::F16 => 2,
        Dtype::Bf16 => 1,
    }
}

/// Returns the number of pairs of some numbers, in whole steps.
pub(crate) fn pairs(numbers: usize) -> usize {
    numbers.div_ceil(2).next_multiple_of(TILE)
}

/// Returns the number of floats that numbers which are paired take: those of a key, or of a column of the values of some keys.
pub(crate) fn floats(numbers: usize, parts: usize) -> usize {
    parts * pairs(numbers)
}

/// Returns the next part of a number, and what it leaves.
#[inline(always)]
fn next_part(x: f32) -> (u16, f32) {
    const EXPONENT: u32 = 0x7F80_0000;
    const UPPER: u32 = 0xFFFF_0000;
    const QUIET: u32 = 0x0040_0000;
    let bits = x.to_bits();
    let finite = bits & EXPONENT != EXPONENT;
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) & UPPER;
    let part = match finite && rounded & EXPONENT != EXPONENT {
        true => rounded,
        false => bits & UPPER | if x.is_nan() { QUIET } else { 0 },
    };
    ((part >> 16) as u16, if finite { x - f32::from_bits(part) } else { 0.0 })
}

/// Takes the next part of sixteen numbers, and leaves what it leaves.
#[inline(always)]
fn take_part(x: &mut [f32; LANES]) -> [u16; LANES] {
    let mut parts = [0; LANES];
    for (x, part) in x.iter_mut().zip(&mut parts) {
        (*part, *x) = next_part(*x);
    }
    parts
}

/// Writes the parts of sixteen pairs, `apart` pairs from each part to the next.
#[inline(always)]
fn store_pairs([mut x, mut y]: [[f32; LANES]; 2], out: &mut [Bf16x2], apart: usize, parts: usize) {
    for part in 0..parts {
        let (x, y) = (take_part(&mut x), take_part(&mut y));
        for (lane, out) in out[part * apart..][..LANES].iter_mut().enumerate() {
            *out = Bf16x2::new(x[lane], y[lane]);
        }
    }
}

/// Writes the parts of a query of some floats, whole vectors, over all of `out`.
pub(crate) fn store_query<S: Simd>(s: S, query: &[f32], parts: usize, out: &mut [Bf16]) {
    out.fill(Bf16::default());
    let part_len = out.len() / parts;
    s.vectorize(
        #[inline(always)]
        || {
            for (n, x) in query.as_chunks::<LANES>().0.iter().enumerate() {
                let mut x = *x;
                for part in 0..parts {
                    let bits = take_part(&mut x);
                    let out = &mut out[part * part_len + n * LANES..][..LANES];
                    out.iter_mut().zip(bits).for_each(|(out, bits)| *out = Bf16(bits));
                }
            }
        },
    );
}

/// Keys to be packed in parts.
#[derive(Clone, Copy)]
pub(crate) enum KeyRows {
    /// Rows; those after the first `n` of `all` are prefetched.
    Rows { rows: AnyRows, n: usize, all: usize },
    /// Packed panels, `[depth][16]`, of at least `n` keys.
    Panels { panels: AnyRows, n: usize },
}

/// Packs keys of `d` elements in parts.
///
/// # Safety
/// The keys are readable.
pub(crate) unsafe fn pack_keys<S: Simd>(s: S, keys: KeyRows, d: usize, parts: usize, out: &mut [Bf16x2]) {
    let (n, panel) = (
        match keys {
            KeyRows::Rows { n, .. } | KeyRows::Panels { n, .. } => n,
        },
        floats(d, parts) * LANES,
    );
    for (number, out) in out[..n.div_ceil(LANES) * panel].chunks_exact_mut(panel).enumerate() {
        for (step, first) in (0..d).step_by(STEP).enumerate() {
            let (here, mut floats) = (STEP.min(d - first), [0.0; STEP * LANES]);
            // SAFETY: the caller guarantees the keys: these columns of sixteen of them, or of those that are left.
            unsafe {
                match keys {
                    KeyRows::Rows { rows, n, all } => {
                        let (rows, key) = (rows.rows_from(number * LANES).columns_from(first), number * LANES);
                        pack::pack_keys(s, rows, [LANES.min(n - key), all - key], here, &mut floats);
                    }
                    KeyRows::Panels { panels, .. } => {
                        let panel = panels.rows_from(number).columns_from(first * LANES);
                        pack::pack_rows(s, panel, [1, here * LANES], NonFinite::Ignored, &mut floats);
                    }
                }
            }
            let (out, apart) = (&mut out[step * TILE * LANES..], pairs(d) * LANES);
            s.vectorize(
                #[inline(always)]
                || {
                    let (rows, _) = floats.as_chunks::<LANES>();
                    for (pair, rows) in rows.as_chunks::<2>().0.iter().enumerate() {
                        store_pairs(*rows, &mut out[pair * LANES..], apart, parts);
                    }
                },
            );
        }
    }
}

/// Packs `n` values of `cols` columns in some number of parts, filled up with zeros to whole vectors of columns and whole steps of keys.
///
/// # Safety
/// `values` has `n` readable rows of `cols` elements.
pub(crate) unsafe fn pack_values<S: Simd>(
    s: S,
    values: AnyRows,
    size: [usize; 2],
    parts: usize,
    nonfinite: NonFinite,
    out: &mut [Bf16x2],
) -> Parts {
    s.vectorize(
        #[inline(always)]
        // SAFETY: same contract.
        || by_type!(Typed, values, |values| unsafe { pack_values_of(s, values, size, parts, nonfinite, out) }),
    );
    packed_values(size, parts, out)
}

/// Returns values that [`pack_values`] has packed.
pub(crate) fn packed_values([n, cols]: [usize; 2], parts: usize, out: &[Bf16x2]) -> Parts {
    let width = cols.next_multiple_of(LANES);
    let first = Rows::strided(out.as_ptr(), width as isize, 1);
    Parts { first, count: parts, bytes: pairs(n) * width * size_of::<Bf16x2>() }
}

/// Packs values of one type, as [`pack_values`] does.
///
/// # Safety
/// Same contract as [`pack_values`].
#[inline(always)]
unsafe fn pack_values_of<S: Simd, T: Element>(
    s: S,
    values: Rows<T>,
    [n, cols]: [usize; 2],
    parts: usize,
    nonfinite: NonFinite,
    out: &mut [Bf16x2],
) {
    let width = cols.next_multiple_of(LANES);
    let apart = pairs(n) * width;
    for (pair, vec) in (0..pairs(n)).flat_map(|pair| (0..width / LANES).map(move |vec| (pair, vec))) {
        let (first, mut two) = (vec * LANES, [[0.0; LANES]; 2]);
        for (row, to) in (2 * pair..n).zip(&mut two) {
            // SAFETY: row `row < n`, columns below `cols`, as the caller guarantees.
            unsafe {
                let from = values.at(row).offset(first as isize * values.element);
                copy_row(s, from, values.element, &mut to[..LANES.min(cols - first)]);
            }
            nonfinite.treat(to);
        }
        store_pairs(two, &mut out[pair * width + first..], apart, parts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the parts of a number, and what they leave.
    fn parts_of(x: f32) -> ([f32; MAX_PARTS], f32) {
        let mut rest = x;
        let parts = core::array::from_fn(|_| {
            let (part, left) = next_part(rest);
            rest = left;
            Bf16(part).widen()
        });
        (parts, rest)
    }

    #[test]
    fn parts_add_up() {
        let mut bits = 1u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            let (parts, rest) = parts_of(x);
            if !x.is_finite() {
                assert_eq!(
                    (Bf16::from_f32(x).0, [0.0; 2]),
                    (Bf16::from_f32(parts[0]).0, [parts[1], parts[2]]),
                    "{x:e}"
                );
                continue;
            }
            assert!(parts.iter().all(|part| part.is_finite()), "{x:e}");
            let sum: f64 = parts.iter().map(|&part| f64::from(part)).sum();
            assert_eq!(sum + f64::from(rest), f64::from(x), "{x:e}");
            // Half a unit in the last place; of the smallest numbers, half a step.
            assert!(
                f64::from(rest).abs() <= f64::from(x).abs() / f64::from(1 << 24) + 4.7e-41,
                "{x:e} leaves {rest:e}"
            );
        }
    }

    #[test]
    fn parts_of_the_largest_numbers_are_finite() {
        for x in [f32::MAX, f32::MIN, 3.39e38, -3.4e38] {
            let (parts, rest) = parts_of(x);
            assert!(
                parts.iter().all(|part| part.is_finite()) && rest.abs() <= x.abs() / 2.0f32.powi(23),
                "{x:e}: {parts:?}"
            );
        }
        let [infinite, nan] = [f32::NEG_INFINITY, f32::NAN].map(|x| parts_of(x).0);
        assert_eq!(infinite, [f32::NEG_INFINITY, 0.0, 0.0]);
        assert!(nan[0].is_nan() && nan[1..] == [0.0; 2]);
    }

    #[test]
    fn short_types_need_fewer_parts() {
        for bits in 0..=u16::MAX {
            let [half, brain] = [crate::tensor::element::F16(bits).widen(), Bf16(bits).widen()];
            let [(half, of_half), (brain, of_brain)] = [half, brain].map(|x| (x, parts_of(x).0));
            assert!(!half.is_finite() || of_half[2] == 0.0 && of_half[0] + of_half[1] == half, "{half:e}");
            assert!(!brain.is_finite() || of_brain == [brain, 0.0, 0.0], "{brain:e}");
        }
    }
}
