//! Portable backend that every machine can run, on [`wide`]: SSE2 on x86-64, NEON on AArch64, simd128 on wasm, plain
//! code elsewhere. `wide` selects instructions when the crate is compiled, so with default flags on x86-64 this is
//! 128-bit and has no FMA; the backends for AVX2, AVX-512 and NEON are this crate's own and chosen at run time.

use self::half::{PortableHalf, bits, from_bits, ints};
use crate::simd::{
    Bf16x2, F16_BIAS, F16_END, F16_NORMAL, Half, INFINITY, Int8Dot, Int8DotWork, LANES, Lower, Query4, Simd,
    TWO_TO_MINUS_64, Upper, Vector, Words4,
};
use wide::{f32x4, i16x8, i32x4, i32x8};

mod half;
#[cfg(any(test, matrix_unit_model))]
pub(crate) mod tiles;

/// Token of the portable backend. It needs no proof: every machine can run it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

/// Sixteen lanes as four times four.
type Quad = [f32x4; 4];

/// Returns the vector of two halves.
#[inline(always)]
fn whole(low: [f32x4; 2], high: [f32x4; 2]) -> Quad {
    [low[0], low[1], high[0], high[1]]
}

/// Returns four values by number. Not `core::array::from_fn` nor `map` of an array, which are calls where little is optimised.
#[inline(always)]
fn each<T>(f: impl Fn(usize) -> T) -> [T; 4] {
    [f(0), f(1), f(2), f(3)]
}

/// Returns eight numbers of sixteen bits, lowest byte first.
#[inline(always)]
fn words_of(bytes: [[u8; 2]; 8]) -> i16x8 {
    let word = |i: usize| i16::from_le_bytes(bytes[i]);
    i16x8::new([word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7)])
}

/// Returns `a > b ? a : b`, NaN included.
#[inline(always)]
fn greater(a: f32x4, b: f32x4) -> f32x4 {
    if cfg!(target_feature = "sse") {
        // The machine's rule for NaN is already the required one.
        a.fast_max(b)
    } else {
        a.simd_gt(b).bitselect(a, b)
    }
}

/// Rounds to nearest even: binary16, sign-extended to 32 bits.
#[inline(always)]
fn narrow_f16(x: f32x4) -> i32x4 {
    let unsigned = bits(x) & ints(0x7FFF_FFFF);
    let sign = (bits(x) ^ unsigned) >> 16;
    let odd = (unsigned >> 13) & ints(1);
    let normal = (unsigned - ints(F16_BIAS) + ints(0x0FFF) + odd) >> 13;
    // The sum is rounded to the unit of subnormal numbers; its lowest bits then count those units.
    let subnormal = bits(from_bits(unsigned) + f32x4::splat(0.5)) - ints(0.5f32.to_bits());
    let finite = ints(F16_NORMAL).simd_gt(unsigned).bitselect(subnormal, normal);
    let nan = ((unsigned >> 13) & ints(0x03FF)) | ints(0x7E00);
    let infinite_or_nan = unsigned.simd_gt(ints(INFINITY)).bitselect(nan, ints(0x7C00));
    ints(F16_END).simd_gt(unsigned).bitselect(finite, infinite_or_nan) | sign
}

/// Rounds to bfloat16, sign-extended to 32 bits, by the algorithm of the AVX2 backend.
#[inline(always)]
fn narrow_bf16(x: f32x4) -> i32x4 {
    let bits = bits(x);
    let odd = (bits >> 16) & ints(1);
    let is_nan = (bits & ints(0x7FFF_FFFF)).simd_gt(ints(INFINITY));
    is_nan.bitselect(bits | ints(0x0040_0000), bits + ints(0x7FFF) + odd) >> 16
}

/// Stores sixteen numbers that fit 16 bits, sign included.
///
/// # Safety
/// `p..p + 16` is writable.
#[inline(always)]
unsafe fn store_16(p: *mut u16, v: [i32x4; 4]) {
    for (i, pair) in [[v[0], v[1]], [v[2], v[3]]].into_iter().enumerate() {
        // SAFETY: both are 32 bytes, the lanes in order, and every bit pattern is a valid i32.
        let pair = unsafe { core::mem::transmute::<[i32x4; 2], i32x8>(pair) };
        // No value saturates. SSE2 packs saturating in one instruction, and needs shuffles for every other way.
        let packed = i16x8::from_i32x8_saturate(pair).to_array();
        // SAFETY: the caller guarantees `p..p + 16`.
        unsafe { p.cast::<[i16; 8]>().add(i).write_unaligned(packed) }
    }
}

