//! Parts of a backward pass with keys that come in parts: launches over some of the keys, in order, and one that ends it.
//!
//! Gradients of queries stay in the rows' memory from launch to launch. Gradients of keys and values are sums over rows that may
//! lie elsewhere, so they stay apart for each query head: rows of several launches are added in the order of one, head by head.

use crate::attention::backward::memory::KeyGradients;
use crate::attention::backward::written::write_rows;
use crate::attention::call::Call;
use crate::attention::scratch::MAX_ROW_BLOCK;
use crate::simd::LANES;
use crate::simd::aligned::SharedFloats;
use crate::simd::isa::Isa;
use crate::tensor::any::TensorMut;
use core::ops::Range;

/// Part of a backward pass that a launch computes. `first_row` is the row of all that the first of this call's rows is.
#[derive(Debug, Default)]
pub enum Part<'a> {
    /// The whole pass.
    #[default]
    Whole,
    /// Pass over some of the keys, after all earlier ones are done: it adds to the rows' memory and to these sums.
    Keys {
        /// Row of all.
        first_row: usize,
        /// Sums over all earlier rows.
        sums: HeadSums<'a>,
    },
    /// End of a pass over all keys of the call, which are not read: gradients of queries, and sums over all rows.
    End {
        /// Row of all.
        first_row: usize,
    },
}

/// Sums over query rows for each key and each query head, without the scale: `[batch][head][key][dimension]`, with keys
/// and dimensions in whole vectors of sixteen. Gradients of keys, then of values.
#[derive(Debug)]
pub struct HeadSums<'a> {
    /// Sums over whole row blocks.
    pub blocks: [&'a mut [f32]; 2],
    /// Sums over the rows of a row block that is not complete.
    pub rest: [&'a mut [f32]; 2],
}

impl HeadSums<'_> {
    /// Number of floats for sums of shape `[batch, heads, keys, dimension]`; `None` on overflow.
    pub fn floats([batch, heads, keys, dim]: [usize; 4]) -> Option<usize> {
        let sizes = [heads, keys.checked_next_multiple_of(LANES)?, dim.checked_next_multiple_of(LANES)?];
        sizes.into_iter().try_fold(batch, usize::checked_mul)
    }
}

/// Part of a pass, shared by its workers.
pub(crate) struct SharedPart<'a> {
    /// Row of a row block that the first row of the call is.
    pub(crate) first_row: usize,
    /// Over whole row blocks, and over the rows of one that is not complete.
    pub(crate) sums: Option<[SharedSums<'a>; 2]>,
    /// True if keys are not read.
    pub(crate) is_end: bool,
}

/// Sums that workers add to, each to those of its keys.
pub(crate) struct SharedSums<'a> {
    /// Sums of keys, then of values, and the floats of a key in them. Those of a key block are accessed only by the worker that has
    /// taken it.
    sums: [(SharedFloats<'a>, usize); 2],
    /// Query heads of all sequences, and keys of each, in whole vectors.
    heads: usize,
    keys: usize,
}

impl<'a> SharedPart<'a> {
    /// Binds a part to its call.
    ///
    /// # Panics
    /// If the sums do not fit the call.
    pub(crate) fn new(part: Part<'a>, call: &Call<'_>) -> Self {
        let (first_row, sums, is_end) = match part {
            Part::Whole => (0, None, false),
            Part::End { first_row } => (first_row, None, true),
            Part::Keys { first_row, sums: HeadSums { blocks, rest } } => {
                (first_row, Some([blocks, rest].map(|sums| SharedSums::new(sums, call))), false)
            }
        };
        Self { first_row: first_row % MAX_ROW_BLOCK, sums, is_end }
    }
}

impl<'a> SharedSums<'a> {
    fn new([k, v]: [&'a mut [f32]; 2], call: &Call<'_>) -> Self {
        assert!(call.options.ragged.is_none(), "ragged sequences do not come in parts");
        let ([batch, heads, ..], [.., keys, dim], [.., value_dim]) =
            (call.q.shape(), call.kv.k_shape(), call.kv.v_shape());
        let fits = |sums: &[f32], dim| HeadSums::floats([batch, heads, keys, dim]) == Some(sums.len());
        assert!(fits(k, dim) && fits(v, value_dim), "the sums do not fit the call");
        let sums = [(k, dim), (v, value_dim)].map(|(sums, dim)| (SharedFloats::new(sums), dim.next_multiple_of(LANES)));
        Self { sums, heads: batch * heads, keys: keys.next_multiple_of(LANES) }
    }
}

impl SharedSums<'_> {
    /// Returns the sums of some keys of a query head, counted over all sequences.
    ///
    /// # Panics
    /// If there is no such head, or it has no such keys.
    ///
    /// # Safety
    /// Nobody else accesses these sums meanwhile.
    pub(crate) unsafe fn of_keys(&self, head: usize, keys: Range<usize>) -> KeyGradients<'_> {
        let end = keys.end.next_multiple_of(LANES);
        assert!(head < self.heads && keys.start <= end && end <= self.keys, "no such sums");
        let [start, end] = [keys.start, end].map(|key| head * self.keys + key);
        // SAFETY: the caller guarantees sole access.
        let [k, v] = self.sums.each_ref().map(|(sums, width)| unsafe { sums.part(start * width..end * width) });
        KeyGradients { k, v }
    }
}

/// Writes gradients of keys or of values, `[batch, kv_heads, keys, dimension]`: `scale` times the sums of the `heads` query
/// heads. Those that share a key/value head are added in order, into the first of them; zeros if there are no query heads.
///
/// # Panics
/// If the sums do not fit the gradient.
pub fn write_head_sums(isa: Isa, gradient: TensorMut<'_>, sums: &mut [f32], heads: usize, scale: f32) {
    let [batch, kv_heads, keys, dim] = gradient.shape();
    assert!(HeadSums::floats([batch, heads, keys, dim]) == Some(sums.len()), "the sums do not fit the gradient");
    assert!(heads.checked_rem(kv_heads).unwrap_or(heads) == 0, "heads that do not share evenly");
    let (width, group) = (dim.next_multiple_of(LANES), heads.checked_div(kv_heads).unwrap_or(0));
    let of_head = keys.next_multiple_of(LANES) * width;
    if of_head == 0 {
        return;
    }
    let mut groups = sums.chunks_exact_mut((group * of_head).max(1));
    for head in 0..batch * kv_heads {
        let sums = groups.next().unwrap_or_default();
        let (total, others) = sums.split_at_mut(of_head.min(sums.len()));
        for other in others.chunks_exact(of_head) {
            total.iter_mut().zip(other).for_each(|(sum, &other)| *sum += other);
        }
        let sums_of = |key| total.get(key * width..(key + 1) * width).unwrap_or_default();
        let (rows, first) = ((0..keys).map(sums_of), [head / kv_heads, head % kv_heads, 0]);
        // SAFETY: the gradient, which nobody else has, is exclusively borrowed, and has these rows.
        dispatch!(isa, |s| unsafe { write_rows(s, &gradient, first, rows, scale) });
    }
}
