//! Backward pass of the oracle: gradients from the weights of the forward oracle, one pair of row and key at a time.
//!
//! With w the weights, s the scores, dp = do·v and δ = Σ w·dp − dlse: ds = w·(dp − δ). Times the derivative of the
//! caller's score function, it gives dbias and dslope. Then also times 1 − (s/cap)² under a softcap, it gives dq = c·Σ
//! ds·k and dk = c·Σ ds·q. dv = Σ w·do. (Dao and others 2022, arXiv:2205.14135, appendix B.2.)

use super::sequence::OracleSequence;
use super::{Answer, Dense, Real, answer};
use crate::attention::Attention;
use crate::backward::{NO_DERIVATIVE, WEIGHT_FUNCTION};
use crate::error::Error;
use crate::inputs::Inputs;
use crate::shape::Shape;
use sdpa_kernels::{Covered, MaskMod, Mods, Position, ScoreMod, Tensor, TokenPart, View, WeightMod};

/// Gradients of attention, the result of [`gradients`]: each dense, in the shape of its tensor.
///
/// ```
/// use sdpa::{Attention, Inputs, Mods, View, naive};
/// let x = View::bhld(&[1.0f32], [1, 1, 1, 1])?; // one row, one key: its weight is 1 whatever the numbers
/// let inputs = Inputs::new(x, x, x);
/// let naive::Gradient { q, k, v, .. } = naive::gradients(&Attention::new(), &inputs, x, None, &Mods::new())?;
/// assert_eq!((q, k, v), (vec![0.0f64], vec![0.0], vec![1.0]));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Gradient<T> {
    /// Gradient in the queries.
    pub q: Vec<T>,
    /// Gradient in the keys.
    pub k: Vec<T>,
    /// Gradient in the values.
    pub v: Vec<T>,
    /// Gradient in the bias, in the shape of the bias; empty without one.
    pub bias: Vec<T>,
    /// Gradient in the sinks, one per query head; zeros without them.
    pub sinks: Vec<T>,
    /// Gradient in the ALiBi slopes, one per query head.
    pub slopes: Vec<T>,
    /// Gradient in the scale.
    pub scale: T,
    /// Gradient in the parameters of the score function.
    pub parameters: Vec<T>,
}

/// Computes the gradients of attention in `f64`, or in `f32` by the usual passes over whole rows, with your own functions or none.
/// `d_out` is the gradient in the output, `[batch, heads, q_len, value_dim]`, `d_lse` that in the log-sum-exp, `[batch, heads,
/// q_len, 1]`.
///
/// Complexity: time B·H·Lq·Lk·(D + Dv), memory B·H·Lq·Lk.
///
/// ```
/// use sdpa::{Attention, Inputs, Mods, Position, View, WithDerivative, naive};
/// let (x, v, d_out) = ([2.0f32, 3.0], [0.0f32, 1.0], [1.0f32; 2]);
/// let view = |x| View::bhld(x, [1, 1, 2, 1]);
/// let (inputs, d_out) = (Inputs::new(view(&x)?, view(&x)?, view(&v)?), view(&d_out)?);
/// let halved = Mods::new().score(WithDerivative::new(|s: f32, _: Position| 0.5 * s, |_, _: Position| 0.5));
/// let gradient: naive::Gradient<f64> = naive::gradients(&Attention::new(), &inputs, d_out, None, &halved)?;
/// let scaled = Attention::new().scale(0.5);
/// assert_eq!(gradient.q, naive::gradients::<f64, _, _, _>(&scaled, &inputs, d_out, None, &Mods::new())?.q);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// As [`oracle`](super::oracle); [`Error::Needs`] for a weight function, and for a score function without a derivative if a row
/// sees a key; [`Error::Mask`] if the mask function does not fit the call.
pub fn gradients<'t, T: Real, S: ScoreMod, M: MaskMod, P: WeightMod>(
    attention: &Attention,
    inputs: &Inputs<'_>,
    d_out: impl Into<Tensor<'t>>,
    d_lse: Option<View<'t>>,
    mods: &Mods<S, M, P>,
) -> Result<Gradient<T>, Error> {
    if mods.weight.is_given() {
        return Err(WEIGHT_FUNCTION);
    }
    let checked = attention.call_alone(inputs)?;
    let (kv, shape) = (checked.call().kv, Shape::of(checked.call()));
    let d_out = d_out.into();
    let forward: Answer<T> = answer(attention, inputs, mods)?;
    let tensors = [
        Dense::of(inputs.q),
        Dense::new(kv.k_shape(), |at, all| kv.elements(TokenPart::Key, at, all)),
        Dense::new(kv.v_shape(), |at, all| kv.elements(TokenPart::Value, at, all)),
        Dense::of(d_out),
    ];
    let zeros = |n: usize| vec![T::from(0.0); n];
    let [q, k, v, _] = tensors.each_ref().map(|x| zeros(x.data.len()));
    let bias = inputs.bias.map_or(0, |bias| bias.of.shape().iter().product());
    let per_head = zeros(shape.heads);
    let (sinks, slopes) = (per_head.clone(), per_head);
    let parameters = zeros(mods.score.parameters());
    let mut all = Gradient { q, k, v, bias: zeros(bias), sinks, slopes, scale: T::from(0.0), parameters };
    for sequence in (0..shape.batch).map(|index| OracleSequence::new(attention, inputs, shape, index)) {
        for (head, row) in (0..shape.heads).flat_map(|head| (0..sequence.q_len).map(move |row| (head, row))) {
            let at = sequence.at(head, row);
            let [b, h, l] = sequence.query(at);
            let d_lse = d_lse.and_then(|d_lse| d_lse.get([b, h, l, 0]).copied());
            let row = Row { sequence: &sequence, at, score: &mods.score, d_lse: T::from(d_lse.unwrap_or(0.0)) };
            row.gradients(&forward, &tensors, &mut all)?;
        }
    }
    Ok(all)
}

