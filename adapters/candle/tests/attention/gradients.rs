//! Gradients that flow through the operation, held against candle's own through matmul, softmax and matmul.

use crate::oracle::{Scores, TYPES, assert_close, assert_same, candle, mask, random};
use candle_core::{DType, Device, Result, Tensor, Var};
use sdpa_candle::{Alignment, Attention, KvCache, KvShape, Sdpa, Window, sdpa};
use std::num::NonZeroUsize;
use std::slice;

/// Queries of four heads, keys and values of two, as variables.
fn variables(rows: usize, keys: usize, dtype: DType) -> [Var; 3] {
    let qkv = [random((2, 4, rows, 32), 1), random((2, 2, keys, 32), 2), random((2, 2, keys, 24), 3)];
    qkv.map(|x| Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap())
}

/// Gradients of Σ out · weights, in `f32`.
fn gradients(vars: &[Var; 3], attend: impl Fn([&Tensor; 3]) -> Result<Tensor>) -> [Tensor; 3] {
    let out = attend(vars.each_ref().map(|var| var.as_tensor())).unwrap().to_dtype(DType::F32).unwrap();
    let loss = (&out * random(out.shape().clone(), 9)).unwrap().sum_all().unwrap();
    let store = loss.backward().unwrap();
    vars.each_ref().map(|var| store.get(var).expect("a gradient").to_dtype(DType::F32).unwrap())
}

fn check(call: &Sdpa, vars: &[Var; 3], scores: &Scores, bound: f32, what: &str) {
    let got = gradients(vars, |[q, k, v]| call.forward(q, k, v));
    // Candle's own gradients are of the same numbers in `f32`.
    let wide = vars.each_ref().map(|var| Var::from_tensor(&var.to_dtype(DType::F32).unwrap()).unwrap());
    let expected = gradients(&wide, |[q, k, v]| candle(q, k, v, scores));
    for ((name, got), expected) in ["q", "k", "v"].into_iter().zip(&got).zip(&expected) {
        assert_close(got, expected, bound, &format!("{what}: gradient in {name}"));
    }
}

#[test]
fn options_have_candles_gradients() {
    let plain = Scores::default;
    let vars = |rows, keys| variables(rows, keys, DType::F32);
    check(&Sdpa::default(), &vars(7, 300), &plain(), 1e-4, "plain");
    check(&Attention::new().scale(0.3).into(), &vars(5, 9), &Scores { scale: Some(0.3), ..plain() }, 1e-4, "scale");
    let softcap = Scores { softcap: Some(3.0), ..plain() };
    check(&Attention::new().softcap(3.0).into(), &vars(9, 20), &softcap, 1e-4, "softcap");
    let causal = Attention::new().causal().align(Alignment::BottomRight);
    let scores = Scores::keep(mask(9, 30, |row, key| key <= row + 21));
    check(&causal.into(), &vars(9, 30), &scores, 1e-4, "causal");
    let window = causal.window(Window::last_tokens(NonZeroUsize::new(4).unwrap()));
    let scores = Scores::keep(mask(9, 30, |row, key| key <= row + 21 && key + 4 > row + 21));
    check(&window.into(), &vars(9, 30), &scores, 1e-4, "window");
    let keep = mask(6, 11, |row, key| (row + key) % 3 > 0);
    let call = Sdpa::default().keep_mask(&keep);
    check(&call, &vars(6, 11), &Scores::keep(keep), 1e-4, "mask");
    let bias = random((1, 4, 6, 11), 5);
    let call = Sdpa::default().bias(&bias);
    check(&call, &vars(6, 11), &Scores { bias: Some(bias), ..plain() }, 1e-4, "bias");
    let sinks = random(4, 6);
    let call = Sdpa::default().sinks(&sinks);
    check(&call, &vars(6, 11), &Scores { sinks: Some(sinks), ..plain() }, 1e-4, "sinks");
}

#[test]
fn short_types_are_near_the_gradients_of_the_same_numbers() {
    for (dtype, bound) in [(DType::BF16, 0.05), (DType::F16, 0.01)] {
        assert!(TYPES.contains(&dtype));
        check(&Sdpa::default(), &variables(20, 40, dtype), &Scores::default(), bound, &format!("{dtype:?}"));
    }
}

