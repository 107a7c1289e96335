//! Refusals: errors of candle's that say what does not fit.

use crate::oracle::random;
use candle_core::{DType, Device, Result, Tensor};
use sdpa_candle::{Attention, KeyScales, KvCache, KvShape, Sdpa};

fn refused<T>(result: Result<T>, message: &str) {
    let error = result.err().expect("an error").to_string();
    assert!(error.starts_with(message), "{error}");
}

/// Queries `[1, 4, 3, 8]`, keys and values `[1, 2, 5, 8]`.
fn qkv() -> [Tensor; 3] {
    [random((1, 4, 3, 8), 1), random((1, 2, 5, 8), 2), random((1, 2, 5, 8), 3)]
}

#[test]
fn shapes() {
    let [q, k, v] = qkv();
    let call = |q: &Tensor, k: &Tensor, v: &Tensor| Sdpa::default().forward(q, k, v);
    refused(call(&q, &random((1, 2, 5, 9), 1), &v), "sdpa: k: head_dim is 9, but q has 8");
    refused(call(&q, &k, &random((1, 2, 6, 8), 1)), "sdpa: v: rows is 6, but k has 5");
    refused(call(&random((1, 3, 3, 8), 1), &k, &v), "sdpa: q: 3 heads are no multiple of the 2 heads of k");
    refused(call(&random((4, 3, 8), 1), &k, &v), "sdpa: q: shape is [4, 3, 8], but must be [batch, heads, rows, dim]");
    refused(call(&q, &random((1, 1, 2, 5, 8), 1), &v), "sdpa: k: shape is [1, 1, 2, 5, 8]");
}

#[test]
fn types() {
    let [q, k, v] = qkv();
    let integers = k.to_dtype(DType::U32).unwrap();
    refused(Sdpa::default().forward(&q, &integers, &v), "sdpa: k: type is u32, but must be f32, bf16, f16 or f64");
    refused(Sdpa::default().keep_mask(&k).forward(&q, &k, &v), "sdpa: mask: type is f32, but must be u8");
    let bias = random((3, 5), 1).to_dtype(DType::I64).unwrap();
    let said = "sdpa: bias: type is i64, but must be f32, bf16, f16 or f64";
    refused(Sdpa::default().bias(&bias).forward(&q, &k, &v), said);
}

#[test]
fn options() {
    let [q, k, v] = qkv();
    let call = |sdpa: Sdpa| sdpa.forward(&q, &k, &v);
    refused(call(Attention::new().causal().into()), "sdpa: causal: 3 rows and 5 keys differ, and no alignment");
    refused(call(Attention::new().softcap(0.0).into()), "sdpa: softcap: 0");
    refused(call(Sdpa::default().sinks(&random(3, 1))), "sdpa: sinks: length is 3, but q (heads) has 4");
    refused(call(Sdpa::default().sinks(&random((1, 4), 1))), "sdpa: sinks: shape is [1, 4] of f32, but must be one");
    refused(call(Sdpa::default().alibi(&random(3, 1))), "sdpa: alibi slopes: length is 3, but q (heads) has 4");
    refused(call(Sdpa::default().bias(&random((4, 5), 1))), "sdpa: bias: rows is 4, but the call has 3");
    let mask = Tensor::zeros((3, 4), DType::U8, &Device::Cpu).unwrap();
    refused(call(Sdpa::default().keep_mask(&mask)), "sdpa: mask: columns is 4, but k (rows) has 5");
    let five = Tensor::zeros((1, 1, 1, 3, 5), DType::U8, &Device::Cpu).unwrap();
    refused(call(Sdpa::default().keep_mask(&five)), "sdpa: mask: shape is [1, 1, 1, 3, 5], but must have at most four");
}

