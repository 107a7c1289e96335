//! Queries, keys and values side by side in one tensor, or rows outside heads, as projections leave them.

use crate::fuzzer::array::{Array, indices};
use crate::fuzzer::bits::{Recorder, settle, sizes};
use crate::fuzzer::case::Case;
use crate::fuzzer::compare::Written;
use crate::fuzzer::draw::{Home, draw_of};
use crate::fuzzer::functions::Functions;
use crate::fuzzer::rng::Rng;
use sdpa::{Alignment, Dtype, Inputs, Outputs, View, ViewMut, alibi_slopes};

/// A self-attention call on its own layout.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let [batch, heads, kv_heads, rows, _, d, _] = sizes(rng);
    let rows = rows.min(200);
    let mut case = draw_of(rng, Home::Tensors, [batch, heads, kv_heads, rows, rows, d, d]);
    settle(rng, &mut case);
    (case.ragged, case.dtypes, case.functions) = (None, [Dtype::F32; 3], Functions::default());
    (case.bias, case.mask, case.kv_lens) = (None, None, None);
    case.alibi = case.alibi.map(|slopes| alibi_slopes(slopes.len()));
    case.settings.alignment = case.settings.alignment.or(Some(Alignment::TopLeft));
    let [q, k] = [case.q.shape, case.k.shape];
    recorder.describe(&case, Home::Tensors);
    if q[2] == k[2] { side_by_side(rng, recorder, &case) } else { rows_outside(rng, recorder, &case) }
}

/// `[batch, rows, heads of queries, keys and values, dim]`.
fn side_by_side(rng: &mut Rng, recorder: &mut Recorder, case: &Case) {
    recorder.say("packed");
    let ([b, h, l, d], g) = (case.q.shape, case.kv_heads());
    let all = Array::from_fn([b, l, h + 2 * g, d], |[b, l, n, c]| match n {
        n if n < h => case.q.get([b, n, l, c]),
        n if n < h + g => case.k.get([b, n - h, l, c]),
        n => case.v.get([b, n - h - g, l, c]),
    });
    recorder.each(rng, |_, exec| {
        let [q, k, v] = View::packed_qkv(&all.data, [b, l, h, d], g).expect("dense");
        run(case, Inputs::new(q, k, v), exec)
    });
}

/// `[batch, rows, heads, dim]` each.
fn rows_outside(rng: &mut Rng, recorder: &mut Recorder, case: &Case) {
    recorder.say("rows outside heads");
    let turned = |x: &Array| {
        let [b, h, l, d] = x.shape;
        Array::from_fn([b, l, h, d], |[b, l, h, d]| x.get([b, h, l, d]))
    };
    let all = [&case.q, &case.k, &case.v].map(turned);
    recorder.each(rng, |_, exec| {
        let [q, k, v] = all.each_ref().map(|x| View::blhd(&x.data, x.shape).expect("dense"));
        run(case, Inputs::new(q, k, v), exec)
    });
}

/// The outputs, with rows outside heads.
fn run<'a>(case: &'a Case, mut inputs: Inputs<'a>, exec: sdpa::Exec) -> [Option<Written>; 2] {
    let ([b, h, l, _], dv) = (case.q.shape, case.value_dim());
    let (mut out, mut lse) = (vec![0.0; b * l * h * dv], vec![0.0; b * h * l]);
    inputs = case.alibi.as_ref().map_or(inputs, |slopes| inputs.alibi(slopes));
    inputs = case.sinks.as_ref().map_or(inputs, |sinks| inputs.sinks(sinks));
    let view = ViewMut::blhd(&mut out, [b, l, h, dv]).expect("dense");
    let outputs = Outputs::new(view).lse(ViewMut::bhl(&mut lse, [b, h, l]).expect("dense"));
    case.attention().problem(inputs, outputs).expect("a good call").run_once(exec);
    [([b, l, h, dv], out), ([b, h, l, 1], lse)].map(|(shape, data)| {
        let bits = Array { shape, data: indices(shape).zip(data).map(|(_, x): (_, f32)| x.to_bits()).collect() };
        Some(Written { bits, dtype: Dtype::F32 })
    })
}
