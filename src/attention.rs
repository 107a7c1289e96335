//! Settings of an attention call, without its tensors.

use crate::cache;
use crate::error::{Error, at_most};
use crate::inputs::{Inputs, check_period};
use crate::plan::problem::Problem;
use crate::shape::Shape;
use sdpa_kernels::{
    Alignment, Call, Causality, CheckedCall, Dropout, Isa, MAX_PARTS, MAX_TASK, Options, Outputs, Precision, Sequence,
    Tiling, Visible, Window, has_memory,
};

/// Settings of an attention call. Plain data; the tensors come with [`Inputs`] and [`Outputs`].
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
    pub(crate) dropout: Option<Dropout>,
    /// Numbers of a part's first row and first key in the whole call, for dropout.
    pub(crate) dropout_from: [usize; 2],
}

impl Attention {
    /// Default settings: softmax(Q·Kᵀ/√head_dim)·V, with every key visible to every row.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the factor of the dot products, 1/√head_dim by default. Any finite value is valid, negative and 0 included.
    #[must_use]
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Sets the softcap: a score becomes c·tanh(score / c) before biases are added and masks applied. `c` must be
    /// positive and finite.
    #[must_use]
    pub fn softcap(self, c: f32) -> Self {
        Self { softcap: Some(c), ..self }
    }

    /// Sets causal attention: a row sees the keys up to its own position and no later ones.
    #[must_use]
    pub fn causal(mut self) -> Self {
        self.visible.causality = Causality::Causal;
        self
    }

    /// Sets a sliding window: a row sees only the keys near its own position.
    #[must_use]
    pub fn window(mut self, window: Window) -> Self {
        self.visible.window = Some(window);
        self
    }

    /// Sets the positions of the query rows relative to the keys. Needed if the numbers of rows and keys differ and a rule
    /// (causal, window, ALiBi) depends on positions.
    #[must_use]
    pub fn align(self, alignment: Alignment) -> Self {
        Self { alignment: Some(alignment), ..self }
    }

    /// Sets which precision shortcuts the kernels may take. None by default: bfloat16 tensors then give the results
    /// that the same numbers in `f32` give. [`Precision::Native`] takes less time on bfloat16; its
    /// documentation states the cost in accuracy. [`Precision::Accurate`] takes less time on a matrix unit, for many rows.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// Sets dropout of the weights, with probability `p` (at least 0, below 1) and random numbers by seed and offset:
    /// see [`Dropout`]. For training; 0 means no dropout.
    #[must_use]
    pub fn dropout(self, p: f32, seed: u64, offset: u32) -> Self {
        Self { dropout: Some(Dropout { p, seed, offset }), ..self }
    }

    /// Returns true if a row sees no keys after its own position.
    pub fn is_causal(&self) -> bool {
        self.visible.causality == Causality::Causal
    }

    /// Returns the positions of the query rows relative to the keys, if they are set.
    pub fn alignment(&self) -> Option<Alignment> {
        self.alignment
    }

    /// Returns the dropout of weights, if it is set.
    pub fn dropout_settings(&self) -> Option<Dropout> {
        self.dropout
    }

    /// Returns the factor of the dot products for queries and keys of length `head_dim`.
    pub fn scale_for(&self, head_dim: usize) -> f32 {
        self.scale.unwrap_or_else(|| (1.0 / (head_dim as f64).sqrt()) as f32)
    }

    /// Binds inputs and outputs and checks, once, everything that can be wrong with the call.
    ///
    /// # Errors
    /// Any [`Error`]; see its variants. Outputs are then untouched.
    pub fn problem<'a>(&self, inputs: Inputs<'a>, mut outputs: Outputs<'a>) -> Result<Problem<'a>, Error> {
        let checked = self.checked(&inputs)?;
        cache::check_held(checked.call(), outputs.of_all_keys())?;
        let checked = checked.writing(&mut outputs)?;
        Ok(Problem { shape: Shape::of(checked.call()), checked })
    }

