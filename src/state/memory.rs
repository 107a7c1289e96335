//! Memory of a state, for the next one.

use crate::error::{Error, zeros};
use crate::plan::run::Workspace;

/// Memory of an [`AttnState`](crate::AttnState) that is finished, for the next one to use again: memory that is new costs the time
/// of its first touch.
///
/// ```
/// use sdpa::{Attention, AttnState, Exec, Inputs, Outputs, StateMemory, View, ViewMut};
/// let (x, mut out, mut memory) = ([0.5; 3 * 4], [0.0; 3 * 4], StateMemory::new());
/// let x = View::bhld(&x, [1, 1, 3, 4])?;
/// for _ in 0..10 {
///     let mut state = AttnState::from_inputs_in(Attention::new(), Inputs::new(x, x, x), Exec::serial(), memory)?;
///     state.push(x, x)?;
///     memory = state.finish(Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 4])?))?;
/// }
/// assert_eq!(out, [0.5; 3 * 4]);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct StateMemory {
    /// Of maxima, sums and outputs.
    pub(super) parts: [Vec<f32>; 3],
    pub(super) workspace: Workspace,
}

impl StateMemory {
    /// Creates empty memory.
    pub const fn new() -> Self {
        Self { parts: [Vec::new(), Vec::new(), Vec::new()], workspace: Workspace::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.capacity() * size_of::<f32>()).sum::<usize>() + self.workspace.bytes()
    }
}

/// Returns `len` numbers, whatever they are, in the same memory if they fit.
pub(super) fn sized(mut memory: Vec<f32>, len: usize) -> Result<Vec<f32>, Error> {
    if memory.capacity() < len {
        return zeros("state", len);
    }
    memory.resize(len, 0.0);
    Ok(memory)
}

/// Returns `len` equal numbers, in the same memory if they fit.
pub(super) fn filled(memory: Vec<f32>, len: usize, number: f32) -> Result<Vec<f32>, Error> {
    let mut memory = sized(memory, len)?;
    memory.fill(number);
    Ok(memory)
}
