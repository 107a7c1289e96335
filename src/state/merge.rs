//! Merging of states and of results.

use crate::attention::Attention;
use crate::error::{Error, same, zeros};
use crate::inputs::Inputs;
use crate::state::AttnState;
use sdpa_kernels::{
    Causality, Dropout, Isa, Precision, Seen, View, ViewMut, Visible, Window, merge_results, merge_states,
    one_or_two_a_row,
};

impl AttnState<'_> {
    /// Merges a later state into this one: a state for the same queries, with keys that follow this state's keys. Sinks of
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
        let settings = [Settings::of(later), Settings::of(self)];
        let options = [later.options(), self.options()];
        if settings[0] == settings[1] && later.call.inputs.alibi == self.call.inputs.alibi && options[0] == options[1] {
            return None;
        }
        let other = options[0].into_iter().zip(options[1]).find(|(got, expected)| got != expected);
        if let Some(((what, got), (_, expected))) = other {
            return Some((what, [got, expected].map(|given| if given { "given" } else { "none" }.to_owned())));
        }
        let [got, expected] = settings.map(Settings::in_words);
        let differ = got.into_iter().zip(expected).find(|((_, got), (_, expected))| got != expected);
        if let Some(((what, got), (_, expected))) = differ {
            return Some((what, [got, expected]));
        }
        let slope = |state: &AttnState<'_>, head: usize| {
            state.call.inputs.alibi.and_then(|slopes| slopes.get(head)).map_or("none".to_owned(), f32::to_string)
        };
        let slopes = (0..self.call.inputs.q.shape()[1]).map(|head| [later, self].map(|state| slope(state, head)));
        slopes.into_iter().find(|[got, expected]| got != expected).map(|slopes| ("ALiBi slope of a head", slopes))
    }

    /// Returns the options that are only compared by whether they are there.
    fn options(&self) -> [(&'static str, bool); 7] {
        let Inputs { bias, mask, kv_lens, row_positions, key_positions, selected, .. } = self.call.inputs;
        [
            ("bias", bias.is_some()),
            ("mask", mask.is_some()),
            ("list of key lengths", kv_lens.is_some()),
            ("list of row positions", row_positions.is_some()),
            ("list of key positions", key_positions.is_some()),
            ("selection of keys", selected.is_some()),
            ("set of functions", self.call.functions.are_given()),
        ]
    }
}

/// Settings in which states must agree, by their effect: the default scale equals the same number, a window without
/// bounds equals none, and offsets of rows are equal if no rule depends on them.
#[derive(Clone, Copy, PartialEq)]
struct Settings {
    scale: f32,
    softcap: Option<f32>,
    causality: Causality,
    window: Option<Window>,
    /// Position of the first row, 0 where no rule depends on positions.
    offset: isize,
    /// Its number among all rows, 0 without functions and dropout.
    first_row: usize,
    dropout: Option<Dropout>,
    precision: Precision,
}

impl Settings {
    fn of(state: &AttnState<'_>) -> Self {
        let Attention { softcap, visible: Visible { causality, window }, precision, dropout, .. } =
            state.call.attention;
        let inputs = &state.call.inputs;
        let measures = state.call.attention.rule(inputs.alibi.is_some()).is_some() && inputs.row_positions.is_none();
        let offset = if measures { state.call.offset() } else { 0 };
        let dropout = dropout.filter(|dropout| dropout.p > 0.0);
        let numbered = dropout.is_some() || state.call.functions.are_given();
        let first_row = if numbered { state.call.first_row } else { 0 };
        let window = window.filter(|window| window.sides() != [None; 2]);
        let scale = state.call.attention.scale_for(state.call.inputs.q.shape()[3]);
        Self { scale, softcap, causality, window, offset, first_row, dropout, precision }
    }

    /// Returns the settings with their names.
    fn in_words(self) -> [(&'static str, String); 8] {
        let Self { scale, softcap, causality, window, offset, first_row, dropout, precision } = self;
        let none = || "none".to_owned();
        let causal = match causality {
            Causality::Full => none(),
            Causality::Causal => "causal".to_owned(),
        };
        let window = window.map_or_else(none, |window| {
            let [before, after] = window.sides().map(|side| side.map_or("all".to_owned(), |n| n.to_string()));
            let first = match window.kept_first() {
                0 => String::new(),
                n => format!(", the first {n}"),
            };
            format!("{before} before, {after} after{first}")
        });
        [
            ("scale", scale.to_string()),
            ("softcap", softcap.map_or_else(none, |c| c.to_string())),
            ("causal rule", causal),
            ("window", window),
            ("alignment", format!("offset {offset}")),
            ("first row", first_row.to_string()),
            (
                "dropout",
                dropout.map_or_else(none, |Dropout { p, seed, offset }| format!("{p}, seed {seed}, offset {offset}")),
            ),
            ("precision", precision.to_string()),
        ]
    }
}

/// Merges two results over different keys by their LSEs: `out` and `lse` become, up to rounding, the result of
/// attention over the keys of both. Shapes `[batch, heads, q_len, value_dim]` and `[batch, heads, q_len, 1]`, or `[.., 2]` if
/// LSEs have their rounding errors in a second column ([`Outputs::lse`](crate::Outputs::lse)).
///
/// An LSE far from 0 needs the second column: rounded to `f32` it is off by up to |LSE| · 2⁻²⁴, which is a relative error of all
/// weights of its side. At 10⁹ it does not say how many keys there were.
///
/// A side with an LSE of −∞ has seen no key and is ignored, even if its output holds NaN; if both LSEs are −∞, the output
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
/// [`Error::Mismatch`] if the shapes differ, [`Error::Size`] if an LSE has more than two values a row; `out` and `lse` are then
/// untouched.
pub fn merge(
    (out, lse): (ViewMut<'_>, ViewMut<'_>),
    (other_out, other_lse): (View<'_>, View<'_>),
) -> Result<(), Error> {
    for (index, what) in ["batch", "heads", "rows", "value_dim"].into_iter().enumerate() {
        same("other out", what, other_out.shape()[index], out.shape()[index], "out")?;
        for (argument, got) in [("lse", lse.shape()[index]), ("other lse", other_lse.shape()[index])] {
            match index {
                3 => one_or_two_a_row(argument, got)?,
                _ => same(argument, what, got, out.shape()[index], "out")?,
            }
        }
    }
    same("other lse", "columns", other_lse.shape()[3], lse.shape()[3], "lse")?;
    merge_results(Isa::detect(), [out, lse], [other_out, other_lse]);
    Ok(())
}
