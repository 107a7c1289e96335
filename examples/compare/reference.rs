//! The answer in f64, and how far a path is from it.
//!
//! The oracle takes a nanosecond or two for every product, so it works on all cores; and where all rows would take
//! more than some seconds, it answers for a fixed random sample of them.

use crate::data::Tensors;
use crate::failure::Result;
use crate::settings::{Settings, flops_of_pairs};
use indicatif::ProgressBar;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rayon::prelude::*;
use sdpa::naive::{self, Answer};
use sdpa::{Attention, Error, Inputs, Shape};

/// Multiply-adds, or as much other work, up to which every row is checked: some seconds of the oracle.
const ALL_ROWS: f64 = 1e9;
/// Multiply-adds that the sample takes where not all rows are.
const SAMPLED: f64 = 3e8;
/// Fewest rows of a sample, however long they are.
const MIN_SAMPLE: usize = 16;
/// Rows that the oracle answers for at a time.
const STRIP: usize = 16;
/// The seed of the sample.
const SEED: u64 = 0x0c1e;

/// Rows of one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Strip {
    batch: usize,
    head: usize,
    first: usize,
    len: usize,
}

/// The rows that are checked.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) strips: Vec<Strip>,
    /// Rows in them.
    pub(crate) checked: usize,
    /// Rows there are.
    pub(crate) all: usize,
    /// Useful operations of the rows checked.
    pub(crate) flops: f64,
}

impl Rows {
    /// All rows, or a sample if they are too many.
    pub(crate) fn choose(settings: &Settings, shape: &Shape) -> Self {
        let heads = shape.batch.saturating_mul(shape.heads);
        let all = heads.saturating_mul(shape.q_len);
        // A row costs something even if it sees no key, and its answer takes memory.
        let work = settings.useful_flops(shape) / 2.0 + all as f64 * (256.0 + 8.0 * shape.value_dim as f64);
        let strip = |row: usize, len| {
            let (head, first) = (row / shape.q_len, row % shape.q_len);
            Strip { batch: head / shape.heads, head: head % shape.heads, first, len }
        };
        let strips: Vec<_> = if all == 0 {
            Vec::new()
        } else if work <= ALL_ROWS {
            let firsts = (0..shape.q_len).step_by(STRIP);
            let strips = |head| firsts.clone().map(move |first| (head, first));
            let strips = (0..heads).flat_map(strips);
            strips.map(|(head, i)| strip(head * shape.q_len + i, STRIP.min(shape.q_len - i))).collect()
        } else {
            let wanted = (SAMPLED / (work / all as f64)) as usize;
            let mut rng = ChaCha8Rng::seed_from_u64(SEED);
            let mut rows = rand::seq::index::sample(&mut rng, all, wanted.max(MIN_SAMPLE).min(all)).into_vec();
            rows.sort_unstable();
            rows.into_iter().map(|row| strip(row, 1)).collect()
        };
        let pairs = |strip: &Strip| (strip.first..strip.first + strip.len).map(|i| settings.keys_seen(shape, i) as f64);
        let flops = flops_of_pairs(shape, strips.iter().flat_map(pairs).sum());
        Self { checked: strips.iter().map(|strip| strip.len).sum(), strips, all, flops }
    }

    /// How much more work all rows are than these.
    pub(crate) fn scale(&self, useful_flops: f64) -> f64 {
        let rows = self.all as f64 / self.checked.max(1) as f64;
        if self.flops > 0.0 { useful_flops / self.flops } else { rows }
    }

    /// True if no row is left out.
    pub(crate) fn are_all(&self) -> bool {
        self.checked == self.all
    }
}

/// A call cut into strips: the settings and inputs of each.
#[derive(Debug)]
pub(crate) struct Cut<'a> {
    tensors: &'a Tensors,
    settings: Settings,
    shape: Shape,
}

impl<'a> Cut<'a> {
    pub(crate) fn new(tensors: &'a Tensors, settings: Settings, shape: Shape) -> Self {
        Self { tensors, settings, shape }
    }

    /// The strip as a call of its own: its rows stand where they stood, and see the keys they saw.
    fn call(&self, strip: &Strip) -> Result<(Attention, Inputs<'a>)> {
        let Strip { batch, head, first, len } = *strip;
        let kv = [batch, head / (self.shape.heads / self.shape.kv_heads)];
        let inputs = Inputs::new(
            self.tensors.q.rows([batch, head], first..first + len)?,
            self.tensors.k.rows(kv, 0..self.shape.kv_len)?,
            self.tensors.v.rows(kv, 0..self.shape.kv_len)?,
        );
        Ok((self.settings.attention_from_row(&self.shape, first), inputs))
    }

    /// The naive f32 answer for one strip.
    pub(crate) fn naive(&self, strip: &Strip) -> Result<Answer<f32>> {
        let (attention, inputs) = self.call(strip)?;
        Ok(naive::attention(&attention, &inputs)?)
    }

    /// Every strip's answer, by all cores.
    fn answers<T: Send>(&self, rows: &Rows, answer: Answerer<T>, progress: &ProgressBar) -> Result<Vec<Answer<T>>> {
        let one = |strip| {
            let (attention, inputs) = self.call(strip)?;
            let answer = answer(&attention, &inputs)?;
            progress.inc(1);
            Ok(answer)
        };
        rows.strips.par_iter().map(one).collect()
    }
}

