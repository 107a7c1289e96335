//! What to compute: the settings of a call, no tensors.

use crate::cache;
use crate::error::Error;
use crate::inputs::Inputs;
use crate::outputs::Outputs;
use crate::problem::Problem;
use crate::shape::Shape;
use sdpa_kernels::{
    Alignment, Call, Causality, Isa, MAX_TASK, Options, Precision, Tiling, Visible, Window, has_memory,
};

/// The settings of an attention call. All plain data; tensors come with [`Inputs`].
///
/// ```
/// use sdpa::{Alignment, Attention, Window};
/// let attention = Attention::new().causal().align(Alignment::BottomRight).softcap(30.0);
/// let local = Attention::new().causal().window(Window::inclusive(Some(255), None));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Attention {
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) visible: Visible,
    pub(crate) alignment: Option<Alignment>,
    pub(crate) precision: Precision,
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

    /// Scores become c·tanh(score / c), before anything is added or hidden. Positive and finite.
    #[must_use]
    pub fn softcap(self, c: f32) -> Self {
        Self { softcap: Some(c), ..self }
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

    /// What may be done to numbers on the way: by default nothing, so that bfloat16 tensors give what the same numbers
    /// in `f32` give. [`Precision::Native`] takes about 0.6 of the time over bfloat16, and says what that costs.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
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
        outputs.check(&inputs, &shape)?;
        let scale = self.scale_for(shape.head_dim);
        if !scale.is_finite() {
            return Err(Error::Number { argument: "scale", got: scale, expected: "finite" });
        }
        if let Some(c) = self.softcap.filter(|c| !(c.is_finite() && *c > 0.0)) {
            return Err(Error::Number { argument: "softcap", got: c, expected: "positive and finite" });
        }
        let options = inputs.options(&shape, self.softcap)?;
        let alignment = self.alignment_for(&inputs, &shape, &options)?;
        let (q, kv) = (inputs.q, inputs.key_values()?);
        scratch_fits(&shape)?;
        let Self { visible, precision, .. } = *self;
        let call = Call { q, kv, scale, visible, alignment, options, precision };
        if let Some(cache) = kv.cache() {
            cache::check_kept(cache, &call, outputs.wants_all_keys())?;
        }
        Ok(Problem { call, outputs: outputs.into_kernel(), shape })
    }

    /// The alignment to go by: the one given, or none needed.
    fn alignment_for(&self, inputs: &Inputs<'_>, shape: &Shape, options: &Options<'_>) -> Result<Alignment, Error> {
        if let Some(alignment) = self.alignment {
            return Ok(alignment);
        }
        let Some(rule) = self.rule(options.alibi.is_some()) else { return Ok(Alignment::TopLeft) };
        // Where no sequence has lengths of its own, the first speaks for all.
        let differ = inputs.lengths_differ();
        for sequence in 0..if differ { shape.batch } else { shape.batch.min(1) } {
            let (q_len, kv_len) = inputs.lengths(shape, sequence);
            if q_len != kv_len {
                return Err(Error::Unaligned { rule, q_len, kv_len });
            }
        }
        Ok(Alignment::TopLeft)
    }

    /// The rule, if any, that depends on where the rows stand among the keys.
    pub(crate) fn rule(&self, alibi: bool) -> Option<&'static str> {
        match (self.visible.causality, self.visible.window) {
            (Causality::Causal, _) => Some("causal"),
            (_, Some(_)) => Some("window"),
            _ => alibi.then_some("alibi"),
        }
    }
}

/// Scratch of a worker from which on it is looked whether there is memory for it, in bytes.
const MUCH_SCRATCH: usize = 16 << 20;

/// Refuses dimensions so large that there is no memory for a worker's scratch: running cannot fail.
fn scratch_fits(shape: &Shape) -> Result<(), Error> {
    let (tile_rows, _) = Isa::detect().tile();
    let bytes = Tiling::new(shape.head_dim, shape.value_dim, MAX_TASK, tile_rows).scratch_bytes();
    if bytes >= MUCH_SCRATCH && !has_memory(bytes / size_of::<f32>()) {
        return Err(Error::Memory { what: "scratch of a worker", bytes });
    }
    Ok(())
}
