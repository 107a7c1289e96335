//! Held against burn's own attention, for all of its options, layouts and types.

#[path = "../../../tests/support/mod.rs"]
mod support;

use burn_tensor::module::attention as burns;
use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{Bool, DType, Device, Tensor, TensorData};
use core::cell::RefCell;
use core::num::NonZeroUsize;
use sdpa::{Alignment, Attention, Window};
use sdpa_burn::{Error, attention, attention_with};
use support::Rng;

const NONE: AttentionModuleOptions = AttentionModuleOptions { scale: None, softcap: None, is_causal: false };

thread_local! {
    // Each test has its own thread, and so the same numbers each time.
    static RNG: RefCell<Rng> = RefCell::new(Rng::new(25));
}

fn random<T: burn_tensor::Element>(shape: [usize; 4], mut draw: impl FnMut(&mut Rng) -> T) -> TensorData {
    let n = shape.iter().product();
    TensorData::new(RNG.with_borrow_mut(|rng| (0..n).map(|_| draw(rng)).collect::<Vec<T>>()), shape)
}

fn normal(shape: [usize; 4]) -> Tensor<4> {
    Tensor::from_data(random(shape, Rng::normal), &Device::default())
}

/// True at about a third of the places.
fn some(shape: [usize; 4]) -> Tensor<4, Bool> {
    Tensor::from_data(random(shape, |rng| rng.below(3) == 0), &Device::default())
}

fn numbers(tensor: Tensor<4>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().try_to_vec().expect("f32")
}

#[track_caller]
fn assert_close(ours: Tensor<4>, burns: Tensor<4>, bound: f32) {
    assert_eq!((ours.dims(), ours.dtype()), (burns.dims(), burns.dtype()));
    let (ours, burns) = (numbers(ours), numbers(burns));
    let most = ours.iter().zip(&burns).map(|(a, b)| (a - b).abs()).fold(0.0, |m: f32, d| if d <= m { m } else { d });
    assert!(most <= bound, "off by {most:e}, bound {bound:e}");
    assert!(ours.iter().any(|&x| x != 0.0), "nothing but zeros");
}

/// Both on the same call.
#[track_caller]
fn compare(
    [q, k, v]: [Tensor<4>; 3],
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) {
    let ours = attention(q.clone(), k.clone(), v.clone(), mask.clone(), bias.clone(), options).expect("a good call");
    assert_close(ours, burns(q, k, v, mask, bias, options), 2e-5);
}

/// Batch 2, 6 heads of 20, 33 rows, 70 keys, values of 24.
fn call() -> [Tensor<4>; 3] {
    [normal([2, 6, 33, 20]), normal([2, 6, 70, 20]), normal([2, 6, 70, 24])]
}

#[test]
fn options() {
    compare(call(), None, None, NONE);
    compare(call(), None, None, AttentionModuleOptions { scale: Some(0.3), ..NONE });
    compare(call(), None, None, AttentionModuleOptions { softcap: Some(2.0), ..NONE });
    let all = AttentionModuleOptions { scale: Some(0.5), softcap: Some(5.0), is_causal: true };
    compare(call(), Some(some([2, 6, 33, 70])), Some(normal([2, 6, 33, 70])), all);
}

/// With fewer rows than keys, the same number, and more: rows then stand before the first key and see nothing.
#[test]
fn causal() {
    let causal = AttentionModuleOptions { is_causal: true, ..NONE };
    for (rows, keys) in [(33, 70), (40, 40), (1, 300), (9, 5)] {
        let tensors = [normal([2, 3, rows, 16]), normal([2, 3, keys, 16]), normal([2, 3, keys, 16])];
        compare(tensors, None, None, causal);
    }
}

/// Long enough for burn's tiled function, 256 Ki scores and more.
#[test]
fn long_calls() {
    let tensors = [normal([1, 2, 520, 16]), normal([1, 2, 530, 16]), normal([1, 2, 530, 16])];
    compare(tensors, Some(some([1, 1, 520, 530])), None, AttentionModuleOptions { is_causal: true, ..NONE });
}

#[test]
fn masks_and_biases_of_every_shape() {
    for shape in [[2, 6, 33, 70], [1, 6, 33, 70], [2, 1, 33, 70], [2, 1, 1, 70], [1, 1, 33, 1], [1, 1, 1, 1]] {
        // One column stands for all keys: a row would see all or none.
        let mask = if shape[3] > 1 { some(shape) } else { Tensor::full(shape, false, &Device::default()) };
        compare(call(), Some(mask), None, NONE);
        compare(call(), None, Some(normal(shape)), NONE);
    }
    let expanded = some([2, 1, 1, 70]).expand([2, 6, 33, 70]);
    compare(call(), Some(expanded), Some(normal([1, 6, 1, 70]).expand([2, 6, 33, 70])), NONE);
    compare(call(), Some(some([2, 6, 70, 33]).swap_dims(2, 3)), Some(normal([6, 2, 33, 70]).swap_dims(0, 1)), NONE);
}