/// [`naive::oracle`] or [`naive::attention`].
type Answerer<T> = fn(&Attention, &Inputs<'_>) -> std::result::Result<Answer<T>, Error>;

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

/// What rounding alone may do to any f32 path, and chance decides to which: in units of f32's epsilon.
///
/// The naive path's largest error is a fair bound where many rows had the chance to meet theirs. Of a few short rows
/// one path may be lucky and the other not. What is at stake is the rounding of scores: by Cauchy and Schwarz none
/// exceeds `S = |scale|·max‖q‖·max‖k‖`, so sums of products are off by some part of `S` epsilons, and so is `lse`;
/// weights are off by as much relative to themselves, and what they add up to by less.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rounding {
    /// Of the output, relative to the largest |v|: 4, or `S/8` where that is more.
    pub(crate) out: f64,
    /// Of `lse`, absolute.
    lse: f64,
}

impl Rounding {
    fn new(cut: &Cut<'_>, answers: &[Answer<f64>]) -> Self {
        let scale = f64::from(cut.settings.attention().scale_for(cut.shape.head_dim)).abs();
        let largest_score = scale * cut.tensors.q.longest_row() * cut.tensors.k.longest_row();
        let lse = answers.iter().flat_map(|answer| &answer.lse).filter(|x| x.is_finite());
        let largest_lse = lse.fold(0.0, |max: f64, x| x.abs().max(max));
        Self { out: (largest_score / 8.0).max(4.0), lse: largest_score.max(4.0 * largest_lse) }
    }
}

/// The answer in f64 for some rows, and the error of the naive f32 path on them.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) rows: Rows,
    answers: Vec<Answer<f64>>,
    pub(crate) naive: Errors,
    pub(crate) rounding: Rounding,
    pub(crate) bound: Bound,
}

impl Reference {
    /// Computes it.
    pub(crate) fn compute(cut: &Cut<'_>, rows: Rows, progress: &ProgressBar) -> Result<Self> {
        progress.set_length(2 * rows.strips.len() as u64);
        progress.set_message("the answer in f64");
        let answers = cut.answers(&rows, naive::oracle, progress)?;
        progress.set_message("the naive path's error");
        let naive = cut.answers(&rows, naive::attention, progress)?;
        let mut errors = Errors::default();
        for (got, want) in naive.iter().zip(&answers) {
            errors.take(&got.out, &got.lse, want);
        }
        let rounding = Rounding::new(cut, &answers);
        let epsilon = f64::from(f32::EPSILON);
        let bound = Bound {
            out: errors.out.max(epsilon * rounding.out * cut.tensors.v.largest()),
            lse: errors.lse.max(epsilon * rounding.lse),
        };
        Ok(Self { rows, answers, naive: errors, rounding, bound })
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
fn error(got: f32, want: f64) -> f64 {
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
    use crate::data::load;
    use sdpa::{Alignment, Causality};

    fn random(shape: Shape) -> Tensors {
        load(&Source::Random(shape)).unwrap()
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

    #[test]
    fn strips_cover_every_row_once() {
        let shape = Shape { batch: 2, heads: 3, kv_heads: 1, q_len: 37, kv_len: 5, head_dim: 4, value_dim: 4 };
        let rows = Rows::choose(&Settings::default(), &shape);
        assert!(rows.are_all());
        assert_eq!((rows.checked, rows.all, rows.flops), (222, 222, shape.flops()));
        let none = Rows::choose(&Settings::default(), &Shape { q_len: 0, ..shape });
        assert!(none.are_all() && none.strips.is_empty());
    }

    #[test]
    fn large_calls_are_sampled() {
        let shape = Shape { batch: 1, heads: 8, kv_heads: 8, q_len: 4096, kv_len: 4096, head_dim: 64, value_dim: 64 };
        for causality in [Causality::Full, Causality::Causal] {
            let settings = Settings { causality, ..Settings::default() };
            let rows = Rows::choose(&settings, &shape);
            assert!(!rows.are_all() && rows.checked > 500 && rows.checked == rows.strips.len());
            assert_eq!(rows.strips, Rows::choose(&settings, &shape).strips);
            let share = rows.flops / settings.useful_flops(&shape) * rows.all as f64 / rows.checked as f64;
            assert!((share - 1.0).abs() < 0.1, "{share}");
        }
    }

    /// The strips' answers, one after another, are the whole call's, wherever the rows stand.
    #[test]
    fn strips_answer_as_the_whole_call() {
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 35, kv_len: 21, head_dim: 8, value_dim: 3 };
        let tensors = random(shape);
        for alignment in [Alignment::TopLeft, Alignment::BottomRight, Alignment::Offset(-7), Alignment::Offset(90)] {
            let settings = Settings { scale: Some(-0.3), causality: Causality::Causal, alignment: Some(alignment) };
            let cut = Cut::new(&tensors, settings, shape);
            let rows = Rows::choose(&settings, &shape);
            let strips = cut.answers(&rows, naive::oracle, &ProgressBar::hidden()).unwrap();
            let whole = naive::oracle(&settings.attention(), &tensors.inputs().unwrap()).unwrap();
            assert_eq!(strips.iter().flat_map(|a| a.out.clone()).collect::<Vec<_>>(), whole.out, "{alignment:?}");
            assert_eq!(strips.iter().flat_map(|a| a.lse.clone()).collect::<Vec<_>>(), whole.lse, "{alignment:?}");
        }
    }

    /// A wrong element is found, and where a row is not written.
    #[test]
    fn wrong_answers_exceed_the_bound() {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 20, kv_len: 30, head_dim: 8, value_dim: 8 };
        let tensors = random(shape);
        let settings = Settings::default();
        let cut = Cut::new(&tensors, settings, shape);
        let rows = Rows::choose(&settings, &shape);
        let reference = Reference::compute(&cut, rows, &ProgressBar::hidden()).unwrap();
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
}
