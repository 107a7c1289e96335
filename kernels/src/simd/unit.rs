//! The matrix unit that this build knows.

use crate::simd::Simd;
use crate::simd::tiles::MatrixUnit;
#[cfg(not(any(matrix_unit_model, target_arch = "x86_64")))]
use crate::simd::tiles::{NoMatrixUnit, Product, TileBlock, Tiles};

/// A scalar model of one, if it is built with `--cfg matrix_unit_model`.
#[cfg(matrix_unit_model)]
pub(crate) use crate::simd::portable::tiles::Model as Unit;
#[cfg(all(not(matrix_unit_model), target_arch = "x86_64"))]
pub(crate) use crate::simd::x86::amx::Amx as Unit;
#[cfg(not(any(matrix_unit_model, target_arch = "x86_64")))]
pub(crate) use NoUnit as Unit;

/// Tiles of the unit.
pub(crate) type UnitTiles = <Unit as MatrixUnit>::Tiles;

/// Returns the tiles of the unit that goes with these vectors.
///
/// # Panics
/// If there is none.
#[inline(always)]
pub(crate) fn tiles<S: Simd>(s: S) -> UnitTiles {
    let unit = Unit::detect().ok().filter(|_| s.has_matrix_unit());
    unit.expect("a call is multiplied by a matrix unit where there is one").configure()
}

/// Matrix unit of builds that know none: there is no value of it.
#[cfg(not(any(matrix_unit_model, target_arch = "x86_64")))]
#[derive(Debug, Clone, Copy)]
#[allow(dead_code, reason = "an empty type would make code that takes one unreachable, which the compiler warns of")]
pub(crate) struct NoUnit(());

#[cfg(not(any(matrix_unit_model, target_arch = "x86_64")))]
impl MatrixUnit for NoUnit {
    type Tiles = Self;

    fn detect() -> Result<Self, NoMatrixUnit> {
        Err(NoMatrixUnit::Absent)
    }

    fn configure(self) -> Self {
        self
    }
}

#[cfg(not(any(matrix_unit_model, target_arch = "x86_64")))]
impl Tiles for NoUnit {
    unsafe fn multiply<S: Simd>(&mut self, _: S, _: Product, _: TileBlock<'_>) {
        unreachable!("this build knows no matrix unit")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;
    use crate::simd::portable::tiles::Model;
    use crate::simd::tiles::{BLOCK, MAX_PAIRS, PartPair, Product, Start, TILE, TileBlock, Tiles};

    /// Numbers from a generator (Steele, Lea and Flood 2014, SplitMix).
    struct Numbers(u64);

    impl Numbers {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB) >> 16
        }

        /// Returns a pair of elements of some kind: near 1; of any exponent; subnormal, infinite, NaN and zeros among them.
        fn pair(&mut self, kind: usize) -> u32 {
            let bits = self.next() as u32;
            let special = [0, 0x8000, 1, 0x807F, 0x7F80, 0xFF80, 0x7FC1, 0x0080];
            match kind {
                0 => bits & 0x83FF_83FF | 0x3C00_3C00,
                1 => bits & 0xBFFF_BFFF,
                _ if self.next().is_multiple_of(40) => special[bits as usize % 8] | bits & 0x3FFF_0000,
                _ => bits & 0x9FFF_9FFF,
            }
        }
    }

    /// Returns the bits that are compared: all NaNs are one. The emulator flushes sums of the smallest exponent, too, if they are
    /// differences.
    fn as_compared(sum: f32) -> u32 {
        let small = cfg!(matrix_unit_emulated) && sum.abs() < 2.0 * f32::MIN_POSITIVE;
        if small { 0 } else { crate::simd::quiet(sum).to_bits() }
    }

    #[test]
    fn the_unit_computes_what_its_model_does() {
        let Ok(unit) = Unit::detect() else {
            eprintln!("SKIPPED: no matrix unit, or not permitted: {:?}", Unit::detect());
            return;
        };
        let (mut numbers, mut tiles) = (Numbers(1), unit.configure());
        for case in 0..900 {
            let product = [Product::Bf16, Product::Bytes, Product::UnsignedBytes][case / 300];
            let (rows, columns, steps) = (1 + case % BLOCK, 1 + case / 3 % 2, case / 7 % 5);
            // The emulator takes all bytes for unsigned ones.
            let kept = if cfg!(matrix_unit_emulated) && product != Product::Bf16 { 0x7F7F_7F7F } else { u32::MAX };
            let mut pairs = |n: usize| (0..n).map(|_| numbers.pair(case % 3) & kept).collect::<Vec<_>>();
            let [a_floats, b_floats] = [rows, columns * TILE].map(|n| n * steps.max(1) * TILE);
            let parts = if product == Product::Bf16 { 1 + case % 3 } else { 1 };
            let (a, b) = (pairs(parts * a_floats), pairs(parts * b_floats));
            let pair = |n: usize| PartPair { a: n % parts * a_floats * 4, b: n / 2 % parts * b_floats * 4 };
            let part_pairs: Vec<_> = (0..1 + case % MAX_PAIRS).map(pair).collect();
            let before: Vec<_> = pairs(rows * BLOCK).into_iter().map(f32::from_bits).collect();
            let (mut found, mut expected) = (before.clone(), before);
            let block = |c: &mut [f32]| TileBlock {
                rows,
                pairs: &part_pairs,
                a: a.as_ptr().cast(),
                a_stride: steps.max(1) * TILE * 4,
                b: [Some(b.as_ptr().cast()), (columns > 1).then(|| b[TILE..].as_ptr().cast())],
                b_stride: columns * TILE * 4,
                steps,
                start: if case % 5 < 2 { Start::There } else { Start::Zero },
                c: c.as_mut_ptr().cast(),
                c_stride: BLOCK * 4,
            };
            // SAFETY: the vectors have these rows, steps and columns.
            dispatch!(Isa::detect(), |s| unsafe {
                tiles.multiply(s, product, block(&mut found));
                Model.multiply(s, product, block(&mut expected));
            });
            for (place, (found, expected)) in found.into_iter().zip(expected).enumerate() {
                let same = match product {
                    Product::Bf16 => as_compared(found) == as_compared(expected),
                    _ => found.to_bits() == expected.to_bits(),
                };
                let of = format!("{rows} rows, {columns} tiles of columns, {steps} steps, {product:?}, case {case}");
                assert!(same, "sum {place} of {of}: {found:e}, expected {expected:e}");
            }
        }
    }
}
