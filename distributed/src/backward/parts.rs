//! Parts of a rank's rows in a backward pass, each of one sequence, and where their gradients go.

use crate::backward::chains::Blocks;
use crate::error::Error;
use crate::layout::{KEY_BLOCK, Part};
use crate::whole::Whole;
use core::ops::Range;
use sdpa::parts::BackwardState;
use sdpa::{Bf16, F16, Gradients, TensorMut, ViewMut};
use std::collections::BTreeMap;

/// Function that makes the state of a part.
pub(crate) type Make<'a> = Box<dyn Fn() -> Result<BackwardState<'a>, sdpa::Error> + 'a>;

/// Rows of one sequence, and their state while its keys come.
pub(crate) struct RowPart<'a> {
    /// Number of their stretch on this rank, and their place in it.
    pub(crate) stretch: usize,
    batch: Option<usize>,
    rows: Range<usize>,
    /// Keys of the sequence; of all, if sequences are computed together.
    keys: Range<usize>,
    make: Make<'a>,
    state: Option<BackwardState<'a>>,
}

impl<'a> RowPart<'a> {
    /// Takes a part of a sequence with these keys, and its state, or none yet.
    pub(crate) fn new(part: &Part, keys: Range<usize>, make: Make<'a>, state: Option<BackwardState<'a>>) -> Self {
        let rows = part.range.start - part.begin..part.range.end - part.begin;
        Self { stretch: part.number, batch: part.batch, rows, keys, make, state }
    }

    /// Returns the state, which is made when it is first needed.
    pub(crate) fn state(&mut self) -> Result<&mut BackwardState<'a>, sdpa::Error> {
        let state = self.state.take();
        Ok(self.state.insert(state.map_or_else(&self.make, Ok)?))
    }

    /// Returns the gradient in the bias of these rows and of some keys of their sequence, in that of their stretch.
    pub(crate) fn dbias<'w>(&self, whole: &'w mut Whole, keys: Range<usize>) -> Result<ViewMut<'w>, sdpa::LayoutError> {
        let [.., rows, columns] = whole.shape();
        let rows = if rows == 1 { 0..1 } else { self.rows.clone() };
        whole.part_mut(self.batch, rows, keys.start.min(columns)..keys.end.min(columns))
    }

    /// Takes the state with all keys passed over that are left.
    fn ended(&mut self) -> Result<BackwardState<'a>, sdpa::Error> {
        let n = self.keys.len();
        skip_to(self.state()?, n)?;
        self.state.take().map_or_else(&self.make, Ok)
    }
}

/// All parts of a rank's rows: those that keys come to, by their number among the parts of all ranks, and empty ones.
///
/// If sequences are computed one by one, there are states for one at a time, and its gradients wait for those of the others.
pub(crate) struct Parts<'a> {
    pub(crate) numbered: BTreeMap<usize, RowPart<'a>>,
    pub(crate) empty: Vec<RowPart<'a>>,
    /// Gradients in the queries of each stretch, if sequences are computed one by one.
    pub(crate) results: Option<Vec<Whole>>,
    /// Gradients in the bias of each stretch, if they are wanted.
    pub(crate) biases: Vec<Option<Whole>>,
}

impl<'a> Parts<'a> {
    /// Returns which parts of this rank's see which parcels, as numbers: those of the parcels for its first part, then for the
    /// second, and so on.
    pub(crate) fn seen(parts: &mut [RowPart<'a>], own: &[Part], parcels: &[Blocks]) -> Result<Vec<bool>, sdpa::Error> {
        let mut seen = vec![false; parts.len() * parcels.len()];
        for ((n, part), own) in parts.iter_mut().enumerate().zip(own) {
            let (state, apart) = (part.state()?, own.sequence.is_some());
            let seen = &mut seen[n * parcels.len()..];
            for (seen, Blocks { sequence, first, keys, .. }) in seen.iter_mut().zip(parcels) {
                *seen = *sequence == own.sequence && state.sees(keys.start - first..keys.end - first);
            }
            part.state.take_if(|_| apart);
        }
        Ok(seen)
    }

    /// Completes the gradients of a part of a sequence that is computed alone; no more keys come to it.
    pub(crate) fn complete(&mut self, number: usize) -> Result<(), Error> {
        let (Some(part), Some(results)) = (self.numbered.get_mut(&number), &mut self.results) else { return Ok(()) };
        let to = results[part.stretch].rows_mut(part.batch, part.rows.clone())?;
        part.ended()?.write(Gradients::new().q(to))?;
        self.numbered.remove(&number);
        Ok(())
    }

    /// Writes the gradients of all stretches; if no rank has keys, zeros.
    pub(crate) fn write(mut self, mut gradients: Vec<Gradients<'_>>, keys: usize) -> Result<(), Error> {
        for (gradients, whole) in gradients.iter_mut().zip(&self.biases) {
            let bias = gradients.bias.take().zip(whole.as_ref());
            bias.into_iter().for_each(|(to, whole)| copy(whole.floats(), to.into()));
        }
        let left: Vec<usize> = self.numbered.keys().copied().collect();
        left.into_iter().try_for_each(|number| self.complete(number))?;
        let Some(results) = self.results else {
            let mut gradients: Vec<_> = gradients.into_iter().map(Some).collect();
            for mut part in self.numbered.into_values().chain(self.empty) {
                part.keys = 0..keys;
                let to = gradients[part.stretch].take().unwrap_or_default();
                part.ended()?.write(to)?;
            }
            return Ok(());
        };
        for (whole, gradients) in results.iter().zip(gradients) {
            gradients.q.into_iter().for_each(|to| copy(whole.floats(), to));
        }
        Ok(())
    }
}

/// Passes over keys that no row sees, up to key `end`, block after block: rules of position and the mask may hide different
/// blocks, and a state that is asked for both at once would find that each shows some.
pub(crate) fn skip_to(state: &mut BackwardState<'_>, end: usize) -> Result<(), sdpa::Error> {
    while state.len() < end {
        state.skip(KEY_BLOCK.min(end - state.len()))?;
    }
    Ok(())
}

/// Copies gradients, rounded to the elements of a tensor.
pub(crate) fn copy(gradients: &[f32], to: TensorMut<'_>) {
    match to {
        TensorMut::F32(to) => copy_as(gradients, to, |x| x),
        TensorMut::Bf16(to) => copy_as(gradients, to, Bf16::from_f32),
        TensorMut::F16(to) => copy_as(gradients, to, F16::from_f32),
        _ => unreachable!("a tensor of another type"),
    }
}

fn copy_as<T>(gradients: &[f32], mut to: ViewMut<'_, T>, convert: impl Fn(f32) -> T) {
    let [batch, heads, rows, dim] = to.shape();
    let indices = (0..batch * heads * rows).flat_map(|row| (0..dim).map(move |d| (row, d)));
    for (&gradient, (row, d)) in gradients.iter().zip(indices) {
        if let Some(element) = to.get_mut([row / rows / heads, row / rows % heads, row % rows, d]) {
            *element = convert(gradient);
        }
    }
}
