//! Keys that are hidden from every row of a state, which need not be pushed.

use crate::error::Error;
use crate::state::AttnState;
use crate::state::parted_call::{PartedCall, check_room};
use core::ops::Range;
use sdpa_kernels::{BlockPosition, Causality, KEY_BLOCK, Visible};

impl AttnState<'_> {
    /// Returns true if some row may see some of these keys, counted from the first of all; false only if one of these hides
    /// them all from every row: causal rule, window and key lengths; the mask; the classes of the mask function
    /// ([`MaskMod::class`](crate::MaskMod::class)); the lists of selected keys. Biases and score functions are not asked, nor
    /// rules by positions of keys.
    ///
    /// ```
    /// use sdpa::{Alignment, Attention, AttnState, Exec, KvShape, View};
    /// let q = [0.0f32; 3];
    /// let attention = Attention::new().causal().align(Alignment::Offset(600)); // rows at 600, 601 and 602
    /// let keys = KvShape { kv_heads: 1, head_dim: 1, value_dim: 1 };
    /// let state = AttnState::new(attention, View::bhld(&q, [1, 1, 3, 1])?, keys, Exec::serial())?;
    /// assert!(state.sees(602..700) && !state.sees(603..700));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn sees(&self, keys: Range<usize>) -> bool {
        self.call.sees(keys)
    }

    /// Passes over the next keys without their numbers, if no row sees them ([`Self::sees`]): as a push of `keys` keys.
    ///
    /// # Errors
    /// [`Error::Needs`] if a row may see one of them; [`Error::Range`] if a bias or mask has no columns for them, or they have no
    /// positions; [`Error::TooLarge`] beyond the last position. The state is then unchanged. [`Error::Selection`] as for
    /// [`Self::push`].
    pub fn skip(&mut self, keys: usize) -> Result<(), Error> {
        let next = self.first + self.len();
        check_room(next, keys)?;
        self.call.inputs.check_columns(next, keys)?;
        if self.sees(next..next + keys) {
            return Err(Error::Needs { argument: "skip", needs: "keys that no row sees" });
        }
        let mut left = keys;
        while left > 0 {
            if self.waiting == 0 && left >= KEY_BLOCK {
                self.accumulated += left / KEY_BLOCK * KEY_BLOCK;
                left %= KEY_BLOCK;
                continue;
            }
            // Whatever lies in their place is hidden.
            let some = left.min(KEY_BLOCK - self.waiting);
            left -= some;
            self.wait_for(some)?;
        }
        Ok(())
    }
}

impl PartedCall<'_> {
    /// Returns true if some row may see some of these keys: [`AttnState::sees`].
    pub(crate) fn sees(&self, keys: Range<usize>) -> bool {
        self.rules_show(keys.clone())
            && self.inputs.lists_name(keys.clone())
            && self.inputs.mask_shows(keys.clone())
            && self.functions_show(keys)
    }

    /// Returns false if causal rule, window and lengths hide keys from every row.
    fn rules_show(&self, keys: Range<usize>) -> bool {
        let [batch, heads, rows, _] = self.inputs.q.shape();
        let longest = self.inputs.kv_lens.map_or(keys.end, |lens| lens.iter().copied().max().unwrap_or(0));
        let end = keys.end.min(longest);
        if batch == 0 || heads == 0 || rows == 0 || keys.start >= end {
            return false;
        }
        if self.inputs.key_positions.is_some() {
            return true;
        }
        let (first, visible) = (self.offset(), self.attention.visible);
        let last = first.saturating_add_unsigned(rows - 1);
        // Kept first keys and the window itself may lie far apart.
        let causal = visible.causality == Causality::Causal;
        let kept = visible.window.map_or(0, |window| window.kept_first());
        let sees_kept = keys.start < kept && (!causal || usize::try_from(last).is_ok_and(|last| last >= keys.start));
        let window = visible.window.map(|window| window.counted_from(usize::MAX));
        let seen = Visible { window, ..visible }.key_range(first, last, end);
        sees_kept || keys.start < seen.end && seen.start < end
    }

    /// Returns false if the mask function says that it hides keys from every row.
    fn functions_show(&self, keys: Range<usize>) -> bool {
        // Of selected keys it may be asked about some alone.
        if self.inputs.selected.is_some_and(|selected| !selected.asks_all()) {
            return true;
        }
        let ([batch, heads, rows, _], position) = (self.inputs.q.shape(), self.offset());
        let rows = self.first_row..self.first_row + rows;
        // As the kernels ask: keys of one block at a time.
        let blocks = (keys.start / KEY_BLOCK..keys.end.div_ceil(KEY_BLOCK))
            .map(|block| keys.start.max(block * KEY_BLOCK)..keys.end.min((block + 1) * KEY_BLOCK));
        let shows = |(batch, head, keys)| {
            self.functions.shows(BlockPosition { batch, head, rows: rows.clone(), keys, position })
        };
        let of_head = |keys: Range<usize>, batch| (0..heads).map(move |head| (batch, head, keys.clone()));
        blocks.flat_map(|keys| (0..batch).flat_map(move |batch| of_head(keys.clone(), batch))).any(shows)
    }
}
