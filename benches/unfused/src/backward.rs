//! Backward pass of the baseline: five products by `matrixmultiply`'s sgemm a head. Per query head:
//!
//! ```text
//! P ← exp(scale · Q Kᵀ − lse)              sgemm, [q_len, kv_len]; 0 where a row does not see a key
//! dS ← P ∘ (dO Vᵀ − Σ dO ∘ out + d_lse)    sgemm; the sum is one number a row
//! dV ← Pᵀ dO                               sgemm
//! dQ ← scale · dS K                        sgemm
//! dK ← scale · dSᵀ Q                       sgemm
//! ```
//!
//! The weights are computed again from the log-sum-exp, as in the fused pass: keeping them from the forward pass would
//! take memory for `heads × q_len × kv_len` numbers.

use super::{
    Dense, SHORT, check_scores, each_key, f32_view, inputs, matrix, refuse_extras, row_of, transposed, visible_keys,
};
use crate::workers::{floats, parts, zeros};
use sdpa::{Attention, Dtype, Error, Exec, Gradients, Inputs, Isa, Saved, TensorMut, View};
use sdpa_kernels::gemm::{Matrix, sgemm};
use sdpa_kernels::{Call, VisibleKeys, exp_in_place};

/// Computes the gradients of attention through the full matrix of weights.
///
/// Gives the results of [`sdpa::attention_backward`](sdpa::attention_backward()) up to rounding. Key/value heads are divided
/// among threads. Complexity: time O(B·H·Lq·Lk·(D + Dv)), memory 2·Lq·Lk + Lk·max(D, Dv) numbers a thread. Gradients
/// that are not asked for are computed too, and dropped.
///
/// ```
/// use sdpa::{Attention, Exec, Gradients, Inputs, Outputs, Saved, View, ViewMut};
/// let (x, d_out, shape) = ([0.5; 3 * 4], [1.0; 3 * 4], [1, 1, 3, 4]);
/// let inputs = Inputs::new(View::bhld(&x, shape)?, View::bhld(&x, shape)?, View::bhld(&x, shape)?);
/// let (mut out, mut lse, mut dv) = ([0.0; 3 * 4], [0.0; 3], [0.0; 3 * 4]);
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, shape)?).lse(ViewMut::bhl(&mut lse, [1, 1, 3])?);
/// sdpa_unfused::attention(&Attention::new(), inputs, outputs, Exec::serial())?;
///
/// let saved = Saved::new(View::bhld(&out, shape)?, View::bhl(&lse, [1, 1, 3])?, View::bhld(&d_out, shape)?);
/// let gradients = Gradients::new().v(ViewMut::bhld(&mut dv, shape)?);
/// sdpa_unfused::attention_backward(&Attention::new(), inputs, saved, gradients, Exec::serial())?;
/// assert!(dv.iter().all(|x| (x - 1.0).abs() < 1e-6)); // three rows, a third each
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// As [`Attention::backward`], and those of [`attention`](super::attention()); an error for `dscale` and
/// `dparameters`, and for saved results or gradients that are not f32. Gradients are then untouched.
pub fn attention_backward(
    attention: &Attention,
    inputs: Inputs<'_>,
    saved: Saved<'_>,
    gradients: Gradients<'_>,
    exec: Exec,
) -> Result<(), Error> {
    let problem = attention.backward(inputs, saved, gradients)?;
    let shape = problem.shape();
    let (call, saved, gradients) = problem.into_parts();
    let Gradients { q, k, v, scale, parameters, .. } = gradients;
    let written = [&q, &k, &v].into_iter().flatten().map(TensorMut::dtype);
    let short = written.chain([saved.out.dtype(), saved.d_out.dtype()]).any(|dtype| dtype != Dtype::F32);
    refuse_extras(&call, [(SHORT, short), ("dscale", scale.is_some()), ("dparameters", parameters.is_some())])?;
    check_scores(&shape)?;
    let (rows, keys) = (shape.batch * shape.heads * shape.q_len, shape.batch * shape.kv_heads * shape.kv_len);
    let mut dense = [
        Dense::new("dq", q, rows * shape.head_dim)?,
        Dense::new("dk", k, keys * shape.head_dim)?,
        Dense::new("dv", v, keys * shape.value_dim)?,
    ];
    let elements = dense.each_mut().map(Dense::elements);
    if rows == 0 || keys == 0 {
        elements.into_iter().for_each(|gradient| gradient.fill(0.0));
    } else {
        all_heads(&call, &saved, elements, exec)?;
    }
    dense.into_iter().for_each(Dense::finish);
    Ok(())
}

/// One key/value head's part of the gradients, dense; `q` is that of all query heads on it.
struct KvHead<'a> {
    index: usize,
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
}