// SAFETY: made for every machine; loads and stores touch sixteen elements.
unsafe impl Vector for Portable {
    type V = Quad;
    const LANES: usize = LANES;

    #[inline(always)]
    fn splat(self, x: f32) -> Quad {
        [f32x4::splat(x); 4]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Quad {
        // SAFETY: the caller guarantees `p..p + 16`.
        each(|i| f32x4::new(unsafe { p.cast::<[f32; 4]>().add(i).read_unaligned() }))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Quad {
        // SAFETY: the caller guarantees sixteen readable elements at `p`; each half loads eight.
        unsafe { whole(PortableHalf.load_bf16(p), PortableHalf.load_bf16(p.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Quad {
        // SAFETY: the caller guarantees sixteen readable elements at `p`; each half loads eight.
        unsafe { whole(PortableHalf.load_f16(p), PortableHalf.load_f16(p.add(8))) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Quad) {
        let lanes = [v[0].to_array(), v[1].to_array(), v[2].to_array(), v[3].to_array()];
        // SAFETY: the caller guarantees `p..p + 16`.
        unsafe { p.cast::<[[f32; 4]; 4]>().write_unaligned(lanes) }
    }

    #[inline(always)]
    fn add(self, a: Quad, b: Quad) -> Quad {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn mul(self, a: Quad, b: Quad) -> Quad {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn fma(self, a: Quad, b: Quad, c: Quad) -> Quad {
        each(|i| a[i].mul_add(b[i], c[i]))
    }
}

// SAFETY: made for every machine; loads and stores touch sixteen elements.
unsafe impl Simd for Portable {
    type Half = PortableHalf;

    // In SSE2 terms: 2 × 4 accumulators, 4 keys, 1 broadcast, 1 product on its way to a sum: 14 of 16 registers.
    const TILE_ROWS: usize = 2;
    const TILE_VECS: usize = 1;
    const DOT_VECS: usize = 1;
    const PREFETCHES: bool = false;
    // Registers are exhausted: ending rows in the tile took 4 % of a call of 128 rows and keys, a fifth of one of 16.
    const ENDS_ROWS: bool = false;

    const FUSED: bool = cfg!(any(target_feature = "fma", all(target_arch = "aarch64", target_feature = "neon")));

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        // A separate function, as for other instruction sets: it takes the compiler less time than one large one.
        #[inline(never)]
        fn inner<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        inner(f)
    }

    #[inline(always)]
    fn half(self) -> Option<PortableHalf> {
        Some(PortableHalf)
    }

    #[inline(always)]
    unsafe fn with_int8_dot<W: Int8DotWork>(self, work: W) -> W::Output {
        // SAFETY: the caller guarantees what the work requires.
        unsafe { work.run(self) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: Quad) {
        // SAFETY: the caller guarantees `p..p + 16`.
        unsafe { store_16(p, [narrow_bf16(v[0]), narrow_bf16(v[1]), narrow_bf16(v[2]), narrow_bf16(v[3])]) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Quad) {
        // SAFETY: the caller guarantees `p..p + 16`.
        unsafe { store_16(p, [narrow_f16(v[0]), narrow_f16(v[1]), narrow_f16(v[2]), narrow_f16(v[3])]) }
    }

    #[inline(always)]
    unsafe fn load_of_pairs(self, p: *const Bf16x2, i: usize) -> Quad {
        // SAFETY: the caller guarantees `p..p + 16`.
        let pairs = unsafe { p.cast::<[[i32; 4]; 4]>().read_unaligned() };
        each(|n| from_bits((i32x4::new(pairs[n]) >> (16 * i as i32)) << 16))
    }

    #[inline(always)]
    unsafe fn select_bytes(self, p: *const u8, zero: Quad, other: Quad) -> Quad {
        // SAFETY: the caller guarantees `p..p + 16`.
        let bytes = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        each(|i| {
            let lanes = i32x4::new(each(|lane| -i32::from(bytes[4 * i + lane] == 0)));
            from_bits(lanes).bitselect(zero[i], other[i])
        })
    }

    #[inline(always)]
    fn select_bits(self, bits: u16, zero: Quad, other: Quad) -> Quad {
        each(|i| {
            let lanes = i32x4::new(each(|lane| -i32::from(bits >> (4 * i + lane) & 1 == 0)));
            from_bits(lanes).bitselect(zero[i], other[i])
        })
    }

    #[inline(always)]
    fn bits_at_least(self, words: [&[u64; LANES / 2]; 4], least: u32) -> [u16; 2] {
        [0, 1].map(|odd| {
            let bit = |i: usize| u16::from(words[i % 4][2 * (i / 4) + odd] as u32 >= least) << i;
            (0..LANES).fold(0, |bits, i| bits | bit(i))
        })
    }

    #[inline(always)]
    fn prefetch(self, _: *const f32) {}

    #[inline(always)]
    fn prefetch_second(self, _: *const f32) {}

    #[inline(always)]
    fn sub(self, a: Quad, b: Quad) -> Quad {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn div(self, a: Quad, b: Quad) -> Quad {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn max(self, a: Quad, b: Quad) -> Quad {
        each(|i| greater(a[i], b[i]))
    }

    #[inline(always)]
    fn select_eq(self, a: Quad, b: Quad, then: Quad, otherwise: Quad) -> Quad {
        each(|i| a[i].simd_eq(b[i]).bitselect(then[i], otherwise[i]))
    }

    #[inline(always)]
    fn one_plus_scaled(self, (a, b): (Quad, Quad), _: Quad, shifted: Quad) -> Quad {
        // As in the AVX2 backend.
        let small = f32x4::splat(TWO_TO_MINUS_64);
        each(|i| (a[i] * small).mul_add(b[i], small) * from_bits(bits(shifted[i]) << 23))
    }

    #[inline(always)]
    fn reduce_max(self, v: Quad) -> f32 {
        let four = greater(greater(v[0], v[2]), greater(v[1], v[3])).to_array();
        let two: [f32; 2] = core::array::from_fn(|i| if four[i] > four[i + 2] { four[i] } else { four[i + 2] });
        if two[0] > two[1] { two[0] } else { two[1] }
    }

    #[inline(always)]
    fn reduce_sum(self, v: Quad) -> f32 {
        // Lanes 8 apart, then 4, 2, 1.
        let four = ((v[0] + v[2]) + (v[1] + v[3])).to_array();
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    unsafe fn transpose(self, first: *const f32, step: isize, out: *mut f32) {
        for top in (0..LANES).step_by(4) {
            for left in (0..LANES).step_by(4) {
                let row = |r: usize| first.wrapping_add(left).wrapping_byte_offset((top + r) as isize * step);
                // SAFETY: four floats of four rows, and four times four of `out`, all inside the squares that the caller
                // guarantees.
                unsafe { transpose_four([row(0), row(1), row(2), row(3)], out.add(left * LANES + top)) };
            }
        }
    }
}

/// Transposes a square of four: element `i` of row `r` becomes element `r` of row `i` of `out`. Its rows are sixteen apart.
///
/// # Safety
/// The rows are readable for four floats, which need not be aligned, and so are those of `out` writable.
#[inline(always)]
pub(crate) unsafe fn transpose_four(rows: [*const f32; 4], out: *mut f32) {
    // SAFETY: the caller guarantees four floats of each row, and of each row of `out`.
    unsafe {
        let block = f32x4::transpose(each(|i| f32x4::new(rows[i].cast::<[f32; 4]>().read_unaligned())));
        for (i, row) in block.into_iter().enumerate() {
            out.add(i * LANES).cast::<[f32; 4]>().write_unaligned(row.to_array());
        }
    }
}

// SAFETY: made for every machine; loads and stores touch sixteen elements.
unsafe impl Int8Dot for Portable {
    // In SSE2 terms: 2 × 4 sums, 2 keys at a time, 2 × 2 broadcasts, 1 product: 15 of 16 registers.
    const INT8_DOT_ROWS: usize = 2;
    const WEIGHT_ROWS: usize = 2;
    type Sums = [i32x4; 4];
    type Keys = Self::Words;
    type Nibbles = [Self::Words; 2];
    /// Sixteen-bit elements 0 and 2 of each key or column, then 1 and 3; four after four.
    type Words = [[i16x8; 2]; 4];
    type NibbleColumns = Self::Words;

    #[inline(always)]
    fn start(self, _: i32) -> Self::Sums {
        [i32x4::splat(0); 4]
    }

    #[inline(always)]
    unsafe fn nibbles(self, p: *const i8) -> Self::Nibbles {
        // SAFETY: same contract: the caller guarantees the range at `p`.
        unsafe { [self.nibble_columns::<Lower>(p), self.nibble_columns::<Upper>(p)] }
    }

    #[inline(always)]
    fn dot8(self, sums: Self::Sums, lower: &Query4, upper: &Query4, keys: Self::Nibbles) -> Self::Sums {
        self.dot4_words(self.dot4_words(sums, lower.words, keys[0]), upper.words, keys[1])
    }

    #[inline(always)]
    unsafe fn nibble_columns<H: Half>(self, p: *const i8) -> Self::Words {
        // SAFETY: the caller guarantees `p..p + 64`.
        let bytes = unsafe { p.cast::<[[[u8; 2]; 8]; 4]>().read_unaligned() };
        each(|i| {
            let pairs = words_of(bytes[i]);
            // Each element up to the end of its 16 bits, and back with its sign.
            let [even, odd] = if H::IS_UPPER { [pairs << 8, pairs] } else { [pairs << 12, pairs << 4] };
            [even >> 12, odd >> 12]
        })
    }

    #[inline(always)]
    fn dot4_bytes(self, sums: Self::Sums, x: u32, columns: Self::Words) -> Self::Sums {
        let alternate = |bytes: u32| (bytes & 0x00FF_00FF).cast_signed();
        self.dot4_words(sums, Words4 { even: alternate(x), odd: alternate(x >> 8) }, columns)
    }

    #[inline(always)]
    unsafe fn keys(self, p: *const i8) -> Self::Keys {
        // SAFETY: same contract: the caller guarantees the range at `p`.
        unsafe { self.words(p) }
    }

    #[inline(always)]
    fn dot4(self, sums: Self::Sums, q: &Query4, keys: Self::Keys) -> Self::Sums {
        self.dot4_words(sums, q.words, keys)
    }

    #[inline(always)]
    unsafe fn words(self, p: *const i8) -> Self::Words {
        // SAFETY: the caller guarantees `p..p + 64`.
        let bytes = unsafe { p.cast::<[[[u8; 2]; 8]; 4]>().read_unaligned() };
        each(|i| {
            let pairs = words_of(bytes[i]);
            [(pairs << 8) >> 8, pairs >> 8]
        })
    }

    #[inline(always)]
    fn dot4_words(self, mut sums: Self::Sums, x: Words4, columns: Self::Words) -> Self::Sums {
        let (even, odd) = (pairs(x.even), pairs(x.odd));
        for (sum, columns) in sums.iter_mut().zip(columns) {
            *sum = *sum + columns[0].dot(even) + columns[1].dot(odd);
        }
        sums
    }

    #[inline(always)]
    fn to_f32(self, sums: Self::Sums) -> Quad {
        each(|i| sums[i].round_float())
    }

    #[inline(always)]
    fn max_magnitude(self, a: Quad, b: Quad) -> Quad {
        each(|i| from_bits((bits(a[i]) & ints(0x7FFF_FFFF)).max(bits(b[i]))))
    }

    #[inline(always)]
    fn bytes<const SHIFT: u32>(self, v: Quad) -> [u8; LANES] {
        let lanes = each(|i| (bits(v[i]) >> SHIFT).to_array());
        core::array::from_fn(|i| lanes[i / 4][i % 4] as u8)
    }
}

/// Returns the lower half of `word` in even lanes, the upper in odd ones.
#[inline(always)]
fn pairs(word: i32) -> i16x8 {
    let (low, high) = (word as i16, (word >> 16) as i16);
    i16x8::new([low, high, low, high, low, high, low, high])
}
