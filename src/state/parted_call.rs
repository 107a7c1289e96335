//! Calls with keys that come in parts: settings, queries and options; each part of the keys takes its part of these.

use crate::attention::Attention;
use crate::error::{Error, same};
use crate::inputs::{Inputs, KeyLists, WHOLE};
use crate::state::functions::{Functions, Shift};
use crate::threads::run::NO_MODS;
use sdpa_kernels::{Alignment, LayoutError, MaskMod, Mods, ScoreMod, Seen, State, Tensor, ViewMut, WeightMod};

/// Alignment that position-dependent rules need in a state, which does not know the final number of keys.
pub(crate) const ALIGNMENT: &str =
    "an alignment: top-left or an offset, since a state does not know how many keys will come";

/// Settings of a call, its queries and options for all keys that will come, and keys and values without rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartedCall<'a> {
    pub(crate) attention: Attention,
    pub(crate) inputs: Inputs<'a>,
    pub(crate) functions: &'a dyn Functions,
    /// Number of the first of these rows among all rows, which functions see.
    pub(crate) first_row: usize,
    /// Heads of the keys, and length of a value.
    pub(crate) kv_heads: usize,
    pub(crate) value_dim: usize,
}

impl<'a> PartedCall<'a> {
    /// Takes the settings and inputs of a call, if keys may come in parts.
    ///
    /// # Errors
    /// [`Error::Needs`] or [`Error::Mismatch`].
    pub(crate) fn new(attention: Attention, inputs: Inputs<'a>) -> Result<Self, Error> {
        inputs.check_for_state()?;
        let [q, k, v] = inputs.shapes();
        same("k", "batch", k[0], q[0], "q")?;
        same("k", "head_dim", k[3], q[3], "q")?;
        same("v", "batch", v[0], q[0], "q")?;
        same("v", "heads", v[1], k[1], "k")?;
        if attention.alignment == Some(Alignment::BottomRight) {
            return Err(Error::Needs {
                argument: "bottom-right",
                needs: "the number of keys, which a state does not know",
            });
        }
        if attention.alignment.is_none() && inputs.row_positions.is_none() {
            let rule = attention.rule(inputs.alibi.is_some());
            rule.map_or(Ok(()), |argument| Err(Error::Needs { argument, needs: ALIGNMENT }))?;
        }
        Ok(Self { attention, inputs, functions: &NO_MODS, first_row: 0, kv_heads: k[1], value_dim: v[3] })
    }

    /// Sets score and mask functions. They do not know yet what call they are for.
    ///
    /// # Errors
    /// [`Error::Needs`] for a weight function.
    pub(crate) fn mods<S: ScoreMod, M: MaskMod, P: WeightMod>(self, mods: &'a Mods<S, M, P>) -> Result<Self, Error> {
        if mods.weight.is_given() {
            return Err(Error::Needs { argument: "weight function", needs: WHOLE });
        }
        Ok(Self { functions: mods, ..self })
    }

    /// Checks the next keys and values, `before` keys after the first. Returns how many there are.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if they do not fit q or each other, [`Error::Range`] if a bias or mask has no columns for
    /// them, or they have no positions.
    pub(crate) fn check_keys(&self, [k, v]: [Tensor<'_>; 2], before: usize) -> Result<usize, Error> {
        let ([batch, _, _, dim], [kb, kh, n, kd], [vb, vh, vn, vd]) = (self.inputs.q.shape(), k.shape(), v.shape());
        same("k", "batch", kb, batch, "q")?;
        same("k", "heads", kh, self.kv_heads, "the state")?;
        same("k", "head_dim", kd, dim, "q")?;
        same("v", "batch", vb, batch, "q")?;
        same("v", "heads", vh, self.kv_heads, "the state")?;
        same("v", "rows", vn, n, "k")?;
        same("v", "value_dim", vd, self.value_dim, "the state")?;
        check_room(before, n)?;
        self.inputs.check_columns(before, n)?;
        Ok(n)
    }

    /// Position of the first of these rows: the offset that was given, otherwise its number among all rows.
    pub(crate) fn offset(&self) -> isize {
        match self.attention.alignment {
            Some(Alignment::Offset(n)) => n,
            _ => self.first_row as isize,
        }
    }

    /// Sets the number of the first of these rows among all rows.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the rows go beyond the last position.
    pub(crate) fn rows_from(self, first_row: usize) -> Result<Self, Error> {
        check_end("rows of the state", first_row, self.inputs.q.shape()[2])?;
        Ok(Self { first_row, ..self })
    }

    /// Distances from positions in a call over keys that follow `before` others to those among all keys.
    pub(crate) fn shift(&self, before: usize) -> Shift {
        let offset = self.offset();
        let by_order = offset.abs_diff(offset.saturating_sub_unsigned(before));
        Shift { rows: self.first_row, keys: before, positions: self.inputs.key_positions.is_none().then_some(by_order) }
    }

    /// Returns the settings and tensors of a call over keys that follow `before` others, and that have these lists, without
    /// sinks.
    pub(crate) fn over<'k>(
        &self,
        keys: [Tensor<'k>; 2],
        before: usize,
        lists: &'k KeyLists<'k>,
    ) -> (Attention, Inputs<'k>)
    where
        'a: 'k,
    {
        let attention = self.attention.align(Alignment::Offset(self.offset()));
        let attention = Attention { dropout_from: [self.first_row, before], ..attention };
        // Given positions are among all keys.
        let attention = if self.inputs.key_positions.is_some() { attention } else { attention.counted_from(before) };
        (attention, self.inputs.over(keys, before, lists))
    }

    /// Returns the state of the rows, of maxima, sums and outputs.
    pub(crate) fn state<'s>(
        &self,
        [max, sum, out]: &'s mut [Vec<f32>; 3],
        seen: Seen,
    ) -> Result<State<'s>, LayoutError> {
        let [b, h, rows, _] = self.inputs.q.shape();
        let [max, sum] = [ViewMut::bhl(max, [b, h, rows])?, ViewMut::bhl(sum, [b, h, rows])?];
        Ok(State { max, sum, out: ViewMut::bhld(out, [b, h, rows, self.value_dim])?, seen })
    }
}

/// Refuses a setting of a state that has keys already.
pub(crate) fn check_no_keys(argument: &'static str, keys: usize) -> Result<(), Error> {
    if keys > 0 { Err(Error::Needs { argument, needs: "a state without keys" }) } else { Ok(()) }
}

/// Refuses `n` keys after `before` others that go beyond the last position.
pub(crate) fn check_room(before: usize, n: usize) -> Result<(), Error> {
    check_end("keys of the state", before, n)
}

/// Refuses `n` rows or keys after `before` others that go beyond the last position.
fn check_end(what: &'static str, before: usize, n: usize) -> Result<(), Error> {
    let fits = before.checked_add(n).is_some_and(|end| end <= isize::MAX as usize);
    if fits { Ok(()) } else { Err(Error::TooLarge { what, sizes: [before, n, 1, 1] }) }
}
