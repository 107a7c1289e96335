//! Queries, keys and values are not copied, whatever their strides: what is allocated is the output and scratch.

#[path = "../../../tests/support/counting.rs"]
mod counting;

use candle_core::{DType, Device, Tensor};
use counting::counted;
use sdpa_candle::{KvCache, KvShape, Sdpa};

/// More than a thread's scratch and all small things, and less than half of any of the tensors.
const SMALL: usize = 1 << 20;

/// Runs on one thread: only its allocations are counted.
fn allocated(call: impl FnOnce() -> Tensor + Send) -> (usize, Tensor) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        let mut out = None;
        let (_, bytes) = counted(|| out = Some(call()));
        (bytes, out.expect("the call ran"))
    })
}

fn bytes(x: &Tensor) -> usize {
    x.elem_count() * x.dtype().size_in_bytes()
}

/// Returns the same elements dense, with rows before heads, with elements before rows, as a part of more, and broadcast.
fn layouts(dtype: DType) -> Vec<Tensor> {
    let x = Tensor::randn(0f32, 1.0, (4, 8, 512, 80), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    let stored = |a: usize, b: usize| x.transpose(a, b).unwrap().contiguous().unwrap().transpose(a, b).unwrap();
    let more = Tensor::cat(&[&x, &x], 3).unwrap();
    let shared = x.narrow(0, 1, 1).unwrap().broadcast_as(x.shape()).unwrap();
    vec![stored(1, 2), stored(2, 3), more.narrow(3, 40, 80).unwrap(), shared, x]
}

#[test]
fn calls_allocate_their_output_alone() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for x in layouts(dtype) {
            assert!(bytes(&x) > 2 * SMALL);
            let (bytes_allocated, out) = allocated(|| Sdpa::default().forward(&x, &x, &x).unwrap());
            let beyond = bytes_allocated.checked_sub(bytes(&out)).expect("the output is allocated");
            assert!(beyond < SMALL, "{dtype:?}, strides {:?}: {beyond} bytes beyond the output", x.stride());
        }
    }
}

#[test]
fn calls_over_caches_allocate_their_output_alone() {
    for x in layouts(DType::BF16) {
        let mut cache =
            KvCache::new(4, KvShape { kv_heads: 8, head_dim: 80, value_dim: 80 }).unwrap().dtype(DType::BF16).unwrap();
        // What is appended fits into what the cache holds once it has held as much.
        cache.append(&x, &x).unwrap();
        for sequence in 0..4 {
            cache.truncate(sequence, 0).unwrap();
        }
        let (appended, _) = allocated(|| {
            cache.append(&x, &x).unwrap();
            x.clone()
        });
        assert!(appended < SMALL, "strides {:?}: {appended} bytes to append", x.stride());
        let (bytes_allocated, out) = allocated(|| cache.attend(&x, &Sdpa::default()).unwrap());
        let beyond = bytes_allocated.checked_sub(bytes(&out)).expect("the output is allocated");
        assert!(beyond < SMALL, "strides {:?}: {beyond} bytes beyond the output", x.stride());
    }
}

#[test]
fn a_copy_would_be_seen() {
    for x in layouts(DType::BF16).into_iter().filter(|x| !x.is_contiguous()) {
        let (bytes_allocated, copy) = allocated(|| x.contiguous().unwrap());
        assert!(bytes_allocated >= bytes(&copy));
    }
}
