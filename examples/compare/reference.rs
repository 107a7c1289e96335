//! The answer in f64, and how far a path is from it.

use crate::elements::Numbers;
use crate::failure::Result;
use crate::paths::Method;
use crate::strips::{Cut, Rows, Strip};
use indicatif::ProgressBar;
use sdpa::naive::Answer;
use sdpa::{Isa, Shape};

/// Largest errors of one path.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Errors {
    /// Of the output, absolute.
    pub(crate) out: f64,
    /// Of the output, relative to the largest element of the row's answer. (Relative to the element itself it would
    /// say only how near to 0 some element happens to be.)
    pub(crate) relative: f64,
    /// Of the log of the row's sum, absolute.
    pub(crate) lse: f64,
}

/// What errors may be at most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bound {
    pub(crate) out: f64,
    pub(crate) lse: f64,
}

/// Largest error of a weight that [`Precision::Native`](sdpa::Precision::Native) rounds, relative to itself.
pub(crate) const ROUNDED_WEIGHT: f64 = 0.0041;

/// What rounding alone may do to any f32 path, and chance decides to which: in units of f32's epsilon.
///
/// The naive path's largest error is a fair bound where many rows had the chance to meet theirs. Of a few short rows
/// one path may be lucky and the other not. What is at stake is the rounding of scores: by Cauchy and Schwarz none
/// exceeds `S = |scale|·max‖q‖·max‖k‖`, so sums of products are off by some part of `S` epsilons, and so is `lse`;
/// weights are off by as much relative to themselves, and what they add up to by less. Bias and ALiBi add up to `A`, and
/// rounding to the nearest number of that size is off by half of `A` epsilons.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rounding {
    /// Of the output, relative to the largest |v|: 4, or `S/8 + A/2` where that is more.
    pub(crate) out: f64,
    /// Of `lse`, absolute.
    lse: f64,
}

impl Rounding {
    fn new(cut: &Cut<'_>, seen: &Seen, answers: &[Answer<f64>]) -> Self {
        let scale = f64::from(cut.settings.attention().scale_for(cut.shape.head_dim)).abs();
        let products = scale * seen.q * seen.k;
        let lse = answers.iter().flat_map(|answer| &answer.lse).copied();
        Self { out: (products / 8.0 + seen.added / 2.0).max(4.0), lse: (products + seen.added).max(4.0 * largest(lse)) }
    }
}

/// How large the finite numbers are that rows get to see: what a mask or a length hides does not count.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Seen {
    /// The largest Euclidean length of a query.
    q: f64,
    /// Of a key.
    k: f64,
    /// The largest absolute element of a value.
    v: f64,
    /// The largest absolute sum of bias and ALiBi, where the weight is more than rounding.
    added: f64,
    /// The largest Σ w·|v − o| of an output o, over its weights w and values v, if weights are rounded; otherwise 0. Times the
    /// relative error of a weight it bounds the error of o.
    spread: f64,
}

impl Seen {
    fn by(strip: &Strip, answer: &Answer<f64>, cut: &Cut<'_>) -> Self {
        let Shape { heads, kv_heads, kv_len, head_dim, value_dim, .. } = cut.shape;
        let kv = [strip.batch, strip.head / (heads / kv_heads)];
        let [_, softcapped, masked, weights] = &answer.points;
        let is_seen = |key: &usize| masked.iter().skip(*key).step_by(kv_len).any(|&s| s != f64::NEG_INFINITY);
        let keys: Vec<usize> = (0..kv_len).filter(is_seen).collect();
        let q = &cut.tensors.q.head([strip.batch, strip.head])[strip.first * head_dim..][..strip.len * head_dim];
        let (k, v) = (cut.tensors.k.head(kv), cut.tensors.v.head(kv));
        let euclid = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let added = masked.iter().zip(softcapped).zip(weights);
        Self {
            q: largest(q.chunks_exact(head_dim).map(euclid)),
            k: largest(keys.iter().map(|j| euclid(&k[j * head_dim..][..head_dim]))),
            v: largest(keys.iter().flat_map(|j| &v[j * value_dim..][..value_dim]).map(|&x| x.into())),
            spread: if cut.numbers().round_weights() { spread(answer, v, value_dim) } else { 0.0 },
            added: largest(added.filter(|(_, w)| **w >= f64::from(f32::EPSILON)).map(|((m, s), _)| m - s)),
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            q: self.q.max(other.q),
            k: self.k.max(other.k),
            v: self.v.max(other.v),
            added: self.added.max(other.added),
            spread: self.spread.max(other.spread),
        }
    }
}

