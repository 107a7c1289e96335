//! Tensors in any order of memory have the bits of dense ones, and outputs lie as queries do.

use crate::oracle::{TYPES, assert_same, random};
use candle_core::{DType, Device, Tensor};
use sdpa_candle::Sdpa;

const SHAPE: (usize, usize, usize, usize) = (2, 4, 19, 40);

/// A tensor's elements in other layouts. What lies beside them is NaN.
fn layouts(x: &Tensor) -> Vec<(&'static str, Tensor)> {
    let nan = Tensor::full(f32::NAN, x.shape(), &Device::Cpu).unwrap().to_dtype(x.dtype()).unwrap();
    let beside = |dim: usize| {
        let wide = Tensor::cat(&[&nan, x, &nan], dim).unwrap();
        wide.narrow(dim, x.dim(dim).unwrap(), x.dim(dim).unwrap()).unwrap()
    };
    let stored = |a: usize, b: usize| x.transpose(a, b).unwrap().contiguous().unwrap().transpose(a, b).unwrap();
    let rows_first = Tensor::cat(&[&nan, x], 3).unwrap().transpose(1, 2).unwrap().contiguous().unwrap();
    vec![
        ("rows before heads", stored(1, 2)),
        ("heads before batch", stored(0, 1)),
        ("elements before rows", stored(2, 3)),
        ("part of the batch", beside(0)),
        ("part of the heads", beside(1)),
        ("part of the rows", beside(2)),
        ("part of the elements", beside(3)),
        ("part of the elements, rows before heads", rows_first.transpose(1, 2).unwrap().narrow(3, 40, 40).unwrap()),
    ]
}

#[test]
fn any_layout_has_the_bits_of_dense_tensors() {
    for dtype in TYPES {
        let [q, k, v] = [1, 2, 3].map(|seed| random(SHAPE, seed).to_dtype(dtype).unwrap());
        let dense = Sdpa::default().forward(&q, &k, &v).unwrap();
        for (name, (q, (k, v))) in layouts(&q)
            .into_iter()
            .zip(layouts(&k).into_iter().zip(layouts(&v)))
            .map(|((name, q), ((_, k), (_, v)))| (name, (q, (k, v))))
        {
            assert!(!q.is_contiguous() || name == "part of the batch", "{name}");
            let out = Sdpa::default().forward(&q, &k, &v).unwrap();
            assert_same(&out, &dense, &format!("{dtype:?}, {name}"));
        }
    }
}

#[test]
fn broadcast_tensors_are_tensors() {
    for dtype in TYPES {
        let q = random(SHAPE, 1).to_dtype(dtype).unwrap();
        let kv = random((1, 1, 19, 40), 2).to_dtype(dtype).unwrap();
        let shared = kv.broadcast_as((2, 2, 19, 40)).unwrap();
        assert_eq!(shared.stride()[..2], [0, 0]);
        let copied = shared.contiguous().unwrap();
        let [got, expected] = [&shared, &copied].map(|kv| Sdpa::default().forward(&q, kv, kv).unwrap());
        assert_same(&got, &expected, &format!("{dtype:?}"));
        let q = q.narrow(1, 2, 1).unwrap();
        let [got, expected] = [q.broadcast_as(SHAPE).unwrap(), q.repeat((1, 4, 1, 1)).unwrap()]
            .map(|q| Sdpa::default().forward(&q, &copied, &copied).unwrap());
        assert_same(&got, &expected, &format!("{dtype:?}, queries"));
    }
}

#[test]
fn outputs_lie_as_queries_do() {
    let (q, v) = (random(SHAPE, 1), random((2, 2, 19, 24), 2));
    let k = random((2, 2, 19, 40), 3);
    let out = Sdpa::default().forward(&q, &k, &v).unwrap();
    assert!(out.is_contiguous());
    let rows_first = q.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
    let out = Sdpa::default().forward(&rows_first, &k, &v).unwrap();
    assert!(!out.is_contiguous() && out.transpose(1, 2).unwrap().is_contiguous());
    // One row lies in memory as both do.
    let row = rows_first.narrow(2, 3, 1).unwrap();
    assert!(Sdpa::default().forward(&row, &k, &v).unwrap().is_contiguous());
}

#[test]
fn offsets_beyond_the_end_hold_nothing() {
    let x = random((1, 1, 4, 8), 1);
    let empty = x.narrow(2, 4, 0).unwrap();
    let out = Sdpa::default().forward(&x, &empty, &empty).unwrap();
    assert_same(&out, &Tensor::zeros((1, 1, 4, 8), DType::F32, &Device::Cpu).unwrap(), "no keys");
}