/// A padding mask `[batch, keys]` is never read as `[rows, keys]`, nor `[batch, rows, keys]` as `[heads, rows, keys]`.
#[test]
fn masks_that_may_begin_with_the_batch() {
    let qkv = |batch, heads, rows| {
        [random((batch, heads, rows, 8), 1), random((batch, 2, 5, 8), 2), random((batch, 2, 5, 8), 3)]
    };
    for (batch, heads, rows) in [(3, 2, 3), (3, 2, 4), (2, 2, 1), (2, 2, 2), (4, 4, 3)] {
        let [q, k, v] = qkv(batch, heads, rows);
        for (dims, as_batch, otherwise) in [
            (vec![batch, 5], [batch, 1, 1, 5], [1, 1, batch, 5]),
            (vec![batch, 1], [batch, 1, 1, 1], [1, 1, batch, 1]),
            (vec![batch, rows, 5], [batch, 1, rows, 5], [1, batch, rows, 5]),
            (vec![batch, 1, 5], [batch, 1, 1, 5], [1, batch, 1, 5]),
        ] {
            let tail = format!(
                "shape is {dims:?}, and the batch is {batch}: reshape to {as_batch:?} if the first dimension is the batch, \
                 otherwise to {otherwise:?}"
            );
            let ones = Tensor::ones(dims, DType::U8, &Device::Cpu).unwrap();
            let bias = ones.to_dtype(DType::F32).unwrap();
            for (argument, sdpa) in [
                ("mask", Sdpa::default().keep_mask(&ones)),
                ("mask", Sdpa::default().drop_mask(&ones)),
                ("bias", Sdpa::default().bias(&bias)),
            ] {
                refused(sdpa.forward(&q, &k, &v), &format!("sdpa: {argument}: {tail}"));
                let mut cache = KvCache::new(batch, KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 }).unwrap();
                cache.append(&k, &v).unwrap();
                refused(cache.attend(&q, &sdpa), &format!("sdpa: {argument}: {tail}"));
            }
            // Four dimensions say what is meant.
            let said = Sdpa::default().keep_mask(&ones.reshape(&as_batch[..]).unwrap());
            said.forward(&q, &k, &v).unwrap();
        }
        // What cannot be one for each sequence is broadcast as candle does.
        let shapes = [vec![1, 5], vec![5], vec![1, rows, 5], vec![1, 1, 5]];
        let rows_alone = [vec![rows, 5], vec![rows, 1]].into_iter().filter(|_| rows != batch);
        for dims in shapes.into_iter().chain(rows_alone) {
            let ones = Tensor::ones(dims, DType::U8, &Device::Cpu).unwrap();
            Sdpa::default().keep_mask(&ones).forward(&q, &k, &v).unwrap();
        }
    }
    // One sequence has one meaning.
    let [q, k, v] = qkv(1, 2, 1);
    let ones = Tensor::ones((1, 5), DType::U8, &Device::Cpu).unwrap();
    Sdpa::default().keep_mask(&ones).forward(&q, &k, &v).unwrap();
}