/// Transposed, cut, stepped, reversed and repeated: as they lie, with the bits of dense copies.
#[test]
fn layouts() {
    let forms: [fn(Tensor<4>) -> Tensor<4>; 6] = [
        |x| x,
        |x| x.swap_dims(1, 2).mul_scalar(1.0).swap_dims(1, 2),
        |x| x.swap_dims(2, 3).mul_scalar(1.0).swap_dims(2, 3),
        |x| {
            let [b, h, l, d] = x.dims();
            let wide = Tensor::cat(vec![x.clone(), x], 3).mul_scalar(1.0);
            wide.slice([0..b, 0..h, 0..l, d..2 * d])
        },
        |x| x.flip([1, 2, 3]),
        |x| {
            let [b, _, l, d] = x.dims();
            x.slice([0..b, 0..1, 0..l, 0..d]).expand([b, 6, l, d])
        },
    ];
    for (n, form) in forms.iter().enumerate() {
        let [q, k, v] = call().map(form);
        compare([q.clone(), k.clone(), v.clone()], None, None, NONE);
        let dense = |x: &Tensor<4>| Tensor::<4>::from_data(x.clone().into_data(), &Device::default());
        let copied = attention(dense(&q), dense(&k), dense(&v), None, None, NONE).expect("a good call");
        let ours = attention(q, k, v, None, None, NONE).expect("a good call");
        assert!(numbers(ours) == numbers(copied), "form {n}");
    }
}

#[test]
fn grouped_heads() {
    let tensors = [normal([2, 6, 33, 20]), normal([2, 2, 70, 20]), normal([2, 2, 70, 24])];
    compare(tensors.clone(), Some(some([2, 6, 33, 70])), None, NONE);
    let [q, k, v] = tensors;
    let six = |x: Tensor<4>| {
        let [b, h, l, d] = x.dims();
        x.reshape([b, h, 1, l * d]).expand([b, h, 3, l * d]).reshape([b, 3 * h, l, d])
    };
    let repeated = attention(q.clone(), six(k.clone()), six(v.clone()), None, None, NONE).expect("a good call");
    assert!(numbers(attention(q, k, v, None, None, NONE).expect("a good call")) == numbers(repeated));
}

#[test]
fn types_of_16_bits() {
    for (dtype, bound) in [(DType::BF16, 2e-2), (DType::F16, 3e-3)] {
        let [q, k, v] = call().map(|x| x.cast(dtype));
        let bias = normal([1, 6, 33, 70]).cast(dtype);
        let ours = attention(q.clone(), k.clone(), v.clone(), None, Some(bias.clone()), NONE).expect("a good call");
        let wide = [q.clone(), k.clone(), v.clone(), bias.clone()].map(|x| x.cast(DType::F32));
        let [wq, wk, wv, wbias] = wide;
        let widened = attention(wq, wk, wv, None, Some(wbias), NONE).expect("a good call");
        assert!(numbers(ours.clone()) == numbers(widened.cast(dtype)), "the bits of widening first, rounded once");
        assert_close(ours, burns(q, k, v, None, Some(bias), NONE), bound);
    }
    // Types may be mixed, which burn's own does not take; the result has that of the queries.
    let [q, k, v] = call();
    let mixed = attention(q.clone(), k.cast(DType::BF16), v.cast(DType::F16), None, None, NONE).expect("a good call");
    assert_eq!(mixed.dtype(), DType::F32);
}

#[test]
fn rows_that_see_nothing() {
    let hidden = Tensor::<4, Bool>::full([2, 1, 33, 70], true, &Device::default());
    let [q, k, v] = call();
    let ours = attention(q, k, v, Some(hidden), None, NONE).expect("a good call");
    assert!(numbers(ours).iter().all(|&x| x == 0.0));
    let [q, ..] = call();
    let none = attention(q, normal([2, 6, 0, 20]), normal([2, 6, 0, 24]), None, None, NONE).expect("a good call");
    assert!(none.dims() == [2, 6, 33, 24] && numbers(none).iter().all(|&x| x == 0.0));
}

/// A window, which burn has no option for, against the mask that says the same.
#[test]
fn settings_of_sdpa() {
    let settings = Attention::new()
        .causal()
        .window(Window::last_tokens(const { NonZeroUsize::new(5).unwrap() }))
        .align(Alignment::BottomRight);
    let [q, k, v] = call();
    let ours = attention_with(&settings, [q.clone(), k.clone(), v.clone()], None, None).expect("a good call");
    let hidden: Vec<bool> =
        (0..33 * 70usize).map(|n| (n / 70 + 37).checked_sub(n % 70).is_none_or(|before| before >= 5)).collect();
    let hidden = TensorData::new(hidden, [1, 1, 33, 70]);
    let mask = Tensor::<4, Bool>::from_data(hidden, &Device::default());
    assert_close(ours, burns(q, k, v, Some(mask), None, NONE), 2e-5);
}

#[test]
fn refusals() {
    let [q, k, v] = call();
    let refused = |q, k, v, mask, options| attention(q, k, v, mask, None, options).expect_err("refused").to_string();
    let said = refused(q.clone().cast(DType::F64), k.clone(), v.clone(), None, NONE);
    assert_eq!(said, "query: elements are F64, but must be f32, bf16 or f16");
    let said = refused(q.clone(), normal([2, 4, 70, 20]), normal([2, 4, 70, 24]), None, NONE);
    assert!(said.contains('6') && said.contains('4'), "{said}");
    let said = refused(q.clone(), k.clone(), v.clone(), Some(some([2, 6, 33, 69])), NONE);
    assert!(said.contains("mask") && said.contains("69") && said.contains("70"), "{said}");
    let said = refused(q.clone(), k.clone(), v.clone(), None, AttentionModuleOptions { softcap: Some(-1.0), ..NONE });
    assert!(said.contains("softcap") && said.contains("-1"), "{said}");
    let error = attention(q, normal([2, 6, 70, 21]), v, None, None, NONE).expect_err("refused");
    assert!(matches!(error, Error::Attention(_)), "{error}");
}
