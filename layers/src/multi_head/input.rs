//! Input of multi-head attention.

use crate::sequences::Sequences;
use sdpa::{Mask, View};

/// Input of a [`MultiHeadAttention`](crate::MultiHeadAttention) call: the rows of queries, keys and values, and the keys that are visible.
///
/// ```
/// use sdpa_layers::{MultiHeadInput, Sequences};
/// // Two sequences: three and two rows of a decoder on five and four rows of an encoder; the last of the four is padding.
/// let (x, memory) = ([0.0; 5 * 8], [0.0; 9 * 8]);
/// let input = MultiHeadInput::new(&x, Sequences::Ragged(&[0, 3, 5]))
///     .memory(&memory, Sequences::Ragged(&[0, 5, 9]))
///     .kv_lens(&[5, 3]);
/// # let _ = input;
/// ```
#[derive(Debug, Clone, Copy)]
pub struct MultiHeadInput<'a> {
    pub(super) x: &'a [f32],
    pub(super) sequences: Sequences<'a>,
    pub(super) memory: Option<Memory<'a>>,
    pub(super) kv_lens: Option<&'a [usize]>,
    pub(super) mask: Option<Mask<'a>>,
    pub(super) bias: Option<View<'a>>,
}

/// Source of keys and values, if it is other than the rows of the queries.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory<'a> {
    pub(super) keys: &'a [f32],
    pub(super) values: &'a [f32],
    pub(super) sequences: Sequences<'a>,
}

impl<'a> MultiHeadInput<'a> {
    /// Self-attention: rows of `x`, `[rows, inputs]`, see the rows of `x` in their own sequence.
    pub fn new(x: &'a [f32], sequences: Sequences<'a>) -> Self {
        Self { x, sequences, memory: None, kv_lens: None, mask: None, bias: None }
    }

    /// Sets cross-attention: rows of x see rows of `memory`, `[keys, width]`, sequence by sequence; `sequences` divides
    /// the memory.
    #[must_use]
    pub fn memory(self, memory: &'a [f32], sequences: Sequences<'a>) -> Self {
        self.keys_and_values(memory, memory, sequences)
    }

    /// Sets cross-attention with keys from one tensor, `[keys, width]`, and values from another, with a row for each key;
    /// `sequences` divides both.
    #[must_use]
    pub fn keys_and_values(self, keys: &'a [f32], values: &'a [f32], sequences: Sequences<'a>) -> Self {
        Self { memory: Some(Memory { keys, values, sequences }), ..self }
    }

    /// Sets key padding: `lens` `[sequences]` is the number of valid keys of each, from the first on.
    #[must_use]
    pub fn kv_lens(self, lens: &'a [usize]) -> Self {
        Self { kv_lens: Some(lens), ..self }
    }

    /// Sets a mask of the keys that each row may see: `[sequences, heads, rows, keys]`, the first three broadcast from
    /// 1.
    #[must_use]
    pub fn mask(self, mask: Mask<'a>) -> Self {
        Self { mask: Some(mask), ..self }
    }

    /// Adds a bias to the scores, such as one of relative positions: `[sequences, heads, rows, keys]`, the first three broadcast
    /// from 1; −∞ hides a key.
    #[must_use]
    pub fn bias(self, bias: View<'a>) -> Self {
        Self { bias: Some(bias), ..self }
    }
}
