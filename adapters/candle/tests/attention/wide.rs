//! Tensors of `f64`: computed in `f32`, and given back in the type of the queries.

use crate::oracle::{TYPES, assert_close, assert_same, random};
use candle_core::{DType, Device, Tensor, Var};
use sdpa_candle::{Attention, KvCache, KvShape, Sdpa};

const SHAPE: (usize, usize, usize, usize) = (2, 4, 9, 16);

/// Numbers that `f32` has to round.
fn wide(seed: u64) -> Tensor {
    let (coarse, fine) = (random(SHAPE, seed).to_dtype(DType::F64).unwrap(), random(SHAPE, seed + 10));
    (coarse + (fine.to_dtype(DType::F64).unwrap() * 1e-9).unwrap()).unwrap()
}

fn cast(x: &Tensor, dtype: DType) -> Tensor {
    x.to_dtype(dtype).unwrap()
}

#[test]
fn any_mix_has_the_bits_of_rounding_first() {
    let qkv = [wide(1), wide(2), wide(3)];
    let call = Sdpa::new(Attention::new().causal());
    for types in (0..64).map(|n| [n % 4, n / 4 % 4, n / 16].map(|n| TYPES.get(n).copied().unwrap_or(DType::F64))) {
        let [q, k, v] = [0, 1, 2].map(|n| cast(&qkv[n], types[n]));
        let [q32, k32, v32] =
            [&q, &k, &v].map(|x| if x.dtype() == DType::F64 { cast(x, DType::F32) } else { x.clone() });
        let [got, expected] = [call.forward(&q, &k, &v), call.forward(&q32, &k32, &v32)].map(Result::unwrap);
        assert_same(&got, &cast(&expected, types[0]), &format!("{types:?}"));
    }
}

#[test]
fn outputs_lie_as_queries_do() {
    let [q, k, v] = [wide(1), wide(2), wide(3)];
    let dense = Sdpa::default().forward(&q, &k, &v).unwrap();
    assert!(dense.is_contiguous());
    let rows_first = q.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
    let out = Sdpa::default().forward(&rows_first, &k, &v).unwrap();
    assert!(out.transpose(1, 2).unwrap().is_contiguous());
    assert_same(&out, &dense, "rows before heads");
}

#[test]
fn numbers_beyond_f32_are_infinite() {
    let [q, k, v] = [wide(1), wide(2), wide(3)];
    let huge = (v.ones_like().unwrap() * 1e300).unwrap();
    let out = Sdpa::default().forward(&q, &k, &huge).unwrap();
    assert_same(&out, &Tensor::full(f64::INFINITY, SHAPE, &Device::Cpu).unwrap(), "values of 1e300");
}

/// Gradients of an `f64` variable are `f64`, with the numbers of the `f32` call.
#[test]
fn gradients_have_the_types_of_their_tensors() {
    let bias = cast(&random((1, 4, 1, 9), 7), DType::F64);
    let of = |dtype: DType| {
        let vars = [wide(1), wide(2), wide(3), bias.clone()].map(|x| Var::from_tensor(&cast(&x, dtype)).unwrap());
        let out = Sdpa::default().bias(&vars[3]).forward(&vars[0], &vars[1], &vars[2]).unwrap();
        let store = (&out * cast(&random(SHAPE, 9), dtype)).unwrap().sum_all().unwrap().backward().unwrap();
        vars.map(|var| store.get(&var).expect("a gradient").clone())
    };
    for (n, (got, expected)) in of(DType::F64).iter().zip(of(DType::F32)).enumerate() {
        assert_eq!(got.dtype(), DType::F64);
        assert_close(got, &expected, 1e-6, &format!("gradient {n}"));
    }
}

#[test]
fn caches_take_them() {
    let [q, k, v] = [wide(1), wide(2), wide(3)];
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| {
        let mut cache = KvCache::new(2, KvShape { kv_heads: 4, head_dim: 16, value_dim: 16 }).unwrap();
        cache.append(&k.narrow(0, 0, 2).unwrap(), v).unwrap();
        cache.attend(q, &Sdpa::default()).unwrap()
    };
    let [q32, k32, v32] = [&q, &k, &v].map(|x| cast(x, DType::F32));
    assert_same(&attend(&q, &k, &v), &cast(&attend(&q32, &k32, &v32), DType::F64), "f64");
}
