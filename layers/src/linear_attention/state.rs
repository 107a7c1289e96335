//! State of linear attention.

use super::settings::Normaliser;
use crate::error::{floats, zeros};
use sdpa::Error;

/// State of linear attention: one matrix for each batch entry and key/value head, zeros before the first token.
///
/// ```
/// use sdpa_layers::LinearState;
/// let mut state = LinearState::new([1, 2, 8, 16])?; // one sequence, two heads, keys of 8, values of 16
/// let saved = state.as_slice().to_vec();
/// state.as_mut_slice().copy_from_slice(&saved);
/// assert_eq!(saved.len(), 2 * 8 * 16);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LinearState {
    /// `[batch, kv_heads, head_dim, value_dim]`; a normaliser adds one column, in which values count as 1.
    pub(super) data: Vec<f32>,
    pub(super) shape: StateShape,
}

/// Sizes of a state, `[batch, kv_heads, head_dim, value_dim]`, and the normaliser it is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StateShape {
    pub(super) sizes: [usize; 4],
    pub(super) normaliser: Normaliser,
}

impl LinearState {
    /// Creates a state of zeros, `[batch, kv_heads, head_dim, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Empty`] for a head_dim or value_dim of 0, [`Error::TooLarge`] or [`Error::Memory`].
    pub fn new(shape: [usize; 4]) -> Result<Self, Error> {
        Self::zeros(shape, Normaliser::None)
    }

    /// Creates a state of zeros for [`Normaliser::KeySum`]: its rows have `value_dim + 1` numbers, the last for the sum
    /// of the keys.
    ///
    /// # Errors
    /// [`Error::Empty`] for a head_dim or value_dim of 0, [`Error::TooLarge`] or [`Error::Memory`].
    pub fn normalised(shape: [usize; 4]) -> Result<Self, Error> {
        Self::zeros(shape, Normaliser::KeySum)
    }

    fn zeros(shape: [usize; 4], normaliser: Normaliser) -> Result<Self, Error> {
        let [batch, heads, head_dim, value_dim] = shape;
        for (what, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if dim == 0 {
                return Err(Error::Empty { argument: "state", what });
            }
        }
        let too_large = Error::TooLarge { what: "state", sizes: shape };
        let columns = value_dim.checked_add(normaliser.columns()).ok_or(too_large.clone())?;
        let len = floats("state", [batch, heads, head_dim, columns]).map_err(|_| too_large)?;
        Ok(Self { data: zeros("state", len)?, shape: StateShape { sizes: shape, normaliser } })
    }

    /// Shape, `[batch, kv_heads, head_dim, value_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape.sizes
    }

    /// Numbers of the state, dense: `[batch, kv_heads, head_dim, value_dim]`, or `value_dim + 1` with a normaliser.
    /// Saving them saves the state.
    pub fn as_slice(&self) -> &[f32] {
        &self.data
    }

    /// Numbers of the state, mutable: copy a saved state here to restore it.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.data
    }
}

impl Normaliser {
    /// Number of columns of the state besides those of the values.
    pub(super) fn columns(self) -> usize {
        match self {
            Self::None => 0,
            Self::KeySum => 1,
        }
    }
}
