//! Types, grouped heads and every option against candle's own.

use crate::oracle::{Scores, TYPES, assert_close, assert_same, candle, mask, random};
use candle_core::{DType, Device, Tensor};
use sdpa_candle::{Alignment, Attention, Sdpa, Window, alibi_slopes};
use std::num::NonZeroUsize;

/// Error of an `f32` output of normal numbers.
const CLOSE: f32 = 1e-5;

/// Queries of four heads, keys and values of two.
fn qkv(rows: usize, keys: usize) -> [Tensor; 3] {
    [random((2, 4, rows, 32), 1), random((2, 2, keys, 32), 2), random((2, 2, keys, 24), 3)]
}

fn check(sdpa: &Sdpa, [q, k, v]: &[Tensor; 3], scores: &Scores, what: &str) {
    let got = sdpa.forward(q, k, v).unwrap();
    assert_close(&got, &candle(q, k, v, scores).unwrap(), CLOSE, what);
}

#[test]
fn sizes_around_tiles_and_blocks() {
    for rows in [1, 2, 6, 7, 97] {
        for keys in [1, 15, 16, 17, 255, 256, 257] {
            check(&Sdpa::default(), &qkv(rows, keys), &Scores::default(), &format!("{rows} rows, {keys} keys"));
        }
    }
}

#[test]
fn types_in_any_mix_have_the_bits_of_widening_first() {
    let wide = qkv(7, 33);
    for types in (0..27).map(|n| [TYPES[n % 3], TYPES[n / 3 % 3], TYPES[n / 9]]) {
        let cast = |n: usize| wide[n].to_dtype(types[n]).unwrap();
        let short = [cast(0), cast(1), cast(2)];
        let widened = short.each_ref().map(|x| x.to_dtype(DType::F32).unwrap());
        let [got, expected] = [&short, &widened].map(|[q, k, v]| Sdpa::default().forward(q, k, v).unwrap());
        assert_same(&got, &expected.to_dtype(types[0]).unwrap(), &format!("{types:?}"));
        check(&Sdpa::default(), &widened, &Scores::default(), &format!("{types:?}, widened"));
    }
}

#[test]
fn one_head_of_keys_for_all() {
    let [q, k, v] = qkv(5, 40);
    let (k, v) = (k.narrow(1, 1, 1).unwrap(), v.narrow(1, 1, 1).unwrap());
    check(&Sdpa::default(), &[q, k, v], &Scores::default(), "multi-query");
}

#[test]
fn scale_and_softcap() {
    let scores = Scores { scale: Some(0.7), softcap: Some(3.0), ..Scores::default() };
    check(&Attention::new().scale(0.7).softcap(3.0).into(), &qkv(9, 20), &scores, "scale and softcap");
}

#[test]
fn causal_by_alignment() {
    for (alignment, offset) in [(Alignment::TopLeft, 0), (Alignment::BottomRight, 21), (Alignment::Offset(3), 3)] {
        let scores = Scores::keep(mask(9, 30, |row, key| key <= row + offset));
        check(&Attention::new().causal().align(alignment).into(), &qkv(9, 30), &scores, &format!("{alignment:?}"));
    }
}

#[test]
fn windows() {
    let window = Window::inclusive(Some(4), Some(2)).keep_first(1);
    let keep = mask(9, 30, |row, key| key < 1 || (row + 17..=row + 23).contains(&key));
    let sdpa = Attention::new().window(window).align(Alignment::BottomRight).into();
    check(&sdpa, &qkv(9, 30), &Scores::keep(keep), "window");
    let keep = mask(9, 30, |row, key| key <= row + 21 && key + 5 > row + 21);
    let attention = Attention::new()
        .causal()
        .window(Window::last_tokens(NonZeroUsize::new(5).unwrap()))
        .align(Alignment::BottomRight);
    check(&attention.into(), &qkv(9, 30), &Scores::keep(keep), "last tokens");
}

#[test]
fn masks_of_either_meaning_broadcast_from_the_left() {
    let tensors = qkv(9, 30);
    let keep = mask(9, 30, |row, key| key == row || (row * 7 + key * 5) % 3 > 0);
    let by_batch = Tensor::cat(&[&keep, &keep.flip(&[3]).unwrap()], 0).unwrap();
    let row = keep.narrow(2, 4, 1).unwrap();
    let two_dimensions = keep.squeeze(0).unwrap().squeeze(0).unwrap();
    for keep in [&keep, &by_batch, &row, &two_dimensions, &two_dimensions.get(4).unwrap()] {
        let scores = Scores::keep(keep.clone());
        check(&Sdpa::default().keep_mask(keep), &tensors, &scores, &format!("keep {:?}", keep.dims()));
        let drop = keep.eq(0u8).unwrap();
        check(&Sdpa::default().drop_mask(&drop), &tensors, &scores, &format!("drop {:?}", keep.dims()));
    }
}

#[test]
fn masks_of_any_strides() {
    let tensors = qkv(9, 30);
    let keep = mask(30, 9, |key, row| key == row || (row * 7 + key * 5) % 3 > 0).t().unwrap();
    assert!(!keep.is_contiguous());
    check(&Sdpa::default().keep_mask(&keep), &tensors, &Scores::keep(keep.clone()), "transposed");
    let keep = keep.narrow(2, 3, 1).unwrap().broadcast_as((2, 4, 9, 30)).unwrap();
    check(&Sdpa::default().keep_mask(&keep), &tensors, &Scores::keep(keep.clone()), "broadcast");
}