/// Divides the key/value heads among workers, which take the next one until none is left.
fn all_heads(call: &Call<'_>, saved: &Saved<'_>, [q, k, v]: [&mut [f32]; 3], exec: Exec) -> Result<(), Error> {
    let ([_, _, q_len, _], [batch, kv_heads, kv_len, _]) = (call.q.shape(), call.kv.v_shape());
    let heads = batch * kv_heads;
    let each = |gradient: &[f32]| gradient.len() / heads;
    let (of_q, of_k, of_v) = (each(q), each(k), each(v));
    let gradients = q.chunks_exact_mut(of_q).zip(k.chunks_exact_mut(of_k)).zip(v.chunks_exact_mut(of_v));
    let heads_of = gradients.enumerate().map(|(index, ((q, k), v))| KvHead { index, q, k, v });
    let workers = exec.workers(f64::INFINITY).min(heads).max(1);
    // Weights, gradients in scores, and a product.
    let widest = call.q.shape()[3].max(call.kv.v_shape()[3]);
    let scores = floats("scores", [2, workers, q_len, kv_len])?;
    let products = floats("products", [1, workers, kv_len, widest])?;
    let mut scratch = zeros("scores", scores.saturating_add(products))?;
    parts(exec.executor(), &mut scratch, 2 * q_len * kv_len + kv_len * widest, heads_of, |scratch, head| {
        one_kv_head(call, saved, exec.instruction_set(), scratch, head)
    });
    Ok(())
}

fn one_kv_head(call: &Call<'_>, saved: &Saved<'_>, isa: Isa, scratch: &mut [f32], head: KvHead<'_>) {
    let ([_, heads, q_len, head_dim], [_, kv_heads, kv_len, value_dim]) = (call.q.shape(), call.kv.v_shape());
    let [q, k, v] = inputs(call);
    let (weights, rest) = scratch.split_at_mut(q_len * kv_len);
    let (d_scores, product) = rest.split_at_mut(q_len * kv_len);
    let (b, kv_head, group) = (head.index / kv_heads, head.index % kv_heads, heads / kv_heads);
    let mut copies = [const { Vec::new() }; 2];
    let [k_copy, v_copy] = &mut copies;
    let (k, v) = (matrix(&k, b, kv_head, k_copy), matrix(&v, b, kv_head, v_copy));
    head.k.fill(0.0);
    head.v.fill(0.0);
    for (g, d_q) in head.q.chunks_exact_mut(q_len * head_dim).enumerate() {
        let h = kv_head * group + g;
        let mut copies = [const { Vec::new() }; 2];
        let [q_copy, d_out_copy] = &mut copies;
        let (q, d_out) = (matrix(&q, b, h, q_copy), matrix(&f32_view(saved.d_out), b, h, d_out_copy));
        sgemm([q_len, head_dim, kv_len], call.scale, q, transposed(k), weights);
        to_weights(call, saved, isa, [b, h], weights);
        sgemm([q_len, value_dim, kv_len], 1.0, d_out, transposed(v), d_scores);
        to_gradients(call, saved, [b, h], weights, d_scores);

        let dense = |data| Matrix { data, strides: (kv_len, 1) };
        let products = Products { weights: dense(weights), d_scores: dense(d_scores), q, k, d_out };
        let gradients = [&mut *d_q, &mut *head.k, &mut *head.v];
        if call.visible.hides_keys() && !products.are_finite(call) {
            products.add_by_pairs(call, gradients);
        } else {
            products.add(call, gradients, product);
        }
    }
}

/// Sets what a row does not see to 0.
fn clear_hidden(row: &mut [f32], VisibleKeys { prefix, start, end }: &VisibleKeys) {
    if prefix < start {
        row[*prefix..*start].fill(0.0);
    }
    row[*end.max(prefix)..].fill(0.0);
}

/// Turns scores into weights.
fn to_weights(call: &Call<'_>, saved: &Saved<'_>, isa: Isa, [b, h]: [usize; 2], scores: &mut [f32]) {
    let seen = visible_keys(call);
    for (i, row) in scores.chunks_exact_mut(call.kv.v_shape()[2]).enumerate() {
        let keys = seen(i);
        let lse = number(&saved.lse, [b, h, i]);
        let visible = &mut row[..keys.end.max(keys.prefix)];
        visible.iter_mut().for_each(|x| *x -= lse);
        exp_in_place(isa, visible);
        clear_hidden(row, &keys);
    }
}

