//! Intermediate results of attention: scores, weights, output.

use crate::compute::Compute;
use crate::error::{floats, same, zeros};
use sdpa::{Attention, Error, Inputs, Outputs, Point, Shape, ViewMut};

/// Intermediate results of attention, for inspection: scores, weights and output of one sequence and all its heads.
///
/// The fused call itself writes them, so they are the numbers it works with, and the output has its bits. They take
/// memory of rows × keys: use them for inspection, not for speed.
///
/// ```
/// use sdpa_layers::{Compute, Steps};
/// use sdpa::{Attention, Inputs, View};
///
/// // Three tokens of two numbers that attend to each other, as in "Attention is all you need", equation 1
/// let x = View::bhld(&[1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0], [1, 1, 3, 2])?;
/// let steps = Steps::new(&Attention::new(), Inputs::new(x, x, x), &mut Compute::default())?;
/// let third = steps.row(0, 2).expect("three rows");
/// assert_eq!(third.scores[0], 0.5f32.sqrt()); // (1, 1)·(1, 0) / √2
/// assert!(third.weights[2] > third.weights[0] && third.output[0] == third.output[1]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Steps {
    shape: Shape,
    scores: Vec<f32>,
    weights: Vec<f32>,
    output: Vec<f32>,
}

/// Intermediate results of one query row.
///
/// ```
/// use sdpa_layers::{Compute, Steps, StepsRow};
/// use sdpa::{Attention, Inputs, View};
/// let x = View::bhld(&[0.0f32, 0.0], [1, 1, 2, 1])?;
/// let steps = Steps::new(&Attention::new().causal(), Inputs::new(x, x, x), &mut Compute::default())?;
/// let StepsRow { scores, weights, output } = steps.row(0, 0).expect("two rows");
/// assert_eq!((scores, weights, output), (&[0.0, f32::NEG_INFINITY][..], &[1.0, 0.0][..], &[0.0][..]));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepsRow<'a> {
    /// Input of the softmax, one score for each key; −∞ for keys that the row does not see.
    pub scores: &'a [f32],
    /// Output of the softmax, one weight for each key. They sum to 1 (less the weight of a sink), or to 0 where no key
    /// is visible.
    pub weights: &'a [f32],
    /// Weighted sum of the values, `[value_dim]`.
    pub output: &'a [f32],
}

impl Steps {
    /// Runs the fused call on one sequence: q `[1, heads, rows, head_dim]`, k `[1, kv_heads, keys, head_dim]`, v
    /// `[1, kv_heads, keys, value_dim]`, and any options. Takes the time of the call, and memory of heads·rows·(2·keys
    /// + value_dim) floats.
    ///
    /// # Errors
    /// As [`Attention::problem`]; [`Error::Mismatch`] unless the batch is one sequence, [`Error::Empty`] if there are
    /// no heads; [`Error::TooLarge`] or [`Error::Memory`].
    pub fn new(attention: &Attention, inputs: Inputs<'_>, compute: &mut Compute) -> Result<Self, Error> {
        let shape = inputs.shape()?;
        same("inputs", "batch", shape.batch, 1, "one sequence")?;
        if shape.heads == 0 {
            return Err(Error::Empty { argument: "q", what: "heads" });
        }
        let pairs = [1, shape.heads, shape.q_len, shape.kv_len];
        let sums = [1, shape.heads, shape.q_len, shape.value_dim];
        let zeros = |what, sizes| zeros(what, floats(what, sizes)?);
        let (mut scores, mut weights) = (zeros("scores", pairs)?, zeros("weights", pairs)?);
        let mut output = zeros("output", sums)?;
        let outputs = Outputs::new(ViewMut::bhld(&mut output, sums)?)
            .scores(Point::Masked, ViewMut::bhld(&mut scores, pairs)?)
            .weights(ViewMut::bhld(&mut weights, pairs)?);
        compute.attend(attention.problem(inputs, outputs)?)?;
        Ok(Self { shape, scores, weights, output })
    }

    /// Sizes of the call.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Input of the softmax, `[heads, rows, keys]`: scale·(q·k), softcap, bias and ALiBi, −∞ where hidden.
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// Output of the softmax, `[heads, rows, keys]`.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Weighted sums of the values, `[heads, rows, value_dim]`: the fused call's output, to the bit.
    pub fn output(&self) -> &[f32] {
        &self.output
    }

    /// Returns one row of one head; `None` outside the shape.
    pub fn row(&self, head: usize, row: usize) -> Option<StepsRow<'_>> {
        let Shape { heads, q_len, kv_len, value_dim, .. } = self.shape;
        if head >= heads || row >= q_len {
            return None;
        }
        let at = head * q_len + row;
        let pairs = at * kv_len..(at + 1) * kv_len;
        Some(StepsRow {
            scores: &self.scores[pairs.clone()],
            weights: &self.weights[pairs],
            output: &self.output[at * value_dim..(at + 1) * value_dim],
        })
    }

    /// Returns the weights of one head, `[rows, keys]`; `None` if there is no such head.
    pub fn head_weights(&self, head: usize) -> Option<&[f32]> {
        let len = self.shape.q_len * self.shape.kv_len;
        (head < self.shape.heads).then(|| &self.weights[head * len..(head + 1) * len])
    }

    /// Returns the weights averaged over the heads, `[rows, keys]`; their rows sum to 1 as well.
    pub fn mean_weights(&self) -> Vec<f32> {
        let Shape { heads, q_len, kv_len, .. } = self.shape;
        let mut mean = vec![0.0; q_len * kv_len];
        for head in (0..heads).filter_map(|head| self.head_weights(head)) {
            mean.iter_mut().zip(head).for_each(|(sum, weight)| *sum += weight);
        }
        mean.iter_mut().for_each(|sum| *sum /= heads as f32);
        mean
    }
}
