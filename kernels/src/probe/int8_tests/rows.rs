//! Tests of row quantisation, against the same in f64 and by hand.

use super::*;
use crate::matmul::int8;
use crate::simd::Simd;

/// Returns rows of every length that matters, with magnitudes over the whole range.
fn rows() -> Vec<Vec<f32>> {
    let mut numbers = Floats(5);
    let mut rows = Vec::new();
    for n in [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255] {
        for power in [-148, -140, -126, -120, -119, -100, -3, 0, 7, 100, 127] {
            // In two steps: 2⁻¹⁴⁸ is not a normal number.
            let scaled = |x: f32| (f64::from(x) * 2f64.powi(power)) as f32;
            rows.push((0..n).map(|_| scaled(numbers.float())).collect());
        }
        // Ties: 127 makes the scale 1.
        rows.push((0..n).map(|i| if i == 0 { 127.0 } else { i as f32 / 2.0 - 32.5 }).collect());
    }
    rows
}

struct Quantise<'a>(&'a [f32], usize);

impl Quantise<'_> {
    fn run<S: Simd>(self, s: S) -> (f32, Vec<i8>) {
        let mut bytes = vec![99; self.1];
        let scale = int8::quantise(s, self.0, &mut bytes);
        (scale, bytes)
    }
}

struct Query<'a>(&'a [f32], f32);

impl Query<'_> {
    fn run<S: Simd>(self, s: S) -> (Row, Vec<Query4>) {
        let mut out = vec![Query4::ZERO; quads(self.0.len())];
        let row = int8::quantise_query(s, self.0, self.1, &mut out);
        (row, out)
    }
}

#[test]
fn bytes_are_the_nearest() {
    for row in rows() {
        let most = row.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for isa in Isa::available() {
            let (scale, bytes) = dispatch!(isa, |s| Quantise(&row, row.len() + 3).run(s));
            assert_eq!(scale, if most == 0.0 { 0.0 } else { (most / 127.0).max(f32::MIN_POSITIVE) });
            for (&x, &b) in row.iter().zip(&bytes) {
                assert_eq!(
                    f32::from(b),
                    if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even() },
                    "{x} / {scale}"
                );
                let (x, scale) = (f64::from(x), f64::from(scale));
                assert!((x - f64::from(b) * scale).abs() <= 0.500_01 * scale, "{isa}: {b} for {x} / {scale}");
            }
            assert_eq!(bytes[row.len()..], [0; 3]);
            let (query, quads) = dispatch!(isa, |s| Query(&row, 0.125).run(s));
            assert_eq!(query.factor, scale * 0.125);
            assert_eq!(query.total, bytes.iter().map(|&b| i32::from(b)).sum::<i32>());
            let padded: Vec<i8> = bytes[..row.len()].iter().copied().chain([0; 3]).collect();
            for (i, quad) in quads.iter().enumerate() {
                assert_eq!(*quad, Query4::new(padded[4 * i..][..4].try_into().unwrap()));
            }
        }
    }
}

#[test]
fn rows_of_zeros_and_rows_that_are_not_finite() {
    for isa in Isa::available() {
        for n in [0, 1, 16, 65] {
            assert_eq!(dispatch!(isa, |s| Quantise(&vec![-0.0; n], n).run(s)), (0.0, vec![0; n]));
        }
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 15, 16, 64, 66] {
                let mut row = vec![1.0; 67];
                row[at] = bad;
                let (scale, bytes) = dispatch!(isa, |s| Quantise(&row, 67).run(s));
                assert!(scale.is_nan() && bytes == [0; 67], "{isa}: {bad} at {at}");
                let (query, quads) = dispatch!(isa, |s| Query(&row, 1.0).run(s));
                assert!(query.factor.is_nan() && query.total == 0 && quads == [Query4::ZERO; 17]);
            }
        }
    }
}

#[test]
fn channels_saturate_and_say_what_is_not_finite() {
    struct ByChannel<'a>(&'a [f32], &'a [f32]);
    impl ByChannel<'_> {
        fn run<S: Simd>(self, s: S) -> (bool, Vec<i8>) {
            let mut bytes = vec![99; self.0.len() + 1];
            (int8::quantise_by_channel(s, self.0, self.1, &mut bytes), bytes)
        }
    }
    for isa in Isa::available() {
        let xs = [0.5, -0.75, 1000.0, -1000.0, 0.0, 3.0, 1.25, -1.25];
        let scales = [0.25, 0.5, 1.0, 1.0, 0.0, 0.0, 0.5, 0.5];
        let repeat = |xs: [f32; 8]| xs.repeat(5);
        let want = [2, -2, 127, -127, 0, 127, 2, -2].repeat(5);
        let (finite, bytes) = dispatch!(isa, |s| ByChannel(&repeat(xs), &repeat(scales)).run(s));
        assert!(finite && bytes[..40] == want && bytes[40] == 0, "{isa}: {bytes:?}");
        for (bad, byte) in [(f32::NAN, 0), (f32::from_bits(0x7FC0_1234), 0), (f32::INFINITY, 127)] {
            let mut xs = xs;
            xs[1] = bad;
            let (finite, bytes) = dispatch!(isa, |s| ByChannel(&repeat(xs), &repeat(scales)).run(s));
            assert!(!finite && bytes[1] == byte && bytes[33] == byte);
        }
    }
}