/// Heads transposed out of `[batch, rows, heads, dim]`, as models have them, forward and back.
#[test]
fn transposed_heads_have_the_gradients_of_dense_ones() {
    let dense = variables(10, 10, DType::F32);
    let rows_first =
        dense.each_ref().map(|x| Var::from_tensor(&x.transpose(1, 2).unwrap().contiguous().unwrap()).unwrap());
    let expected = gradients(&dense, |[q, k, v]| Sdpa::default().forward(q, k, v));
    let got = gradients(&rows_first, |qkv| {
        let [q, k, v] = qkv.map(|x| x.transpose(1, 2).unwrap());
        Sdpa::default().forward(&q, &k, &v)
    });
    for (got, expected) in got.iter().zip(&expected) {
        assert_close(&got.transpose(1, 2).unwrap(), expected, 1e-6, "transposed");
    }
}

/// Dropout hides what the rule says, and scales the rest: candle's gradients through the same weights.
#[test]
fn dropout_is_part_of_the_gradients() {
    let vars = variables(6, 20, DType::F32);
    let rule = sdpa::Dropout { p: 0.25, seed: 3, offset: 1 };
    let call = Sdpa::new(Attention::new().dropout(rule.p, rule.seed, rule.offset));
    let got = gradients(&vars, |[q, k, v]| call.forward(q, k, v));
    let factors: Vec<f32> = (0..2 * 4 * 6 * 20)
        .map(|n| {
            let at = sdpa::Position {
                batch: n / 480,
                head: n / 120 % 4,
                row: n / 20 % 6,
                key: n % 20,
                position: 0,
                distance: 0,
            };
            if rule.keeps(at, 4) { rule.factor() } else { 0.0 }
        })
        .collect();
    let factors = Tensor::from_vec(factors, (2, 4, 6, 20), &Device::Cpu).unwrap();
    let expected = gradients(&vars, |[q, k, v]| {
        let repeat = |x: &Tensor| {
            let (b, h, l, d) = x.dims4()?;
            x.unsqueeze(2)?.broadcast_as((b, h, 2, l, d))?.reshape((b, 2 * h, l, d))
        };
        let scores = (q.matmul(&repeat(k)?.t()?)? / 32f64.sqrt())?;
        (candle_nn::ops::softmax(&scores, 3)? * &factors)?.matmul(&repeat(v)?)
    });
    for ((name, got), expected) in ["q", "k", "v"].into_iter().zip(&got).zip(&expected) {
        assert_close(got, expected, 1e-4, &format!("dropout: gradient in {name}"));
    }
}

/// Queries, keys and values as variables, or not, beside the variables of an option.
fn of_options(vars: &[Var], attend: impl Fn() -> Result<Tensor>) -> Vec<Tensor> {
    let out = attend().unwrap().to_dtype(DType::F32).unwrap();
    let loss = (&out * random(out.shape().clone(), 9)).unwrap().sum_all().unwrap();
    let store = loss.backward().unwrap();
    vars.iter().map(|var| store.get(var).expect("a gradient in every variable").clone()).collect()
}

/// Holds a call in which only options are variables against candle's own, then one in which all are.
fn check_options(dtype: DType, options: &[Var], call: &Sdpa, scores: &Scores, what: &str) {
    for all in [false, true] {
        let qkv = variables(6, 11, dtype);
        let [q, k, v] = qkv.each_ref().map(|x| if all { x.as_tensor().clone() } else { x.as_detached_tensor() });
        let vars = [if all { &qkv[..] } else { &[] }, options].concat();
        let got = of_options(&vars, || call.forward(&q, &k, &v));
        let expected = of_options(&vars, || candle(&q, &k, &v, scores));
        // Gradients of slopes add up products with distances of up to 10, rounded by candle, too.
        let bound = if dtype == DType::F32 { 1e-3 } else { 0.5 };
        for (n, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(got.dtype(), expected.dtype(), "{what}");
            assert_close(got, expected, bound, &format!("{what}, {dtype:?}: gradient {n}, all: {all}"));
        }
    }
}

