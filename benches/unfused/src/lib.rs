//! Tuned unfused path: the scores of a whole head by `matrixmultiply`'s sgemm, then mask, softmax, and a second sgemm.
//!
//! This is what a careful user builds without `sdpa`, and the baseline of its benchmarks. Per head:
//!
//! ```text
//! S ← scale · Q Kᵀ                      sgemm, [q_len, kv_len]
//! S ← −∞ where a row does not see a key
//! P ← exp(S − rowmax S), sums aside     each row while it is in the first-level cache
//! out ← P V                             sgemm
//! out ← out / sums                      value_dim divisions a row in place of kv_len
//! ```
//! It holds `q_len × kv_len` scores for every head in progress, so its memory grows with the square of the length; the
//! fused path's memory does not grow. Heads are divided among threads; one head is never divided. Scores of hidden keys
//! are computed and then masked, since sgemm computes them all.

#![forbid(unsafe_code)]

mod backward;
mod workers;

pub use backward::attention_backward;

use crate::workers::{floats, parts, zeros};
use core::ops::Range;
use sdpa::{Attention, Dtype, Error, Exec, Inputs, Isa, Outputs, Shape, Tensor, TensorMut, View, ViewMut};
use sdpa_kernels::gemm::{Matrix, sgemm};
use sdpa_kernels::{Call, VisibleKeys, exp_in_place};

/// Computes attention through the full matrix of scores.
///
/// Gives the results of [`sdpa::attention`](sdpa::attention()) up to rounding; its bits depend on shapes and on the machine.
///
/// ```
/// use sdpa::{Attention, Exec, Inputs, Outputs, View, ViewMut};
/// let (x, mut out) = ([0.5; 3 * 4], [0.0; 3 * 4]);
/// let x = View::bhld(&x, [1, 1, 3, 4])?;
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 4])?);
/// sdpa_unfused::attention(&Attention::new().causal(), Inputs::new(x, x, x), outputs, Exec::serial())?;
/// assert!(out.iter().all(|x| (x - 0.5).abs() < 1e-6));
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// As [`Attention::problem`]; [`Error::TooLarge`] or [`Error::Memory`] if a head's scores do not fit in memory;
/// [`Error::Needs`] for options and outputs beyond scale, range rules and the LSE, which the baseline does not support.
pub fn attention(attention: &Attention, inputs: Inputs<'_>, outputs: Outputs<'_>, exec: Exec<'_>) -> Result<(), Error> {
    let problem = attention.problem(inputs, outputs)?;
    let shape = problem.shape();
    let (call, outputs) = problem.into_parts();
    let plain = outputs.out.as_ref().is_none_or(|out| out.dtype() == Dtype::F32);
    let extras = [
        (SHORT, !plain),
        ("scores", outputs.points.iter().any(Option::is_some)),
        ("key weight sums", outputs.key_weight_sums.is_some()),
    ];
    refuse_extras(&call, extras)?;
    let Outputs { out, lse, .. } = outputs;
    let Some(out) = out else { return Ok(()) };
    check_scores(&shape)?;
    let heads = shape.batch * shape.heads;
    if heads == 0 || shape.q_len == 0 {
        return Ok(());
    }
    let mut row_lse = zeros("lse", heads * shape.q_len)?;
    let mut out = Dense::new("out", Some(out), heads * shape.q_len * shape.value_dim)?;
    all_heads(&call, out.elements(), &mut row_lse, exec)?;
    out.finish();
    if let Some(mut lse) = lse {
        scatter(&row_lse, &mut lse);
    }
    Ok(())
}

/// Checks that the scores of a head are few enough to be held.
fn check_scores(shape: &Shape) -> Result<(), Error> {
    floats("scores", [1, 1, shape.q_len, shape.kv_len]).map(drop)
}

/// Name of elements that are not `f32`.
const SHORT: &str = "16-bit elements";

/// Refuses options that only the fused path supports, and `others` that are given.
fn refuse_extras<const N: usize>(call: &Call<'_>, others: [(&'static str, bool); N]) -> Result<(), Error> {
    let options = call.options;
    let mut tensors = call.kv.tensors().into_iter().flatten().chain([call.q]);
    let extras = [
        ("softcap", options.softcap.is_some()),
        ("bias", options.bias.is_some()),
        ("alibi slopes", options.alibi.is_some()),
        ("mask", options.mask.is_some()),
        ("sinks", options.sinks.is_some()),
        ("kv_lens", options.kv_lens.is_some()),
        ("ragged", options.ragged.is_some()),
        ("positions", options.own_positions().is_some()),
        ("selected keys", options.selected.is_some()),
        ("dropout", options.dropout.is_some()),
        ("cache or pages", call.kv.tensors().is_none()),
        (SHORT, tensors.any(|tensor| tensor.dtype() != Dtype::F32)),
    ];
    match extras.into_iter().chain(others).find(|(_, given)| *given) {
        Some((argument, _)) => {
            Err(Error::Needs { argument, needs: "the fused path; the unfused baseline has no such option" })
        }
        None => Ok(()),
    }
}