    /// Returns a call without outputs, if settings and inputs fit together; errors as for [`Self::problem`].
    pub(crate) fn call_alone<'a>(&self, inputs: &Inputs<'a>) -> Result<CheckedCall<'a>, Error> {
        let checked = self.checked(inputs)?;
        cache::check_held(checked.call(), None)?;
        Ok(checked)
    }

    /// Returns a call without outputs, if settings and inputs fit together, whatever a cache has evicted.
    pub(crate) fn checked<'a>(&self, inputs: &Inputs<'a>) -> Result<CheckedCall<'a>, Error> {
        let Self { visible, precision, softcap, dropout, dropout_from, .. } = *self;
        let call = inputs.call()?;
        let scale = self.scale_for(call.q.shape()[3]);
        let options = Options { softcap, dropout_from, ..call.options }.dropout(dropout);
        let call = Call { scale, visible, options, precision, ..call };
        let checked = CheckedCall::new(call)?;
        inputs.check_sequences()?;
        self.check_numbers(checked.call())?;
        check_period(call.options.period, call.sequence_count())?;
        let alignment = self.alignment_for(checked.call())?;
        self.check_window(checked.call())?;
        scratch_fits(call.kv.dims())?;
        Ok(checked.aligned(alignment))
    }

    /// Returns these settings for a call over keys that follow `first` others, if rows are aligned to the first of all keys.
    pub(crate) fn counted_from(&self, first: usize) -> Self {
        let mut attention = *self;
        let offset = |alignment: Alignment| alignment.offset(0, 0).saturating_sub_unsigned(first);
        attention.alignment = self.alignment.map(|alignment| Alignment::Offset(offset(alignment)));
        attention.visible.window = self.visible.window.map(|window| window.counted_from(first));
        attention
    }

    /// Refuses numbers that are not finite or outside their range.
    fn check_numbers(&self, call: &Call<'_>) -> Result<(), Error> {
        let number = |argument, got, expected| Err(Error::Number { argument, got, expected });
        if !call.scale.is_finite() {
            return number("scale", call.scale, "finite");
        }
        if let Some(c) = self.softcap.filter(|c| !(c.is_finite() && *c > 0.0)) {
            return number("softcap", c, "positive and finite");
        }
        if let Some(Dropout { p, .. }) = self.dropout.filter(|dropout| !(0.0..1.0).contains(&dropout.p)) {
            return number("dropout", p, "at least 0 and below 1");
        }
        let slopes = call.options.alibi.unwrap_or_default();
        slopes.iter().find(|slope| !slope.is_finite()).map_or(Ok(()), |&slope| number("alibi slopes", slope, "finite"))
    }

    /// Returns the alignment of the call: the given one, or top-left if no rule needs one.
    fn alignment_for(&self, call: &Call<'_>) -> Result<Alignment, Error> {
        if let Some(alignment) = self.alignment {
            return Ok(alignment);
        }
        if call.options.row_positions.is_some() {
            return Ok(Alignment::TopLeft);
        }
        let Options { alibi, ragged, kv_lens, sources, .. } = call.options;
        let Some(rule) = self.rule(alibi.is_some()) else { return Ok(Alignment::TopLeft) };
        // If no source has lengths, all sequences are like the first.
        let differ = ragged.is_some() || kv_lens.is_some() || call.kv.lens().is_some();
        for index in 0..if differ { call.sequence_count() } else { call.sequence_count().min(1) } {
            let Sequence { q_len, kv_len, .. } = call.sequence(index);
            if q_len != kv_len {
                let number = sources.map_or(index, |sources| sources[index]);
                return Err(Error::Unaligned { rule, sequence: differ.then_some(number), q_len, kv_len });
            }
        }
        Ok(Alignment::TopLeft)
    }

    /// Refuses a window if its first key would be wrong because positions end at `isize::MAX`.
    fn check_window(&self, call: &Call<'_>) -> Result<(), Error> {
        let Some(Alignment::Offset(offset)) = self.alignment else { return Ok(()) };
        let Some([Some(left), _]) = self.visible.window.map(|window| window.sides()) else { return Ok(()) };
        // No sequence has more rows than that.
        if offset.checked_add_unsigned(call.q.shape()[2]).is_some() {
            return Ok(());
        }
        for Sequence { q_len, kv_len, .. } in (0..call.sequence_count()).map(|index| call.sequence(index)) {
            let own = call.options.key_positions.is_some();
            let [least, most] = if own { [i32::MIN, i32::MAX].map(i128::from) } else { [0, kv_len as i128] };
            let first_key = |position: i128| (position - left as i128).clamp(least, most);
            let last = offset as i128 + q_len as i128 - 1;
            // The first key moves with the position, so no row between is off if the last is not.
            if first_key(last) != first_key(last.min(isize::MAX as i128)) {
                const OF: &str = "the largest position less the number of keys, as rows go beyond the largest position";
                return at_most("window", "left", left, isize::MAX as usize - kv_len, OF);
            }
        }
        Ok(())
    }

    /// Returns the rule, if any, that depends on the positions of the rows relative to the keys.
    pub(crate) fn rule(&self, alibi: bool) -> Option<&'static str> {
        match (self.visible.causality, self.visible.window) {
            (Causality::Causal, _) => Some("causal"),
            (_, Some(_)) => Some("window"),
            _ => alibi.then_some("alibi"),
        }
    }
}

/// Smallest scratch of a worker, in bytes, for which a trial allocation checks that there is memory.
const MUCH_SCRATCH: usize = 16 << 20;

/// Head dimension up to which scratch is below [`MUCH_SCRATCH`] on every instruction set.
const USUAL_DIMS: usize = 1024;

/// Refuses head dimensions for which a worker's scratch cannot be allocated, because running a problem cannot fail.
fn scratch_fits([head_dim, value_dim]: [usize; 2]) -> Result<(), Error> {
    if head_dim.max(value_dim) <= USUAL_DIMS {
        return Ok(());
    }
    let (tile_rows, _) = Isa::detect().tile();
    let bytes = Tiling::new(head_dim, value_dim, MAX_TASK, tile_rows).with_parts(MAX_PARTS).scratch_bytes();
    scratch_of(bytes)
}

/// Refuses `bytes` of scratch for a worker, if they are many and there is no memory for them.
pub(crate) fn scratch_of(bytes: usize) -> Result<(), Error> {
    if bytes >= MUCH_SCRATCH && !has_memory(bytes / size_of::<f32>()) { Err(no_scratch(bytes)) } else { Ok(()) }
}

/// Returns the error of a call without memory for the scratch of its workers, `bytes` each.
pub(crate) fn no_scratch(bytes: usize) -> Error {
    Error::Memory { what: "scratch of a worker", bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_of_usual_dimensions_is_small() {
        for isa in Isa::available() {
            let (tile_rows, _) = isa.tile();
            let bytes = Tiling::new(USUAL_DIMS, USUAL_DIMS, MAX_TASK, tile_rows).with_parts(MAX_PARTS).scratch_bytes();
            assert!(bytes < MUCH_SCRATCH, "{isa}: {bytes} bytes");
        }
    }
}
