//! Matrix units: products of tiles of bfloat16 pairs or of bytes.
//!
//! A tile has up to sixteen rows of 64 bytes: sixteen sums, or sixteen groups of elements that are multiplied together, two of
//! bfloat16 or four bytes. One step adds to each sum the products of sixteen groups of a row of A and of a column of B.

use crate::simd::Simd;
use core::fmt;

/// Number of rows of a tile, of columns, and of groups that a step multiplies.
pub(crate) const TILE: usize = 16;
/// Largest number of rows, and of columns, of a block of sums.
pub(crate) const BLOCK: usize = 2 * TILE;

/// Reason why a machine's matrix unit is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoMatrixUnit {
    /// The machine, or this build, has none.
    Absent,
    /// The system does not let this process use it, or is not asked: only Linux is.
    Refused,
    /// It goes with another instruction set of this machine.
    Elsewhere,
}

impl fmt::Display for NoMatrixUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "there is none",
            Self::Refused => "the system does not let this process use it",
            Self::Elsewhere => "it goes with another instruction set",
        })
    }
}

/// Products that a unit has, of the groups of a row of A and of a column of B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Product {
    /// Pairs of bfloat16; sums are `f32`. In one step the products of the first elements of the pairs are one chain of FMAs from 0,
    /// those of the second another; their sum is added once. Rounds to nearest even; subnormal numbers count as 0.
    /// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.)
    Bf16,
    /// Fours of signed bytes; sums are `i32`, which wrap (TDPBSSD).
    Bytes,
    /// Fours of unsigned bytes by fours of signed ones (TDPBUSD).
    UnsignedBytes,
}

/// What a block of sums begins with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Zero,
    /// The sums that are there.
    There,
}

/// Pair of parts of A and of B that are multiplied: the bytes from the first part of each to them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct PartPair {
    pub(crate) a: usize,
    pub(crate) b: usize,
}

/// Pairs of operands that have one part each.
pub(crate) const WHOLE: &[PartPair] = &[PartPair { a: 0, b: 0 }];
/// Largest number of pairs of parts.
pub(crate) const MAX_PAIRS: usize = 6;

/// Block of products, of up to two tiles of rows by one or two of columns.
#[derive(Clone, Copy)]
#[cfg_attr(not(any(matrix_unit_model, target_arch = "x86_64")), allow(dead_code, reason = "a unit reads it"))]
pub(crate) struct TileBlock<'a> {
    pub(crate) rows: usize,
    /// Pairs of parts that each step multiplies, in this order: at least one, at most [`MAX_PAIRS`].
    pub(crate) pairs: &'a [PartPair],
    /// First row of A, and the bytes from one row to the next. A row has [`TILE`] groups for each step.
    pub(crate) a: *const u8,
    pub(crate) a_stride: usize,
    /// First row of B of each tile of columns, a row of sixteen columns for each group, and the bytes from one row to the next.
    pub(crate) b: [Option<*const u8>; 2],
    pub(crate) b_stride: usize,
    pub(crate) steps: usize,
    pub(crate) start: Start,
    /// First row of sums, and the bytes from one row to the next.
    pub(crate) c: *mut u8,
    pub(crate) c_stride: usize,
}

/// Proof that the machine has a matrix unit, and that this process may use it. Only a detection makes one.
///
/// Its operations need a [configuration](Self::configure), which is this thread's: no code that may use the unit otherwise runs
/// while one exists.
pub(crate) trait MatrixUnit: Copy {
    /// Tiles of some number of rows; the unit is released when they are dropped.
    type Tiles: Tiles;

    /// Returns the proof, or the reason why there is none.
    fn detect() -> Result<Self, NoMatrixUnit>;

    /// Prepares the unit for blocks.
    fn configure(self) -> Self::Tiles;
}

/// Configured tiles of this thread, the only ones while they exist.
pub(crate) trait Tiles {
    /// Computes a block.
    ///
    /// # Safety
    /// This thread has no other tiles, and made these. The block has at most [`BLOCK`] rows, at least one, and B for its first tile of
    /// columns. Rows of A and B are readable for all steps, of every part, and sixteen sums of each row and tile of columns writable;
    /// readable too if the block starts with them.
    unsafe fn multiply<S: Simd>(&mut self, s: S, product: Product, block: TileBlock<'_>);
}
