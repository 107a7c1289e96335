//! The rows that are checked, and the answers to them, a few rows at a time.
//!
//! The oracle takes a nanosecond or two for every product, so it works on all cores; and where all rows would take
//! more than some seconds, it answers for a fixed random sample of them.

use crate::data::Tensors;
use crate::elements::Numbers;
use crate::failure::Result;
use crate::settings::Settings;
use indicatif::ProgressBar;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rayon::prelude::*;
use sdpa::naive::{self, Answer, Real};
use sdpa::{Attention, Inputs, Mods, SelectedKeys, Shape};

/// Multiply-adds, or as much other work, up to which every row is checked: some seconds of the oracle.
const ALL_ROWS: f64 = 1e9;
/// Multiply-adds that the sample takes where not all rows are.
const SAMPLED: f64 = 3e8;
/// What a pair of row and key takes besides products, in multiply-adds: an exponential above all.
const PER_PAIR: f64 = 16.0;
/// What a row takes besides its pairs.
const PER_ROW: f64 = 256.0;
/// Fewest rows of a sample, however long they are.
const MIN_SAMPLE: usize = 16;
/// Rows that the oracle answers for at a time.
const STRIP: usize = 16;
/// The seed of the sample.
const SEED: u64 = 0x0c1e;

/// Rows of one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Strip {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) first: usize,
    pub(crate) len: usize,
}

/// The rows that are checked.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) strips: Vec<Strip>,
    /// Rows in them.
    pub(crate) checked: usize,
    /// Rows there are.
    pub(crate) all: usize,
}

impl Rows {
    /// All rows, or a sample if they are too many.
    pub(crate) fn choose(shape: &Shape) -> Self {
        let heads = shape.batch.saturating_mul(shape.heads);
        let all = heads.saturating_mul(shape.q_len);
        // The oracle multiplies for every key, seen or not.
        let pair = (shape.head_dim + shape.value_dim) as f64 + PER_PAIR;
        let row = shape.kv_len as f64 * pair + 8.0 * shape.value_dim as f64 + PER_ROW;
        let strip = |row: usize, len| {
            let (head, first) = (row / shape.q_len, row % shape.q_len);
            Strip { batch: head / shape.heads, head: head % shape.heads, first, len }
        };
        let strips: Vec<_> = if all == 0 {
            Vec::new()
        } else if row * all as f64 <= ALL_ROWS {
            let firsts = (0..shape.q_len).step_by(STRIP);
            let strips = |head| firsts.clone().map(move |first| (head, first));
            let strips = (0..heads).flat_map(strips);
            strips.map(|(head, i)| strip(head * shape.q_len + i, STRIP.min(shape.q_len - i))).collect()
        } else {
            let wanted = (SAMPLED / row) as usize;
            let mut rng = ChaCha8Rng::seed_from_u64(SEED);
            let mut rows = rand::seq::index::sample(&mut rng, all, wanted.max(MIN_SAMPLE).min(all)).into_vec();
            rows.sort_unstable();
            rows.into_iter().map(|row| strip(row, 1)).collect()
        };
        Self { checked: strips.iter().map(|strip| strip.len).sum(), strips, all }
    }

    /// True if no row is left out.
    pub(crate) fn are_all(&self) -> bool {
        self.checked == self.all
    }

    /// How many times as many rows there are as are checked.
    pub(crate) fn scale(&self) -> f64 {
        self.all as f64 / self.checked.max(1) as f64
    }
}

/// A call cut into strips: the settings and inputs of each.
#[derive(Debug)]
pub(crate) struct Cut<'a> {
    pub(crate) tensors: &'a Tensors,
    pub(crate) settings: Settings,
    pub(crate) shape: Shape,
}

impl<'a> Cut<'a> {
    pub(crate) fn new(tensors: &'a Tensors, settings: Settings, shape: Shape) -> Self {
        Self { tensors, settings, shape }
    }