#[test]
fn biases_add_and_hide() {
    let bias = random((2, 1, 9, 30), 4);
    let hidden = mask(9, 30, |row, key| (row + key) % 4 == 1).broadcast_as(bias.shape()).unwrap();
    let infinite = Tensor::full(f32::NEG_INFINITY, bias.shape(), &Device::Cpu).unwrap();
    let bias = hidden.where_cond(&infinite, &bias).unwrap();
    let scores = |bias: &Tensor| Scores { bias: Some(bias.clone()), ..Scores::default() };
    check(&Sdpa::default().bias(&bias), &qkv(9, 30), &scores(&bias), "bias");
    let transposed = random((30, 9), 5).t().unwrap();
    check(&Sdpa::default().bias(&transposed), &qkv(9, 30), &scores(&transposed), "transposed, two dimensions");
    for dtype in [DType::BF16, DType::F16] {
        let bias = bias.to_dtype(dtype).unwrap();
        check(&Sdpa::default().bias(&bias), &qkv(9, 30), &scores(&bias), &format!("{dtype:?}"));
    }
}

#[test]
fn alibi_and_sinks() {
    let slopes = alibi_slopes(4);
    let distances = |n: usize| -slopes[n / 270] * ((n / 30 % 9 + 21) as f32 - (n % 30) as f32).abs();
    let bias = Tensor::from_iter((0..4 * 9 * 30).map(distances), &Device::Cpu).unwrap();
    let scores = Scores { bias: Some(bias.reshape((1, 4, 9, 30)).unwrap()), ..Scores::default() };
    let slopes = Tensor::new(&slopes[..], &Device::Cpu).unwrap();
    let aligned = Sdpa::new(Attention::new().align(Alignment::BottomRight));
    check(&aligned.clone().alibi(&slopes), &qkv(9, 30), &scores, "alibi");
    let sinks = random(4, 6);
    let scores = Scores { sinks: Some(sinks.clone()), ..scores };
    check(&aligned.alibi(&slopes).sinks(&sinks), &qkv(9, 30), &scores, "alibi and sinks");
    let sinks = sinks.to_dtype(DType::BF16).unwrap();
    let scores = Scores { sinks: Some(sinks.to_dtype(DType::F32).unwrap()), ..Scores::default() };
    check(&Sdpa::default().sinks(&sinks), &qkv(9, 30), &scores, "sinks in bf16");
}

#[test]
fn lengths_of_any_integer_type() {
    let [q, k, v] = qkv(9, 30);
    let keep = Tensor::cat(&[mask(1, 30, |_, _| true), mask(1, 30, |_, key| key < 17)], 0).unwrap();
    // What lies behind a length is not read.
    let behind = keep.reshape((2, 1, 30, 1)).unwrap();
    let nan = |x: &Tensor| Tensor::full(f32::NAN, x.shape(), &Device::Cpu).unwrap();
    let poisoned = |x: &Tensor| behind.broadcast_as(x.shape()).unwrap().where_cond(x, &nan(x)).unwrap();
    let expected = candle(&q, &k, &v, &Scores::keep(keep)).unwrap();
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let lens = Tensor::new(&[30u32, 17], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let got = Sdpa::default().kv_lens(&lens).forward(&q, &poisoned(&k), &poisoned(&v)).unwrap();
        assert_close(&got, &expected, CLOSE, &format!("{dtype:?}"));
    }
}

#[test]
fn all_at_once() {
    let attention = Attention::new().causal().align(Alignment::BottomRight).softcap(5.0).scale(0.2);
    let (bias, sinks) = (random((1, 4, 1, 30), 7), random(4, 8));
    let drop = mask(9, 30, |row, key| (row + key) % 5 == 2);
    let keep = mask(9, 30, |row, key| key <= row + 21 && (row + key) % 5 != 2);
    let sdpa = Sdpa::new(attention).bias(&bias).sinks(&sinks).drop_mask(&drop);
    let scores =
        Scores { scale: Some(0.2), softcap: Some(5.0), bias: Some(bias), keep: Some(keep), sinks: Some(sinks) };
    check(&sdpa, &qkv(9, 30), &scores, "all at once");
}

#[test]
fn rows_without_keys_are_zero() {
    let [q, k, v] = qkv(3, 5);
    let nothing = mask(3, 5, |_, _| false);
    let out = Sdpa::default().keep_mask(&nothing).forward(&q, &k, &v).unwrap();
    assert_same(&out, &Tensor::zeros((2, 4, 3, 24), DType::F32, &Device::Cpu).unwrap(), "masked");
    let (k, v) = (k.narrow(2, 0, 0).unwrap(), v.narrow(2, 0, 0).unwrap());
    let out = Sdpa::default().forward(&q, &k, &v).unwrap();
    assert_same(&out, &Tensor::zeros((2, 4, 3, 24), DType::F32, &Device::Cpu).unwrap(), "no keys");
    let out = Sdpa::default().forward(&q.narrow(2, 1, 0).unwrap(), &k, &v).unwrap();
    assert_eq!(out.dims(), [2, 4, 0, 24]);
}
