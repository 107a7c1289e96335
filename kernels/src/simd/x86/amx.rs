//! AMX, the matrix unit of Intel's processors since Sapphire Rapids: eight tiles of sixteen rows of 64 bytes.
//!
//! Stable Rust has neither intrinsics nor detection for it, so both are `asm!` here. Tiles do not live from one `asm!` block to
//! the next in the compiler's eyes: one block computes sums over the whole depth. (Intel 64 and IA-32 Architectures Software
//! Developer's Manual, volume 1, chapter 18.)

use crate::simd::Simd;
use crate::simd::tiles::{
    BLOCK, MAX_PAIRS, MatrixUnit, NoMatrixUnit, PartPair, Product, Start, TILE, TileBlock, Tiles,
};
use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use core::marker::PhantomData;
use std::sync::OnceLock;

/// Proof that this machine has AMX with products of bfloat16 and of bytes, and that the system lets this process use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(());

impl MatrixUnit for Amx {
    type Tiles = AmxTiles;

    /// Asks once: a virtual machine takes microseconds to answer.
    fn detect() -> Result<Self, NoMatrixUnit> {
        static FOUND: OnceLock<Result<Amx, NoMatrixUnit>> = OnceLock::new();
        *FOUND.get_or_init(|| match has_instructions() {
            false => Err(NoMatrixUnit::Absent),
            true if is_permitted() => Ok(Amx(())),
            true => Err(NoMatrixUnit::Refused),
        })
    }

    #[inline(always)]
    fn configure(self) -> AmxTiles {
        AmxTiles { rows: 0, thread: PhantomData }
    }
}

/// Returns true if the processor has tiles of the usual size, and both products.
fn has_instructions() -> bool {
    /// Bits of leaf 7: AMX-BF16, AMX-TILE, AMX-INT8.
    const PRODUCTS: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    if cfg!(miri) || __cpuid_count(0, 0).eax < 0x1D || __cpuid_count(7, 0).edx & PRODUCTS != PRODUCTS {
        return false;
    }
    // Palette 1: bytes of a row and number of tiles in the upper halves, rows of a tile.
    let palette = __cpuid_count(0x1D, 1);
    palette.ebx & 0xFFFF >= 64 && palette.ebx >> 16 >= 8 && palette.ecx & 0xFFFF >= TILE as u32
}

/// Asks the system for the use of tiles, for all threads of the process, and returns true if it saves and restores them.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    /// Number of the system call `arch_prctl`, its request for a component of the state, and the component: the tiles.
    const ARCH_PRCTL: i64 = 158;
    const REQUEST: u64 = 0x1023;
    const TILES: u64 = 18;
    /// Bits of the state that the system manages: configuration and tiles.
    const STATE: u32 = 1 << 17 | 1 << 18;
    /// Bit of leaf 1: the system uses XSAVE, so XGETBV exists.
    const OSXSAVE: u32 = 1 << 27;
    if __cpuid_count(1, 0).ecx & OSXSAVE == 0 {
        return false;
    }
    let mut answer = ARCH_PRCTL;
    // SAFETY: the system call touches no memory of the process; it changes the registers that are named.
    unsafe {
        asm!("syscall", inlateout("rax") answer, in("rdi") REQUEST, in("rsi") TILES, lateout("rcx") _, lateout("r11") _,
            options(nostack));
    }
    // Only now: before the request, a system may hide the state.
    let managed: u32;
    // SAFETY: the system uses XSAVE, so the instruction exists.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") managed, out("edx") _, options(nomem, nostack)) }
    // The emulator's tiles are on, but its system knows nothing of them: `.ci/emulated`.
    (answer == 0 || cfg!(matrix_unit_emulated)) && managed & STATE == STATE
}

/// Other systems are not asked.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Tiles of the rows that the last block had. Tiles 0 to 3 are sums, two of columns for each of rows; 4 and 5 are A, 6 and 7 B.
pub(crate) struct AmxTiles {
    /// Number of rows of a block that the unit is configured for; 0 if it is not configured.
    rows: usize,
    /// They are one thread's.
    thread: PhantomData<*const ()>,
}

/// Operand of LDTILECFG.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<Configuration>() == 64);

/// Bits that tell the instructions of a block which tiles it has, and what it starts with.
const TWO_COLUMNS: u32 = 1;
const TWO_ROWS: u32 = 2;
const SUMS_THERE: u32 = 4;

/// Operands that the instructions of a block read from memory, because there are too few registers.
#[repr(C)]
struct Pairs {
    /// Place of the first pair, in numbers of eight bytes: pairs lie in the opposite order.
    first: usize,
    /// Bytes from B of the first tile of columns to that of the second.
    second_columns: usize,
    pairs: [PartPair; MAX_PAIRS],
}

impl Pairs {
    #[inline(always)]
    fn of(pairs: &[PartPair], second_columns: usize) -> Self {
        assert!((1..=MAX_PAIRS).contains(&pairs.len()), "{} pairs of parts", pairs.len());
        let mut reversed = [PartPair::default(); MAX_PAIRS];
        for (to, &pair) in reversed[..pairs.len()].iter_mut().rev().zip(pairs) {
            *to = pair;
        }
        Self { first: 2 * (pairs.len() - 1), second_columns, pairs: reversed }
    }
}

