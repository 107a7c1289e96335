//! Share of a rank in a backward pass: its rows, its keys, and where their gradients go.

use crate::description::Description;
use crate::share::{of_all, of_keys, of_rows};
use sdpa::{Attention, Gradients, Inputs, Saved, Tensor, TensorMut, ViewMut};

/// Share of a rank in a backward pass: stretches of query rows, and stretches of keys and values, as in a
/// [`Share`](crate::Share), with the gradients that it wants.
///
/// ```
/// use sdpa::{Inputs, Saved, View, ViewMut};
/// // Rows 4 and 5, and keys 2, 3 and 4, of one head of eight numbers.
/// let (q, kv, out, lse, d_out) = ([0.5f32; 2 * 8], [0.25f32; 3 * 8], [0.25f32; 2 * 8], [2.0f32; 2], [1.0f32; 2 * 8]);
/// let (mut dq, mut dk, mut dv) = ([0.0f32; 2 * 8], [0.0f32; 3 * 8], [0.0f32; 3 * 8]);
/// let (rows, keys) = ([1, 1, 2, 8], [1, 1, 3, 8]);
/// let (q, kv) = (View::bhld(&q, rows)?, View::bhld(&kv, keys)?);
/// let saved = Saved::new(View::bhld(&out, rows)?, View::bhl(&lse, [1, 1, 2])?, View::bhld(&d_out, rows)?);
/// let share = sdpa_mpi::BackwardShare::new()
///     .rows(4, Inputs::new(q, kv, kv), saved, ViewMut::bhld(&mut dq, rows)?)
///     .keys(2, kv, kv, ViewMut::bhld(&mut dk, keys)?, ViewMut::bhld(&mut dv, keys)?);
/// # let _ = share;
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct BackwardShare<'a> {
    pub(crate) rows: Vec<Rows<'a>>,
    pub(crate) keys: Vec<Keys<'a>>,
}

/// Stretch of query rows.
#[derive(Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) first: usize,
    pub(crate) inputs: Inputs<'a>,
    pub(crate) saved: Saved<'a>,
    /// Gradients but for that in the bias.
    pub(crate) gradients: Gradients<'a>,
    pub(crate) dbias: Option<ViewMut<'a>>,
}

/// Stretch of keys and values.
#[derive(Debug)]
pub(crate) struct Keys<'a> {
    pub(crate) first: usize,
    /// Keys, then values.
    pub(crate) kv: [Tensor<'a>; 2],
    pub(crate) gradients: [TensorMut<'a>; 2],
}

impl<'a> BackwardShare<'a> {
    /// Creates a share without rows and keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a stretch of query rows, as [`Share::rows`](crate::Share::rows) does; the results of the forward pass that were saved of
    /// these rows; and where the gradient in their queries goes, `[batch, heads, rows, head_dim]`. Rows with a log-sum-exp of
    /// 256 or more, or −256 or less, need one of two columns ([`Outputs::lse`](sdpa::Outputs::lse)).
    #[must_use]
    pub fn rows(self, first: usize, inputs: Inputs<'a>, saved: Saved<'a>, dq: impl Into<TensorMut<'a>>) -> Self {
        self.rows_with(first, inputs, saved, Gradients::new().q(dq))
    }

    /// Adds a stretch of query rows as [`Self::rows`] does, with any gradients that a
    /// [`BackwardState`](sdpa::parts::BackwardState) writes:
    /// - in queries;
    /// - in the bias, if it has a row for each of these rows and more columns than one;
    /// - in sinks, slopes, scale and a bias of one row for all, which are sums over all rows: if the stretch has all of them.
    ///
    /// Those in parameters of a score function are refused: they are sums over all rows and keys.
    ///
    /// Sequences that are computed one by one have no sums over rows, and each must have a separate bias: ragged ones, and those
    /// of a batch of different lengths under bottom-right alignment.
    #[must_use]
    pub fn rows_with(mut self, first: usize, inputs: Inputs<'a>, saved: Saved<'a>, gradients: Gradients<'a>) -> Self {
        let mut gradients = gradients;
        let dbias = gradients.bias.take();
        self.rows.push(Rows { first, inputs, saved, gradients, dbias });
        self
    }

    /// Adds a stretch of keys and values, as [`Share::keys`](crate::Share::keys) does, and where the gradients in them go, of the
    /// same shapes.
    #[must_use]
    pub fn keys(
        mut self,
        first: usize,
        k: impl Into<Tensor<'a>>,
        v: impl Into<Tensor<'a>>,
        dk: impl Into<TensorMut<'a>>,
        dv: impl Into<TensorMut<'a>>,
    ) -> Self {
        self.keys.push(Keys { first, kv: [k.into(), v.into()], gradients: [dk.into(), dv.into()] });
        self
    }

    /// Says what this rank has, and what of the call it knows.
    pub(crate) fn description(&self, attention: &Attention) -> Result<Description, sdpa::Error> {
        let stretches: Result<_, _> = self
            .rows
            .iter()
            .map(|rows| rows.description(attention))
            .chain(self.keys.iter().map(Keys::description))
            .collect();
        Ok(of_all(stretches?, attention))
    }
}

/// Name under which a rank says that one row of the bias stands for all of a stretch.
pub(crate) const ONE_ROW: &str = "one row of the bias for all";

impl Rows<'_> {
    fn description(&self, attention: &Attention) -> Result<Description, sdpa::Error> {
        let mut description = of_rows(self.first, &self.inputs, attention)?;
        let rows = self.inputs.bias_and_mask().0.map(|bias| bias.shape()[2]);
        // A single row may be one of several.
        if rows == Some(1) && self.inputs.queries().shape()[2] != 1 {
            description.fact(ONE_ROW, true);
        }
        Ok(description)
    }
}

impl Keys<'_> {
    fn description(&self) -> Result<Description, sdpa::Error> {
        let description = of_keys(self.first, self.kv)?;
        for ((argument, of), (gradient, tensor)) in
            [("dk", "k"), ("dv", "v")].into_iter().zip(self.gradients.iter().zip(&self.kv))
        {
            let sizes = gradient.shape().into_iter().zip(tensor.shape());
            let mut named = ["batch", "heads", "rows", "last dimension"].into_iter().zip(sizes);
            if let Some((what, (got, expected))) = named.find(|(_, (got, expected))| got != expected) {
                return Err(sdpa::Error::Mismatch { argument, what, got, expected, of });
            }
        }
        Ok(description)
    }
}