#[test]
fn padding() {
    let [q, k, v] = qkv();
    let mask = |dims: &[usize], dtype| Tensor::ones(dims, dtype, &Device::Cpu).unwrap();
    let call = |padding: &Tensor| Sdpa::default().padding(padding).forward(&q, &k, &v);
    refused(call(&mask(&[5], DType::U8)), "sdpa: padding: shape is [5] of u8, but must be [batch, keys] of integers");
    refused(call(&mask(&[1, 1, 1, 5], DType::U32)), "sdpa: padding: shape is [1, 1, 1, 5] of u32, but must be [batch");
    // An additive mask has 0 for tokens.
    refused(
        call(&mask(&[1, 5], DType::F32)),
        "sdpa: padding: shape is [1, 5] of f32, but must be [batch, keys] of int",
    );
    refused(call(&mask(&[3, 5], DType::U8)), "sdpa: padding: rows is 3, but q (batch) has 1");
    refused(call(&mask(&[1, 3], DType::I64)), "sdpa: padding: columns is 3, but k (rows) has 5");
    // Beside a mask.
    let left = Tensor::new(&[[0u8, 0, 1, 1, 1]], &Device::Cpu).unwrap();
    let both = |given: &Tensor| Sdpa::default().keep_mask(given).padding(&left).forward(&q, &k, &v);
    refused(both(&mask(&[3, 5], DType::F32)), "sdpa: mask: type is f32, but must be u8");
    refused(both(&mask(&[3, 4], DType::U8)), "sdpa: mask: columns is 4, but the padding has 5");
    refused(both(&mask(&[2, 1, 3, 5], DType::U8)), "sdpa: mask: batch is 2, but the padding has 1");
    refused(
        both(&mask(&[1, 1, 1, 3, 5], DType::U8)),
        "sdpa: mask: shape is [1, 1, 1, 3, 5], but must have at most four",
    );
    refused(both(&mask(&[2, 5], DType::U8)), "sdpa: mask: rows is 2, but the call has 3");
    // Whatever the mask holds, the sizes decide whether an alignment is needed.
    let aligned = "sdpa: causal: 3 rows and 5 keys differ, and no alignment";
    for padding in [[1u8, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]] {
        let padding = Tensor::new(&[padding], &Device::Cpu).unwrap();
        refused(Sdpa::new(Attention::new().causal()).padding(&padding).forward(&q, &k, &v), aligned);
    }
    // Over a cache.
    let mut cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 }).unwrap();
    cache.append(&k, &v).unwrap();
    let cached = |padding: &Tensor| cache.attend(&q, &Sdpa::default().padding(padding));
    refused(cached(&mask(&[1, 4], DType::U8)), "sdpa: padding: columns is 4, but k (rows) has 5");
    refused(cached(&mask(&[2, 5], DType::U8)), "sdpa: padding: rows is 2, but q (batch) has 1");
}

#[test]
fn lengths() {
    let [q, k, v] = qkv();
    let call = |lens: &[i64]| Sdpa::default().kv_lens(&Tensor::new(lens, &Device::Cpu).unwrap()).forward(&q, &k, &v);
    refused(call(&[6]), "sdpa: kv_lens: entry 0 is 6, but must be at most 5, the keys of that sequence");
    refused(call(&[-1]), "sdpa: kv_lens: entry 0 is -1, but must be at least 0");
    refused(call(&[5, 5]), "sdpa: kv_lens: length is 2, but the batch has 1");
    let floats = Sdpa::default().kv_lens(&random(1, 1)).forward(&q, &k, &v);
    refused(floats, "sdpa: kv_lens: shape is [1] of f32, but must be one dimension of integers");
}

#[test]
fn caches() {
    let [q, k, v] = qkv();
    let new = || KvCache::new(1, KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 }).unwrap();
    let mut cache = new();
    refused(KvCache::new(1, KvShape { kv_heads: 2, head_dim: 0, value_dim: 8 }), "sdpa: ");
    refused(new().dtype(DType::U8), "sdpa: dtype: type is u8, but must be f32, bf16 or f16");
    refused(new().int8(KeyScales::PerChannel(vec![1.0])), "sdpa: key scales: length is 1");
    refused(cache.append(&q, &v), "sdpa: k: heads is 4, but the cache has 2");
    refused(cache.append_to(1, &k, &v), "sdpa: sequence: there is no sequence 1, the cache has 1");
    assert_eq!(cache.lens(), [0]);
    cache.append(&k, &v).unwrap();
    let lens = Tensor::new(&[5u32], &Device::Cpu).unwrap();
    refused(cache.attend(&q, &Sdpa::default().kv_lens(&lens)), "sdpa: kv_lens: needs tensors");
    refused(cache.attend(&random((1, 4, 3, 9), 1), &Sdpa::default()), "sdpa: cache: head_dim is 8, but q has 9");
}
