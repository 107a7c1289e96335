//! Tensors that a call writes, and checks that they fit its inputs.

use crate::error::{Error, ONE_A_ROW, one, same};
use crate::inputs::Inputs;
use crate::shape::Shape;
use sdpa_kernels::{KeyValues, Point, Ragged, State, TensorMut, ViewMut};

/// Tensors that a call writes.
///
/// ```
/// use sdpa::{Attention, Inputs, Outputs, View, ViewMut};
/// let x = [0.0; 2 * 4];
/// let x = View::bhld(&x, [1, 1, 2, 4])?;
/// let (mut out, mut lse, mut weights) = ([0.0; 2 * 4], [0.0; 2], [0.0; 2 * 2]);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 4])?)
///     .lse(ViewMut::bhl(&mut lse, [1, 1, 2])?)
///     .weights(ViewMut::bhld(&mut weights, [1, 1, 2, 2])?);
/// sdpa::attention(&Attention::new().causal(), Inputs::new(x, x, x), outputs)?;
/// assert_eq!(weights, [1.0, 0.0, 0.5, 0.5]);
/// assert!(lse[0] == 0.0 && (lse[1] - 2f32.ln()).abs() < 1e-6);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug)]
pub struct Outputs<'a> {
    out: Option<TensorMut<'a>>,
    lse: Option<ViewMut<'a>>,
    points: [Option<ViewMut<'a>>; 4],
    key_weight_sums: Option<ViewMut<'a>>,
    state: Option<State<'a>>,
    /// Name of an output that was given more than once.
    twice: Option<&'static str>,
}

/// Names of the scores at each [`Point`] in error messages.
const POINTS: [&str; 4] = ["raw scores", "softcapped scores", "masked scores", "weights"];

impl<'a> Outputs<'a> {
    const NONE: Self =
        Self { out: None, lse: None, points: [const { None }; 4], key_weight_sums: None, state: None, twice: None };

    /// Takes the output tensor, `[batch, heads, q_len, value_dim]`, of any element type: results are rounded once, to
    /// nearest even, when they are written. Outputs that are added later are `f32`.
    pub fn new(out: impl Into<TensorMut<'a>>) -> Self {
        Self { out: Some(out.into()), ..Self::NONE }
    }