/// Returns [`Seen::spread`] of some rows of a head with these values.
fn spread(answer: &Answer<f64>, values: &[f32], value_dim: usize) -> f64 {
    let [.., weights] = &answer.points;
    let keys = weights.len() / answer.lse.len().max(1);
    let rows = weights.chunks_exact(keys.max(1)).zip(answer.out.chunks_exact(value_dim.max(1)));
    let of_row = |(weights, out): (&[f64], &[f64])| {
        let mut sums = vec![0.0; value_dim];
        let seen = weights.iter().zip(values.chunks_exact(value_dim.max(1))).filter(|(w, _)| **w != 0.0);
        for (w, value) in seen {
            sums.iter_mut().zip(value).zip(out).for_each(|((sum, &v), o)| *sum += w * (f64::from(v) - o).abs());
        }
        largest(sums.into_iter())
    };
    largest(rows.map(of_row))
}

/// The largest absolute value of what is finite.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.filter(|x| x.is_finite()).fold(0.0, |max, x| x.abs().max(max))
}

/// Without the scores, which take memory in the number of rows times keys.
fn without_scores<T>(mut answer: Answer<T>) -> Answer<T> {
    (answer.points, answer.key_weight_sums) = (Default::default(), Vec::new());
    answer
}

/// The answer in f64 for some rows, and the error of the naive f32 path on them.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) rows: Rows,
    answers: Vec<Answer<f64>>,
    pub(crate) naive: Errors,
    pub(crate) rounding: Rounding,
    pub(crate) numbers: Numbers,
    pub(crate) bound: Bound,
    /// The bound where fused paths round weights.
    pub(crate) native: Bound,
}

impl Reference {
    /// Computes it.
    pub(crate) fn compute(cut: &Cut<'_>, rows: Rows, progress: &ProgressBar) -> Result<Self> {
        progress.set_length(2 * rows.strips.len() as u64);
        progress.set_message("the answer in f64");
        let keep = |strip: &Strip, answer| (Seen::by(strip, &answer, cut), without_scores(answer));
        let (seen, answers): (Vec<_>, Vec<_>) = cut.answers(&rows, keep, progress)?.into_iter().unzip();
        let seen = seen.into_iter().fold(Seen::default(), Seen::max);
        progress.set_message("the naive path's error");
        let naive = cut.answers(&rows, |_, answer| without_scores::<f32>(answer), progress)?;
        let mut errors = Errors::default();
        for (got, want) in naive.iter().zip(&answers) {
            errors.take(&got.out, &got.lse, want);
        }
        let rounding = Rounding::new(cut, &seen, &answers);
        let epsilon = f64::from(f32::EPSILON);
        let bound =
            Bound { out: errors.out.max(epsilon * rounding.out * seen.v), lse: errors.lse.max(epsilon * rounding.lse) };
        // Native products take subnormal numbers for 0, once a key.
        let subnormal = f64::from(f32::MIN_POSITIVE) * cut.shape.kv_len as f64;
        let native =
            Bound { out: bound.out + ROUNDED_WEIGHT * seen.spread + subnormal, lse: bound.lse + ROUNDED_WEIGHT };
        Ok(Self { rows, answers, naive: errors, rounding, numbers: cut.numbers(), bound, native })
    }

    /// The bound of a path's errors. A path that rounds weights may also be off by what the docs of [`sdpa::Precision`] say.
    pub(crate) fn bound_of(&self, method: Method) -> &Bound {
        if self.rounds_weights(method) { &self.native } else { &self.bound }
    }

    /// True if the path rounds weights to bfloat16.
    pub(crate) fn rounds_weights(&self, method: Method) -> bool {
        self.numbers.round_weights() && method.isa().is_some_and(Isa::has_native_bf16)
    }

    /// The errors of a path's whole output.
    pub(crate) fn errors(&self, shape: &Shape, out: &[f32], lse: &[f32]) -> Errors {
        let mut errors = Errors::default();
        for (strip, want) in self.rows.strips.iter().zip(&self.answers) {
            let first = (strip.batch * shape.heads + strip.head) * shape.q_len + strip.first;
            let out = &out[first * shape.value_dim..][..strip.len * shape.value_dim];
            errors.take(out, &lse[first..][..strip.len], want);
        }
        errors
    }
}

