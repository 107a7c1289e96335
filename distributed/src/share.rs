//! Share of a rank: the rows and keys that it has, and what it says of them.

use crate::description::{Description, agree};
use crate::error::Error;
use crate::sequences::Sequences;
use core::ops::Range;
use sdpa::{Alignment, Attention, Inputs, Outputs, Tensor, parts::Datum};

/// Share of a rank in a call: stretches of query rows (it wants their results), and stretches of keys and values, which
/// all ranks see. There may be any number of either, in any order, of any lengths.
///
/// ```
/// use sdpa::{Inputs, Outputs, View, ViewMut};
/// // Rows 4 and 5, and keys 2, 3 and 4, of one head of eight numbers.
/// let (q, kv, mut out) = ([0.5f32; 2 * 8], [0.25f32; 3 * 8], [0.0f32; 2 * 8]);
/// let (q, kv) = (View::bhld(&q, [1, 1, 2, 8])?, View::bhld(&kv, [1, 1, 3, 8])?);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 8])?);
/// let share = sdpa_mpi::Share::new().rows(4, Inputs::new(q, kv, kv), outputs).keys(2, kv, kv);
/// # let _ = share;
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Share<'a> {
    pub(crate) rows: Vec<Rows<'a>>,
    pub(crate) keys: Vec<Keys<'a>>,
}

/// Stretch of query rows.
#[derive(Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) first: usize,
    pub(crate) inputs: Inputs<'a>,
    pub(crate) outputs: Outputs<'a>,
}

/// Stretch of keys and values.
#[derive(Debug)]
pub(crate) struct Keys<'a> {
    pub(crate) first: usize,
    pub(crate) k: Tensor<'a>,
    pub(crate) v: Tensor<'a>,
}

impl Rows<'_> {
    /// Number of columns of the log-sum-exps that are wanted: one, or two with the rounding error of each.
    pub(crate) fn lse_columns(&self) -> Option<usize> {
        self.outputs.lse.as_ref().map(|lse| lse.shape()[3])
    }
}

impl<'a> Share<'a> {
    /// Creates a share without rows and keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a stretch of query rows; its first row is row `first` of the call. Biases and masks of the inputs have
    /// these rows (or one, for all) and the columns of all keys; slopes, sinks, lengths and positions are those of the call. Of
    /// the keys and values of the inputs only the shapes are taken: they may have no rows.
    ///
    /// Rows and keys of [ragged](Inputs::ragged) sequences lie end to end over all stretches, and the ends are those of the call.
    /// Biases and masks then have batch 1 and these rows, or one row for all and batch 1 or a batch of the sequences.
    #[must_use]
    pub fn rows(mut self, first: usize, inputs: Inputs<'a>, outputs: Outputs<'a>) -> Self {
        self.rows.push(Rows { first, inputs, outputs });
        self
    }

    /// Adds a stretch of keys `[batch, kv_heads, n, head_dim]` and values `[batch, kv_heads, n, value_dim]`, the first of
    /// which is key `first` of the call.
    #[must_use]
    pub fn keys(mut self, first: usize, k: impl Into<Tensor<'a>>, v: impl Into<Tensor<'a>>) -> Self {
        self.keys.push(Keys { first, k: k.into(), v: v.into() });
        self
    }

    /// Says what this rank has, and what of the call it knows.
    pub(crate) fn description(&self, attention: &Attention) -> Result<Description, sdpa::Error> {
        self.described(attention, |_, _| Ok(()))
    }

    /// Says what this rank has, and more of each of its stretches of rows.
    pub(crate) fn described(
        &self,
        attention: &Attention,
        more: impl Fn(&Rows<'a>, &mut Description) -> Result<(), sdpa::Error>,
    ) -> Result<Description, sdpa::Error> {
        let of_rows = |rows: &Rows<'a>| {
            let mut description = of_rows(rows.first, &rows.inputs, attention)?;
            more(rows, &mut description)?;
            Ok(description)
        };
        let stretches: Vec<_> = self
            .rows
            .iter()
            .map(of_rows)
            .chain(self.keys.iter().map(|keys| of_keys(keys.first, [keys.k, keys.v])))
            .collect::<Result<_, _>>()?;
        Ok(of_all(stretches, attention))
    }
}

/// Name of the causal rule in [`Attention::settings`].
pub(crate) const CAUSAL: &str = "causal rule";

