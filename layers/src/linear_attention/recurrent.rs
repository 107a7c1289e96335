//! Recurrent form: token by token.
//!
//! ```text
//! u ← v                                      or, under a delta rule,  β v − Sᵀ(β a ⊙ k)
//! S ← Diag(a) S + k uᵀ
//! out ← Sᵀ(scale · q)                        for each query head
//! ```

use super::call::Call;
use super::head::Head;
use super::product::{Matrix, MatrixMut, add_product};
use sdpa_kernels::HeadsMut;

/// Floats of scratch: key, decay and reader of the correction; value; queries and their results.
pub(super) fn scratch_len(call: &Call<'_>) -> usize {
    let (keys, values) = (call.group.saturating_add(3), call.group.saturating_add(1));
    keys.saturating_mul(call.head_dim).saturating_add(values.saturating_mul(call.width))
}

#[inline(always)]
pub(super) fn run(head: &Head<'_>, state: &mut [f32], out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
    let &Call { isa, head_dim: d, width, group, .. } = head.call;
    let (key, scratch) = scratch.split_at_mut(d);
    let (decay, scratch) = scratch.split_at_mut(d);
    let (reader, scratch) = scratch.split_at_mut(d);
    let (value, scratch) = scratch.split_at_mut(width);
    let (queries, rows) = scratch.split_at_mut(group * d);
    let rows = &mut rows[..group * width];
    for t in head.first..head.len {
        head.key(t, key);
        head.value(t, value);
        head.decay(t, decay);
        if head.corrects() {
            let beta = head.beta(t);
            reader.iter_mut().zip(&*key).for_each(|(x, k)| *x = -beta * k);
            if head.decays() {
                reader.iter_mut().zip(&*decay).for_each(|(x, a)| *x *= a);
            }
            value.iter_mut().for_each(|x| *x *= beta);
            let (c, a) = (MatrixMut { data: value, stride: width }, Matrix { data: reader, stride: d });
            add_product(isa, c, a, Matrix { data: state, stride: width }, [1, d, width]);
        }
        for (i, row) in state.chunks_exact_mut(width).enumerate() {
            let key = key[i];
            if head.decays() {
                let decay = decay[i];
                row.iter_mut().zip(&*value).for_each(|(s, u)| *s = *s * decay + key * u);
            } else {
                row.iter_mut().zip(&*value).for_each(|(s, u)| *s += key * u);
            }
        }
        for (h, query) in queries.chunks_exact_mut(d).enumerate() {
            head.query(h, t, query);
        }
        rows.fill(0.0);
        let (c, a) = (MatrixMut { data: rows, stride: width }, Matrix { data: queries, stride: d });
        add_product(isa, c, a, Matrix { data: state, stride: width }, [group, d, width]);
        for (h, row) in rows.chunks_exact_mut(width).enumerate() {
            head.write(out, [h, t], row);
        }
    }
}
