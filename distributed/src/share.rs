//! Share of a rank: the rows and keys that it has, and what it says of them.

use crate::error::Error;
use crate::told::{Told, agree};
use core::ops::Range;
use sdpa::{Attention, Inputs, Outputs, Tensor};

/// Share of a rank in a call: stretches of query rows, whose results it wants, and stretches of keys and values, which
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

impl<'a> Share<'a> {
    /// Creates a share without rows and keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a stretch of query rows, the first of which is row `first` of the call. Biases and masks of the inputs have
    /// these rows (or one, for all) and the columns of all keys; slopes, sinks and lengths are those of the call. Of the
    /// keys and values of the inputs only the shapes are taken: they may have no rows.
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
    pub(crate) fn told(&self, attention: &Attention) -> Result<Told, sdpa::Error> {
        let stretches: Vec<_> = self
            .rows
            .iter()
            .map(|rows| rows.told(attention))
            .chain(self.keys.iter().map(Keys::told))
            .collect::<Result<_, _>>()?;
        let mut told = Told::default();
        told.fact("causal rule", if attention.is_causal() { "causal" } else { "none" });
        told.fact("alignment", attention.alignment().map_or("none".to_owned(), |alignment| format!("{alignment:?}")));
        if let Err(Error::Disagree { what, got, expected, .. }) = agree(&stretches) {
            told.refused = Some(format!("{what}: one stretch has {got}, but another has {expected}"));
        }
        for mut stretch in stretches {
            told.rows.append(&mut stretch.rows);
            told.keys.append(&mut stretch.keys);
            let new = |(what, _): &(String, String)| !told.facts.iter().any(|(known, _)| known == what);
            let facts: Vec<_> = stretch.facts.into_iter().filter(new).collect();
            told.facts.extend(facts);
        }
        // Last, since the others say more plainly what differs.
        told.fact("settings", format!("{attention:?}"));
        Ok(told)
    }
}

impl Rows<'_> {
    fn told(&self, attention: &Attention) -> Result<Told, sdpa::Error> {
        let ([batch, heads, rows, dim], kv) = (self.inputs.queries().shape(), self.inputs.key_values()?);
        let mut told = Told { rows: vec![positions(self.first, rows)?], ..Told::default() };
        told.fact("batch", batch.to_string());
        told.fact("query heads", heads.to_string());
        told.fact("key/value heads", kv.k_shape()[1].to_string());
        told.fact("head_dim", dim.to_string());
        told.fact("value_dim", kv.v_shape()[3].to_string());
        told.fact("scale", attention.scale_for(dim).to_string());
        told.fact("element type of q", self.inputs.queries().dtype().to_string());
        for (what, words) in self.inputs.options_in_words() {
            told.fact(what, words);
        }
        Ok(told)
    }
}

impl Keys<'_> {
    fn told(&self) -> Result<Told, sdpa::Error> {
        let ([batch, heads, n, dim], [vb, vh, vn, value_dim]) = (self.k.shape(), self.v.shape());
        let of_both = [("batch", vb, batch), ("heads", vh, heads), ("rows", vn, n)];
        if let Some((what, got, expected)) = of_both.into_iter().find(|(_, got, expected)| got != expected) {
            return Err(sdpa::Error::Mismatch { argument: "v", what, got, expected, of: "k" });
        }
        let mut told = Told { keys: vec![positions(self.first, n)?], ..Told::default() };
        told.fact("batch", batch.to_string());
        told.fact("key/value heads", heads.to_string());
        told.fact("head_dim", dim.to_string());
        told.fact("value_dim", value_dim.to_string());
        told.fact("element type of k", self.k.dtype().to_string());
        told.fact("element type of v", self.v.dtype().to_string());
        Ok(told)
    }
}

/// Returns the positions of `n` rows or keys from `first` on.
fn positions(first: usize, n: usize) -> Result<Range<usize>, sdpa::Error> {
    let end = first.checked_add(n).filter(|&end| end <= isize::MAX as usize);
    let too_large = sdpa::Error::TooLarge { what: "positions of a stretch", sizes: [first, n, 1, 1] };
    end.map(|end| first..end).ok_or(too_large)
}