/// Memory of a result, dense in the order batch, heads, rows, dim.
enum Dense<'a> {
    /// Memory of the caller's view.
    InPlace(&'a mut [f32]),
    /// Separate memory, for a view of other strides, or for a result that nobody asked for.
    Copied(Vec<f32>, Option<ViewMut<'a>>),
}

impl<'a> Dense<'a> {
    fn new(what: &'static str, to: Option<TensorMut<'a>>, len: usize) -> Result<Self, Error> {
        let to = to.map(|to| match to {
            TensorMut::F32(to) => to,
            _ => unreachable!("other types were refused"),
        });
        Ok(match to.map(ViewMut::into_dense) {
            Some(Ok(elements)) => Self::InPlace(elements),
            Some(Err(to)) => Self::Copied(zeros(what, len)?, Some(to)),
            None => Self::Copied(zeros(what, len)?, None),
        })
    }

    fn elements(&mut self) -> &mut [f32] {
        match self {
            Self::InPlace(elements) => elements,
            Self::Copied(elements, _) => elements,
        }
    }

    /// Copies the elements to the caller's view, if they are not there yet.
    fn finish(self) {
        if let Self::Copied(elements, Some(mut to)) = self {
            scatter(&elements, &mut to);
        }
    }
}

/// Copies a dense array to a view of the same shape.
fn scatter(dense: &[f32], to: &mut ViewMut<'_>) {
    let [_, heads, rows, dim] = to.shape();
    for (i, &x) in dense.iter().enumerate() {
        let at = [i / dim / rows / heads, i / dim / rows % heads, i / dim % rows, i % dim];
        *to.get_mut(at).expect("an element for each index") = x;
    }
}

/// One head's part of the outputs, dense.
struct Head<'a> {
    index: usize,
    out: &'a mut [f32],
    lse: &'a mut [f32],
}

/// Divides the heads among workers, which take the next one until none is left.
fn all_heads(call: &Call<'_>, out: &mut [f32], lse: &mut [f32], exec: Exec<'_>) -> Result<(), Error> {
    let ([batch, heads_of_batch, q_len, _], [_, _, kv_len, value_dim]) = (call.q.shape(), call.kv.v_shape());
    let pairs = out.chunks_exact_mut(q_len * value_dim).zip(lse.chunks_exact_mut(q_len)).enumerate();
    let heads = pairs.map(|(index, (out, lse))| Head { index, out, lse });
    // At least one float each, so that the scratch can be divided.
    let (each, workers) = ((q_len * kv_len).max(1), exec.workers(f64::INFINITY).min(batch * heads_of_batch).max(1));
    let sizes = [workers, 1, q_len, kv_len];
    let mut scores = zeros("scores", floats("scores", sizes)?.max(workers))?;
    let work = |scores: &mut [f32], head| one_head(call, exec.instruction_set(), head, &mut scores[..q_len * kv_len]);
    parts(exec.executor(), &mut scores, each, heads, work);
    Ok(())
}

