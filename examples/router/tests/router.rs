//! The function by sdpa and by the loop, held against candle's plain products, with every combination of options.

#[path = "../../../benches/support/interleaved.rs"]
mod interleaved;

use candle_core::{DType, Device, Result, Tensor};
use router::{Options, Softmax, chunked_sdpa, padding_mask, plain, tiled};

const HEADS: usize = 3;
const DIM: usize = 16;

fn random(batch: usize, rows: usize, seed: u64) -> Tensor {
    let numbers = interleaved::random(batch * HEADS * rows * DIM, seed);
    Tensor::from_vec(numbers, (batch, HEADS, rows, DIM), &Device::Cpu).unwrap()
}

/// Tokens of three texts: padded on the right, on the left, and not at all.
fn tokens(keys: usize) -> Tensor {
    let token = |n: usize| [n % keys < keys - keys / 3, n % keys >= keys / 4, true][n / keys];
    let bytes: Vec<u32> = (0..3 * keys).map(|n| u32::from(token(n))).collect();
    Tensor::from_vec(bytes, (3, keys), &Device::Cpu).unwrap()
}

/// Largest difference, or infinity where one of the two is not a number.
fn difference(a: &Tensor, b: &Tensor) -> f32 {
    let numbers = |x: &Tensor| x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(a.dims(), b.dims());
    let differences = numbers(a).into_iter().zip(numbers(b)).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

/// Every combination of options that leaves each row a key, for these rows and keys.
fn combinations(rows: usize, keys: usize) -> Vec<Options> {
    let mut all = Vec::new();
    for window in [None, Some(0), Some(5), Some(64)] {
        for causal in [false, true] {
            for q_offset in [0, keys - rows] {
                for (scale, block_size) in [(0.25, 0), (0.1, 1), (-0.7, 16), (0.25, 512)] {
                    all.push(Options { window, causal, scale, block_size, q_offset });
                }
            }
        }
    }
    all
}

/// Rows whose window holds padding alone have equal weights, by rounding of the sums −3.4·10³⁸ + score.
#[test]
fn every_combination_of_options() {
    for (rows, keys) in [(1, 1), (7, 7), (130, 130), (1, 200), (33, 150)] {
        let [q, k, v] = [random(3, rows, 1), random(3, keys, 2), random(3, keys, 3)];
        let pad_mask = padding_mask(&tokens(keys)).unwrap();
        for options in combinations(rows, keys) {
            for pad_mask in [None, Some(&pad_mask)] {
                let what = format!("{rows} rows, {keys} keys, padded: {}, {options:?}", pad_mask.is_some());
                let expected = plain(&q, &k, &v, pad_mask, &options).unwrap();
                let ours = chunked_sdpa(&q, &k, &v, pad_mask, &options).unwrap();
                let worst = difference(&ours, &expected);
                assert!(worst <= 1e-5, "sdpa: {what}: off by {worst:e}");
                for softmax in [Softmax::Composed, Softmax::Fused] {
                    let worst = difference(&tiled(&q, &k, &v, pad_mask, &options, softmax).unwrap(), &expected);
                    assert!(worst <= 1e-5, "loop, {softmax:?}: {what}: off by {worst:e}");
                }
            }
        }
    }
}

/// By a finite mask a text of padding alone is a mean, as in candle; a row that no rule leaves a key is 0, not NaN.
#[test]
fn rows_without_keys() {
    let [q, k, v] = [1, 2, 3].map(|seed| random(1, 9, seed));
    let global = Options { window: None, causal: false, scale: 0.25, block_size: 512, q_offset: 0 };
    let padding = padding_mask(&Tensor::zeros((1, 9), DType::U32, &Device::Cpu).unwrap()).unwrap();
    let mean = v.mean_keepdim(2).unwrap().broadcast_as(q.shape()).unwrap();
    assert!(difference(&chunked_sdpa(&q, &k, &v, Some(&padding), &global).unwrap(), &mean) <= 1e-5);
    assert!(difference(&plain(&q, &k, &v, Some(&padding), &global).unwrap(), &mean) <= 1e-5);
    // Rows at 6 to 14 of nine keys: the last four see none within 1.
    let behind = Options { window: Some(1), q_offset: 6, ..global };
    let ours = chunked_sdpa(&q, &k, &v, None, &behind).unwrap();
    let [seen, unseen] = [(0, 4), (4, 5)].map(|(from, len)| ours.narrow(2, from, len).unwrap());
    let expected = plain(&q, &k, &v, None, &behind).unwrap();
    assert!(difference(&seen, &expected.narrow(2, 0, 4).unwrap()) <= 1e-5);
    assert_eq!(difference(&unseen, &unseen.zeros_like().unwrap()), 0.0);
    assert_eq!(difference(&expected, &expected), f32::INFINITY, "candle's rows are NaN");
}

#[test]
fn other_types() {
    let [q, k, v] = [1, 2, 3].map(|seed| random(3, 70, seed));
    let pad_mask = padding_mask(&tokens(70)).unwrap();
    let options = Options { window: Some(20), causal: true, scale: 0.25, block_size: 32, q_offset: 0 };
    for (dtype, bound) in [(DType::BF16, 8e-3), (DType::F16, 1e-3), (DType::F64, 1e-5)] {
        let [q, k, v] = [&q, &k, &v].map(|x| x.to_dtype(dtype).unwrap());
        let [q32, k32, v32] = [&q, &k, &v].map(|x| x.to_dtype(DType::F32).unwrap());
        let expected = plain(&q32, &k32, &v32, Some(&pad_mask), &options).unwrap();
        let ours = chunked_sdpa(&q, &k, &v, Some(&pad_mask), &options).unwrap();
        assert_eq!(ours.dtype(), dtype);
        let worst = difference(&ours, &expected);
        assert!(worst <= bound, "{dtype:?}: off by {worst:e}");
    }
}

/// A prompt in chunks, then token by token, is the prompt at once.
#[test]
fn chunks_are_the_whole() -> Result<()> {
    let [q, k, v] = [1, 2, 3].map(|seed| random(2, 90, seed));
    let whole = Options { window: Some(30), causal: true, scale: 0.25, block_size: 512, q_offset: 0 };
    let expected = chunked_sdpa(&q, &k, &v, None, &whole)?;
    let mut from = 0;
    for rows in [40, 1, 1, 47, 1] {
        let [k, v] = [&k, &v].map(|x| x.narrow(2, 0, from + rows));
        let part = chunked_sdpa(&q.narrow(2, from, rows)?, &k?, &v?, None, &Options { q_offset: from, ..whole })?;
        assert_eq!(difference(&part, &expected.narrow(2, from, rows)?), 0.0, "{rows} rows from {from}");
        from += rows;
    }
    Ok(())
}