/// Turns gradients in the weights into gradients in the scores.
fn to_gradients(call: &Call<'_>, saved: &Saved<'_>, [b, h]: [usize; 2], weights: &[f32], d_weights: &mut [f32]) {
    let (kv_len, value_dim) = (call.kv.v_shape()[2], call.kv.v_shape()[3]);
    let seen = visible_keys(call);
    let mut copies = [const { Vec::new() }; 2];
    let [out_copy, d_out_copy] = &mut copies;
    let out = matrix(&f32_view(saved.out), b, h, out_copy);
    let d_out = matrix(&f32_view(saved.d_out), b, h, d_out_copy);
    for (i, (weights, row)) in weights.chunks_exact(kv_len).zip(d_weights.chunks_exact_mut(kv_len)).enumerate() {
        let products = row_of(&d_out, i, value_dim).zip(row_of(&out, i, value_dim)).map(|(d, out)| d * out);
        let delta = products.sum::<f32>() - saved.d_lse.map_or(0.0, |d_lse| number(&d_lse, [b, h, i]));
        row.iter_mut().zip(weights).for_each(|(d, &weight)| *d = weight * (*d - delta));
        clear_hidden(row, &seen(i));
    }
}

/// Returns a row's number.
fn number(rows: &View<'_>, [b, h, i]: [usize; 3]) -> f32 {
    *rows.get([b, h, i, 0]).expect("a number for each row")
}

/// Factors of one query head's gradients.
struct Products<'a> {
    weights: Matrix<'a>,
    d_scores: Matrix<'a>,
    q: Matrix<'a>,
    k: Matrix<'a>,
    d_out: Matrix<'a>,
}

