//! P·V of a row block and a key block whose values are int8.

use crate::attention::blocks::key_block::KeyBlock;
use crate::attention::blocks::prefetch;
use crate::attention::call::tiling::Regions;
use crate::attention::steps::pv::{ValueSums, Values};
use crate::attention::steps::pv_int8;
use crate::kv::value_panels::ValuePanels;
use crate::matmul::int8::ValueQuad;
use crate::simd::Simd;
use core::ops::Range;

impl<S: Simd> KeyBlock<'_, '_, S> {
    /// Accumulates the P·V of int8 values: their scales are multiplied into the weights, which are rounded and not read
    /// afterwards.
    ///
    /// # Safety
    /// The values and scales are the block's.
    pub(crate) unsafe fn accumulate_pv_int8(
        &mut self,
        values: ValuePanels<ValueQuad>,
        scales: *const [f32],
        row_block: Range<usize>,
    ) {
        let (task, stride, rows) = (self.task, self.task.tiling.width(), row_block.len());
        let value_dim = task.tiling.value_dim;
        // SAFETY: the caller guarantees the block's scales: the cache outlives the call, and the block's table the block.
        let scales = unsafe { &*scales };
        if !values.first.are_scattered() {
            prefetch::behind_scales(task, scales.as_ptr().cast(), size_of_val(scales));
        }
        pv_int8::round_weights(task.s, self.scores(rows), scales);
        let Regions { scores, out, rescale_prev, rescale_block, .. } = &mut *self.regions;
        for (columns, values) in values.panels() {
            // SAFETY: value panels are whole vectors, for every key of the block; weights were rounded just now.
            unsafe {
                let sums = &mut ValueSums {
                    weights: scores,
                    cols: columns.end.min(value_dim) - columns.start,
                    spans: self.spans,
                    rows,
                    rescale_prev,
                    rescale_block,
                    fresh: self.fresh,
                    out: &mut out[row_block.start * stride + columns.start..],
                    out_stride: stride,
                    ends: None,
                    prefetch: &mut self.prefetch,
                };
                task.s.with_int8_dot(Values { values, sums });
            }
        }
    }
}
