//! Additive masks `[batch, 1, 1, keys]` as models hold them, against candle's scores + mask, softmax.

use crate::oracle::{Scores, TYPES, assert_close, assert_same, candle, random};
use candle_core::{DType, Device, Tensor};
use sdpa_candle::{Attention, Sdpa, Window};

const KEYS: usize = 40;

/// 0 for tokens, `hide` for padding; sequence 1 is padded on the left.
fn additive(hide: f64, dtype: DType) -> Tensor {
    let hidden = |sequence: usize, key: usize| [key >= 29, key < 11, false][sequence];
    let numbers = (0..3 * KEYS).map(|n| if hidden(n / KEYS, n % KEYS) { hide } else { 0.0 });
    Tensor::from_iter(numbers, &Device::Cpu).unwrap().reshape((3, 1, 1, KEYS)).unwrap().to_dtype(dtype).unwrap()
}

fn qkv(dtype: DType) -> [Tensor; 3] {
    [(4, 1), (2, 2), (2, 3)].map(|(heads, seed)| random((3, heads, KEYS, 16), seed).to_dtype(dtype).unwrap())
}

#[test]
fn masks_of_any_type_and_any_number_that_hides() {
    for dtype in [TYPES[0], TYPES[1], TYPES[2], DType::F64] {
        let [q, k, v] = qkv(dtype);
        for (hide, of) in [f64::NEG_INFINITY, f64::from(f32::MIN), -1e9, -1e4, f64::MIN]
            .into_iter()
            .flat_map(|hide| [DType::F32, DType::BF16, DType::F16, DType::F64].map(|of| (hide, of)))
        {
            let mask = additive(hide, of);
            let out = Sdpa::default().bias(&mask).forward(&q, &k, &v).unwrap();
            assert_eq!(out.dtype(), dtype);
            let expected = candle(&q, &k, &v, &Scores { bias: Some(mask), ..Scores::default() }).unwrap();
            let bound = if matches!(dtype, DType::BF16) {
                1e-2
            } else if dtype == DType::F16 {
                1e-3
            } else {
                1e-5
            };
            assert_close(&out, &expected, bound, &format!("{hide:e} in {of:?}, {dtype:?}"));
        }
    }
}

/// One mask for the batch, one for each sequence, or one of rows too; and beside windows.
#[test]
fn shapes_and_windows() {
    let [q, k, v] = qkv(DType::F32);
    let mask = additive(f64::from(f32::MIN), DType::F32);
    let one = mask.narrow(0, 1, 1).unwrap();
    let rows = mask.broadcast_as((3, 1, KEYS, KEYS)).unwrap();
    for mask in [&mask, &one, &rows] {
        let expected = candle(&q, &k, &v, &Scores { bias: Some(mask.clone()), ..Scores::default() }).unwrap();
        let out = Sdpa::default().bias(mask).forward(&q, &k, &v).unwrap();
        assert_close(&out, &expected, 1e-5, &format!("{:?}", mask.dims()));
    }
    let near = Tensor::from_iter(
        (0..KEYS * KEYS).map(|n| if (n / KEYS).abs_diff(n % KEYS) <= 15 { 0.0 } else { f32::NEG_INFINITY }),
        &Device::Cpu,
    );
    let both = mask.broadcast_add(&near.unwrap().reshape((1, 1, KEYS, KEYS)).unwrap()).unwrap();
    let expected = candle(&q, &k, &v, &Scores { bias: Some(both), ..Scores::default() }).unwrap();
    let window = Attention::new().window(Window::inclusive(Some(15), Some(15)));
    let out = Sdpa::new(window).bias(&mask).forward(&q, &k, &v).unwrap();
    assert_close(&out, &expected, 1e-5, "window");
}

/// A row whose keys are all hidden: by a finite number it is the mean of the values, as in candle; by −∞ it is 0, not NaN.
#[test]
fn rows_with_every_key_hidden() {
    let [q, k, v] = qkv(DType::F32);
    let all = |hide: f64| Tensor::full(hide, (3, 1, 1, KEYS), &Device::Cpu).unwrap();
    for hide in [f64::from(f32::MIN), -1e30] {
        let mask = all(hide).to_dtype(DType::F32).unwrap();
        let out = Sdpa::default().bias(&mask).forward(&q, &k, &v).unwrap();
        let expected = candle(&q, &k, &v, &Scores { bias: Some(mask), ..Scores::default() }).unwrap();
        assert_close(&out, &expected, 1e-5, &format!("{hide:e}"));
        let mean = v.mean_keepdim(2).unwrap().narrow(1, 1, 1).unwrap().broadcast_as((3, 1, KEYS, 16)).unwrap();
        assert_close(&out.narrow(1, 3, 1).unwrap(), &mean, 1e-5, &format!("{hide:e}: the mean"));
    }
    for mask in [all(f64::NEG_INFINITY), all(f64::MIN), all(f64::NEG_INFINITY).to_dtype(DType::F32).unwrap()] {
        let out = Sdpa::default().bias(&mask).forward(&q, &k, &v).unwrap();
        assert_same(&out, &out.zeros_like().unwrap(), "−∞");
    }
}
