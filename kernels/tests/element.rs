//! 16-bit elements against the `half` crate's conversions in software, on every instruction set, bit by bit.

use sdpa_kernels::{Bf16, Dtype, F16, Isa, narrow, widen};

const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// `half`, which makes every NaN quiet. So do we, but for bfloat16 widened: that is a shift, NaN or not.
fn expected_wide(dtype: Dtype, bits: u16) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::from_bits(bits).to_f32_const(),
        _ => {
            let x = half::bf16::from_bits(bits).to_f32_const();
            if x.is_nan() { f32::from_bits(u32::from(bits) << 16) } else { x }
        }
    }
}

fn expected_narrow(dtype: Dtype, x: f32) -> u16 {
    match dtype {
        Dtype::F16 => half::f16::from_f32_const(x).to_bits(),
        _ => half::bf16::from_f32_const(x).to_bits(),
    }
}

fn widened(isa: Isa, dtype: Dtype, from: &[u16]) -> Vec<f32> {
    let mut to = vec![7.0; from.len()];
    widen(isa, dtype, from, &mut to);
    to
}

fn narrowed(isa: Isa, dtype: Dtype, from: &[f32]) -> Vec<u16> {
    let mut to = vec![7; from.len()];
    narrow(isa, dtype, from, &mut to);
    to
}

#[test]
fn known_numbers() {
    for isa in Isa::available() {
        assert_eq!(widened(isa, Dtype::Bf16, &[0x3F80, 0xC040]), [1.0, -3.0]);
        assert_eq!(widened(isa, Dtype::F16, &[0x3C00, 0x0001]), [1.0, 2f32.powi(-24)]);
        assert_eq!(narrowed(isa, Dtype::F16, &[1.0, 65520.0]), [0x3C00, 0x7C00], "the second is infinite");
    }
}

/// One by one, without vectors.
fn widen_one(dtype: Dtype, bits: u16) -> f32 {
    if dtype == Dtype::F16 { F16(bits).to_f32() } else { Bf16(bits).to_f32() }
}

fn narrow_one(dtype: Dtype, x: f32) -> u16 {
    if dtype == Dtype::F16 { F16::from_f32(x).0 } else { Bf16::from_f32(x).0 }
}

/// Every instruction set and the scalar code against `half`.
#[track_caller]
fn narrows_like_half(xs: &[f32]) {
    for dtype in DTYPES {
        let expected: Vec<u16> = xs.iter().map(|&x| expected_narrow(dtype, x)).collect();
        let one_by_one = xs.iter().map(|&x| narrow_one(dtype, x)).collect();
        let vectors = Isa::available().map(|isa| (isa.name(), narrowed(isa, dtype, xs)));
        for (name, ours) in vectors.chain([("scalar", one_by_one)]) {
            let wrong = (0..xs.len()).find(|&i| ours[i] != expected[i]);
            let wrong = wrong.map(|i| format!("{:08x} to {:04x}, not {:04x}", xs[i].to_bits(), ours[i], expected[i]));
            assert_eq!(wrong, None, "{name}, {dtype}");
        }
    }
}

#[test]
fn every_pattern_is_widened_exactly() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for dtype in DTYPES {
        let one_by_one = all.iter().map(|&bits| widen_one(dtype, bits)).collect();
        let vectors = Isa::available().map(|isa| (isa.name(), widened(isa, dtype, &all)));
        for (name, ours) in vectors.chain([("scalar", one_by_one)]) {
            for (&bits, &x) in all.iter().zip(&ours) {
                let expected = expected_wide(dtype, bits);
                assert_eq!(x.to_bits(), expected.to_bits(), "{name}, {dtype} {bits:04x}: {x} not {expected}");
            }
        }
    }
}

#[test]
fn what_was_widened_narrows_to_itself() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for (isa, dtype) in Isa::available().flat_map(|isa| DTYPES.map(|dtype| (isa, dtype))) {
        let wide = widened(isa, dtype, &all);
        for ((&bits, x), back) in all.iter().zip(&wide).zip(narrowed(isa, dtype, &wide)) {
            let quiet = if dtype == Dtype::F16 { 0x0200 } else { 0x0040 };
            assert_eq!(back, if x.is_nan() { bits | quiet } else { bits }, "{isa}, {dtype} {bits:04x}");
        }
    }
}

#[test]
fn rounding_is_to_nearest_even_at_every_exponent() {
    // What is cut off: nothing, just below, at and just above the middle, nearly all. What stays ends in 0 and in 1, or is
    // all ones and carries. The cut lies at bit 16 of a bfloat16, 13 of a normal f16, and up to 24 of a subnormal one.
    let mut mantissas = vec![0, 1, 0x7F_FFFF];
    for cut in 10..=23u32 {
        let (unit, middle) = (1 << cut, 1 << (cut - 1));
        for kept in [0, unit, 2 * unit, 0x2A_AAAA, 0x55_5555, u32::MAX] {
            for rest in [0, 1, middle - 1, middle, middle + 1, unit - 1] {
                mantissas.push((kept & !(unit - 1) | rest) & 0x7F_FFFF);
            }
        }
    }
    let signs = [0, 1 << 31];
    let exponents = signs.iter().flat_map(|sign| (0..256u32).map(move |exponent| sign | exponent << 23));
    let xs: Vec<f32> = exponents.flat_map(|high| mantissas.iter().map(move |m| f32::from_bits(high | m))).collect();
    narrows_like_half(&xs);
}