    /// Element type of the call, and its precision on fused paths.
    pub(crate) fn numbers(&self) -> Numbers {
        Numbers::of_call(&self.settings, self.tensors)
    }

    /// The strip as a call of its own: its rows stand where they stood, and see the keys they saw. Its lists of selected keys are
    /// made in `lists`.
    pub(crate) fn call<'b>(&self, strip: &Strip, lists: &'b mut SelectedKeys) -> Result<(Attention, Inputs<'b>)>
    where
        'a: 'b,
    {
        let Strip { batch, head, first, len } = *strip;
        let inputs = self.tensors.inputs_of_rows([batch, head], first..first + len, lists)?;
        let kv_len = self.tensors.kv_len(batch);
        Ok((self.settings.attention_from_row(first, self.shape.q_len, kv_len), inputs))
    }

    /// The answer for one strip.
    pub(crate) fn answer<T: Real>(&self, strip: &Strip) -> Result<Answer<T>> {
        let mut lists = SelectedKeys::new();
        let (attention, inputs) = self.call(strip, &mut lists)?;
        Ok(naive::answer(&attention, &inputs, &Mods::new())?)
    }

    /// What is to be kept of every strip's answer, by all cores.
    pub(crate) fn answers<T: Real, R: Send>(
        &self,
        rows: &Rows,
        keep: impl Fn(&Strip, Answer<T>) -> R + Sync,
        progress: &ProgressBar,
    ) -> Result<Vec<R>> {
        let one = |strip| {
            let kept = keep(strip, self.answer(strip)?);
            progress.inc(1);
            Ok(kept)
        };
        rows.strips.par_iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Source;
    use crate::data::{Tensor, load};
    use crate::lists::Lists;
    use crate::settings::{Groups, Sides};
    use sdpa::{Alignment, Causality, Precision};

    const SHAPE: Shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 35, kv_len: 21, head_dim: 8, value_dim: 3 };

    #[test]
    fn strips_cover_every_row_once() {
        let rows = Rows::choose(&SHAPE);
        assert!(rows.are_all());
        assert_eq!((rows.checked, rows.all, rows.scale()), (280, 280, 1.0));
        let none = Rows::choose(&Shape { q_len: 0, ..SHAPE });
        assert!(none.are_all() && none.strips.is_empty());
    }

    #[test]
    fn large_calls_are_sampled() {
        let shape = Shape { batch: 1, heads: 8, kv_heads: 8, q_len: 4096, kv_len: 4096, head_dim: 64, value_dim: 64 };
        let rows = Rows::choose(&shape);
        assert!(!rows.are_all() && rows.checked > 400 && rows.checked == rows.strips.len());
        assert_eq!(rows.strips, Rows::choose(&shape).strips);
        assert_eq!(rows.scale(), 32768.0 / rows.checked as f64);
    }

    /// Reproducible numbers between −1 and 1.
    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i * 7919 % 257) as f32 / 128.0 - 1.0).collect()
    }

    fn tensor<T: From<u8>>(shape: [usize; 4], data: impl Fn(usize) -> T) -> Tensor<T> {
        Tensor { shape, data: (0..shape.iter().product()).map(data).collect() }
    }

    /// One plain set of tensors, then with options of every shape that broadcasts.
    fn all_tensors() -> Vec<Tensors> {
        let plain = load(&Source::Random(SHAPE)).unwrap();
        let bias = |shape| {
            let data = numbers(shape_len(shape));
            // Some keys hidden, and some of what lies behind the lengths poisoned.
            Tensor { shape, data: data.iter().map(|&x| if x > 0.9 { f32::NEG_INFINITY } else { x }).collect() }
        };
        let mask = |shape| tensor(shape, |i| u8::from(i * 7919 % 5 > 0) * 3);
        let mut all = vec![plain.clone()];
        for (shape, lens) in [
            ([2, 4, 35, 21], [21, 13]),
            ([1, 4, 1, 21], [20, 0]),
            ([2, 1, 1, 1], [7, 21]),
            ([2, 1, 35, 1], [7, 21]),
            ([1, 1, 35, 21], [1, 21]),
        ] {
            let mut tensors = Tensors {
                bias: Some(bias(shape)),
                mask: Some(mask([shape[0], 1, shape[2], 21])),
                sinks: Some(numbers(4)),
                alibi_slopes: Some(sdpa::alibi_slopes(4)),
                kv_lens: Some(lens.to_vec()),
                ..plain.clone()
            };
            for (batch, len) in lens.into_iter().enumerate() {
                for head in 0..2 {
                    tensors.k.data[((batch * 2 + head) * 21 + len) * 8..][..(21 - len) * 8].fill(f32::NAN);
                    tensors.v.data[((batch * 2 + head) * 21 + len) * 3..][..(21 - len) * 3].fill(f32::NAN);
                }
            }
            // Lists for each key/value head, of units of two keys, for groups of three rows.
            let places = 12 * 2 * 2 * 4;
            let numbers = (0..places).map(|i| if i % 4 == 3 { -1 } else { (i / 4 + 2 * (i % 4)) % 11 }).collect();
            let numbers = Tensor { shape: [2, 2, 12, 4], data: numbers };
            let lists = Lists { numbers, lens: Some(vec![4, 2]), keys: SelectedKeys::new() };
            let mut selecting = Tensors { selected: Some(lists), kv_lens: None, ..plain.clone() };
            selecting.select(Some(Groups { rows: 3, unit: 2 })).unwrap();
            all.push(Tensors { bias: tensors.bias.clone(), mask: tensors.mask.clone(), ..selecting });
            all.push(Tensors { mask: None, ..tensors.clone() });
            all.push(Tensors { bias: None, ..tensors.clone() });
            all.push(tensors);
        }
        all
    }

    fn shape_len(shape: [usize; 4]) -> usize {
        shape.iter().product()
    }

    /// Strips' answers, one after another, are the whole call's, wherever the rows stand and whatever the options; and
    /// so is a single row's, as a sample takes it.
    #[test]
    fn strips_answer_as_the_whole_call() {
        let alignments = [Alignment::TopLeft, Alignment::BottomRight, Alignment::Offset(-7), Alignment::Offset(90)];
        let windows = [None, Some(Sides { left: Some(6), right: None }), Some(Sides { left: Some(9), right: Some(2) })];
        let single = |row: usize| Strip { batch: row / 35 / 4, head: row / 35 % 4, first: row % 35, len: 1 };
        let ones = Rows { strips: (0..280).map(single).collect(), checked: 280, all: 280 };
        for tensors in all_tensors() {
            for (i, alignment) in alignments.into_iter().enumerate() {
                let settings = Settings {
                    scale: Some(-0.3),
                    softcap: (i % 2 == 0).then_some(2.0),
                    causality: if i == 3 { Causality::Full } else { Causality::Causal },
                    window: windows[i % 3],
                    alignment: Some(alignment),
                    precision: Precision::Exact,
                };
                let cut = Cut::new(&tensors, settings, SHAPE);
                let whole = naive::oracle(&settings.attention(), &tensors.inputs().unwrap()).unwrap();
                assert!(whole.out.iter().all(|x| x.is_finite()), "{settings}: what is hidden was seen");
                for rows in [&Rows::choose(&SHAPE), &ones] {
                    let keep = |_: &Strip, answer: Answer<f64>| answer;
                    let strips = cut.answers(rows, keep, &ProgressBar::hidden()).unwrap();
                    assert_eq!(strips.iter().flat_map(|a| a.out.clone()).collect::<Vec<_>>(), whole.out, "{settings}");
                    assert_eq!(strips.iter().flat_map(|a| a.lse.clone()).collect::<Vec<_>>(), whole.lse, "{settings}");
                    let masked = strips.iter().flat_map(|a| a.points[2].clone()).collect::<Vec<_>>();
                    assert_eq!(masked, whole.points[2], "{settings}");
                }
            }
        }
    }
}
