//! A workload's tensors as elements of a type hold them.

use crate::elements::Elements;
use crate::failure::Result;
use crate::support::Workload;
use crate::workloads::Values;
use sdpa::{Alignment, Attention, Inputs, Shape, View};
use std::ops::Range;

/// Queries, keys and values.
#[derive(Debug)]
pub(crate) struct Qkv {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

/// A workload and its queries, keys and values, in f32 that the elements can hold.
#[derive(Debug)]
pub(crate) struct Rounded {
    pub(crate) workload: Workload,
    pub(crate) elements: Elements,
    pub(crate) qkv: Qkv,
}

/// The first `value_dim` elements of each key.
fn first_columns(k: &[f32], Shape { head_dim, value_dim, .. }: Shape) -> Vec<f32> {
    k.chunks_exact(head_dim).flat_map(|key| &key[..value_dim]).copied().collect()
}

impl Rounded {
    pub(crate) fn new(workload: Workload, elements: Elements) -> Self {
        let tensors = workload.tensors();
        let [q, k, v] = tensors.parts().map(|part| part.iter().map(|&x| elements.rounded(x)).collect::<Vec<_>>());
        let v = match Values::of(&workload) {
            Values::Separate => v,
            Values::InKeys => first_columns(&k, workload.shape),
        };
        Self { workload, elements, qkv: Qkv { q, k, v } }
    }

    /// Some rows of one head as a separate problem.
    pub(crate) fn strip(&self, [b, h]: [usize; 2], rows: Range<usize>) -> Result<(Attention, Inputs<'_>)> {
        let Shape { heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = self.workload.shape;
        let kv = b * kv_heads + h / (heads / kv_heads);
        let row = (b * heads + h) * q_len + rows.start;
        let Qkv { q, k, v } = &self.qkv;
        let inputs = Inputs::new(
            View::bhld(&q[row * head_dim..], [1, 1, rows.len(), head_dim])?,
            View::bhld(&k[kv * kv_len * head_dim..], [1, 1, kv_len, head_dim])?,
            View::bhld(&v[kv * kv_len * value_dim..], [1, 1, kv_len, value_dim])?,
        );
        Ok((self.workload.attention().align(Alignment::Offset(rows.start as isize)), inputs))
    }
}
