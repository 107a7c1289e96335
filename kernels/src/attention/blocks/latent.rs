//! Latent keys of integers, which are stored as values are: packed into scratch, with the numbers of int4 blocks behind them.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::steps::qk_int8::IntegerKeys;
use crate::kv::key_block::BlockValues;
use crate::matmul::int4::{self, BLOCK_QUADS};
use crate::matmul::int8;
use crate::matmul::key_code::{Int4Keys, Int8Keys};
use crate::simd::aligned::{elements, elements_mut};
use crate::simd::{LANES, Simd};
use crate::tensor::element::F16;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Packed latent keys.
pub(crate) enum LatentKeys {
    Int8(IntegerKeys<Int8Keys<'static>>),
    Int4(IntegerKeys<Int4Keys>),
}

/// Sizes of a packed panel.
struct PanelSizes {
    /// Number of groups of four bytes of a key.
    quads: usize,
    /// Number of scales and centres of a key, `f16`.
    numbers: usize,
}

impl PanelSizes {
    fn of(stored: BlockValues, head_dim: usize) -> Self {
        match stored {
            BlockValues::Int8 { .. } => Self { quads: int8::quads(head_dim), numbers: 0 },
            BlockValues::Int4 { numbers, .. } => {
                let blocks = int4::blocks(head_dim);
                Self { quads: blocks * (BLOCK_QUADS / 2), numbers: blocks * numbers.kind.numbers() }
            }
            BlockValues::Rows { .. } | BlockValues::ValuePanels(_) => unreachable!("latent keys of floats are rows"),
        }
    }

    /// Number of bytes of the keys of a panel, without their numbers.
    fn key_bytes(&self) -> usize {
        self.quads * 4 * LANES
    }
}

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Returns the number of panels for which there is scratch.
    pub(crate) fn latent_panels_at_once(&self, stored: BlockValues) -> usize {
        let sizes = PanelSizes::of(stored, self.task.tiling.head_dim);
        size_of_val(self.regions.keys) / (sizes.key_bytes() + sizes.numbers * LANES * size_of::<F16>()).max(1)
    }

    /// Returns some panels of the block's latent keys, packed unless they were packed last.
    ///
    /// # Safety
    /// `stored` is the block's keys, and has these panels. The result is used before other keys are packed.
    pub(crate) unsafe fn latent_keys(&mut self, stored: BlockValues, panels: Range<usize>) -> LatentKeys {
        let (s, sizes) = (self.task.s, PanelSizes::of(stored, self.task.tiling.head_dim));
        let pack = self.packed_keys.replace(panels.start * LANES) != Some(panels.start * LANES);
        let fours = panels.start * (LANES / int8::QUAD);
        let (keys, numbers) = self.regions.keys.split_at_mut(panels.len() * sizes.key_bytes() / size_of::<f32>());
        let panel = sizes.key_bytes() as isize;
        // SAFETY: the caller guarantees the panels, whose keys have as many quads; the block's memory outlives the result.
        unsafe {
            match stored {
                BlockValues::Int8 { values, scales } => {
                    let at = |four: usize, quad| values.first.at(fours + four).add(int8::QUAD * quad).cast();
                    if pack {
                        int8::pack_fours(s, sizes.quads, at, elements_mut(keys));
                    }
                    let panels_at = Rows::strided(elements(keys).as_ptr(), panel, 1);
                    let (_, scales) = (&*scales).split_at(panels.start * LANES);
                    let code = Int8Keys(Some(scales));
                    LatentKeys::Int8(IntegerKeys { panels: panels_at, code })
                }
                BlockValues::Int4 { values, numbers: stored } => {
                    let at = |four: usize, quad| {
                        let first = values.vector(quad / int8::QUAD).at(fours + four);
                        first.add(int8::QUAD * (quad % int8::QUAD)).cast()
                    };
                    let numbers = elements_mut::<F16>(numbers);
                    if pack {
                        int8::pack_fours(s, sizes.quads, at, elements_mut(keys));
                        for (panel, numbers) in panels.zip(numbers.chunks_exact_mut((sizes.numbers * LANES).max(1))) {
                            for (i, numbers) in numbers.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                                *numbers = *stored.first.at(panel).add(i * stored.step).cast();
                            }
                        }
                    }
                    let numbers = Rows::strided(numbers.as_ptr(), (sizes.numbers * LANES) as isize, 1);
                    let panels_at = Rows::strided(elements(keys).as_ptr(), panel, 1);
                    LatentKeys::Int4(IntegerKeys { panels: panels_at, code: Int4Keys { kind: stored.kind, numbers } })
                }
                BlockValues::Rows { .. } | BlockValues::ValuePanels(_) => {
                    unreachable!("latent keys of floats are rows")
                }
            }
        }
    }
}