/// Computes a block with one of the unit's products. Tiles that the block lacks are skipped by branches, which take no time beside
/// products of sixteen cycles. Sums that are 0 at first are loaded nowhere; a product of no steps leaves them.
macro_rules! multiply {
    ($product:literal, $block:ident) => {{
        let TileBlock { rows, pairs, a, a_stride, b: [b0, b1], b_stride, steps, start, c, c_stride } = $block;
        let b0 = b0.expect("a block has columns");
        let how = u32::from(b1.is_some()) * TWO_COLUMNS
            | u32::from(rows > TILE) * TWO_ROWS
            | u32::from(start == Start::There) * SUMS_THERE;
        // Exposed: the second tile's columns are reached from the first's.
        let second_columns = b1.unwrap_or(b0).expose_provenance().wrapping_sub(b0.expose_provenance());
        let pairs = Pairs::of(pairs, second_columns);
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "test {how:e}, 4", "jz 3f",
            "tileloadd tmm0, [{c} + {c_stride}]",
            "test {how:e}, 1", "jz 2f",
            "tileloadd tmm1, [{c} + {c_stride} + 64]",
            "2:", "test {how:e}, 2", "jz 3f",
            "lea {at_a}, [{c} + 8 * {c_stride}]", "lea {at_a}, [{at_a} + 8 * {c_stride}]",
            "tileloadd tmm2, [{at_a} + {c_stride}]",
            "test {how:e}, 1", "jz 3f",
            "tileloadd tmm3, [{at_a} + {c_stride} + 64]",
            "3:", "test {steps}, {steps}", "jz 8f",
            "4:", "mov {pair}, [{pairs}]",
            "5:", "mov {at_a}, [{pairs} + 8 * {pair} + 16]", "add {at_a}, {a}",
            "mov {at_b}, [{pairs} + 8 * {pair} + 24]", "add {at_b}, {b}",
            "tileloadd tmm4, [{at_a} + {a_stride}]",
            "tileloadd tmm6, [{at_b} + {b_stride}]",
            concat!($product, " tmm0, tmm4, tmm6"),
            "test {how:e}, 1", "jz 6f",
            "add {at_b}, [{pairs} + 8]",
            "tileloadd tmm7, [{at_b} + {b_stride}]",
            concat!($product, " tmm1, tmm4, tmm7"),
            "6:", "test {how:e}, 2", "jz 7f",
            "lea {at_a}, [{at_a} + 8 * {a_stride}]", "lea {at_a}, [{at_a} + 8 * {a_stride}]",
            "tileloadd tmm5, [{at_a} + {a_stride}]",
            concat!($product, " tmm2, tmm5, tmm6"),
            "test {how:e}, 1", "jz 7f",
            concat!($product, " tmm3, tmm5, tmm7"),
            "7:", "sub {pair}, 2", "jns 5b",
            "add {a}, 64",
            "lea {b}, [{b} + 8 * {b_stride}]", "lea {b}, [{b} + 8 * {b_stride}]",
            "dec {steps}", "jnz 4b",
            "8:", "tilestored [{c} + {c_stride}], tmm0",
            "test {how:e}, 1", "jz 9f",
            "tilestored [{c} + {c_stride} + 64], tmm1",
            "9:", "test {how:e}, 2", "jz 22f",
            "lea {at_a}, [{c} + 8 * {c_stride}]", "lea {at_a}, [{at_a} + 8 * {c_stride}]",
            "tilestored [{at_a} + {c_stride}], tmm2",
            "test {how:e}, 1", "jz 22f",
            "tilestored [{at_a} + {c_stride} + 64], tmm3",
            "22:",
            how = in(reg) how,
            pairs = in(reg) &raw const pairs,
            pair = out(reg) _,
            a = inout(reg) a => _,
            at_a = out(reg) _,
            a_stride = in(reg) a_stride,
            b = inout(reg) b0 => _,
            at_b = out(reg) _,
            b_stride = in(reg) b_stride,
            steps = inout(reg) steps => _,
            c = in(reg) c,
            c_stride = in(reg) c_stride,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }};
}

impl AmxTiles {
    /// Configures the unit for blocks of `rows` rows, unless it already is.
    #[inline(always)]
    fn configure(&mut self, rows: usize) {
        if self.rows == rows {
            return;
        }
        assert!((1..=BLOCK).contains(&rows), "a block of {rows} rows");
        let first = rows.min(TILE) as u8;
        // The second tile of rows exists even if no block uses it: without rows it would be an invalid operand.
        let second = rows.saturating_sub(TILE).max(1) as u8;
        let full = TILE as u8;
        let mut configuration =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        configuration.row_bytes[..8].fill(64);
        configuration.rows[..8].copy_from_slice(&[first, first, second, second, first, second, full, full]);
        // SAFETY: an `Amx` made these tiles, so the instruction exists; the configuration is a valid one of palette 1, of 64 bytes.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const configuration, out("tmm0") _, out("tmm1") _, out("tmm2") _,
                out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _, options(nostack, readonly));
        }
        self.rows = rows;
    }
}

impl Tiles for AmxTiles {
    #[inline(always)]
    unsafe fn multiply<S: Simd>(&mut self, _: S, product: Product, block: TileBlock<'_>) {
        self.configure(block.rows);
        // SAFETY: an `Amx` made these tiles, and they are configured for the block's rows; the caller guarantees its memory.
        unsafe {
            match product {
                Product::Bf16 => multiply!("tdpbf16ps", block),
                Product::Bytes => multiply!("tdpbssd", block),
                Product::UnsignedBytes => multiply!("tdpbusd", block),
            }
        }
    }
}

impl Drop for AmxTiles {
    #[inline(always)]
    fn drop(&mut self) {
        if self.rows > 0 {
            // SAFETY: an `Amx` made these tiles, so the instruction exists.
            unsafe {
                asm!("tilerelease", out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                    out("tmm5") _, out("tmm6") _, out("tmm7") _, options(nomem, nostack));
            }
        }
    }
}
