//! Inputs of calls with keys that come in parts.

use crate::error::Error;
use crate::inputs::{Inputs, Source};
use core::ops::Range;
use sdpa_kernels::{Bound, Cover, Covered, Mask, SelectedKeys, Tensor};

/// Lengths of the sequences, positions of their keys, and the keys that rows select, in a call over some of the keys.
#[derive(Debug)]
pub(crate) struct KeyLists<'a> {
    lens: Option<Vec<usize>>,
    positions: Option<Vec<&'a [i32]>>,
    selected: Option<SelectedKeys>,
}

/// Need of whatever a state, which has some of the keys, cannot take.
pub(crate) const WHOLE: &str = "a call over all keys, not a state";

impl<'a> Inputs<'a> {
    /// Name of the bias or mask that has columns for the last keys only, if there is one.
    pub(crate) fn suffix(&self) -> Option<&'static str> {
        let covers =
            [("bias suffix", self.bias.map(|bias| bias.cover)), ("mask suffix", self.mask.map(|mask| mask.cover))];
        covers.into_iter().find_map(|(argument, cover)| (cover == Some(Cover::LastKeys)).then_some(argument))
    }

    /// Refuses inputs with keys that cannot come in parts.
    pub(crate) fn check_for_state(&self) -> Result<(), Error> {
        let refused = match self.source {
            Source::Tensors { .. } => self.ragged.map(|_| "ragged").or(self.suffix()),
            Source::Cache(_) => Some("cache"),
            Source::Pages(_) => Some("pages"),
        };
        refused.map_or(Ok(()), |argument| Err(Error::Needs { argument, needs: WHOLE }))?;
        if let (Some(selected), Some(lens)) = (self.selected, self.kv_lens) {
            lens.iter().enumerate().try_for_each(|(sequence, &len)| selected.ends_within(sequence, len))?;
        }
        self.check_row_positions()
    }

    /// Returns true if lists of selected keys, if there are any, name some of these keys.
    pub(crate) fn lists_name(&self, keys: Range<usize>) -> bool {
        let names = |selected: &SelectedKeys| {
            (0..selected.sequences()).any(|sequence| selected.first_in(sequence, keys.clone()).is_some())
        };
        self.selected.is_none_or(names)
    }

    /// Refuses positions of rows alone, in a call over some of the keys, where keys are not at their own indices.
    pub(crate) fn check_row_positions(&self) -> Result<(), Error> {
        let needs = "positions of the keys, too, where keys come in parts";
        let alone = self.row_positions.is_some() && self.key_positions.is_none();
        if alone { Err(Error::Needs { argument: "row positions", needs }) } else { Ok(()) }
    }

    /// Refuses more than `n` keys after the first `before`, if a bias or mask has no columns for them, or they have no positions.
    pub(crate) fn check_columns(&self, before: usize, n: usize) -> Result<(), Error> {
        let columns = |all, cover| (cover == Cover::AllKeys && all != 1).then_some(all);
        let bias = self.bias.and_then(|bias| columns(bias.of.shape()[3], bias.cover));
        let mask = self.mask.and_then(|mask| columns(mask.of.view().shape()[3], mask.cover));
        let key_len = |(b, list): (usize, &&[i32])| {
            let len = self.kv_lens.and_then(|lens| lens.get(b));
            if len.is_some_and(|&len| len <= list.len()) { usize::MAX } else { list.len() }
        };
        let positions = self.key_positions.and_then(|all| all.iter().enumerate().map(key_len).min());
        let all = [
            (bias, "the columns of the bias that are left"),
            (mask, "the columns of the mask that are left"),
            (positions, "the key positions that are left"),
        ];
        for (columns, of) in all {
            let limit = columns.map(|all| all.saturating_sub(before));
            if let Some(limit) = limit.filter(|&limit| n > limit) {
                return Err(Error::Range { argument: "k", what: "rows", got: n, bound: Bound::AtMost, limit, of });
            }
        }
        Ok(())
    }

    /// Returns false if the mask hides keys from every row.
    pub(crate) fn mask_shows(&self, keys: Range<usize>) -> bool {
        let Some(Covered { of, cover }) = self.mask else { return true };
        let (view, keep) = (of.view(), matches!(of, Mask::Keep(_)));
        let [batch, heads, rows, columns] = view.shape();
        let keys = match cover {
            Cover::AllKeys if columns == 1 => 0..1,
            // There will be an error.
            Cover::AllKeys if keys.end > columns => return true,
            _ => keys.start.min(columns)..keys.end.min(columns),
        };
        let shows = |at: [usize; 4]| view.get(at).is_some_and(|&byte| (byte != 0) == keep);
        let mut rows = (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |l| [b, h, l])));
        rows.any(|[b, h, l]| keys.clone().any(|j| shows([b, h, l, j])))
    }

    /// Returns the lists of a call over the `n` keys from key `before` on.
    ///
    /// # Errors
    /// [`Error::Selection`] if there is no memory for the lists of selected keys.
    pub(crate) fn lists_from(&self, before: usize, n: usize) -> Result<KeyLists<'a>, Error> {
        let len = |len: usize| len.saturating_sub(before).min(n);
        let positions = |(b, list): (usize, &&'a [i32])| {
            // `check_columns` has seen that the list is long enough.
            let len = len(self.kv_lens.and_then(|lens| lens.get(b)).copied().unwrap_or(list.len()));
            &list[before.min(list.len())..][..len]
        };
        let part = |all| {
            let mut part = SelectedKeys::new();
            part.fill_part(all, before..before.saturating_add(n), self.kv_lens).map(|()| part)
        };
        Ok(KeyLists {
            lens: self.kv_lens.map(|lens| lens.iter().map(|&of| len(of)).collect()),
            positions: self.key_positions.map(|all| all.iter().enumerate().map(positions).collect()),
            selected: self.selected.map(part).transpose()?,
        })
    }

    /// Returns the inputs of a call over some of the keys, `before` keys after the first, with the lists that
    /// [`Self::lists_from`] made there. Sinks are left out.
    pub(crate) fn over(self, [k, v]: [Tensor<'a>; 2], before: usize, lists: &'a KeyLists<'a>) -> Self {
        let n = k.shape()[2];
        let range = |columns: usize| before.min(columns)..before.saturating_add(n).min(columns);
        let is_one = |columns, cover| columns == 1 && cover == Cover::AllKeys;
        let bias = self.bias.map(|bias| match bias.of.shape()[3] {
            columns if is_one(columns, bias.cover) => bias,
            columns => Covered { of: bias.of.columns_in(range(columns)).unwrap_or(bias.of), ..bias },
        });
        let mask = self.mask.map(|mask| {
            let view = mask.of.view();
            match view.shape()[3] {
                columns if is_one(columns, mask.cover) => mask,
                columns => Covered { of: mask.of.with_view(view.columns(range(columns)).unwrap_or(view)), ..mask },
            }
        });
        let KeyLists { lens, positions, selected } = lists;
        let (kv_lens, key_positions, selected) = (lens.as_deref(), positions.as_deref(), selected.as_ref());
        let source = Source::Tensors { k, v };
        Self { source, bias, mask, kv_lens, key_positions, selected, sinks: None, ..self }
    }
}
