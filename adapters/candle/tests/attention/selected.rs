//! Lists of selected keys: those of a mask that keeps the listed keys, in every type, over tensors and a cache; refusals.

use crate::oracle::{assert_close, assert_same, random};
use candle_core::{DType, Device, Tensor, Var};
use sdpa_candle::{Alignment, Attention, KvCache, KvShape, ListShape, Sdpa};

const CLOSE: f32 = 1e-5;

/// Two sequences of four query heads, five rows; two key/value heads, 40 keys.
fn qkv() -> [Tensor; 3] {
    [random((2, 4, 5, 16), 1), random((2, 2, 40, 16), 2), random((2, 2, 40, 24), 3)]
}

/// Lists of four places, two of them in the order of numbers that fall, one with a hole, for groups of two rows.
fn numbers(heads: usize, units: i64) -> Vec<i64> {
    (0..2 * heads * 3)
        .flat_map(|list| {
            let first = list as i64 % units;
            [(first + 2) % units, -1, first, if list % 2 == 0 { -1 } else { (first + 1) % units }]
        })
        .collect()
}

fn tensor(numbers: &[i64], heads: usize) -> Tensor {
    Tensor::from_slice(numbers, (2, heads, 3, 4), &Device::Cpu).unwrap()
}

#[test]
fn lists_are_masks_that_keep_the_listed_keys() {
    let [q, k, v] = qkv();
    for heads in [1, 2, 4] {
        for unit in [1, 3, 16] {
            let numbers = numbers(heads, 40usize.div_ceil(unit) as i64);
            let keeps = |i: usize| {
                let (key, row, head, batch) = (i % 40, i / 40 % 5, i / 200 % 4, i / 800);
                let list = (batch * heads + head * heads / 4) * 3 + row / 2;
                u8::from(numbers[4 * list..][..4].contains(&((key / unit) as i64)))
            };
            let mask = Tensor::from_vec((0..1600).map(keeps).collect(), (2, 4, 5, 40), &Device::Cpu).unwrap();
            let causal = Attention::new().causal().align(Alignment::BottomRight);
            let expected = Sdpa::new(causal).keep_mask(&mask).forward(&q, &k, &v).unwrap();
            let lists = tensor(&numbers, heads);
            let mut cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 16, value_dim: 24 }).unwrap();
            cache.append(&k, &v).unwrap();
            let shape = ListShape { rows: 2, unit };
            let mut first = None;
            for dtype in [DType::I64, DType::I32] {
                let sdpa = Sdpa::new(causal).selected(&lists.to_dtype(dtype).unwrap(), shape);
                let out = sdpa.forward(&q, &k, &v).unwrap();
                let what = format!("{heads} heads, units of {unit}, {dtype:?}");
                assert_close(&out, &expected, CLOSE, &what);
                assert_same(&cache.attend(&q, &sdpa).unwrap(), &out, &what);
                assert_same(first.get_or_insert_with(|| out.clone()), &out, &what);
            }
        }
    }
}

/// Lists without holes may be unsigned; layouts do not matter.
#[test]
fn unsigned_numbers_of_any_layout() {
    let [q, k, v] = qkv();
    let numbers = Tensor::new(&[[7u32, 2], [39, 0]], &Device::Cpu).unwrap().reshape((2, 1, 1, 2)).unwrap();
    let shape = ListShape { rows: 5, unit: 1 };
    let out = Sdpa::default().selected(&numbers, shape).forward(&q, &k, &v).unwrap();
    let turned = numbers.transpose(0, 3).unwrap().contiguous().unwrap().transpose(0, 3).unwrap();
    assert_same(&Sdpa::default().selected(&turned, shape).forward(&q, &k, &v).unwrap(), &out, "transposed");
    let keys = Tensor::new(&[2u32, 7], &Device::Cpu).unwrap();
    let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(0, 0, 1).unwrap());
    let [k, v] = [&k, &v].map(|x| x.contiguous().unwrap().index_select(&keys, 2).unwrap());
    assert_same(&Sdpa::default().forward(&q, &k, &v).unwrap(), &out.narrow(0, 0, 1).unwrap(), "the listed keys alone");
}

fn refused(sdpa: &Sdpa, message: &str) {
    let [q, k, v] = qkv();
    let error = sdpa.forward(&q, &k, &v).expect_err("an error").to_string();
    assert!(error.starts_with(message), "{error}");
}

#[test]
fn refusals() {
    let shape = ListShape { rows: 2, unit: 1 };
    let lists = |numbers: &[i64], heads| Sdpa::default().selected(&tensor(numbers, heads), shape);
    let words = "but must be [batch, heads, groups, places] of u32, i32 or i64";
    refused(
        &Sdpa::default().selected(&random((2, 1, 3, 4), 1), shape),
        &format!("sdpa: selected: shape is [2, 1, 3, 4] of f32, {words}"),
    );
    let three = tensor(&numbers(1, 40), 1).squeeze(1).unwrap();
    refused(&Sdpa::default().selected(&three, shape), &format!("sdpa: selected: shape is [2, 3, 4] of i64, {words}"));
    let mut numbers = numbers(1, 40);
    refused(
        &Sdpa::default().selected(&tensor(&numbers, 1), ListShape { rows: 1, unit: 1 }),
        "sdpa: selected keys: groups of the numbers is 6, but the shape says 10",
    );
    refused(
        &Sdpa::default().selected(&tensor(&numbers, 1), ListShape { rows: 2, unit: 0 }),
        "sdpa: selected keys: unit is 0, but must be at least 1",
    );
    numbers[4] = 40;
    refused(&lists(&numbers, 1), "sdpa: selected keys: the list of sequence 0, head 0, row 2 has 40 at place 0");
    numbers[4] = numbers[6];
    refused(&lists(&numbers, 1), "sdpa: selected keys: the list of sequence 0, head 0, row 2 has 1 at places 0 and 2");
    numbers[4] = 1 << 31;
    refused(&lists(&numbers, 1), "sdpa: selected: entry 4 is 2147483648, but must be from -1 to 2147483647");
    refused(&lists(&self::numbers(3, 40), 3), "sdpa: selected keys: heads is 3, but q (a list is for all heads");
}

/// The forward call is the same for a variable; its backward pass is an error.
#[test]
fn there_are_no_gradients() {
    let [q, k, v] = qkv();
    let sdpa = Sdpa::default().selected(&tensor(&numbers(1, 40), 1), ListShape { rows: 2, unit: 1 });
    let variable = Var::from_tensor(&q).unwrap();
    let out = sdpa.forward(&variable, &k, &v).unwrap();
    assert_same(&out, &sdpa.forward(&q, &k, &v).unwrap(), "of a variable");
    let error = out.sum_all().unwrap().backward().expect_err("an error").to_string();
    assert!(error.contains("sdpa: selected keys: needs a forward call: there are no gradients"), "{error}");
}
