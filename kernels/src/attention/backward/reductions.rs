//! Gradients that are sums over all rows: of sinks, slopes, scale, a bias of one column, and a score function's parameters. Taken
//! when all key blocks are done, row after row, or head after head, in `f64`.

use crate::attention::backward::call::BiasColumns;
use crate::attention::backward::memory::{RowNumber, locked};
use crate::attention::backward::pass::BackwardPass;
use crate::elementary::exp;
use crate::simd::quiet;

/// Returns a sum as it is written: a zero is positive, and a NaN the quiet one.
fn written(sum: f64) -> f32 {
    quiet(sum as f32 + 0.0)
}

impl BackwardPass<'_> {
    /// Takes the sums over all rows. All workers are done.
    pub(crate) fn reduce(mut self) {
        let heads = self.checked.call().q.shape()[1];
        let per_head = self.reduced.sinks.is_some() || self.reduced.slopes.is_some();
        for head in 0..if per_head { heads } else { 0 } {
            let logit = self.checked.call().options.sinks.map(|sinks| f64::from(sinks[head]));
            let (mut sink, mut slope) = (0.0, 0.0);
            for at in self.rows_of_head(head) {
                const NUMBERS: [RowNumber; 4] =
                    [RowNumber::Delta, RowNumber::Distance, RowNumber::Reference, RowNumber::Lse];
                let [delta, distance, reference, lse] = self.numbers(at, NUMBERS);
                slope -= distance;
                // The sink's weight is what the keys leave of 1; its value is 0.
                sink -= match logit.map(|logit| logit - reference - lse) {
                    Some(logit) if lse != f64::NEG_INFINITY => exp(logit) * delta,
                    _ => 0.0,
                };
            }
            if let Some(sinks) = &mut self.reduced.sinks {
                sinks[head] = written(sink);
            }
            if let Some(slopes) = &mut self.reduced.slopes {
                slopes[head] = written(slope);
            }
        }
        let rows = || (0..heads).flat_map(|head| self.rows_of_head(head));
        let dots = |at| self.numbers(at, [RowNumber::Dot])[0];
        let scale = self.reduced.scale.is_some().then(|| rows().map(dots).sum::<f64>());
        if let (Some(to), Some(scale)) = (&mut self.reduced.scale, scale) {
            **to = written(scale);
        }
        self.finish_bias(heads);
        self.finish_parameters();
    }

    /// Writes the gradients in parameters: the sums of all heads.
    fn finish_parameters(self) {
        let Some(gradient) = self.reduced.parameters else { return };
        let (n, of_heads) = (gradient.len(), locked(self.parameter_sums));
        for (parameter, x) in gradient.iter_mut().enumerate() {
            *x = written(of_heads.iter().skip(parameter).step_by(n).sum());
        }
    }

    /// Adds each row's sum to its element of a bias of one column.
    fn finish_bias(&self, heads: usize) {
        let Some(bias) = self.gradients.bias.as_ref().filter(|bias| bias.columns == BiasColumns::One) else { return };
        for at in (0..heads).flat_map(|head| self.rows_of_head(head)) {
            let [b, h, l] = bias.row([at.sequence, at.index[1], at.row]);
            let [sum] = self.numbers(at, [RowNumber::Bias]);
            // SAFETY: an element of the bias; all workers are done.
            unsafe {
                let (element, _) = bias.view.row(b, h, l);
                *element = quiet(*element + sum as f32);
            }
        }
    }

    fn numbers<const N: usize>(&self, at: RowAt, which: [RowNumber; N]) -> [f64; N] {
        // SAFETY: a row of the call; all workers are done.
        let (_, numbers) = unsafe { self.rows.row(at.index) };
        which.map(|number| f64::from(numbers[number as usize]))
    }

    /// Iterates over the rows of a query head, sequence after sequence.
    fn rows_of_head(&self, head: usize) -> impl Iterator<Item = RowAt> + use<'_> {
        let call = *self.checked.call();
        (0..call.sequence_count()).flat_map(move |sequence| {
            let seq = call.sequence(sequence);
            (0..seq.q_len).map(move |row| RowAt { sequence, row, index: [seq.q_batch, head, seq.first_row + row] })
        })
    }
}

/// Row of a sequence, and its index in q: batch, head, row.
#[derive(Debug, Clone, Copy)]
struct RowAt {
    sequence: usize,
    row: usize,
    index: [usize; 3],
}