/// One row of a sequence, the score function, and the gradient in the row's log-sum-exp.
struct Row<'a, T, S> {
    sequence: &'a OracleSequence<'a>,
    at: Position,
    score: &'a S,
    d_lse: T,
}

impl<T: Real, S: ScoreMod> Row<'_, T, S> {
    /// Adds what the row contributes to every gradient.
    fn gradients(
        &self,
        forward: &Answer<T>,
        [q, k, v, d_out]: &[Dense<T>; 4],
        all: &mut Gradient<T>,
    ) -> Result<(), Error> {
        let &Self { sequence, at, d_lse, .. } = self;
        let &OracleSequence { attention, inputs, shape: Shape { heads, q_len, kv_len, head_dim, .. }, .. } = sequence;
        let (zero, one, hidden) = (T::from(0.0), T::from(1.0), T::from(f32::NEG_INFINITY));
        let number = (at.batch * heads + at.head) * q_len + at.row;
        let [_, capped, masked, weights] = forward.points.each_ref().map(|x| &x[number * kv_len..][..kv_len]);
        let query = sequence.query(at);
        let (q_row, d_out_row) = (q.row(query), d_out.row(query));
        let visible: Vec<usize> = (0..kv_len).filter(|&j| masked[j] != hidden).collect();
        let dot = |x: &[T], y: &[T]| x.iter().zip(y).fold(zero, |sum, (&x, &y)| sum + x * y);
        let mut dp = vec![zero; kv_len];
        for &j in &visible {
            let here = sequence.with_key(at, j);
            dp[j] = dot(d_out_row, v.row(sequence.key(here))) * T::from(sequence.dropout_factor(here));
        }
        let delta = visible.iter().fold(zero, |sum, &j| sum + weights[j] * dp[j]) - d_lse;
        let scale = T::from(attention.scale_for(head_dim));
        for &j in &visible {
            let here = sequence.with_key(at, j);
            let (key, kept) = (sequence.key(here), T::from(sequence.dropout_factor(here)));
            let ds = self.before_function(here, capped[j], weights[j] * (dp[j] - delta), all)?;
            self.option_gradients(here, ds, all);
            let slope = attention.softcap.map_or(one, |cap| {
                let y = capped[j] / T::from(cap);
                one - y * y
            });
            let ds = ds * slope;
            all.scale = all.scale + ds * dot(q_row, k.row(key));
            add(q.slot(query, &mut all.q), ds * scale, k.row(key));
            add(k.slot(key, &mut all.k), ds * scale, q_row);
            add(v.slot(key, &mut all.v), weights[j] * kept, d_out_row);
        }
        if let Some(sink) = inputs.sinks.map(|sinks| T::from(sinks[at.head]))
            && sink != hidden
        {
            // The logarithm of a sum loses the number of keys where scores are far from 0.
            let scores = core::iter::once(sink).chain(visible.iter().map(|&j| masked[j]));
            let sum = scores.fold(zero, |sum, score| sum + (score - sink).exp());
            all.sinks[at.head] = all.sinks[at.head] - delta / sum;
        }
        Ok(())
    }

    /// Returns the gradient of the score that bias and ALiBi make of a capped score from that of what the score function makes of it,
    /// and adds those in the function's parameters.
    fn before_function(&self, here: Position, capped: T, ds: T, all: &mut Gradient<T>) -> Result<T, Error> {
        if !self.score.is_given() {
            return Ok(ds);
        }
        let OracleSequence { inputs, .. } = self.sequence;
        let bias =
            inputs.bias.and_then(|Covered { of, cover }| of.get(self.sequence.entry(of.shape(), cover, here)?));
        let slope = T::from(inputs.alibi.map_or(0.0, |slopes| slopes[here.head]));
        let penalty = slope * T::from(self.sequence.ahead(here).unsigned_abs() as f32);
        let score = capped + T::from(bias.unwrap_or(0.0)) - penalty;
        let slope = self.score.derivative(score.to_f32(), here).map(T::from).ok_or(NO_DERIVATIVE)?;
        let zero = T::from(0.0);
        if ds == zero {
            return Ok(zero);
        }
        self.score.parameter_derivatives(score.to_f32(), here, &mut |parameter, derivative| {
            all.parameters[parameter] = all.parameters[parameter] + ds * T::from(derivative);
        });
        Ok(ds * slope)
    }

    /// Adds a score's gradient to those of slope and bias.
    fn option_gradients(&self, here: Position, ds: T, all: &mut Gradient<T>) {
        let distance = self.sequence.ahead(here).unsigned_abs();
        all.slopes[here.head] = all.slopes[here.head] - ds * T::from(distance as f32);
        if let Some(Covered { of, cover }) = self.sequence.inputs.bias
            && let Some([b, h, l, c]) = self.sequence.entry(of.shape(), cover, here)
        {
            let [_, heads, rows, columns] = of.shape();
            let element = &mut all.bias[((b * heads + h) * rows + l) * columns + c];
            *element = *element + ds;
        }
    }
}

/// Adds `factor · x` to a row of sums.
fn add<T: Real>(sums: &mut [T], factor: T, x: &[T]) {
    sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum = *sum + factor * x);
}
