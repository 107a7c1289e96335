//! One sequence of a call of the oracle: where its rows and keys are, and how far apart.

use crate::attention::Attention;
use crate::inputs::Inputs;
use crate::shape::Shape;
use sdpa_kernels::{Alignment, Cover, Position};

/// Sequence of a call, with the call's settings, inputs and sizes.
pub(super) struct OracleSequence<'a> {
    pub(super) attention: &'a Attention,
    pub(super) inputs: &'a Inputs<'a>,
    pub(super) shape: Shape,
    index: usize,
    /// Numbers of its rows and of its keys.
    pub(super) q_len: usize,
    pub(super) kv_len: usize,
}

impl<'a> OracleSequence<'a> {
    pub(super) fn new(attention: &'a Attention, inputs: &'a Inputs<'a>, shape: Shape, index: usize) -> Self {
        let (q_len, kv_len) = inputs.lengths(&shape, index);
        Self { attention, inputs, shape, index, q_len, kv_len }
    }

    /// Returns the position of a row among the keys.
    fn position(&self, row: usize) -> i128 {
        let offset = match self.attention.alignment {
            Some(Alignment::BottomRight) => self.kv_len as i128 - self.q_len as i128,
            Some(Alignment::Offset(n)) => n as i128,
            _ => 0,
        };
        row as i128 + offset
    }

    /// Returns a row, of no key yet, as the caller's functions receive it.
    pub(super) fn at(&self, head: usize, row: usize) -> Position {
        Position { batch: self.index, head, row, key: 0, position: clamped(self.position(row)), distance: 0 }
    }

    /// Returns a row and a key as the caller's functions receive them.
    pub(super) fn with_key(&self, at: Position, key: usize) -> Position {
        let at = Position { key, ..at };
        Position { distance: clamped(self.ahead(at)), ..at }
    }

    /// Returns how far a row is behind a key: by given positions, or by order.
    pub(super) fn ahead(&self, at: Position) -> i128 {
        let own = |positions: &[&[i32]], i: usize| positions[self.index].get(i).map_or(0, |&position| position as i128);
        let row = self.inputs.row_positions.map_or_else(|| self.position(at.row), |positions| own(positions, at.row));
        let key = self.inputs.key_positions.map_or(at.key as i128, |positions| own(positions, at.key));
        row - key
    }

    /// Returns the place of a row in q.
    pub(super) fn query(&self, at: Position) -> [usize; 3] {
        let (b, first) = self.inputs.ragged.map_or((self.index, 0), |ragged| (0, ragged.q[self.index]));
        [b, at.head, first + at.row]
    }

    /// Returns the place of a key in k and v.
    pub(super) fn key(&self, at: Position) -> [usize; 3] {
        let first = self.inputs.ragged.and_then(|ragged| ragged.k).map_or(0, |k| k[self.index]);
        [self.inputs.source_of(self.index), self.kv_head(at), first + at.key]
    }

    /// Returns the key/value head of a row.
    pub(super) fn kv_head(&self, at: Position) -> usize {
        at.head / (self.shape.heads / self.shape.kv_heads)
    }

    /// Returns the head whose lists of keys are those of a row.
    fn list_head(&self, at: Position, heads: usize) -> usize {
        at.head / (self.shape.heads / heads)
    }

    /// Returns true if the list of a row names a key, or rows have no lists.
    pub(super) fn selects(&self, at: Position) -> bool {
        let selected = self.inputs.selected;
        selected.is_none_or(|lists| lists.names(at.batch, self.list_head(at, lists.heads()), at.row, at.key))
    }

    /// Returns true if the mask function is asked about a key.
    pub(super) fn asks(&self, at: Position) -> bool {
        let selected = self.inputs.selected;
        selected.is_none_or(|lists| lists.asks(at.batch, self.list_head(at, lists.heads()), at.row, at.key))
    }

    /// Returns what dropout multiplies a weight by.
    pub(super) fn dropout_factor(&self, at: Position) -> f32 {
        let Some(dropout) = self.attention.dropout else { return 1.0 };
        if dropout.keeps(at, self.shape.heads) { dropout.factor() } else { 0.0 }
    }

    /// Returns the index of the entry for a row and key in a bias or mask of this shape; `None` if it leaves the key as it is.
    /// With [`Cover::FirstKeys`], a missing column hides its key. Fewer sequences than the call has repeat. Fewer heads than
    /// query heads serve equal groups of these.
    pub(super) fn entry(&self, [b, h, l, columns]: [usize; 4], cover: Cover, at: Position) -> Option<[usize; 4]> {
        let column = match cover {
            Cover::AllKeys if columns == 1 => 0,
            Cover::AllKeys | Cover::FirstKeys => at.key,
            Cover::LastKeys => (at.key + columns).checked_sub(self.kv_len)?,
        };
        Some([at.batch % b, at.head / (self.shape.heads / h), at.row.min(l - 1), column])
    }
}

/// Returns the nearest number that the caller's functions can receive.
fn clamped(position: i128) -> isize {
    position.clamp(isize::MIN as i128, isize::MAX as i128) as isize
}
