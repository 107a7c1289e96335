//! The answer in f64, and how far a peer's is from it.

use crate::failure::Result;
use crate::rounded::Rounded;
use rayon::prelude::*;
use sdpa::{Shape, naive};
use std::ops::Range;

/// Rows that are asked for together, so that the keys are not converted for each.
const STRIP: usize = 16;
/// Operations worth spending on a workload's answer: some seconds. What would take more is sampled, evenly, in strips of
/// rows of every head, the first and the last among them.
const BUDGET: usize = 8_000_000_000;

/// Answers for some rows of every head.
#[derive(Debug)]
pub(crate) struct Reference {
    shape: Shape,
    strips: Vec<Strip>,
}

#[derive(Debug)]
struct Strip {
    batch: usize,
    head: usize,
    rows: Range<usize>,
    out: Vec<f64>,
}

/// The strips of rows of each head that are worth their time.
fn choose(shape: &Shape) -> Vec<Range<usize>> {
    let Shape { batch, heads, q_len, kv_len, head_dim, value_dim, .. } = *shape;
    let all = q_len.div_ceil(STRIP);
    let each = 2 * batch * heads * STRIP * kv_len * (head_dim + value_dim);
    let some = (BUDGET / each.max(1)).clamp(2, all.max(2)).min(all);
    let start = |n: usize| if some == 1 { 0 } else { n * (all - 1) / (some - 1) * STRIP };
    (0..some).map(|n| start(n)..q_len.min(start(n) + STRIP)).collect()
}

impl Reference {
    pub(crate) fn compute(tensors: &Rounded) -> Result<Self> {
        let shape = tensors.workload.shape;
        let places = (0..shape.batch * shape.heads)
            .into_par_iter()
            .flat_map_iter(|n| choose(&shape).into_iter().map(move |rows| (n / shape.heads, n % shape.heads, rows)));
        let strips = places.map(|(batch, head, rows)| {
            let (attention, inputs) = tensors.strip([batch, head], rows.clone())?;
            Ok(Strip { batch, head, rows, out: naive::oracle(&attention, &inputs)?.out })
        });
        Ok(Self { shape, strips: strips.collect::<Result<_>>()? })
    }

    /// Rows that have an answer, and all rows.
    pub(crate) fn rows(&self) -> [usize; 2] {
        let Shape { batch, heads, q_len, .. } = self.shape;
        [self.strips.iter().map(|strip| strip.rows.len()).sum(), batch * heads * q_len]
    }

    /// The largest magnitude in an answer.
    pub(crate) fn largest(&self) -> f64 {
        self.strips.iter().flat_map(|strip| &strip.out).fold(0.0, |most, x| x.abs().max(most))
    }

    /// The largest absolute error of an output; infinite if any element, with or without an answer, is not finite.
    pub(crate) fn error(&self, out: &[f32]) -> Result<f64> {
        let Shape { batch, heads, q_len, value_dim, .. } = self.shape;
        let wanted = batch * heads * q_len * value_dim;
        if out.len() != wanted {
            return Err(format!("{} elements of output, but {wanted} wanted", out.len()).into());
        }
        if !out.iter().all(|x| x.is_finite()) {
            return Ok(f64::INFINITY);
        }
        let errors = self.strips.iter().flat_map(|strip| {
            let row = (strip.batch * heads + strip.head) * q_len + strip.rows.start;
            strip.out.iter().zip(&out[row * value_dim..]).map(|(want, &got)| (want - f64::from(got)).abs())
        });
        Ok(errors.fold(0.0, f64::max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elements::Elements;
    use crate::workloads;

    #[test]
    fn the_first_and_the_last_rows_are_chosen() {
        for workload in workloads::named() {
            let strips = choose(&workload.shape);
            assert_eq!(strips[0].start, 0, "{}", workload.name);
            assert_eq!(strips[strips.len() - 1].end, workload.shape.q_len, "{}", workload.name);
            assert!(strips.windows(2).all(|pair| pair[0].end <= pair[1].start), "{}", workload.name);
        }
    }

    #[test]
    fn errors_are_found() {
        let tiny = workloads::by_name("tiny-16").unwrap();
        let reference = Reference::compute(&Rounded::new(tiny, Elements::F32)).unwrap();
        assert_eq!(reference.rows(), [192, 192]);
        let mut out: Vec<f32> = reference.strips.iter().flat_map(|strip| &strip.out).map(|&x| x as f32).collect();
        assert!(reference.error(&out).unwrap() < 1e-6);
        out[777] += 0.5;
        assert!((reference.error(&out).unwrap() - 0.5).abs() < 1e-6);
        out[0] = f32::NAN;
        assert_eq!(reference.error(&out).unwrap(), f64::INFINITY);
        assert!(reference.error(&out[1..]).is_err());
    }
}
