//! Parts of a rank's rows, each of one sequence, and the states that take its keys.

use crate::error::Error;
use crate::layout::Part;
use crate::whole::{Whole, write};
use core::ops::Range;
use sdpa::{AttnState, Outputs, Workspace};

/// Function that makes the state of a part, in memory that another had.
pub(crate) type Make<'a> = Box<dyn Fn(Workspace) -> Result<AttnState<'a>, sdpa::Error> + 'a>;

/// Rows of one sequence, and their state while its keys come.
pub(crate) struct RowPart<'a> {
    /// Number of their stretch on this rank, and their place in it.
    stretch: usize,
    batch: Option<usize>,
    rows: Range<usize>,
    /// Keys of the sequence.
    keys: Range<usize>,
    make: Make<'a>,
    state: Option<AttnState<'a>>,
}

impl<'a> RowPart<'a> {
    /// Takes a part of a sequence with these keys, and its state, or none yet.
    pub(crate) fn new(part: &Part, keys: Range<usize>, make: Make<'a>, state: Option<AttnState<'a>>) -> Self {
        let rows = part.range.start - part.begin..part.range.end - part.begin;
        Self { stretch: part.number, batch: part.batch, rows, keys, make, state }
    }

    fn state(&mut self, left: &mut Vec<Workspace>) -> Result<&mut AttnState<'a>, sdpa::Error> {
        let state = match self.state.take() {
            Some(state) => state,
            None => (self.make)(left.pop().unwrap_or_default())?,
        };
        Ok(self.state.insert(state))
    }
}

/// All parts of a rank's rows.
///
/// If sequences are computed one by one, there are states for one at a time, and its results wait for those of the others: a state
/// holds a key block and the memory of workers, whatever the length of its sequence.
pub(crate) struct Parts<'a> {
    parts: Vec<RowPart<'a>>,
    /// Outputs and log-sum-exps of each stretch, if sequences are computed one by one.
    results: Option<Vec<[Whole; 2]>>,
    /// Memory that states have left.
    left: Vec<Workspace>,
}

impl<'a> Parts<'a> {
    pub(crate) fn new(parts: Vec<RowPart<'a>>, results: Option<Vec<[Whole; 2]>>, left: Vec<Workspace>) -> Self {
        Self { parts, results, left }
    }

    /// Returns the states that take keys, all of one sequence, and where these lie in it.
    pub(crate) fn of_keys(
        &mut self,
        keys: &Range<usize>,
    ) -> Result<Vec<(&mut AttnState<'a>, Range<usize>)>, sdpa::Error> {
        let (parts, left) = (&mut self.parts, &mut self.left);
        let here = parts.iter_mut().filter(|part| part.keys.contains(&keys.start));
        here.map(|part| {
            let keys = keys.start - part.keys.start..keys.end - part.keys.start;
            Ok((part.state(left)?, keys))
        })
        .collect()
    }

    /// Completes the results of the sequence that ends with these keys, if one does.
    pub(crate) fn after(&mut self, keys: &Range<usize>) -> Result<(), Error> {
        let Self { parts, results: Some(results), left } = self else { return Ok(()) };
        parts
            .iter_mut()
            .filter(|part| part.keys.end == keys.end && !part.keys.is_empty())
            .try_for_each(|part| complete(part, results, left))
    }

    /// Writes the outputs of all stretches. Returns memory for the states of a later call.
    pub(crate) fn finish(mut self, outputs: Vec<Outputs<'_>>) -> Result<Vec<Workspace>, Error> {
        let Some(mut results) = self.results else {
            for (part, outputs) in self.parts.iter_mut().zip(outputs) {
                part.state(&mut self.left)?;
                let state = part.state.take();
                self.left.extend(state.map(|state| state.finish(outputs)).transpose()?);
            }
            return Ok(self.left);
        };
        for part in self.parts.iter_mut().filter(|part| part.keys.is_empty()) {
            complete(part, &mut results, &mut self.left)?;
        }
        for (outputs, [out, lse]) in outputs.into_iter().zip(&results) {
            write(outputs, [out, lse]);
        }
        Ok(self.left)
    }
}

/// Completes the results of a part after all its keys have been here.
fn complete(part: &mut RowPart<'_>, results: &mut [[Whole; 2]], left: &mut Vec<Workspace>) -> Result<(), Error> {
    part.state(left)?;
    let [out, lse] = &mut results[part.stretch];
    let [out, lse] = [out, lse].map(|whole| whole.rows_mut(part.batch, part.rows.clone()));
    let outputs = Outputs::new(out?).lse(lse?);
    left.extend(part.state.take().map(|state| state.finish(outputs)).transpose()?);
    Ok(())
}
