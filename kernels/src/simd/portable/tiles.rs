//! Scalar model of a matrix unit, in the bits of its instructions, for tests on any machine.

use crate::simd::tiles::{MatrixUnit, NoMatrixUnit, Product, Start, TILE, TileBlock, Tiles};
use crate::simd::{Bf16x2, LANES, Simd};

/// Model of a matrix unit. Every machine has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model;

impl MatrixUnit for Model {
    type Tiles = Self;

    fn detect() -> Result<Self, NoMatrixUnit> {
        Ok(Self)
    }

    fn configure(self) -> Self {
        self
    }
}

impl Tiles for Model {
    unsafe fn multiply<S: Simd>(&mut self, s: S, product: Product, block: TileBlock<'_>) {
        s.vectorize(
            #[inline(always)]
            // SAFETY: same contract.
            || unsafe {
                match product {
                    Product::Bf16 => multiply(block, add_pairs),
                    Product::Bytes => multiply(block, |sums, row, columns| add_bytes(sums, row, columns, signed)),
                    Product::UnsignedBytes => {
                        multiply(block, |sums, row, columns| add_bytes(sums, row, columns, i32::from))
                    }
                }
            },
        );
    }
}

/// Groups of a step: of a row, and of sixteen columns.
type Row = [u32; TILE];
type Columns = [[u32; LANES]; TILE];

/// Computes a block; `add` adds the products of one step to the sums of a row.
///
/// # Safety
/// As operations of [`Tiles`].
#[inline(always)]
unsafe fn multiply<T: Copy + Default>(block: TileBlock<'_>, add: impl Fn(&mut [T; LANES], &Row, &Columns)) {
    let TileBlock { rows, pairs, a, a_stride, b, b_stride, steps, start, c, c_stride } = block;
    for row in 0..rows {
        for (n, b) in b.into_iter().enumerate().filter_map(|(n, b)| Some((n, b?))) {
            // SAFETY: sixteen sums of the row, groups of the row's and of the columns' steps, which the caller guarantees.
            unsafe {
                let to = c.add(row * c_stride).cast::<[T; LANES]>().add(n);
                let mut sums = if start == Start::There { to.read_unaligned() } else { [T::default(); LANES] };
                for (step, pair) in (0..steps).flat_map(|step| pairs.iter().map(move |pair| (step, pair))) {
                    let groups = a.add(pair.a + row * a_stride).cast::<Row>().add(step).read_unaligned();
                    let first = b.add(pair.b + step * TILE * b_stride);
                    let columns =
                        core::array::from_fn(|n| first.add(n * b_stride).cast::<[u32; LANES]>().read_unaligned());
                    add(&mut sums, &groups, &columns);
                }
                to.write_unaligned(sums);
            }
        }
    }
}

/// Adds products of bfloat16 pairs: those of the first elements are one chain of FMAs from 0, those of the second another, and the sum
/// of both is added once. Subnormal inputs and sums count as 0.
#[inline(always)]
fn add_pairs(sums: &mut [f32; LANES], row: &Row, columns: &Columns) {
    let mut chains = [[0.0; LANES]; 2];
    for (x, y) in row.iter().zip(columns) {
        let x = halves(*x);
        for lane in 0..LANES {
            let y = halves(y[lane]);
            for half in 0..2 {
                chains[half][lane] = flushed(x[half].mul_add(y[half], chains[half][lane]));
            }
        }
    }
    for lane in 0..LANES {
        sums[lane] = flushed(flushed(sums[lane]) + flushed(chains[0][lane] + chains[1][lane]));
    }
}

/// Returns a byte as a signed number.
#[inline(always)]
fn signed(byte: u8) -> i32 {
    i32::from(byte.cast_signed())
}

/// Adds products of fours of bytes; those of the row become numbers by `number`.
#[inline(always)]
fn add_bytes(sums: &mut [i32; LANES], row: &Row, columns: &Columns, number: impl Fn(u8) -> i32) {
    for (x, y) in row.iter().zip(columns) {
        for lane in 0..LANES {
            for (x, y) in x.to_le_bytes().into_iter().zip(y[lane].to_le_bytes()) {
                sums[lane] = sums[lane].wrapping_add(number(x) * signed(y));
            }
        }
    }
}

/// Returns both numbers of a pair, as the unit reads them.
#[inline(always)]
fn halves(pair: u32) -> [f32; 2] {
    let [first, second] = Bf16x2(pair).elements();
    [first, second].map(|bits| flushed(f32::from_bits(u32::from(bits) << 16)))
}

/// Returns 0, with the sign, for subnormal numbers, others as they are.
#[inline(always)]
pub(crate) fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0_f32.copysign(x) } else { x }
}