fn one_head(call: &Call<'_>, isa: Isa, head: Head<'_>, scores: &mut [f32]) {
    let ([_, heads, q_len, head_dim], [_, kv_heads, kv_len, value_dim]) = (call.q.shape(), call.kv.v_shape());
    let [q, k, v] = inputs(call);
    let (b, h) = (head.index / heads, head.index % heads);
    let kv_head = h / (heads / kv_heads);
    let mut copies = [const { Vec::new() }; 3];
    let [q_copy, k_copy, v_copy] = &mut copies;
    let q = matrix(&q, b, h, q_copy);
    let k = matrix(&k, b, kv_head, k_copy);
    let v = matrix(&v, b, kv_head, v_copy);
    sgemm([q_len, head_dim, kv_len], call.scale, q, transposed(k), scores);

    let seen = visible_keys(call);
    // Sums of the rows' weights, replaced by their reciprocals once the LSE is written.
    let mut sums = vec![0.0; q_len];
    for i in 0..q_len {
        let row = &mut scores[i * kv_len..][..kv_len];
        let keys = seen(i);
        let end = keys.end.max(keys.prefix);
        if keys.prefix < keys.start {
            row[keys.prefix..keys.start].fill(f32::NEG_INFINITY);
        }
        row[end..].fill(0.0);
        let (max, sum) = softmax(isa, &mut row[..end]);
        head.lse[i] = max + sum.ln();
        // Nothing visible: the weights are zeros, and so is the output.
        sums[i] = if sum == 0.0 { 0.0 } else { 1.0 / sum };
    }

    let hides = call.visible.hides_keys();
    if hides && !(0..kv_len).all(|j| row_of(&v, j, value_dim).all(f32::is_finite)) {
        // A hidden ∞ or NaN times weight 0 would be NaN: leave hidden keys out one by one.
        head.out.fill(0.0);
        for (i, out) in head.out.chunks_exact_mut(value_dim).enumerate() {
            let weights = &scores[i * kv_len..][..kv_len];
            for j in each_key(seen(i)) {
                out.iter_mut().zip(row_of(&v, j, value_dim)).for_each(|(o, x)| *o += weights[j] * x);
            }
        }
    } else {
        sgemm([q_len, kv_len, value_dim], 1.0, Matrix { data: scores, strides: (kv_len, 1) }, v, head.out);
    }
    for (out, factor) in head.out.chunks_exact_mut(value_dim).zip(sums) {
        out.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Returns queries, keys and values.
fn inputs<'a>(call: &Call<'a>) -> [View<'a>; 3] {
    let Some([k, v]) = call.kv.tensors() else { unreachable!("other sources were refused") };
    [call.q, k, v].map(f32_view)
}

fn f32_view(tensor: Tensor<'_>) -> View<'_> {
    let Tensor::F32(view) = tensor else { unreachable!("other types were refused") };
    view
}

/// Returns the function that says which keys a row sees.
fn visible_keys(call: &Call<'_>) -> impl Fn(usize) -> VisibleKeys {
    let ([_, _, q_len, _], [_, _, kv_len, _]) = (call.q.shape(), call.kv.v_shape());
    let (offset, visible) = (call.alignment.offset(q_len, kv_len), call.visible);
    move |i| visible.keys(offset.saturating_add_unsigned(i), kv_len)
}

/// Iterates over the keys that a row sees.
fn each_key(VisibleKeys { prefix, start, end }: VisibleKeys) -> impl Iterator<Item = usize> {
    (0..prefix).chain(start..end)
}

/// Returns a head as a matrix for sgemm. Its strides may be any but negative ones; a head with those is copied.
fn matrix<'a>(view: &View<'a>, b: usize, h: usize, copy: &'a mut Vec<f32>) -> Matrix<'a> {
    if let Some((data, strides)) = view.head(b, h) {
        return Matrix { data, strides };
    }
    let [_, _, rows, dim] = view.shape();
    let at = |i| *view.get([b, h, i / dim, i % dim]).expect("inside the shape");
    *copy = (0..rows * dim).map(at).collect();
    Matrix { data: copy, strides: (dim, 1) }
}

fn transposed(Matrix { data, strides: (rows, columns) }: Matrix<'_>) -> Matrix<'_> {
    Matrix { data, strides: (columns, rows) }
}

/// Iterates over row `j` of a matrix.
fn row_of<'a>(matrix: &Matrix<'a>, j: usize, dim: usize) -> impl Iterator<Item = f32> + use<'a> {
    let Matrix { data, strides } = *matrix;
    (0..dim).map(move |n| data[j * strides.0 + n * strides.1])
}

/// Number of lanes of the loops that the compiler vectorises.
const LANES: usize = 16;

/// Turns scores into unnormalised weights; returns the largest score and the sum of the weights.
fn softmax(isa: Isa, row: &mut [f32]) -> (f32, f32) {
    let max = lanes(row, f32::NEG_INFINITY, |m, x| if x > m { x } else { m });
    // −∞ − −∞ would be NaN; without a finite score every weight is exp(−∞) = 0.
    let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
    row.iter_mut().for_each(|x| *x -= shift);
    exp_in_place(isa, row);
    (max, lanes(row, 0.0, |sum, x| sum + x))
}

/// Reduces in sixteen independent lanes, so that no operation waits for the previous one.
fn lanes(xs: &[f32], start: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let (chunks, rest) = xs.as_chunks::<LANES>();
    let mut acc = [start; LANES];
    for chunk in chunks {
        for (a, &x) in acc.iter_mut().zip(chunk) {
            *a = f(*a, x);
        }
    }
    acc.iter_mut().zip(rest).for_each(|(a, &x)| *a = f(*a, x));
    let halve = |acc: &mut [f32; LANES], range: Range<usize>| {
        let n = range.len();
        range.for_each(|i| acc[i] = f(acc[i], acc[i + n]));
    };
    [8, 4, 2, 1].into_iter().for_each(|n| halve(&mut acc, 0..n));
    acc[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa::{Alignment, naive};

    /// Batch, heads, key/value heads, rows, keys, lengths of keys and of values.
    pub(super) const SIZES: [[usize; 7]; 6] = [
        [1, 1, 1, 1, 1, 1, 1],
        [2, 4, 2, 7, 19, 5, 3],
        [1, 6, 1, 33, 16, 24, 17],
        [2, 2, 2, 5, 0, 4, 4],
        [1, 2, 2, 0, 5, 4, 4],
        [0, 2, 2, 3, 5, 4, 4],
    ];

    /// Reproducible numbers between −2 and 2; their sums do not cancel out.
    pub(super) fn fill(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 251) as f32 / 62.5 - 2.0).collect()
    }

    fn check(options: &Attention, inputs: Inputs<'_>, exec: Exec<'_>) {
        let shape = inputs.shape().unwrap();
        let [b, h, l, d] = [shape.batch, shape.heads, shape.q_len, shape.value_dim];
        let expected = naive::oracle(options, &inputs).unwrap();
        // First dense, then with batch-rows-heads-dim layout, which is written through a copy.
        for blhd in [false, true] {
            let (mut out, mut lse) = (vec![9.0; b * h * l * d], vec![9.0; b * h * l]);
            let view = if blhd { ViewMut::blhd(&mut out, [b, l, h, d]) } else { ViewMut::bhld(&mut out, [b, h, l, d]) };
            let outputs = Outputs::new(view.unwrap()).lse(ViewMut::bhl(&mut lse, [b, h, l]).unwrap());
            attention(options, inputs, outputs, exec).unwrap();
            let out = if blhd { View::blhd(&out, [b, l, h, d]) } else { View::bhld(&out, [b, h, l, d]) }.unwrap();
            let out = expected
                .out
                .iter()
                .enumerate()
                .map(|(i, &want)| (want, *out.get([i / d / l / h, i / d / l % h, i / d % l, i % d]).unwrap()));
            for (want, got) in out.chain(expected.lse.iter().copied().zip(lse)) {
                let close = (want - got as f64).abs() < 1e-5;
                assert!(close || want == got as f64 || want.is_nan() && got.is_nan(), "{shape:?}: {got} for {want}");
            }
        }
    }

    #[test]
    fn agrees_with_the_oracle() {
        let options = [
            Attention::new(),
            Attention::new().scale(-0.3),
            Attention::new().causal().align(Alignment::TopLeft),
            Attention::new().causal().align(Alignment::BottomRight),
            Attention::new().causal().align(Alignment::Offset(-3)),
        ];
        for [b, h, kv, lq, lk, d, dv] in SIZES {
            let (q, k, v) = (fill(b * h * lq * d, 1), fill(b * kv * lk * d, 2), fill(b * kv * lk * dv, 3));
            let inputs = Inputs::new(
                View::bhld(&q, [b, h, lq, d]).unwrap(),
                View::bhld(&k, [b, kv, lk, d]).unwrap(),
                View::bhld(&v, [b, kv, lk, dv]).unwrap(),
            );
            for options in &options {
                for isa in Isa::available() {
                    check(options, inputs, Exec::serial().isa(isa));
                }
                check(options, inputs, Exec::default().threads(3));
            }
        }
    }

    #[test]
    fn any_strides_will_do() {
        let data = fill(4 * 9 * 8, 4);
        let packed = View::packed_qkv(&data, [1, 9, 4, 8], 2);
        assert!(packed.is_err(), "the slice holds the queries alone");
        let data = fill(9 * 8 * 8, 4);
        let [q, k, v] = View::packed_qkv(&data, [1, 9, 4, 8], 2).unwrap();
        check(&Attention::new().causal(), Inputs::new(q, k, v), Exec::serial());
        let backwards = View::from_strides(&data, 71, [1, 4, 9, 8], [0, 72, -8, -1]).unwrap();
        let every_other = View::from_strides(&data, 0, [1, 2, 9, 8], [0, 144, 16, 2]).unwrap();
        let same = View::from_strides(&data, 0, [1, 2, 9, 8], [0, 0, 0, 1]).unwrap();
        check(&Attention::new(), Inputs::new(backwards, every_other, same), Exec::serial());
    }

    #[test]
    fn what_is_hidden_is_not_seen() {
        let (q, k, mut v) = (fill(6 * 4, 1), fill(6 * 4, 2), fill(6 * 4, 3));
        v[5 * 4 + 1] = f32::NAN;
        v[3 * 4] = f32::NEG_INFINITY;
        let view = |x| View::bhld(x, [1, 1, 6, 4]).unwrap();
        check(&Attention::new().causal(), Inputs::new(view(&q), view(&k), view(&v)), Exec::serial());
    }
}
