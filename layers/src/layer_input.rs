//! Input of transformer layers.

use crate::multi_head::MultiHeadInput;
use crate::sequences::Sequences;
use sdpa::Mask;

/// Rows, their division into sequences, and the rows that are visible.
///
/// ```
/// use sdpa_layers::{LayerInput, Sequences};
/// // Two sequences of three rows of width 4, the second padded by one row.
/// let x = [0.0; 2 * 3 * 4];
/// let input = LayerInput::new(&x, Sequences::Even { batch: 2, len: 3 }).kv_lens(&[3, 2]);
/// # let _ = input;
/// ```
#[derive(Debug, Clone, Copy)]
pub struct LayerInput<'a> {
    pub(super) rows: &'a [f32],
    pub(super) sequences: Sequences<'a>,
    kv_lens: Option<&'a [usize]>,
    mask: Option<Mask<'a>>,
}

impl<'a> LayerInput<'a> {
    /// Takes rows, `[rows, width]`. All are visible within their sequence, except where the layer's own rules hide
    /// them.
    pub fn new(rows: &'a [f32], sequences: Sequences<'a>) -> Self {
        Self { rows, sequences, kv_lens: None, mask: None }
    }

    /// Sets key padding: `lens` `[sequences]` is the number of visible rows of each sequence, from the first on.
    #[must_use]
    pub fn kv_lens(self, lens: &'a [usize]) -> Self {
        Self { kv_lens: Some(lens), ..self }
    }

    /// Sets a mask: which of these rows each row of the layer may see. `[sequences, heads, rows, keys]`, the first
    /// three broadcast from 1.
    #[must_use]
    pub fn mask(self, mask: Mask<'a>) -> Self {
        Self { mask: Some(mask), ..self }
    }

    /// Adds key padding and mask to the input of an attention.
    pub(super) fn keys(self, mut input: MultiHeadInput<'a>) -> MultiHeadInput<'a> {
        if let Some(lens) = self.kv_lens {
            input = input.kv_lens(lens);
        }
        if let Some(mask) = self.mask {
            input = input.mask(mask);
        }
        input
    }
}
