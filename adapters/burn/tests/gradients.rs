//! Gradients that flow through the operation, held against those of burn's own attention under its autodiff.

#[path = "../../../tests/support/mod.rs"]
mod support;

use burn_tensor::module::attention as burns;
use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{Bool, DType, Device, GradientCheckpointingStrategy, Tensor, TensorData};
use core::num::NonZeroUsize;
use sdpa::{Alignment, Attention, Dropout, Position, Window};
use sdpa_burn::{attention, attention_with};
use support::Rng;

const NONE: AttentionModuleOptions = AttentionModuleOptions { scale: None, softcap: None, is_causal: false };

fn from<T: burn_tensor::Element>(shape: [usize; 4], seed: u64, mut draw: impl FnMut(&mut Rng) -> T) -> TensorData {
    let mut rng = Rng::new(seed);
    TensorData::new((0..shape.iter().product()).map(|_| draw(&mut rng)).collect::<Vec<T>>(), shape)
}

fn normal(shape: [usize; 4], seed: u64) -> Tensor<4> {
    Tensor::from_data(from(shape, seed, Rng::normal), &Device::default())
}

/// True at about a third of the places.
fn some(shape: [usize; 4]) -> Tensor<4, Bool> {
    Tensor::from_data(from(shape, 7, |rng| rng.below(3) == 0), &Device::default())
}

/// Batch 2, 6 heads of 20, 33 rows, 70 keys, values of 24.
fn call() -> Vec<Tensor<4>> {
    vec![normal([2, 6, 33, 20], 1), normal([2, 6, 70, 20], 2), normal([2, 6, 70, 24], 3)]
}

/// Σ out · weights, where the weights are exact in every type.
fn loss(out: Tensor<4>) -> Tensor<1> {
    let (shape, dtype) = (out.dims(), out.dtype());
    let weights = from(shape, 9, |rng| rng.below(33) as f32 / 8.0 - 2.0);
    (out * Tensor::<4>::from_data(weights, &Device::default()).cast(dtype)).sum()
}

/// Gradients of the loss in every tensor, in `f32`.
fn gradients(tensors: &[Tensor<4>], attend: impl Fn(&[Tensor<4>]) -> Tensor<4>) -> Vec<Tensor<4>> {
    let leaves: Vec<_> = tensors.iter().map(|x| x.clone().autodiff().require_grad()).collect();
    let all = loss(attend(&leaves)).backward();
    let gradient = |leaf: &Tensor<4>| leaf.grad(&all).expect("a gradient");
    let gradients: Vec<_> = leaves.iter().map(gradient).collect();
    for (gradient, tensor) in gradients.iter().zip(tensors) {
        assert_eq!((gradient.dims(), gradient.dtype()), (tensor.dims(), tensor.dtype()));
    }
    gradients.into_iter().map(|gradient| gradient.cast(DType::F32)).collect()
}

fn numbers(tensor: &Tensor<4>) -> Vec<f32> {
    tensor.clone().into_data().try_to_vec().expect("f32")
}

#[track_caller]
fn assert_close(ours: &[Tensor<4>], burns: &[Tensor<4>], bound: f32) {
    assert_eq!(ours.len(), burns.len());
    for ((name, ours), burns) in ["query", "key", "value", "bias"].into_iter().zip(ours).zip(burns) {
        let (ours, burns) = (numbers(ours), numbers(burns));
        let most = ours.iter().zip(&burns).map(|(a, b)| (a - b).abs());
        let most = most.fold(0.0, |m: f32, d| if d <= m { m } else { d });
        assert!(most <= bound, "gradient in {name}: off by {most:e}, bound {bound:e}");
        assert!(ours.iter().any(|&x| x != 0.0), "gradient in {name}: nothing but zeros");
    }
}

/// Both on the same call; a fourth tensor is a bias.
#[track_caller]
fn compare(tensors: &[Tensor<4>], mask: Option<Tensor<4, Bool>>, options: AttentionModuleOptions) {
    let call = |x: &[Tensor<4>]| (x[0].clone(), x[1].clone(), x[2].clone(), mask.clone(), x.get(3).cloned());
    let ours = gradients(tensors, |x| {
        let (q, k, v, mask, bias) = call(x);
        attention(q, k, v, mask, bias, options).expect("a good call")
    });
    let theirs = gradients(tensors, |x| {
        let (q, k, v, mask, bias) = call(x);
        burns(q, k, v, mask, bias, options)
    });
    assert_close(&ours, &theirs, 1e-4);
}

