//! Options and tensors, checked once. After a [`Problem`] exists nothing can fail.

use crate::error::Error;
use sdpa_kernels::{Alignment, Call, Causality, View, ViewMut, Visible, Window};

/// What to compute: the settings of an attention call, no tensors.
///
/// ```
/// use sdpa::{Alignment, Attention};
/// let attention = Attention::new().causal().align(Alignment::BottomRight);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Attention {
    pub(crate) scale: Option<f32>,
    pub(crate) visible: Visible,
    pub(crate) alignment: Option<Alignment>,
}

impl Attention {
    /// softmax(Q·Kᵀ/√head_dim)·V, every row seeing every key.
    pub fn new() -> Self {
        Self::default()
    }

    /// The factor of the dot products, in place of 1/√head_dim. Any finite value, negative and 0 included.
    #[must_use]
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// A row sees only the keys up to its own position.
    #[must_use]
    pub fn causal(mut self) -> Self {
        self.visible.causality = Causality::Causal;
        self
    }

    /// A row sees only the keys near its own position.
    #[must_use]
    pub fn window(mut self, window: Window) -> Self {
        self.visible.window = Some(window);
        self
    }

    /// Where the rows stand among the keys. Needed where their numbers differ and a rule depends on it.
    #[must_use]
    pub fn align(self, alignment: Alignment) -> Self {
        Self { alignment: Some(alignment), ..self }
    }

    /// The factor of the dot products for keys of this length.
    pub fn scale_for(&self, head_dim: usize) -> f32 {
        self.scale.unwrap_or_else(|| (1.0 / (head_dim as f64).sqrt()) as f32)
    }

    /// Binds inputs and outputs, and checks everything there is to check.
    ///
    /// # Errors
    /// Any [`Error`]; see its variants. Outputs are untouched.
    pub fn problem<'a>(&self, inputs: Inputs<'a>, outputs: Outputs<'a>) -> Result<Problem<'a>, Error> {
        let shape = inputs.shape()?;
        outputs.check(&shape)?;
        let scale = self.scale_for(shape.head_dim);
        if !scale.is_finite() {
            return Err(Error::Number { argument: "scale", got: scale, expected: "finite" });
        }
        let alignment = self.alignment_for(&shape)?;
        let Inputs { q, k, v } = inputs;
        let call = Call { q, k, v, scale, visible: self.visible, alignment };
        Ok(Problem { call, outputs, shape })
    }

    /// The alignment to go by: the one given, or none needed.
    fn alignment_for(&self, shape: &Shape) -> Result<Alignment, Error> {
        let rule = match (self.visible.causality, self.visible.window) {
            (Causality::Causal, _) => "causal",
            (_, Some(_)) => "window",
            _ => return Ok(self.alignment.unwrap_or(Alignment::TopLeft)),
        };
        match self.alignment {
            Some(alignment) => Ok(alignment),
            None if shape.q_len == shape.kv_len => Ok(Alignment::TopLeft),
            None => Err(Error::Unaligned { rule, q_len: shape.q_len, kv_len: shape.kv_len }),
        }
    }
}

/// The sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; `heads` is a multiple of it.
    pub kv_heads: usize,
    /// Query rows of a sequence.
    pub q_len: usize,
    /// Keys of a sequence.
    pub kv_len: usize,
    /// Length of a query or key.
    pub head_dim: usize,
    /// Length of a value.
    pub value_dim: usize,
}

impl Shape {
    /// Multiplications and additions of QKᵀ and PV with every key visible: 2·B·H·Lq·Lk·(D + Dv).
    pub fn flops(&self) -> f64 {
        let rows = self.batch as f64 * self.heads as f64 * self.q_len as f64;
        2.0 * rows * self.kv_len as f64 * (self.head_dim + self.value_dim) as f64
    }
}

/// The tensors that a call reads.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries, `[batch, heads, q_len, head_dim]`.
    pub q: View<'a>,
    /// Keys, `[batch, kv_heads, kv_len, head_dim]`.
    pub k: View<'a>,
    /// Values, `[batch, kv_heads, kv_len, value_dim]`.
    pub v: View<'a>,
}

impl<'a> Inputs<'a> {
    /// Queries, keys and values.
    pub fn new(q: View<'a>, k: View<'a>, v: View<'a>) -> Self {
        Self { q, k, v }
    }

    /// The sizes, if the tensors fit together.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Heads`], [`Error::Empty`] or [`Error::TooLarge`].
    pub fn shape(&self) -> Result<Shape, Error> {
        let ([batch, heads, q_len, head_dim], [kb, kv_heads, kv_len, kd], [vb, vh, vl, value_dim]) =
            (self.q.shape(), self.k.shape(), self.v.shape());
        same("k", "batch", kb, batch, "q")?;
        same("v", "batch", vb, batch, "q")?;
        same("k", "head_dim", kd, head_dim, "q")?;
        same("v", "heads", vh, kv_heads, "k")?;
        same("v", "rows", vl, kv_len, "k")?;
        if head_dim == 0 {
            return Err(Error::Empty { argument: "q", what: "head_dim" });
        }
        if value_dim == 0 {
            return Err(Error::Empty { argument: "v", what: "value_dim" });
        }
        if !(heads == kv_heads || kv_heads > 0 && heads.is_multiple_of(kv_heads)) {
            return Err(Error::Heads { q_heads: heads, kv_heads });
        }
        let sizes = [batch, heads, q_len, value_dim];
        if sizes.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).is_none_or(|n| n > isize::MAX as usize) {
            return Err(Error::TooLarge { what: "out", sizes });
        }
        Ok(Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim })
    }
}

/// The tensors that a call writes.
#[derive(Debug)]
pub struct Outputs<'a> {
    pub(crate) out: ViewMut<'a>,
    pub(crate) lse: Option<ViewMut<'a>>,
}

impl<'a> Outputs<'a> {
    /// The output alone, `[batch, heads, q_len, value_dim]`.
    pub fn new(out: ViewMut<'a>) -> Self {
        Self { out, lse: None }
    }

    /// Also the natural log of each row's Σ exp(score), `[batch, heads, q_len, 1]`; −∞ where no key is visible.
    #[must_use]
    pub fn lse(self, lse: ViewMut<'a>) -> Self {
        Self { lse: Some(lse), ..self }
    }

    fn check(&self, shape: &Shape) -> Result<(), Error> {
        let rows = |argument: &'static str, [b, h, l, _]: [usize; 4]| {
            same(argument, "batch", b, shape.batch, "q")?;
            same(argument, "heads", h, shape.heads, "q")?;
            same(argument, "rows", l, shape.q_len, "q")
        };
        rows("out", self.out.shape())?;
        same("out", "value_dim", self.out.shape()[3], shape.value_dim, "v")?;
        if let Some(lse) = &self.lse {
            rows("lse", lse.shape())?;
            same("lse", "last dimension", lse.shape()[3], 1, "one value a row")?;
        }
        Ok(())
    }
}

fn same(
    argument: &'static str,
    what: &'static str,
    got: usize,
    expected: usize,
    of: &'static str,
) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::Mismatch { argument, what, got, expected, of }) }
}

/// A call that has been checked: running it cannot fail.
#[derive(Debug)]
pub struct Problem<'a> {
    pub(crate) call: Call<'a>,
    pub(crate) outputs: Outputs<'a>,
    pub(crate) shape: Shape,
}

impl Problem<'_> {
    /// The sizes.
    pub fn shape(&self) -> Shape {
        self.shape
    }
}