#[test]
fn a_bias_slopes_or_sinks_that_are_variables_have_candles_gradients() {
    let var = |x: Tensor| Var::from_tensor(&x).unwrap();
    let distances: Vec<f32> = (0..66).map(|n| -((n / 11 + 5) as f32 - (n % 11) as f32).abs()).collect();
    let distances = Tensor::from_vec(distances, (1, 1, 6, 11), &Device::Cpu).unwrap();
    let by_distance = |slopes: &Var| slopes.reshape((1, 4, 1, 1)).unwrap().broadcast_mul(&distances).unwrap();
    let aligned = Attention::new().align(Alignment::BottomRight);
    for dtype in [DType::F32, DType::BF16] {
        let shapes: [&[usize]; 6] = [&[2, 4, 6, 11], &[1, 4, 6, 11], &[2, 1, 1, 11], &[6, 11], &[11], &[4, 6, 1]];
        for shape in shapes {
            let bias = var(random(shape, 5).to_dtype(dtype).unwrap());
            let scores = Scores { bias: Some(bias.as_tensor().clone()), ..Scores::default() };
            check_options(
                dtype,
                slice::from_ref(&bias),
                &Sdpa::default().bias(&bias),
                &scores,
                &format!("bias {shape:?}"),
            );
        }
        let sinks = var(random(4, 6));
        let scores = Scores { sinks: Some(sinks.as_tensor().clone()), ..Scores::default() };
        check_options(dtype, slice::from_ref(&sinks), &Sdpa::default().sinks(&sinks), &scores, "sinks");
        let slopes = var(random(4, 7));
        let scores = Scores { bias: Some(by_distance(&slopes)), ..Scores::default() };
        check_options(dtype, slice::from_ref(&slopes), &Sdpa::new(aligned).alibi(&slopes), &scores, "slopes");
        // What depends on a variable, and all at once, where the order of the gradients would show.
        let [bias, sinks] = [var(random((4, 6, 11), 5)), var(random(4, 6).to_dtype(DType::F64).unwrap())];
        let twice = (bias.as_tensor() * 2.0).unwrap();
        let call =
            Sdpa::new(aligned).bias(&twice.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap());
        let call = call.alibi(&slopes).sinks(&sinks);
        let scores = Scores {
            bias: Some(twice.broadcast_add(&by_distance(&slopes)).unwrap()),
            sinks: Some(sinks.to_dtype(DType::F32).unwrap()),
            ..Scores::default()
        };
        check_options(dtype, &[bias, slopes, sinks], &call, &scores, "all");
    }
}

/// With options that are variables the results are those without.
#[test]
fn what_candle_tracks_changes_no_bit() {
    let (bias, sinks) = (random((4, 6, 11), 5), random(4, 6));
    let [q, k, v] = variables(6, 11, DType::BF16).map(|x| x.as_detached_tensor());
    let plain = Sdpa::default().bias(&bias).sinks(&sinks).forward(&q, &k, &v).unwrap();
    let [bias, sinks] = [bias, sinks].map(|x| Var::from_tensor(&x).unwrap());
    let tracked = Sdpa::default().bias(&bias).sinks(&sinks).forward(&q, &k, &v).unwrap();
    assert_same(&tracked, &plain, "tracked");
}

/// A cache has no backward pass: whatever candle tracks is named, instead of having no gradient in silence.
#[test]
fn a_step_back_through_a_cache_is_an_error_that_names_the_argument() {
    let plain = || [random((1, 4, 3, 8), 1), random((1, 2, 5, 8), 2), random((1, 2, 5, 8), 3)];
    let var = |x: &Tensor| Var::from_tensor(x).unwrap().as_tensor().clone();
    let said = |[q, k, v]: [Tensor; 3], call: &Sdpa| {
        let mut cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 }).unwrap();
        cache.append(&k, &v).unwrap();
        let out = cache.attend(&q, call).unwrap();
        let weight = Var::from_tensor(&random(out.shape().clone(), 9)).unwrap();
        let loss = (&out * weight.as_tensor()).unwrap().sum_all().unwrap();
        loss.backward().map_or_else(|e| e.to_string(), |_| "nothing".into())
    };
    let [bias, slopes, sinks] = [random((3, 5), 4), random(4, 5), random(4, 6)];
    let aligned = Sdpa::new(Attention::new().align(Alignment::BottomRight));
    let constant = aligned.clone().bias(&bias).alibi(&slopes).sinks(&sinks);
    assert_eq!(said(plain(), &constant), "nothing", "the weight, which is no argument, has a gradient");
    for (n, argument) in ["q", "k", "v"].into_iter().enumerate() {
        let mut qkv = plain();
        qkv[n] = var(&qkv[n]);
        assert!(said(qkv, &constant).starts_with(&format!("sdpa: {argument}: needs Sdpa::forward for a gradient")));
    }
    let calls = [
        ("bias", constant.clone().bias(&var(&bias))),
        ("alibi", constant.clone().alibi(&var(&slopes))),
        ("sinks", constant.clone().sinks(&var(&sinks))),
    ];
    for (argument, call) in calls {
        let said = said(plain(), &call);
        assert!(said.starts_with(&format!("sdpa: {argument}: needs Sdpa::forward for a gradient")), "{said}");
    }
}
