//! Latent keys of integers, which are stored as values are: packed into scratch, with the numbers of int4 blocks behind them.

use crate::attention::blocks::key_block::KeyBlock;
use crate::kv::key_block::{BlockValues, Keys};
use crate::matmul::int4;
use crate::matmul::int8::{self, QUAD};
use crate::simd::aligned::{elements, elements_mut};
use crate::simd::{LANES, Simd};
use crate::tensor::element::F16;
use crate::tensor::rows::Rows;
use core::ops::Range;

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Returns the number of bytes of a packed panel of latent keys, and of numbers beside it.
    fn latent_sizes(&self) -> [usize; 2] {
        let d = self.task.tiling.head_dim;
        match self.values {
            BlockValues::Int4 { numbers, .. } => {
                [int4::blocks(d) * int4::BLOCK_BYTES, numbers.kind.number_bytes(LANES, d) / size_of::<F16>()]
            }
            _ => [int8::panel_bytes(d), 0],
        }
    }

    /// Returns the number of panels of latent keys for which there is scratch.
    pub(crate) fn latent_panels_at_once(&self) -> usize {
        let [bytes, numbers] = self.latent_sizes();
        size_of_val(self.regions.keys) / (bytes + numbers * size_of::<F16>()).max(1)
    }

    /// Returns some panels of the block's latent keys, packed unless they were packed last.
    ///
    /// # Safety
    /// The block has these panels. The result is used before other keys are packed.
    pub(crate) unsafe fn latent_keys(&mut self, panels: Range<usize>) -> Keys {
        let (s, [bytes, count]) = (self.task.s, self.latent_sizes());
        let pack = self.packed_keys.replace(panels.start * LANES) != Some(panels.start * LANES);
        let (quads, fours) = (bytes / (QUAD * LANES), panels.start * (LANES / QUAD));
        let (keys, numbers) = self.regions.keys.split_at_mut(panels.len() * bytes / size_of::<f32>());
        // SAFETY: the caller guarantees the panels, whose keys, of which the values are the first columns, have as many quads; the
        // block's memory outlives the result.
        unsafe {
            match self.values {
                BlockValues::Int8 { values, scales } => {
                    if pack {
                        let at = |four: usize, quad| values.first.at(fours + four).add(QUAD * quad).cast();
                        int8::pack_fours(s, quads, at, elements_mut(keys));
                    }
                    let (_, scales) = (&*scales).split_at(panels.start * LANES);
                    let panels = Rows::strided(elements(keys).as_ptr(), bytes as isize, 1);
                    Keys::Int8 { panels, scales: Some(scales) }
                }
                BlockValues::Int4 { mut values, numbers: stored } => {
                    let numbers = elements_mut::<F16>(numbers);
                    if pack {
                        values.layout.width = quads * QUAD;
                        let at = |four: usize, quad| {
                            values.vector(quad / QUAD).at(fours + four).add(QUAD * (quad % QUAD)).cast()
                        };
                        int8::pack_fours(s, quads, at, elements_mut(keys));
                        for (panel, numbers) in panels.zip(numbers.chunks_exact_mut(count.max(1))) {
                            for (i, numbers) in numbers.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                                *numbers = *stored.first.at(panel).add(i * stored.step).cast();
                            }
                        }
                    }
                    let panels = Rows::strided(elements(keys).as_ptr(), bytes as isize, 1);
                    let numbers = Rows::strided(numbers.as_ptr(), count as isize, 1);
                    Keys::Int4 { panels, kind: stored.kind, numbers }
                }
                BlockValues::Rows { .. } | BlockValues::ValuePanels(_) => {
                    unreachable!("latent keys of floats are rows")
                }
            }
        }
    }
}