#[test]
fn where_the_rules_change() {
    let at = [
        (Dtype::F16, 65504.0, 0x7BFF),
        (Dtype::F16, 65519.996, 0x7BFF),
        (Dtype::F16, 65520.0, 0x7C00),
        (Dtype::F16, f32::MAX, 0x7C00),
        (Dtype::F16, f32::INFINITY, 0x7C00),
        (Dtype::F16, 2f32.powi(-14), 0x0400),
        (Dtype::F16, 2f32.powi(-14) - 2f32.powi(-26), 0x0400),
        (Dtype::F16, 2f32.powi(-24), 0x0001),
        (Dtype::F16, 1.5 * 2f32.powi(-24), 0x0002),
        (Dtype::F16, 2f32.powi(-25), 0x0000),
        (Dtype::F16, 2f32.powi(-25).next_up(), 0x0001),
        (Dtype::Bf16, f32::MAX, 0x7F80),
        (Dtype::Bf16, f32::from_bits(0x7F7F_7FFF), 0x7F7F),
        (Dtype::Bf16, f32::from_bits(0x7F7F_8000), 0x7F80),
        (Dtype::Bf16, f32::from_bits(0x0000_8000), 0x0000),
        (Dtype::Bf16, f32::from_bits(0x0000_8001), 0x0001),
        (Dtype::Bf16, f32::from_bits(0x0001_8000), 0x0002),
        (Dtype::Bf16, f32::from_bits(0x7FFF_FFFF), 0x7FFF),
        (Dtype::Bf16, f32::from_bits(0x7F80_0001), 0x7FC0),
    ];
    for (dtype, x, bits) in at {
        for isa in Isa::available() {
            let negative = bits | 0x8000;
            assert_eq!(narrowed(isa, dtype, &[x, -x]), [bits, negative], "{isa}, {dtype} {x:e}");
        }
    }
}

#[test]
fn random_bits_are_narrowed_like_half() {
    // SplitMix64. Every second number is within the exponents of an f16, where there is something to round.
    let mut state = 0u64;
    let mut random = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ z >> 31) as u32
    };
    let mut xs = vec![0.0; 1 << 18];
    for _ in 0..16 {
        for pair in xs.as_chunks_mut::<2>().0 {
            let exponent = 127 - 26 + random() % 44;
            *pair = [random(), random() & 0x807F_FFFF | exponent << 23].map(f32::from_bits);
        }
        narrows_like_half(&xs);
    }
}

#[test]
fn slices_of_every_length() {
    for (isa, dtype) in Isa::available().flat_map(|isa| DTYPES.map(|dtype| (isa, dtype))) {
        for length in 0..=70u16 {
            // Off the vectors' alignment, among elements that must stay as they are.
            let bits: Vec<u16> = (0..length).map(|i| 0x3C00 + 37 * i).collect();
            let end = 1 + usize::from(length);
            let mut wide = vec![-1.0; end + 1];
            widen(isa, dtype, &bits, &mut wide[1..end]);
            assert!(wide[0] == -1.0 && wide[end] == -1.0, "{isa}, {dtype}: wrote beyond {length} elements");
            let expected: Vec<f32> = bits.iter().map(|&bits| expected_wide(dtype, bits)).collect();
            assert_eq!(wide[1..end], expected, "{isa}, {dtype}: {length} elements");
            let mut back = vec![0xFFFF; end + 1];
            narrow(isa, dtype, &wide[1..end], &mut back[1..end]);
            assert!(back[0] == 0xFFFF && back[end] == 0xFFFF, "{isa}, {dtype}: wrote beyond {length} elements");
            assert_eq!(back[1..end], bits, "{isa}, {dtype}: {length} elements");
        }
    }
}

#[test]
fn types_have_sizes_and_names() {
    let facts = [Dtype::F32, Dtype::Bf16, Dtype::F16].map(|dtype| (dtype.bytes(), dtype.to_string()));
    assert_eq!(facts, [(4, "f32".into()), (2, "bf16".into()), (2, "f16".into())]);
    assert_eq!(format!("{:>6}", Dtype::F16), "   f16");
}

#[test]
#[should_panic = "f32 is not a 16-bit type"]
fn f32_is_refused() {
    widen(Isa::detect(), Dtype::F32, &[], &mut []);
}

#[test]
#[should_panic = "inputs and outputs of one length"]
fn other_lengths_are_refused() {
    narrow(Isa::detect(), Dtype::Bf16, &[1.0; 3], &mut [0; 2]);
}