#[test]
fn options_have_burns_gradients() {
    compare(&call(), None, NONE);
    compare(&call(), None, AttentionModuleOptions { scale: Some(0.3), ..NONE });
    compare(&call(), None, AttentionModuleOptions { softcap: Some(2.0), ..NONE });
    compare(&call(), None, AttentionModuleOptions { is_causal: true, ..NONE });
    compare(&call(), Some(some([2, 1, 33, 70])), NONE);
    let mut tensors = call();
    tensors.push(normal([2, 6, 33, 70], 4));
    compare(
        &tensors,
        Some(some([2, 6, 33, 70])),
        AttentionModuleOptions { scale: Some(0.5), softcap: Some(5.0), is_causal: true },
    );
}

/// The gradient in a bias is summed over what it is broadcast to.
#[test]
fn biases_of_every_shape() {
    for shape in [[1, 6, 33, 70], [2, 1, 33, 70], [1, 6, 1, 70], [1, 1, 33, 70]] {
        let mut tensors = call();
        tensors.push(normal(shape, 4));
        compare(&tensors, None, NONE);
    }
}

/// Heads of `[batch, rows, heads, dim]`, swapped; and one tensor for all three: its gradients add up.
#[test]
fn layouts_and_self_attention() {
    let swapped = |x: &Tensor<4>| x.clone().swap_dims(1, 2);
    let tensors: Vec<_> = call().iter().map(|x| swapped(x).mul_scalar(1.0)).collect();
    let ours = gradients(&tensors, |x| {
        attention(swapped(&x[0]), swapped(&x[1]), swapped(&x[2]), None, None, NONE).expect("a good call")
    });
    let theirs = gradients(&tensors, |x| burns(swapped(&x[0]), swapped(&x[1]), swapped(&x[2]), None, None, NONE));
    assert_close(&ours, &theirs, 1e-4);
    let x = [normal([1, 2, 40, 16], 5)];
    let ours =
        gradients(&x, |x| attention(x[0].clone(), x[0].clone(), x[0].clone(), None, None, NONE).expect("a good call"));
    let theirs = gradients(&x, |x| burns(x[0].clone(), x[0].clone(), x[0].clone(), None, None, NONE));
    assert_close(&ours, &theirs, 1e-4);
}

/// Two key/value heads, each for three query heads.
fn repeated(x: &Tensor<4>) -> Tensor<4> {
    let [b, h, l, d] = x.dims();
    x.clone().reshape([b, h, 1, l * d]).expand([b, h, 3, l * d]).reshape([b, 3 * h, l, d])
}

#[test]
fn grouped_heads() {
    let tensors = [normal([2, 6, 33, 20], 1), normal([2, 2, 70, 20], 2), normal([2, 2, 70, 24], 3)];
    let ours = gradients(&tensors, |x| {
        attention(x[0].clone(), x[1].clone(), x[2].clone(), None, None, NONE).expect("a good call")
    });
    let theirs = gradients(&tensors, |x| burns(x[0].clone(), repeated(&x[1]), repeated(&x[2]), None, None, NONE));
    assert_close(&ours, &theirs, 1e-4);
}

/// Gradients have the type of their tensors, and are near those of the same numbers in `f32`.
#[test]
fn types_of_16_bits() {
    for (dtype, bound) in [(DType::BF16, 0.05), (DType::F16, 0.01)] {
        let mut tensors = call();
        tensors.push(normal([1, 6, 33, 70], 4));
        let short: Vec<_> = tensors.iter().map(|x| x.clone().cast(dtype)).collect();
        let wide: Vec<_> = short.iter().map(|x| x.clone().cast(DType::F32)).collect();
        let bias = |x: &[Tensor<4>]| Some(x[3].clone());
        let ours = gradients(&short, |x| {
            attention(x[0].clone(), x[1].clone(), x[2].clone(), None, bias(x), NONE).expect("a good call")
        });
        let theirs = gradients(&wide, |x| burns(x[0].clone(), x[1].clone(), x[2].clone(), None, bias(x), NONE));
        assert_close(&ours, &theirs, bound);
    }
}

