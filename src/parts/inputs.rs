//! What ranks ask of inputs, and the inputs of a part of a call.

use crate::error::{Error, at_most, same};
use crate::inputs::{Inputs, Source, WHOLE, check_period};
use core::ops::Range;
use sdpa_kernels::{Bound, Cover, Covered, Mask, Ragged, Tensor, View};

/// Name of selected keys in messages.
pub(crate) const SELECTED: &str = "selected keys";

impl<'a> Inputs<'a> {
    /// Returns inputs over tensors of some query heads and of the key/value heads that these share, with the options of these
    /// inputs, cut to `heads` where they differ from head to head. Lists of selected keys are not cut: give none, or lists that all
    /// heads share.
    ///
    /// ```
    /// use sdpa::{Inputs, View, parts::Datum};
    /// let (x, slopes) = ([0.0; 2 * 8], [0.5, 0.25]);
    /// let (both, one) = (View::bhld(&x, [1, 2, 1, 8])?, View::bhld(&x[8..], [1, 1, 1, 8])?);
    /// let second = Inputs::new(both, both, both).alibi(&slopes).of_heads(1..2, [one.into(); 3]);
    /// assert!(second.options().contains(&("alibi slopes", Datum::from(&[0.25f32][..]))));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn of_heads(self, heads: Range<usize>, [q, k, v]: [Tensor<'a>; 3]) -> Self {
        // Where there are fewer, the call is refused as one over all heads is.
        let cut = |numbers: &'a [f32]| numbers.get(heads.clone()).unwrap_or(numbers);
        let [[_, q_heads, ..], [_, kv_heads, ..], _] = self.shapes();
        let group = (q_heads / kv_heads.max(1)).max(1);
        let some = |all: usize| match all {
            1 => 0..1,
            all if all == kv_heads => heads.start / group..heads.end.div_ceil(group),
            _ => heads.clone(),
        };
        let (bias, mask) = self.bias_and_mask();
        let bias = bias.map(|bias| bias.heads_in(some(bias.shape()[1])).unwrap_or(bias));
        let mask = mask.map(|mask| mask.heads(some(mask.shape()[1])).unwrap_or(mask));
        let (alibi, sinks) = (self.alibi.map(cut), self.sinks.map(cut));
        Self { q, source: Source::Tensors { k, v }, alibi, sinks, ..self.with_bias_and_mask(bias, mask) }
    }

    /// Returns the elements of the bias and the bytes of the mask, as they were given.
    ///
    /// ```
    /// use sdpa::{Inputs, Mask, View};
    /// let (x, padding) = ([0.0; 3 * 8], [true, true, false]);
    /// let (x, padding) = (View::bhld(&x, [1, 1, 3, 8])?, View::bhld(&padding, [1, 1, 1, 3])?);
    /// let (bias, mask) = Inputs::new(x, x, x).mask(Mask::keep(padding)).bias_and_mask();
    /// assert!(bias.is_none() && mask.is_some_and(|mask| mask.shape() == [1, 1, 1, 3]));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn bias_and_mask(&self) -> (Option<Tensor<'a>>, Option<View<'a, u8>>) {
        (self.bias.map(|bias| bias.of), self.mask.map(|mask| mask.of.view()))
    }

    /// Replaces the elements of a bias and the bytes of a mask. These otherwise stay what they are: keys to keep or to drop, with
    /// columns for all keys, the first or the last. What these inputs do not have is not added.
    ///
    /// ```
    /// use sdpa::{Inputs, Mask, View};
    /// let (x, all) = ([0.0; 3 * 8], [true, true, false, false, true, false, true, true, true]);
    /// let (x, all) = (View::bhld(&x, [1, 1, 3, 8])?, View::bhld(&all, [1, 1, 3, 3])?);
    /// let inputs = Inputs::new(x, x, x).mask(Mask::keep(all));
    /// let second = inputs.with_bias_and_mask(None, inputs.bias_and_mask().1.and_then(|mask| mask.rows(1..2)));
    /// assert!(second.bias_and_mask().1.is_some_and(|mask| mask.shape() == [1, 1, 1, 3]));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn with_bias_and_mask(self, bias: Option<Tensor<'a>>, mask: Option<View<'a, u8>>) -> Self {
        let with_bias = |given: Covered<Tensor<'a>>| Covered { of: bias.unwrap_or(given.of), ..given };
        let with_mask =
            |given: Covered<Mask<'a>>| Covered { of: mask.map_or(given.of, |mask| given.of.with_view(mask)), ..given };
        Self { bias: self.bias.map(with_bias), mask: self.mask.map(with_mask), ..self }
    }

    /// Returns the ends of ragged sequences laid end to end in tensors, of their rows and of their keys, as
    /// [`Self::ragged`] took them; `None` if sequences are not ragged.
    ///
    /// ```
    /// use sdpa::{Inputs, View};
    /// let x = [0.0; 5 * 8];
    /// let x = View::bhld(&x, [1, 1, 5, 8])?;
    /// let inputs = Inputs::new(x, x, x).ragged(&[0, 2, 5], &[0, 4, 5]);
    /// assert_eq!(inputs.ragged_ends(), Some([&[0, 2, 5][..], &[0, 4, 5]]));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn ragged_ends(&self) -> Option<[&'a [usize]; 2]> {
        self.ragged.and_then(|ragged| Some([ragged.q, ragged.k?]))
    }

    /// Returns the number of valid keys of each sequence, as [`Self::kv_lens`] took them.
    ///
    /// ```
    /// use sdpa::{Inputs, View};
    /// let x = [0.0; 5 * 8];
    /// let x = View::bhld(&x, [1, 1, 5, 8])?;
    /// assert_eq!(Inputs::new(x, x, x).kv_lens(&[3]).key_lens(), Some(&[3][..]));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn key_lens(&self) -> Option<&'a [usize]> {
        self.kv_lens
    }

    /// Returns the inputs of some rows of one sequence, as a call of that sequence alone has them: for a state.
    /// `rows` are counted in the queries, which may be but a stretch of those of the call. Biases and masks have these rows, or
    /// one row for all.
    ///
    /// Sequences are those of a batch, or ragged ones laid end to end in tensors. Of ragged sequences, biases and masks have
    /// batch 1, or, with one row for all, a batch of the sequences; their columns are the keys of the longest sequence, and keys
    /// and values stay those of all.
    ///
    /// ```
    /// use sdpa::{Attention, AttnState, Exec, Inputs, View};
    /// // Sequences of 2 and 3 rows, rows 1, 2 and 3 are here: the last two belong to the second.
    /// let x = [0.0; 5 * 8];
    /// let (q, kv) = (View::bhld(&x[..24], [1, 1, 3, 8])?, View::bhld(&x, [1, 1, 5, 8])?);
    /// let inputs = Inputs::new(q, kv, kv).ragged(&[0, 2, 5], &[0, 4, 5]).kv_lens(&[3, 1]);
    /// let second = inputs.of_sequence(1, 1..3)?;
    /// assert_eq!(second.queries().shape(), [1, 1, 2, 8]);
    /// let state = AttnState::from_inputs(Attention::new(), second, Exec::serial())?;
    /// assert!(state.sees(0..1) && !state.sees(1..9));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] unless keys and values are tensors; [`Error::Range`] for a sequence or rows that are not there;
    /// [`Error::Mismatch`] for lengths, biases or masks of other sizes; [`Error::Entry`] for a length beyond the keys of its ragged
    /// sequence.
    pub fn of_sequence(self, sequence: usize, rows: Range<usize>) -> Result<Self, Error> {
        self.check_sequence(sequence, &rows)?;
        let (one, is_ragged) = (sequence..sequence + 1, self.ragged.is_some());
        let of_tensor = |x: Tensor<'a>| if is_ragged { x } else { x.batch_in(one.clone()).unwrap_or(x) };
        let source = match self.source {
            Source::Tensors { k, v } => Source::Tensors { k: of_tensor(k), v: of_tensor(v) },
            source => source,
        };
        let of_batch = |n: usize| sequence % n.max(1)..sequence % n.max(1) + 1;
        let part = |[batch, _, all, _]: [usize; 4]| (of_batch(batch), if all == 1 { 0..1 } else { rows.clone() });
        let (bias, mask) = self.bias_and_mask();
        let bias = bias.and_then(|of| {
            let (batch, rows) = part(of.shape());
            of.batch_in(batch)?.rows_in(rows)
        });
        let mask = mask.and_then(|of| {
            let (batch, rows) = part(of.shape());
            of.batch(batch)?.rows(rows)
        });
        let kv_lens = self.kv_lens.map(|lens| &lens[one.clone()]);
        // Where there are fewer, or not all rows, the call is refused.
        let list = |lists: &'a [&'a [i32]]| lists.get(one.clone()).unwrap_or(lists);
        let (row_positions, key_positions) = (self.row_positions.map(list), self.key_positions.map(list));
        let (q, all) = (of_tensor(self.q), self.with_bias_and_mask(bias, mask));
        let q = q.rows_in(rows.clone()).unwrap_or(q);
        Ok(Self { q, source, kv_lens, row_positions, key_positions, ragged: None, period: None, ..all })
    }

    /// Refuses a sequence or rows that are not there, and lengths, biases and masks that do not fit them.
    fn check_sequence(&self, sequence: usize, rows: &Range<usize>) -> Result<(), Error> {
        let needs = "sequences of a batch, or laid end to end, in tensors";
        if self.selected.is_some() {
            return Err(Error::Needs { argument: SELECTED, needs: WHOLE });
        }
        let ends = match (self.source, self.ragged) {
            (Source::Tensors { .. }, None) => None,
            (Source::Tensors { .. }, Some(Ragged { k: Some(ends), .. })) => Some(ends),
            _ => return Err(Error::Needs { argument: "sequence", needs }),
        };
        let [batch, _, all_rows, _] = self.q.shape();
        let sequences = ends.map_or(batch, |ends| ends.len().saturating_sub(1));
        let up_to_it = sequence.saturating_add(1);
        at_most("sequence", "number up to it", up_to_it, sequences, "the sequences of the call")?;
        if ends.is_some() {
            same("q", "batch", batch, 1, "a ragged call")?;
        }
        at_most("rows", "end", rows.end, all_rows, "the rows of q")?;
        at_most("rows", "first row", rows.start, rows.end, "the end of the rows")?;
        let len = |ends: &[usize], s: usize| ends[s + 1].saturating_sub(ends[s]);
        if let Some(lens) = self.kv_lens {
            same("kv_lens", "length", lens.len(), sequences, "the batch")?;
            let (got, limit) = (lens[sequence], ends.map_or(usize::MAX, |ends| len(ends, sequence)));
            if got > limit {
                let (bound, of) = (Bound::AtMost, "the keys of that sequence");
                return Err(Error::Entry { argument: "kv_lens", index: sequence, got, bound, limit, of });
            }
        }
        check_period(self.period, sequences)?;
        let longest = |ends| (0..sequences).map(|s| len(ends, s)).max().unwrap_or(0);
        let fits = |argument, [batch, _, all, columns]: [usize; 4], cover| {
            if all != 1 {
                same(argument, "rows", all, all_rows, "q")?;
            }
            let of_sequences = all == 1 || ends.is_none();
            if batch != 1 && !(of_sequences && self.period == Some(batch)) {
                same(argument, "batch", batch, if of_sequences { sequences } else { 1 }, "the call")?;
            }
            match (ends, cover, columns) {
                (None, ..) | (_, Cover::FirstKeys | Cover::LastKeys, _) | (_, _, 1) => Ok(()),
                (Some(ends), ..) => {
                    same(argument, "columns", columns, longest(ends), "k (keys of the longest sequence)")
                }
            }
        };
        self.bias.map_or(Ok(()), |Covered { of, cover }| fits("bias", of.shape(), cover))?;
        Ok(self.mask.map_or(Ok(()), |Covered { of, cover }| fits("mask", of.view().shape(), cover))?)
    }
}