impl Errors {
    /// True if the errors are within the bound; never if one is no number.
    pub(crate) fn within(&self, bound: &Bound) -> bool {
        self.out <= bound.out && self.lse <= bound.lse
    }

    /// Counts some rows in.
    fn take(&mut self, out: &[f32], lse: &[f32], want: &Answer<f64>) {
        let value_dim = want.out.len() / want.lse.len().max(1);
        for (got, want) in out.chunks_exact(value_dim.max(1)).zip(want.out.chunks_exact(value_dim.max(1))) {
            let error = got.iter().zip(want).fold(0.0, |max, (&got, &want)| error(got, want).max(max));
            let largest = want.iter().fold(0.0, |max: f64, x| x.abs().max(max));
            self.out = self.out.max(error);
            self.relative = self.relative.max(if error == 0.0 { 0.0 } else { error / largest });
        }
        for (&got, &want) in lse.iter().zip(&want.lse) {
            self.lse = self.lse.max(error(got, want));
        }
    }
}

/// The distance from the answer: 0 where both overflow or neither is a number, infinite where only one is.
pub(crate) fn error(got: f32, want: f64) -> f64 {
    if f64::from(got) == want || got == want as f32 || got.is_nan() && want.is_nan() {
        return if got.is_finite() { (f64::from(got) - want).abs() } else { 0.0 };
    }
    let error = (f64::from(got) - want).abs();
    if error.is_nan() { f64::INFINITY } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Source;
    use crate::data::{Tensor, Tensors, load};
    use crate::elements::{self, Elements};
    use crate::paths::Path;
    use crate::runner::Runner;
    use crate::settings::Settings;
    use sdpa::{Causality, Dtype, Precision, naive};

    fn reference(tensors: &Tensors, settings: Settings) -> Reference {
        let shape = tensors.inputs().unwrap().shape().unwrap();
        Reference::compute(&Cut::new(tensors, settings, shape), Rows::choose(&shape), &ProgressBar::hidden()).unwrap()
    }

    #[test]
    fn errors_of_what_is_no_number() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        assert_eq!(error(1.5, 1.25), 0.25);
        assert_eq!(error(inf, 1e300), 0.0);
        assert_eq!(error(-inf, f64::NEG_INFINITY), 0.0);
        assert_eq!(error(nan, f64::NAN), 0.0);
        assert_eq!(error(nan, 1.0), f64::INFINITY);
        assert_eq!(error(1.0, f64::NAN), f64::INFINITY);
        assert_eq!(error(-inf, f64::INFINITY), f64::INFINITY);
        assert!(error(0.1, 0.1) > 0.0);
    }

    /// A wrong element is found, and where a row is not written.
    #[test]
    fn wrong_answers_exceed_the_bound() {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 20, kv_len: 30, head_dim: 8, value_dim: 8 };
        let tensors = load(&Source::Random(shape)).unwrap();
        let settings = Settings::default();
        let reference = reference(&tensors, settings);
        let mut answer = naive::attention(&settings.attention(), &tensors.inputs().unwrap()).unwrap();
        let errors = reference.errors(&shape, &answer.out, &answer.lse);
        assert_eq!(errors, reference.naive);
        assert!(errors.within(&reference.bound));
        answer.lse[39] += 0.01;
        assert!(!reference.errors(&shape, &answer.out, &answer.lse).within(&reference.bound));
        answer.lse[39] -= 0.01;
        answer.out[319] += 1e-5;
        assert!(!reference.errors(&shape, &answer.out, &answer.lse).within(&reference.bound));
        answer.out[319] = f32::NAN;
        assert!(!reference.errors(&shape, &answer.out, &answer.lse).within(&reference.bound));
    }

    /// Errors on every instruction set: native ones are beyond the bound of exact ones, which would otherwise do.
    #[test]
    fn errors_of_16_bits_are_within_their_bounds() {
        let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 50, kv_len: 300, head_dim: 40, value_dim: 24 };
        for (dtype, precision) in [
            (Dtype::Bf16, Precision::Exact),
            (Dtype::Bf16, Precision::Native),
            (Dtype::F16, Precision::Exact),
            (Dtype::F16, Precision::Native),
            (Dtype::F32, Precision::Native),
            (Dtype::F32, Precision::Accurate),
            (Dtype::F16, Precision::Accurate),
            (Dtype::Bf16, Precision::Accurate),
        ] {
            let tensors = elements::load(&Source::Random(shape), Some(dtype)).unwrap();
            let causality = Causality::Causal;
            let alignment = Some(sdpa::Alignment::BottomRight);
            let settings = Settings { precision, causality, alignment, ..Settings::default() };
            let (reference, elements) = (reference(&tensors, settings), Elements::of(&tensors).unwrap());
            let mut runner = Runner::new(&tensors, &elements, settings, &reference.rows).unwrap();
            for method in Isa::available().map(Method::Fused) {
                runner.clear();
                runner.run(Path { method, threads: 1 }, None).unwrap();
                let errors = reference.errors(&shape, &runner.out, &runner.lse);
                let rounds = reference.rounds_weights(method);
                assert!(errors.within(reference.bound_of(method)), "{dtype}, {precision}, {method:?}: {errors:?}");
                assert_eq!(errors.within(&reference.bound), !rounds, "{dtype}, {precision}, {method:?}: {errors:?}");
                assert!(!rounds || (dtype, precision) == (Dtype::Bf16, Precision::Native));
            }
            assert!(!reference.rounds_weights(Method::Naive) && !reference.rounds_weights(Method::Unfused));
        }
    }

    /// The error of a path that rounds weights grows with the distance of values from their mean, not with values.
    #[test]
    fn the_spread_of_values_is_that_around_the_output() {
        let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 2, kv_len: 3, head_dim: 2, value_dim: 2 };
        let mut tensors = elements::load(&Source::Random(shape), Some(Dtype::Bf16)).unwrap();
        tensors.q.data.fill(0.0);
        tensors.v.data = vec![100.0, 1.0, 100.0, 4.0, 100.0, 1.0];
        let settings = Settings { precision: Precision::Native, ..Settings::default() };
        let Reference { bound, native, .. } = reference(&tensors, settings);
        // Mean 2, distances 1, 2, 1.
        assert!((native.out - bound.out - ROUNDED_WEIGHT * 4.0 / 3.0).abs() < 1e-12, "{native:?}, {bound:?}");
        assert_eq!(native.lse, bound.lse + ROUNDED_WEIGHT);
        tensors.v.data = vec![f32::NAN, 1.0, 100.0, 4.0, 100.0, 1.0];
        tensors.mask = Some(Tensor { shape: [1, 1, 1, 3], data: vec![0, 1, 1] });
        let Reference { bound, native, .. } = reference(&tensors, settings);
        assert!((native.out - bound.out - ROUNDED_WEIGHT * 1.5).abs() < 1e-12, "{native:?}, {bound:?}");
    }

    /// However large the numbers are that no row sees, the bound stays what it is.
    #[test]
    fn what_is_hidden_does_not_loosen_the_bound() {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 20, kv_len: 30, head_dim: 8, value_dim: 8 };
        let mut tensors = load(&Source::Random(shape)).unwrap();
        tensors.kv_lens = Some(vec![25]);
        tensors.mask = Some(Tensor { shape: [1, 1, 1, 30], data: (0..30).map(|j| u8::from(j != 3)).collect() });
        let bias = |x: f32| Some(Tensor { shape: [1, 1, 1, 30], data: (0..30).map(|j| [x, 0.0][j.min(1)]).collect() });
        tensors.bias = bias(f32::NEG_INFINITY);
        let bound = reference(&tensors, Settings::default()).bound;
        for hidden in [0, 3, 25, 29] {
            for poison in [f32::NAN, f32::INFINITY, 1e30] {
                for head in 0..2 {
                    tensors.k.data[(head * 30 + hidden) * 8..][..8].fill(poison);
                    tensors.v.data[(head * 30 + hidden) * 8..][..8].fill(poison);
                }
                let poisoned = reference(&tensors, Settings::default());
                assert_eq!(poisoned.bound, bound, "{hidden} {poison}");
                assert!(poisoned.naive.within(&bound));
            }
        }
        // A score that another sort of −∞ hides is large, but weighs nothing. (The key behind it is seen.)
        tensors.k.data[..8].fill(0.0);
        tensors.v.data[..8].fill(0.0);
        tensors.k.data[30 * 8..][..8].fill(0.0);
        tensors.v.data[30 * 8..][..8].fill(0.0);
        tensors.bias = bias(-1e9);
        assert_eq!(reference(&tensors, Settings::default()).bound, bound);
    }
}