/// A window against the mask that says the same.
#[test]
fn windows() {
    let settings = Attention::new()
        .causal()
        .window(Window::last_tokens(const { NonZeroUsize::new(5).unwrap() }))
        .align(Alignment::BottomRight);
    let ours = gradients(&call(), |x| {
        attention_with(&settings, [x[0].clone(), x[1].clone(), x[2].clone()], None, None).expect("a good call")
    });
    let hidden: Vec<bool> =
        (0..33 * 70usize).map(|n| (n / 70 + 37).checked_sub(n % 70).is_none_or(|before| before >= 5)).collect();
    let mask = Tensor::<4, Bool>::from_data(TensorData::new(hidden, [1, 1, 33, 70]), &Device::default());
    let theirs =
        gradients(&call(), |x| burns(x[0].clone(), x[1].clone(), x[2].clone(), Some(mask.clone()), None, NONE));
    assert_close(&ours, &theirs, 1e-4);
}

/// Dropout hides what the rule says, and scales the rest: burn's gradients through the same weights.
#[test]
fn dropout() {
    let rule = Dropout { p: 0.25, seed: 3, offset: 1 };
    let settings = Attention::new().dropout(rule.p, rule.seed, rule.offset);
    let ours = gradients(&call(), |x| {
        attention_with(&settings, [x[0].clone(), x[1].clone(), x[2].clone()], None, None).expect("a good call")
    });
    let factor = |n: usize| {
        let (batch, head, row, key) = (n / 70 / 33 / 6, n / 70 / 33 % 6, n / 70 % 33, n % 70);
        let at = Position { batch, head, row, key, position: 0, distance: 0 };
        if rule.keeps(at, 6) { rule.factor() } else { 0.0 }
    };
    let factors: Vec<f32> = (0..2 * 6 * 33 * 70).map(factor).collect();
    let factors = Tensor::<4>::from_data(TensorData::new(factors, [2, 6, 33, 70]), &Device::default());
    let theirs = gradients(&call(), |x| {
        let scores = x[0].clone().matmul(x[1].clone().swap_dims(2, 3)) / 20f32.sqrt();
        (burn_tensor::activation::softmax(scores, 3) * factors.clone()).matmul(x[2].clone())
    });
    assert_close(&ours, &theirs, 1e-4);
}

/// Constants get no gradient, whether autodiff knows them or not, and a call of constants records nothing.
#[test]
fn constants() {
    let tensors = call();
    let [q, k, v] = [0, 1, 2].map(|i| tensors[i].clone());
    let key = k.clone().autodiff().require_grad();
    let out = attention(q.clone().autodiff(), key.clone(), v.clone(), None, None, NONE).expect("a good call");
    let mask = some([2, 1, 33, 70]).autodiff();
    let masked = attention(q.clone(), key.clone(), v.clone(), Some(mask), None, NONE).expect("a good call");
    assert!(out.is_tracked() && masked.is_tracked());
    let got = [key.grad(&loss(out).backward()).expect("a gradient")];
    let all = gradients(&tensors, |x| {
        attention(x[0].clone(), x[1].clone(), x[2].clone(), None, None, NONE).expect("a good call")
    });
    assert_eq!(numbers(&got[0]), numbers(&all[1]));
    let constant = attention(q.clone().autodiff(), k.clone(), v.clone(), None, None, NONE).expect("a good call");
    assert!(constant.is_autodiff() && !constant.is_tracked());
    assert!(!attention(q, k, v, None, None, NONE).expect("a good call").is_autodiff());
}

/// Checkpoints compute what led to the tensors again: the same gradients.
#[test]
fn checkpointing() {
    let attend = |x: &[Tensor<4>]| {
        let [q, k, v] = [0, 1, 2].map(|i| x[i].clone().mul_scalar(0.5).tanh());
        attention(q, k, v, None, None, NONE).expect("a good call")
    };
    let plain = gradients(&call(), attend);
    let balanced = GradientCheckpointingStrategy::Balanced;
    let leaves: Vec<_> = call()
        .into_iter()
        .map(|x| x.autodiff().with_gradient_checkpointing_strategy(balanced).require_grad())
        .collect();
    let all = loss(attend(&leaves)).backward();
    for (leaf, plain) in leaves.iter().zip(&plain) {
        assert_eq!(numbers(&leaf.grad(&all).expect("a gradient")), numbers(plain));
    }
    let [q, k, v] = [0, 1, 2].map(|i| leaves[i].clone());
    let error = attention(q, k.without_autodiff().autodiff(), v, None, None, NONE).expect_err("refused").to_string();
    assert!(error.starts_with("key: ") && error.contains("Balanced") && error.contains("Disabled"), "{error}");
}
