//! What is left of the tokens so far.

use super::Normaliser;
use crate::error::Error;

/// What linear attention remembers: for each batch and key/value head a matrix, zeros before the first token.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearState {
    /// `[batch, kv_heads, head_dim, value_dim]`; with a normaliser one column more, in which values count as 1.
    pub(super) data: Vec<f32>,
    pub(super) shape: [usize; 4],
    pub(super) normaliser: Normaliser,
}

impl LinearState {
    /// Zeros, `[batch, kv_heads, head_dim, value_dim]`.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn new(shape: [usize; 4]) -> Result<Self, Error> {
        Self::zeros(shape, Normaliser::None)
    }

    /// The same for [`Normaliser::KeySum`]: rows of the slice are one longer than `value_dim`, and end with the sum of
    /// their keys.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn normalised(shape: [usize; 4]) -> Result<Self, Error> {
        Self::zeros(shape, Normaliser::KeySum)
    }

    fn zeros(shape: [usize; 4], normaliser: Normaliser) -> Result<Self, Error> {
        let [batch, heads, head_dim, value_dim] = shape;
        let columns = value_dim.checked_add(normaliser.columns());
        let all = [Some(batch), Some(heads), Some(head_dim), columns]
            .into_iter()
            .try_fold(1usize, |n, size| n.checked_mul(size?));
        let fits = all.filter(|&n| n <= isize::MAX as usize / size_of::<f32>());
        let len = fits.ok_or(Error::TooLarge { what: "state", sizes: shape })?;
        Ok(Self { data: vec![0.0; len], shape, normaliser })
    }

    /// `[batch, kv_heads, head_dim, value_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The numbers, dense: `[batch, kv_heads, head_dim, value_dim]`, or `value_dim + 1` with a normaliser. All there is to
    /// save.
    pub fn as_slice(&self) -> &[f32] {
        &self.data
    }

    /// The same, to be changed: a state that was saved is copied back here.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.data
    }
}

impl Normaliser {
    /// Columns of the state beside those of the values.
    pub(super) fn columns(self) -> usize {
        match self {
            Self::None => 0,
            Self::KeySum => 1,
        }
    }
}
