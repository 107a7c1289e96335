//! Inputs of calls whose keys come in parts.

use crate::error::Error;
use crate::inputs::{Cover, Covered, Inputs, Source};
use core::ops::Range;
use sdpa_kernels::{Bound, Mask, Tensor};

/// Need of whatever a state, which has some of the keys, cannot take.
pub(crate) const WHOLE: &str = "a call over all keys, not a state";

impl<'a> Inputs<'a> {
    /// Names the options that inputs can have, and says in words what they are here: for messages, and to compare the
    /// inputs of parts of one call. Of biases and masks only the kind is told.
    ///
    /// ```
    /// use sdpa::{Inputs, View};
    /// let (x, slopes) = ([0.0; 2 * 8], [0.5, 0.25]);
    /// let x = View::bhld(&x, [1, 2, 1, 8])?;
    /// let options = Inputs::new(x, x, x).alibi(&slopes).options_in_words();
    /// assert!(options.contains(&("alibi slopes", "[0.5, 0.25]".to_string())));
    /// assert!(options.contains(&("mask", "none".to_string())));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn options_in_words(&self) -> Vec<(&'static str, String)> {
        let words = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
        let columns = |n, cover| match (n, cover) {
            (1, Cover::AllKeys) => "one column for all keys".to_owned(),
            (n, Cover::AllKeys) => format!("{n} columns"),
            (n, Cover::FirstKeys) => format!("{n} columns, the rest hidden"),
        };
        let bias = self.bias.map(|Covered { of, cover }| format!("{}, {}", of.dtype(), columns(of.shape()[3], cover)));
        let mask = self.mask.map(|Covered { of, cover }| {
            let kind = if matches!(of, Mask::Keep(_)) { "of keys to keep" } else { "of keys to drop" };
            format!("{kind}, {}", columns(of.view().shape()[3], cover))
        });
        vec![
            ("bias", words(bias)),
            ("mask", words(mask)),
            ("alibi slopes", words(self.alibi.map(|slopes| format!("{slopes:?}")))),
            ("sinks", words(self.sinks.map(|sinks| format!("{sinks:?}")))),
            ("kv_lens", words(self.kv_lens.map(|lens| format!("{lens:?}")))),
            ("ragged", words(self.ragged.map(|ragged| format!("{:?}, {:?}", ragged.q, ragged.k)))),
            ("row positions", words(self.row_positions.map(|positions| format!("{positions:?}")))),
            ("key positions", words(self.key_positions.map(|positions| format!("{positions:?}")))),
            ("sequences", words(self.sequences.map(|sequences| format!("{sequences:?}")))),
        ]
    }

    /// Returns inputs over tensors of some query heads and of the key/value heads that these share, with the options of these
    /// inputs: slopes and sinks are cut to `heads`; biases and masks stay as they are.
    ///
    /// ```
    /// use sdpa::{Inputs, View};
    /// let (x, slopes) = ([0.0; 2 * 8], [0.5, 0.25]);
    /// let (both, one) = (View::bhld(&x, [1, 2, 1, 8])?, View::bhld(&x[8..], [1, 1, 1, 8])?);
    /// let second = Inputs::new(both, both, both).alibi(&slopes).of_heads(1..2, [one.into(); 3]);
    /// assert!(second.options_in_words().contains(&("alibi slopes", "[0.25]".to_string())));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn of_heads(self, heads: Range<usize>, [q, k, v]: [Tensor<'a>; 3]) -> Self {
        // Where there are fewer, the call is refused as one over all heads is.
        let cut = |numbers: &'a [f32]| numbers.get(heads.clone()).unwrap_or(numbers);
        Self { q, source: Source::Tensors { k, v }, alibi: self.alibi.map(cut), sinks: self.sinks.map(cut), ..self }
    }

    /// Name of the positions that rows or keys have of their own, if they have any.
    pub(crate) fn own_positions(&self) -> Option<&'static str> {
        self.row_positions.map(|_| "row positions").or(self.key_positions.map(|_| "key positions"))
    }

    /// Refuses inputs whose keys cannot come in parts.
    pub(crate) fn check_for_state(&self) -> Result<(), Error> {
        let refused = match self.source {
            Source::Tensors { .. } => self.ragged.map(|_| "ragged").or(self.own_positions()),
            Source::Cache(_) => Some("cache"),
            Source::Pages(_) => Some("pages"),
        };
        refused.map_or(Ok(()), |argument| Err(Error::Needs { argument, needs: WHOLE }))
    }

    /// Refuses more than `n` keys after the first `before`, if a bias or mask has no columns for them.
    pub(crate) fn check_columns(&self, before: usize, n: usize) -> Result<(), Error> {
        let columns = |all, cover| (cover == Cover::AllKeys && all != 1).then_some(all);
        let bias = self.bias.and_then(|bias| columns(bias.of.shape()[3], bias.cover));
        let mask = self.mask.and_then(|mask| columns(mask.of.view().shape()[3], mask.cover));
        let both = [(bias, "the columns of the bias that are left"), (mask, "the columns of the mask that are left")];
        for (columns, of) in both {
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

    /// Returns the lengths of the sequences, counted from key `before` on, in a call over the `n` keys from there.
    pub(crate) fn lengths_from(&self, before: usize, n: usize) -> Option<Vec<usize>> {
        self.kv_lens.map(|lens| lens.iter().map(|len| len.saturating_sub(before).min(n)).collect())
    }

    /// Returns the inputs of a call over some of the keys, `before` keys after the first, whose lengths are
    /// [`Self::lengths_from`] there. Sinks are left out.
    pub(crate) fn over(self, [k, v]: [Tensor<'a>; 2], before: usize, lens: Option<&'a [usize]>) -> Self {
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
        Self { source: Source::Tensors { k, v }, bias, mask, kv_lens: lens, sinks: None, ..self }
    }
}
