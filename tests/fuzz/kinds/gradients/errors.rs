//! Bounds of the errors of gradients.

use crate::fuzzer::array::Array;
use crate::fuzzer::case::Case;
use crate::fuzzer::kinds::gradients::{All, Back, NAMES, Written};
use crate::fuzzer::place::value;
use sdpa::Dtype;
use std::collections::HashMap;

impl Back {
    /// Ratio of the error of the sum over all rows to one row's, and of the sum over the rows that share a key, about: errors
    /// of different rows go either way, those of equal rows the same way.
    fn sums_of_rows(&self) -> (f64, f64) {
        let (heads, sharing) = (self.case.heads(), self.case.sharing());
        let mut equal: HashMap<(Option<usize>, Vec<u32>), f64> = HashMap::new();
        for [b, h, i] in self.case.every_row() {
            let (at, l) = self.case.row_at(b, i);
            let row = self.d_out.0.row(at, h, l);
            // Without gradients nothing errs.
            if self.d_lse.is_none() && row.iter().all(|&x| x == 0.0) {
                continue;
            }
            let row: Vec<u32> = row.iter().map(|x| x.to_bits()).collect();
            let group = b * (heads / sharing) + h / sharing;
            *equal.entry((Some(group), row.clone())).or_default() += 1.0;
            *equal.entry((None, row)).or_default() += 1.0;
        }
        let mut squares: HashMap<Option<usize>, f64> = HashMap::new();
        equal.iter().for_each(|((group, _), n)| *squares.entry(*group).or_default() += n * n);
        let all = squares.remove(&None).unwrap_or(0.0);
        (all.sqrt(), squares.values().fold(0.0, |most: f64, x| most.max(*x)).sqrt())
    }

    /// Bound of the distances.
    fn farthest(&self) -> f64 {
        let (rows, keys) = self.case.longest();
        let far = (0..self.case.batch()).map(|b| self.case.offset(b).unsigned_abs()).max().unwrap_or(0);
        (far + rows + keys) as f64
    }

    /// Bound of the error of a score's gradient that cancels wholly, times all that it is multiplied by and added up
    /// with in each gradient: about, since errors go either way.
    pub(crate) fn noise(&self) -> [f64; 8] {
        let Case { q, k, v, bias, alibi, settings, .. } = &self.case;
        let factor = settings.dropout.map_or(1.0, |dropout| dropout.factor().into());
        let (_, keys) = self.case.longest();
        let d_lse = self.d_lse.as_ref().map_or(0.0, largest);
        let one = self.weight_error().max(1e-6) * (factor * norm(&self.d_out.0) * norm(v) + d_lse);
        let scale = f64::from(self.case.scale()).abs();
        let (all, of_key) = self.sums_of_rows();
        let distance = if alibi.is_some() { self.farthest() } else { 0.0 };
        let dv = 1e-6 * factor * of_key * largest(&self.d_out.0);
        let bias = bias.as_ref().map_or(0.0, |(bias, _)| finite_largest(&bias.of));
        let score = scale * norm(q) * norm(k) + bias + self.steepest() * distance;
        [
            one * scale * largest(k),
            one * scale * largest(q) * of_key,
            dv,
            one * all * (keys as f64).sqrt(),
            one * all,
            one * all * distance,
            one * all * norm(q) * norm(k),
            one * all * (keys as f64).sqrt() * (1.0 + score),
        ]
    }

    /// Bound of the errors of weights, which come from a log-sum-exp of 32 bits: more than a little only where ALiBi makes scores
    /// large.
    fn weight_error(&self) -> f64 {
        let Case { q, k, alibi: Some(_), .. } = &self.case else { return 0.0 };
        let product = f64::from(self.case.scale()).abs() * norm(q) * norm(k);
        2f64.powi(-22) * (product + self.steepest() * self.farthest())
    }

    /// Largest slope of ALiBi.
    fn steepest(&self) -> f64 {
        self.case.alibi.iter().flatten().fold(0.0f64, |most, &x| most.max(f64::from(x).abs()))
    }

    /// Panics unless gradients are as close to those in `f64` as those of the plain passes in `f32`, about.
    pub(crate) fn close(&self, what: &str, all: &All, expected: &[Vec<f64>; 8], plain: &[Vec<f32>; 8]) {
        let relative = self.weight_error().max(1e-4);
        for (n, (written, noise)) in all.iter().zip(self.noise()).enumerate() {
            let Some(Written { bits, dtype }) = written else { continue };
            let (expected, plain) = (&expected[n], &plain[n]);
            assert_eq!(bits.data.len(), expected.len(), "{what}: {}", NAMES[n]);
            let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let off = plain.iter().zip(expected).fold(0.0f64, |most, (x, y)| most.max((f64::from(*x) - y).abs()));
            let (rounding, most) = match dtype {
                Dtype::F32 => (0.0, f64::INFINITY),
                Dtype::Bf16 => (1.0 / 256.0, f64::INFINITY),
                Dtype::F16 => (1.0 / 2048.0, 65_000.0),
                dtype => panic!("a new type: {dtype}"),
            };
            for (i, (&bits, expected)) in bits.data.iter().zip(expected).enumerate() {
                let got = f64::from(value(bits, *dtype));
                let bound = 8.0 * off + relative * largest + noise + rounding * expected.abs() + 1e-7;
                assert!(
                    expected.abs() > most || (got - expected).abs() <= bound,
                    "{what}: element {i} of {} is {got:e}, expected {expected:e}, at most {bound:e} off; plain {off:e}",
                    NAMES[n]
                );
            }
        }
    }
}

/// Returns the largest magnitude of the elements that are finite.
fn finite_largest(x: &Array) -> f64 {
    x.data.iter().filter(|x| x.is_finite()).fold(0.0f64, |most, &x| most.max(f64::from(x).abs()))
}

fn largest(x: &Array) -> f64 {
    x.data.iter().fold(0.0f64, |most, &x| most.max(f64::from(x).abs()))
}

/// Bound of the norms of rows.
fn norm(x: &Array) -> f64 {
    largest(x) * (x.shape[3] as f64).sqrt()
}