    /// Returns the kernels' form of no outputs.
    pub(crate) fn none() -> sdpa_kernels::Outputs<'a> {
        Self::NONE.into_kernel()
    }

    /// Accumulates the keys of the call into `state` and writes no results.
    pub(crate) fn accumulate(state: State<'a>) -> Self {
        Self { state: Some(state), ..Self::NONE }
    }

    /// Continues from the state accumulated by earlier calls.
    pub(crate) fn resume(self, state: State<'a>) -> Self {
        Self { state: Some(state), ..self }
    }

    /// Adds the LSE of each row, the natural log of Σ exp(score), `[batch, heads, q_len, 1]`; −∞ where no key is
    /// visible.
    #[must_use]
    pub fn lse(self, lse: ViewMut<'a>) -> Self {
        let twice = self.twice.or(self.lse.is_some().then_some("lse"));
        Self { lse: Some(lse), twice, ..self }
    }

    /// Adds the weights, `[batch, heads, q_len, kv_len]`: each row sums to 1 less the weight of a sink (to within
    /// 0.0041 with [`Precision::Native`](crate::Precision::Native)); hidden keys have weight 0.
    #[must_use]
    pub fn weights(self, weights: ViewMut<'a>) -> Self {
        self.scores(Point::Weights, weights)
    }

    /// Adds the scores at a [`Point`], `[batch, heads, q_len, kv_len]`. Keys beyond a sequence's length are written as
    /// −∞ (weight 0). Blocks that masks hide are no longer skipped, so this costs time as well as memory.
    #[must_use]
    pub fn scores(mut self, point: Point, scores: ViewMut<'a>) -> Self {
        let before = self.points[point as usize].replace(scores);
        self.twice = self.twice.or(before.map(|_| POINTS[point as usize]));
        self
    }

    /// Adds the sum of each key's weights over the query rows and heads that share it, `[batch, kv_heads, kv_len, 1]`,
    /// as cache eviction uses it. Costs QKᵀ two more times and no memory; workers share the work by sequence and
    /// key/value head. Rows are added in order, so the bits do not depend on threads.
    #[must_use]
    pub fn key_weight_sums(self, sums: ViewMut<'a>) -> Self {
        let twice = self.twice.or(self.key_weight_sums.is_some().then_some("key weight sums"));
        Self { key_weight_sums: Some(sums), twice, ..self }
    }

    /// Returns the name of the first output, if any, that has an element for every key, hidden or not.
    pub(crate) fn of_all_keys(&self) -> Option<&'static str> {
        let point = POINTS.into_iter().zip(&self.points).find(|(_, given)| given.is_some());
        point.map(|(name, _)| name).or(self.key_weight_sums.as_ref().map(|_| "key weight sums"))
    }

    /// Refuses outputs that need all keys at once.
    pub(crate) fn check_for_state(&self) -> Result<(), Error> {
        let needs = "a call over all keys, not a state";
        self.of_all_keys().map_or(Ok(()), |argument| Err(Error::Needs { argument, needs }))
    }

    pub(crate) fn check(&self, inputs: &Inputs<'_>, shape: &Shape, kv: &KeyValues<'_>) -> Result<(), Error> {
        if let Some(argument) = self.twice {
            return Err(Error::Twice { argument });
        }
        let ([batch, _, q_rows, _], [keys, values]) = (inputs.q.shape(), inputs.names());
        // Tensors laid end to end have the sums of all sequences end to end, too.
        let (sums_batch, sums_keys, keys_of) = match inputs.ragged {
            Some(Ragged { k: Some(_), .. }) => (1, kv.k_shape()[2], keys),
            Some(Ragged { k: None, .. }) => (shape.batch, shape.kv_len, "the call"),
            None => (shape.batch, shape.kv_len, keys),
        };
        let rows = |argument: &'static str, [b, h, l, _]: [usize; 4]| {
            same(argument, "batch", b, batch, "q")?;
            same(argument, "heads", h, shape.heads, "q")?;
            same(argument, "rows", l, q_rows, "q")
        };
        if let Some(out) = &self.out {
            rows("out", out.shape())?;
            same("out", "value_dim", out.shape()[3], shape.value_dim, values)?;
        }
        if let Some(lse) = &self.lse {
            rows("lse", lse.shape())?;
            one("lse", lse.shape()[3], ONE_A_ROW)?;
        }
        for (argument, view) in POINTS.into_iter().zip(&self.points) {
            let Some(view) = view else { continue };
            let [b, h, l, columns] = view.shape();
            same(argument, "batch", b, shape.batch, "the call")?;
            same(argument, "heads", h, shape.heads, "q")?;
            same(argument, "rows", l, shape.q_len, "q")?;
            same(argument, "columns", columns, shape.kv_len, inputs.columns_of())?;
        }
        if let Some(sums) = &self.key_weight_sums {
            let [b, h, l, last] = sums.shape();
            same("key weight sums", "batch", b, sums_batch, keys_of)?;
            same("key weight sums", "heads", h, shape.kv_heads, keys)?;
            same("key weight sums", "rows", l, sums_keys, keys_of)?;
            one("key weight sums", last, "1 (one value a key)")?;
        }
        Ok(())
    }

    /// Shape of an output, by its name in error messages.
    pub(crate) fn shape_of(&self, argument: &str) -> Option<[usize; 4]> {
        match argument {
            "out" => self.out.as_ref().map(|out| out.shape()),
            "lse" => self.lse.as_ref().map(|lse| lse.shape()),
            _ => {
                let point = POINTS.iter().position(|&point| point == argument)?;
                self.points[point].as_ref().map(|view| view.shape())
            }
        }
    }

    pub(crate) fn into_kernel(self) -> sdpa_kernels::Outputs<'a> {
        let Self { out, lse, points, key_weight_sums, state, twice: _ } = self;
        sdpa_kernels::Outputs { out, lse, points, key_weight_sums, state }
    }
}
