//! Merging of states and of results.

use crate::attention::Attention;
use crate::error::{Error, same, zeros};
use crate::inputs::Inputs;
use crate::state::AttnState;
use sdpa_kernels::{Alignment, Causality, Isa, Seen, View, ViewMut, Visible, merge_results, merge_states, one_a_row};

impl AttnState<'_> {
    /// Merges a later state into this one: a state for the same queries whose keys follow this state's keys. Sinks of
    /// `later` are ignored; those of this state are added when it is read. If `later` holds one block, the result has
    /// the bits of one state over all keys; otherwise it is equal up to rounding, because sums are taken in another
    /// order.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the shapes differ; [`Error::Differs`] if the settings, slopes or kinds of options do; [`Error::Apart`] if
    /// `later` does not start where this state ends; [`Error::Memory`].
    pub fn merge(&mut self, later: &AttnState<'_>) -> Result<(), Error> {
        for (what, index) in [("batch", 0), ("heads", 1), ("rows", 2), ("head_dim", 3)] {
            same("later q", what, later.call.inputs.q.shape()[index], self.call.inputs.q.shape()[index], "this state")?;
        }
        same("later state", "kv_heads", later.call.kv_heads, self.call.kv_heads, "this state")?;
        same("later state", "value_dim", later.call.value_dim, self.call.value_dim, "this state")?;
        if let Some((what, [got, expected])) = self.difference(later) {
            return Err(Error::Differs { argument: "later state", what, got, expected, of: "this state" });
        }
        let (first, end) = (later.first, self.first + self.len());
        if first != end {
            return Err(Error::Apart { first, end });
        }
        // The other state starts at a whole block, so this state holds no incomplete block.
        let [max, sum, out] = &mut self.parts;
        let [later_max, later_sum, mut later_out] = later.parts.each_ref();
        if self.seen == Seen::Nothing {
            out.fill(0.0);
        }
        let nothing;
        if later.seen == Seen::Nothing {
            nothing = zeros("state", later_out.len())?;
            later_out = &nothing;
        }
        let (isa, value_dim) = (self.exec.isa, self.call.value_dim);
        merge_states(isa, value_dim, [max, sum, out], [later_max, later_sum, later_out]);
        self.seen = Seen::Keys;
        self.accumulated += later.accumulated;
        self.waiting = later.waiting;
        self.waiting_k.clone_from(&later.waiting_k);
        self.waiting_v.clone_from(&later.waiting_v);
        Ok(())
    }

    /// Returns the name of the first setting, if any, in which another state differs, and in words what it has and what
    /// this state has.
    fn difference(&self, later: &AttnState<'_>) -> Option<(&'static str, [String; 2])> {
        let settings = later.settings().into_iter().zip(self.settings());
        let settings = settings.map(|((what, got), (_, expected))| (what, [got, expected]));
        let [got, expected] = [later, self].map(|state| state.call.inputs.alibi);
        let heads = if got == expected { 0 } else { self.call.inputs.q.shape()[1] };
        let slope = |of: Option<&[f32]>, head| of.and_then(|of| of.get(head)).map_or(NONE.to_owned(), f32::to_string);
        let slopes = (0..heads).map(|head| ("ALiBi slope of a head", [slope(got, head), slope(expected, head)]));
        settings.chain(slopes).find(|(_, [got, expected])| got != expected)
    }

    /// Returns in words which options there are whose numbers are not compared, and the settings in which states must agree, by
    /// their effect: the default scale equals the same number, a window without bounds equals none, and offsets of rows are
    /// equal if no rule depends on them.
    fn settings(&self) -> [(&'static str, String); 12] {
        let Attention { softcap, visible: Visible { causality, window }, alignment, precision, .. } =
            self.call.attention;
        let Inputs { q, bias, mask, alibi, kv_lens, row_positions, key_positions, .. } = self.call.inputs;
        let given = |is: bool| if is { "given" } else { NONE }.to_owned();
        let measures = self.call.attention.rule(alibi.is_some()).is_some() && row_positions.is_none();
        let offset = match alignment {
            Some(Alignment::Offset(n)) if measures => n,
            _ => 0,
        };
        let window = window.filter(|window| window.sides() != [None; 2]).map(|window| {
            let [before, after] = window.sides().map(|side| side.map_or("all".to_owned(), |n| n.to_string()));
            let first = match window.kept_first() {
                0 => String::new(),
                n => format!(", the first {n}"),
            };
            format!("{before} before, {after} after{first}")
        });
        [
            ("bias", given(bias.is_some())),
            ("mask", given(mask.is_some())),
            ("list of key lengths", given(kv_lens.is_some())),
            ("list of row positions", given(row_positions.is_some())),
            ("list of key positions", given(key_positions.is_some())),
            ("set of functions", given(self.call.functions.are_given())),
            // 0 and −0 are the same scale.
            ("scale", (self.call.attention.scale_for(q.shape()[3]) + 0.0).to_string()),
            ("softcap", softcap.map_or(NONE.to_owned(), |c| c.to_string())),
            ("causal rule", if causality == Causality::Causal { "causal" } else { NONE }.to_owned()),
            ("window", window.unwrap_or(NONE.to_owned())),
            ("alignment", format!("offset {offset}")),
            ("precision", precision.to_string()),
        ]
    }
}

/// Setting that a state does not have, in words.
const NONE: &str = "none";

/// Merges two results over different keys by their LSEs: `out` and `lse` become, up to rounding, the result of
/// attention over the keys of both. Shapes `[batch, heads, q_len, value_dim]` and `[batch, heads, q_len, 1]`.
///
/// A side whose LSE is −∞ has seen no key and is ignored, even if its output holds NaN; if both LSEs are −∞, the output
/// is 0 and the LSE −∞. Only one of the two results may include a sink. (Flash-Decoding; `merge_state` in FlashInfer.
/// The log is natural.)
///
/// ```
/// use sdpa::{View, ViewMut};
/// // One row: 1 from a part with Σ exp(score) = 1, and 5 from a part with Σ exp(score) = 3.
/// let ((mut out, mut lse), (other_out, other_lse)) = (([1.0], [0.0]), ([5.0], [3f32.ln()]));
/// let shape = [1, 1, 1, 1];
/// sdpa::merge(
///     (ViewMut::bhld(&mut out, shape)?, ViewMut::bhld(&mut lse, shape)?),
///     (View::bhld(&other_out, shape)?, View::bhld(&other_lse, shape)?),
/// )?;
/// assert!((out[0] - 4.0).abs() < 1e-6 && (lse[0] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// [`Error::Mismatch`] if the shapes differ, [`Error::Size`] if an LSE has more than one value a row; `out` and `lse` are then
/// untouched.
pub fn merge(
    (out, lse): (ViewMut<'_>, ViewMut<'_>),
    (other_out, other_lse): (View<'_>, View<'_>),
) -> Result<(), Error> {
    for (index, what) in ["batch", "heads", "rows", "value_dim"].into_iter().enumerate() {
        same("other out", what, other_out.shape()[index], out.shape()[index], "out")?;
        for (argument, got) in [("lse", lse.shape()[index]), ("other lse", other_lse.shape()[index])] {
            match index {
                3 => one_a_row(argument, got)?,
                _ => same(argument, what, got, out.shape()[index], "out")?,
            }
        }
    }
    merge_results(Isa::detect(), [out, lse], [other_out, other_lse]);
    Ok(())
}
