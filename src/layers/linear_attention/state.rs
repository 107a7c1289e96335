//! What is left of the tokens so far.

use super::settings::Normaliser;
use crate::error::{Error, floats, zeros};

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
    /// [`Error::TooLarge`] or [`Error::Memory`].
    pub fn new(shape: [usize; 4]) -> Result<Self, Error> {
        Self::zeros(shape, Normaliser::None)
    }

    /// The same for [`Normaliser::KeySum`]: rows of the slice are one longer than `value_dim`, and end with the sum of
    /// their keys.
    ///
    /// # Errors
    /// [`Error::TooLarge`] or [`Error::Memory`].
    pub fn normalised(shape: [usize; 4]) -> Result<Self, Error> {
        Self::zeros(shape, Normaliser::KeySum)
    }

    fn zeros(shape: [usize; 4], normaliser: Normaliser) -> Result<Self, Error> {
        let [batch, heads, head_dim, value_dim] = shape;
        let too_large = Error::TooLarge { what: "state", sizes: shape };
        let columns = value_dim.checked_add(normaliser.columns()).ok_or(too_large.clone())?;
        let len = floats("state", [batch, heads, head_dim, columns]).map_err(|_| too_large)?;
        Ok(Self { data: zeros("state", len)?, shape, normaliser })
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