/// Says what a rank has of a call, all of whose stretches say this.
pub(crate) fn of_all(stretches: Vec<Description>, attention: &Attention) -> Description {
    let mut description = Description::default();
    description.options(attention.settings());
    if let Err(Error::Disagree { what, got, expected, .. }) = agree(&stretches) {
        description.refused = Some(format!("{what}: one stretch has {got}, but another has {expected}"));
    }
    for mut stretch in stretches {
        if description.sequences.is_empty() {
            description.sequences = stretch.sequences;
        }
        description.rows.append(&mut stretch.rows);
        description.keys.append(&mut stretch.keys);
        let new = |(what, _): &(String, _)| !description.facts.iter().any(|(known, _)| known == what);
        let facts: Vec<_> = stretch.facts.into_iter().filter(new).collect();
        description.facts.extend(facts);
    }
    description
}

/// Name under which a rank says that sequences of the batch are computed one by one.
pub(crate) const ONE_BY_ONE: &str = "sequences one by one";

/// Says the sizes and the element type of queries, and the sizes of their keys and values that all ranks know.
pub(crate) fn of_queries(inputs: &Inputs<'_>, description: &mut Description) -> Result<(), sdpa::Error> {
    let ([batch, heads, _, dim], kv) = (inputs.queries().shape(), inputs.key_values()?);
    description.fact("batch", batch);
    description.fact("query heads", heads);
    description.fact("key/value heads", kv.k_shape()[1]);
    description.fact("head_dim", dim);
    description.fact("value_dim", kv.v_shape()[3]);
    description.fact("element type of q", inputs.queries().dtype());
    Ok(())
}

/// Says what a stretch of rows is.
pub(crate) fn of_rows(first: usize, inputs: &Inputs<'_>, attention: &Attention) -> Result<Description, sdpa::Error> {
    let rows = positions(first, inputs.queries().shape()[2])?;
    let mut description = Description { rows: vec![rows], ..Description::default() };
    of_queries(inputs, &mut description)?;
    let options = inputs.options();
    if options.iter().any(|(what, value)| *what == "selected keys" && *value != Datum::default()) {
        return Err(sdpa::Error::Needs { argument: "selected keys", needs: "a call on one machine" });
    }
    description.options(options);
    match (inputs.ragged_ends(), inputs.key_lens(), attention.alignment()) {
        (Some([rows, keys]), ..) => description.sequences = Sequences::of(rows, keys)?.ends().to_vec(),
        (None, Some(lens), Some(Alignment::BottomRight)) if lens.iter().any(|&len| len != lens[0]) => {
            description.fact(ONE_BY_ONE, true);
        }
        _ => {}
    }
    Ok(description)
}

/// Says what a stretch of keys and values is.
pub(crate) fn of_keys(first: usize, [k, v]: [Tensor<'_>; 2]) -> Result<Description, sdpa::Error> {
    let ([batch, heads, n, dim], [vb, vh, vn, value_dim]) = (k.shape(), v.shape());
    let of_both = [("batch", vb, batch), ("heads", vh, heads), ("rows", vn, n)];
    if let Some((what, got, expected)) = of_both.into_iter().find(|(_, got, expected)| got != expected) {
        return Err(sdpa::Error::Mismatch { argument: "v", what, got, expected, of: "k" });
    }
    let mut description = Description { keys: vec![positions(first, n)?], ..Description::default() };
    description.fact("batch", batch);
    description.fact("key/value heads", heads);
    description.fact("head_dim", dim);
    description.fact("value_dim", value_dim);
    description.fact("element type of k", k.dtype());
    description.fact("element type of v", v.dtype());
    Ok(description)
}

/// Returns the positions of `n` rows or keys from `first` on.
pub(crate) fn positions(first: usize, n: usize) -> Result<Range<usize>, sdpa::Error> {
    let end = first.checked_add(n).filter(|&end| end <= isize::MAX as usize);
    let too_large = sdpa::Error::TooLarge { what: "positions of a stretch", sizes: [first, n, 1, 1] };
    end.map(|end| first..end).ok_or(too_large)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa::{SelectedKeys, View};

    #[test]
    fn rows_that_select_keys_are_refused() {
        let (x, selected) = ([0.0f32; 8], SelectedKeys::new());
        let x = View::bhld(&x, [1, 1, 1, 8]).expect("a view");
        let inputs = Inputs::new(x, x, x);
        assert!(of_rows(0, &inputs, &Attention::new()).is_ok());
        let refused = of_rows(0, &inputs.selected(&selected), &Attention::new()).err();
        assert!(matches!(refused, Some(sdpa::Error::Needs { argument: "selected keys", .. })), "{refused:?}");
    }
}