impl Products<'_> {
    /// Adds to the gradients in queries, keys and values; `product` holds a product for all keys.
    fn add(&self, call: &Call<'_>, [d_q, d_k, d_v]: [&mut [f32]; 3], product: &mut [f32]) {
        let ([_, _, q_len, head_dim], [_, _, kv_len, value_dim]) = (call.q.shape(), call.kv.v_shape());
        sgemm([q_len, kv_len, head_dim], call.scale, self.d_scores, self.k, d_q);
        sgemm([kv_len, q_len, head_dim], call.scale, transposed(self.d_scores), self.q, product);
        d_k.iter_mut().zip(&*product).for_each(|(sum, x)| *sum += x);
        sgemm([kv_len, q_len, value_dim], 1.0, transposed(self.weights), self.d_out, product);
        d_v.iter_mut().zip(&*product).for_each(|(sum, x)| *sum += x);
    }

    /// Returns true if nothing that is multiplied by 0 where a key is hidden is ∞ or NaN.
    fn are_finite(&self, call: &Call<'_>) -> bool {
        let ([_, _, q_len, head_dim], [_, _, kv_len, value_dim]) = (call.q.shape(), call.kv.v_shape());
        let finite = |x: &Matrix<'_>, rows: usize, dim| (0..rows).all(|i| row_of(x, i, dim).all(f32::is_finite));
        finite(&self.q, q_len, head_dim) && finite(&self.k, kv_len, head_dim) && finite(&self.d_out, q_len, value_dim)
    }

    /// As [`Self::add`], pair by pair of row and key: hidden keys are left out.
    fn add_by_pairs(&self, call: &Call<'_>, [d_q, d_k, d_v]: [&mut [f32]; 3]) {
        let ([_, _, q_len, head_dim], [_, _, kv_len, value_dim]) = (call.q.shape(), call.kv.v_shape());
        let seen = visible_keys(call);
        let add = |to: &mut [f32], factor: f32, x: &Matrix<'_>, i: usize| {
            let dim = to.len();
            to.iter_mut().zip(row_of(x, i, dim)).for_each(|(sum, x)| *sum += factor * x);
        };
        d_q.fill(0.0);
        for i in 0..q_len {
            for j in each_key(seen(i)) {
                let (weight, d_score) =
                    (self.weights.data[i * kv_len + j], call.scale * self.d_scores.data[i * kv_len + j]);
                add(&mut d_q[i * head_dim..][..head_dim], d_score, &self.k, j);
                add(&mut d_k[j * head_dim..][..head_dim], d_score, &self.q, i);
                add(&mut d_v[j * value_dim..][..value_dim], weight, &self.d_out, i);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{SIZES, fill};
    use sdpa::{Alignment, Mods, Outputs, Shape, ViewMut, Window, naive};

    /// Holds all gradients against the oracle's, written in the layout batch-heads-rows-dim or batch-rows-heads-dim.
    fn check(options: &Attention, tensors: &[Vec<f32>; 4], shape: Shape, exec: Exec) {
        let Shape { batch: b, heads: h, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
        let sizes = [[b, h, q_len, head_dim], [b, kv_heads, kv_len, head_dim], [b, kv_heads, kv_len, value_dim]];
        let (of_out, of_rows) = ([b, h, q_len, value_dim], [b, h, q_len, 1]);
        let view = |i: usize| View::bhld(&tensors[i], if i < 3 { sizes[i] } else { of_out }).unwrap();
        let inputs = Inputs::new(view(0), view(1), view(2));
        let d_lse = fill(b * h * q_len, 5);
        let d_lse = View::bhld(&d_lse, of_rows).unwrap();
        let expected = naive::gradients::<f64, _, _, _>(options, &inputs, view(3), Some(d_lse), &Mods::new()).unwrap();
        let (mut out, mut lse) = (vec![9.0; of_out.iter().product()], vec![9.0; b * h * q_len]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, of_out).unwrap());
        let outputs = outputs.lse(ViewMut::bhld(&mut lse, of_rows).unwrap());
        crate::attention(options, inputs, outputs, exec).unwrap();
        let saved = Saved::new(View::bhld(&out, of_out).unwrap(), View::bhld(&lse, of_rows).unwrap(), view(3));
        for blhd in [false, true] {
            let mut got = sizes.map(|shape| vec![9.0f32; shape.iter().product()]);
            let [dq, dk, dv] = got.each_mut();
            let to = |x, [b, h, l, d]: [usize; 4]| {
                if blhd { ViewMut::blhd(x, [b, l, h, d]) } else { ViewMut::bhld(x, [b, h, l, d]) }.unwrap()
            };
            let gradients = Gradients::new().q(to(dq, sizes[0])).k(to(dk, sizes[1])).v(to(dv, sizes[2]));
            attention_backward(options, inputs, saved.d_lse(d_lse), gradients, exec).unwrap();
            for ((got, want), [_, h, l, d]) in got.iter().zip([&expected.q, &expected.k, &expected.v]).zip(sizes) {
                for (i, &want) in want.iter().enumerate() {
                    let (b, head, row, n) = (i / d / l / h, i / d / l % h, i / d % l, i % d);
                    let got = f64::from(got[if blhd { ((b * l + row) * h + head) * d + n } else { i }]);
                    let close = (want - got).abs() < 5e-5 || want.is_nan() && got.is_nan();
                    assert!(close, "{shape:?}: {got} for {want}");
                }
            }
        }
    }

    fn tensors(shape: Shape) -> [Vec<f32>; 4] {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
        let (rows, keys) = (batch * heads * q_len, batch * kv_heads * kv_len);
        let lens = [rows * head_dim, keys * head_dim, keys * value_dim, rows * value_dim];
        core::array::from_fn(|i| fill(lens[i], i + 1))
    }

    #[test]
    fn agrees_with_the_oracle() {
        let options = [
            Attention::new(),
            Attention::new().scale(-0.3),
            Attention::new().causal().align(Alignment::TopLeft),
            Attention::new().causal().align(Alignment::Offset(-3)),
            Attention::new().window(Window::inclusive(Some(2), Some(1)).keep_first(1)).align(Alignment::BottomRight),
        ];
        for [batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim] in SIZES {
            let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
            for options in &options {
                for exec in Isa::available().map(|isa| Exec::serial().isa(isa)).chain([Exec::default().threads(3)]) {
                    check(options, &tensors(shape), shape, exec);
                }
            }
        }
    }

    #[test]
    fn what_is_hidden_is_not_seen() {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 6, kv_len: 6, head_dim: 4, value_dim: 4 };
        for tensor in 0..4 {
            let mut tensors = tensors(shape);
            tensors[tensor][2 * 4 + 1] = f32::NAN;
            tensors[tensor][5 * 4 + 1] = f32::NAN;
            check(&Attention::new().causal(), &tensors, shape, Exec::serial());
        }
    }

    #[test]
    fn options_of_the_fused_path_are_refused() {
        let (x, rows) = ([0.5f32; 3 * 4], [1.0f32; 3]);
        let (x, rows) = (View::bhld(&x, [1, 1, 3, 4]).unwrap(), View::bhld(&rows, [1, 1, 3, 1]).unwrap());
        let call = |options: &Attention, gradients: Gradients<'_>| {
            attention_backward(options, Inputs::new(x, x, x), Saved::new(x, rows, x), gradients, Exec::serial())
        };
        let refused =
            |argument| Err(Error::Needs { argument, needs: "the fused path; the unfused baseline has no such option" });
        assert_eq!(call(&Attention::new().softcap(2.0), Gradients::new()), refused("softcap"));
        assert_eq!(call(&Attention::new(), Gradients::new().scale(&mut 0.0)), refused("dscale"));
        let mut half = [sdpa_kernels::Bf16::default(); 3 * 4];
        let half = Gradients::new().q(ViewMut::bhld(&mut half, [1, 1, 3, 4]).unwrap());
        assert_eq!(call(&Attention::new(), half), refused("16-bit elements"));
    }
}
