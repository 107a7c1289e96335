//! Lists of selected keys in tensors.

use crate::views;
use candle_core::{DType, Result, Tensor, bail};
use sdpa::{Inputs, Rectangle, SelectedKeys, SelectionShape, View};

/// Rows that lists of selected keys are for, and keys that their numbers count, for [`Sdpa::selected`](crate::Sdpa::selected).
///
/// ```
/// use sdpa_candle::ListShape;
/// // Blocks of 64 keys for 16 neighbouring rows; by default a list is for one row, of single keys.
/// let blocks = ListShape { rows: 16, unit: 64 };
/// assert_eq!(ListShape::default(), ListShape { rows: 1, unit: 1 });
/// # let _ = blocks;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListShape {
    /// Number of neighbouring rows that share a list; the last group may have fewer.
    pub rows: usize,
    /// Number of keys that a number stands for: number `n` names the keys from `n · unit` on.
    pub unit: usize,
}

impl Default for ListShape {
    fn default() -> Self {
        Self { rows: 1, unit: 1 }
    }
}

/// Numbers of selected keys, and what they are for.
#[derive(Debug, Clone)]
pub(crate) struct Selected {
    pub(crate) numbers: Tensor,
    pub(crate) shape: ListShape,
}

impl Selected {
    /// Makes lists for the rows of a call, of which tensors may have lengths.
    pub(crate) fn keys(&self, inputs: Inputs<'_>, kv_lens: Option<&[usize]>) -> Result<SelectedKeys> {
        let inputs = kv_lens.map_or(inputs, |lens| inputs.kv_lens(lens));
        let sdpa::Shape { batch, q_len, kv_len, .. } = inputs.shape().map_err(views::refused)?;
        let cached = inputs.key_values().map_err(views::refused)?.lens();
        let lens = kv_lens.or(cached).map_or_else(|| vec![kv_len; batch], <[usize]>::to_vec);
        let (numbers, shape) = self.numbers()?;
        let rectangle = Rectangle::new(View::bhld(&numbers, shape).map_err(views::refused)?);
        let (q_lens, ListShape { rows, unit }) = (vec![q_len; batch], self.shape);
        let shape = SelectionShape { q_lens: &q_lens, heads: shape[1], rows, unit };
        let mut keys = SelectedKeys::new();
        keys.fill_padded(shape, &lens, rectangle, None).map_err(views::refused)?;
        Ok(keys)
    }

    /// Returns the numbers, and their shape.
    fn numbers(&self) -> Result<(Vec<i32>, [usize; 4])> {
        let (dims, dtype) = (self.numbers.dims(), self.numbers.dtype());
        let (&[batch, heads, groups, places], DType::U32 | DType::I32 | DType::I64) = (dims, dtype) else {
            bail!(
                "sdpa: selected: shape is {dims:?} of {}, but must be [batch, heads, groups, places] of u32, i32 or i64",
                dtype.as_str()
            )
        };
        let numbers = views::integers(&self.numbers)?.into_iter().enumerate();
        let number = |(index, got)| match i32::try_from(got) {
            Ok(number) => Ok(number),
            Err(_) => bail!("sdpa: selected: entry {index} is {got}, but must be from -1 to {}", i32::MAX),
        };
        Ok((numbers.map(number).collect::<Result<_>>()?, [batch, heads, groups, places]))
    }
}
