//! 1–10 and 18–21: sizes of tensors that do not fit, tensors in the wrong layout, and rules without positions.

use super::{ACCEPTED, K, Mistake, More, OUT, Q, V, ZEROS, bytes, call, floats, good, inputs, mistake, outcome};
use sdpa::parts::{KeyGradientShape, KeyGradientSums, RowStates};
use sdpa::{Attention, CacheFormat, Dtype, Inputs, KvCache, KvShape, Mask, Outputs, PagePool, View, ViewMut, Window};

fn unaligned(rule: &str, rows: usize, keys: usize) -> String {
    format!(
        "{rule}: {rows} rows and {keys} keys differ, and no alignment says where the rows stand among the keys (top-left, \
         bottom-right or an offset)"
    )
}

pub(super) fn mistakes() -> Vec<Mistake> {
    let of = |q, k, v, out| call(Attention::new(), Inputs::new(floats(q), floats(k), floats(v)), out, &[]);
    let seven = "out: value_dim is 6, but v has 7";
    let window = Attention::new().window(Window::inclusive(Some(1), None));
    let slopes = [0.5; 4];
    let mut all = vec![
        mistake(1, "q and k of different head_dim", of(Q, [2, 2, 5, 8], V, OUT), "k: head_dim is 8, but q has 6"),
        mistake(2, "k and v of different lengths", of(Q, K, [2, 2, 4, 7], OUT), "v: rows is 4, but k has 5"),
        mistake(
            3,
            "heads no multiple of kv_heads",
            of([2, 5, 3, 6], K, V, [2, 5, 3, 7]),
            "q: 5 heads are no multiple of the 2 heads of k",
        ),
        mistake(6, "q and out of different rows", of(Q, K, V, [2, 4, 5, 7]), "out: rows is 5, but q has 3"),
        mistake(7, "out with q's head_dim", of(Q, K, V, Q), seven),
        mistake(8, "causal", call(Attention::new().causal(), good(), OUT, &[]), unaligned("causal", 3, 5)),
        mistake(8, "causal over a cache", second_of_two(), unaligned_second()),
        mistake(9, "window", call(window, good(), OUT, &[]), unaligned("window", 3, 5)),
        mistake(10, "ALiBi", inputs(good().alibi(&slopes)), unaligned("alibi", 3, 5)),
        mistake(19, "head_dim 0", of([2, 4, 3, 0], [2, 2, 5, 0], V, OUT), "q: head_dim is 0, but must be at least 1"),
        mistake(20, "value_dim 0", of(Q, K, [2, 2, 5, 0], [2, 4, 3, 0]), "v: value_dim is 0, but must be at least 1"),
        mistake(
            20,
            "value_dim 0 of states of rows",
            outcome(RowStates::new([2, 4, 3, 0])),
            "states of rows: value_dim is 0, but must be at least 1",
        ),
        mistake(21, "states of no rows", outcome(RowStates::new([2, 4, 0, 7])), ACCEPTED),
        mistake(
            19,
            "head_dim 0 of sums of gradients",
            gradient_sums([0, 7]),
            "sums of gradients of keys: head_dim is 0, but must be at least 1",
        ),
        mistake(
            20,
            "value_dim 0 of sums of gradients",
            gradient_sums([6, 0]),
            "sums of gradients of keys: value_dim is 0, but must be at least 1",
        ),
        mistake(21, "batch 0", of([0, 4, 3, 6], [0, 2, 5, 6], [0, 2, 5, 7], [0, 4, 3, 7]), ACCEPTED),
        mistake(21, "rows 0", of([2, 4, 0, 6], K, V, [2, 4, 0, 7]), ACCEPTED),
        mistake(21, "keys 0", no_keys(), ACCEPTED),
    ];
    all.extend(transposed());
    all.extend(stored_otherwise());
    all.extend(too_large());
    all
}

fn gradient_sums([head_dim, value_dim]: [usize; 2]) -> String {
    outcome(KeyGradientSums::new(KeyGradientShape { batch: 2, heads: 4, keys: 5, head_dim, value_dim }))
}

/// Outcome of a causal call over the second sequence of a cache alone, the first of the call.
fn second_of_two() -> String {
    let mut cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 6, value_dim: 7 }).unwrap();
    cache.append(floats(K), floats(V)).unwrap();
    let inputs = Inputs::cached(floats([1, 4, 3, 6]), &cache).sequences(&[1]);
    call(Attention::new().causal(), inputs, [1, 4, 3, 7], &[])
}

fn unaligned_second() -> String {
    unaligned("causal", 3, 5).replace("3 rows and 5 keys differ", "sequence 1 has 3 rows and 5 keys")
}

/// Nothing to see: zeros, and −∞ as the log of their sum.
fn no_keys() -> String {
    let (mut out, mut lse) = ([42.0; 168], [42.0; 24]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, OUT).unwrap()).lse(ViewMut::bhl(&mut lse, [2, 4, 3]).unwrap());
    let inputs = Inputs::new(floats(Q), floats([2, 2, 0, 6]), floats([2, 2, 0, 7]));
    let result = sdpa::attention(&Attention::new(), inputs, outputs);
    assert_eq!((out, lse), ([0.0; 168], [f32::NEG_INFINITY; 24]));
    outcome(result)
}

/// 4: `[batch, rows, heads, dim]` where `[batch, heads, rows, dim]` is expected. 8 heads on 2, or on 8; 10 rows.
fn transposed() -> Vec<Mistake> {
    let of = |q, k, v, out| call(Attention::new(), Inputs::new(floats(q), floats(k), floats(v)), out, &[]);
    let right = ([1, 8, 10, 6], [1, 2, 10, 6], [1, 2, 10, 7], [1, 8, 10, 7]);
    let (q, k, v) = ([1, 10, 8, 6], [1, 10, 2, 6], [1, 10, 2, 7]);
    let grouped = Inputs::new(floats(q), floats(k), floats(v));
    let square = Inputs::new(floats(q), floats(q), floats([1, 10, 8, 7]));
    let out = [1, 10, 8, 7];
    let mask = Mask::keep(bytes([1, 1, 10, 10]));
    let lse = call(
        Attention::new(),
        Inputs::new(floats(right.0), floats(right.1), floats(right.2)),
        right.3,
        &[(More::Lse, [1, 10, 8, 1])],
    );
    let heads = |n: usize, kv: usize| format!("q: {n} heads are no multiple of the {kv} heads of k");
    let mut cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 6, value_dim: 7 }).unwrap();
    let appended = outcome(cache.append(floats(k), floats(v)));
    assert_eq!(cache.lens(), [0]);
    vec![
        mistake(4, "BLHD as BHLD: all, 10 rows and 7 keys", of(q, [1, 7, 2, 6], [1, 7, 2, 7], out), heads(10, 7)),
        mistake(
            4,
            "BLHD as BHLD: all, grouped heads, causal",
            call(Attention::new().causal(), grouped, out, &[]),
            unaligned("causal", 8, 2),
        ),
        mistake(
            4,
            "BLHD as BHLD: all, with a mask of rows and keys",
            call(Attention::new(), square.mask(mask), out, &[]),
            "mask: rows is 10, but the call has 8",
        ),
        mistake(4, "BLHD as BHLD: q", of(q, [1, 4, 10, 6], [1, 4, 10, 7], out), heads(10, 4)),
        mistake(4, "BLHD as BHLD: k and v", of(right.0, k, v, right.3), heads(8, 10)),
        mistake(4, "BLHD as BHLD: v", of(right.0, right.1, v, right.3), "v: heads is 10, but k has 2"),
        mistake(4, "BLHD as BHLD: out", of(right.0, right.1, right.2, out), "out: heads is 10, but q has 8"),
        mistake(4, "BLHD as BHLD: lse", lse, "lse: heads is 10, but q has 8"),
        mistake(4, "BLHD as BHLD: appended", appended, "k: heads is 10, but the cache has 2"),
    ]
}

/// 5: arrays stored batch, heads, rows, dim and said to be stored batch, rows, heads, dim.
fn stored_otherwise() -> Vec<Mistake> {
    let as_blhd = |stored| View::blhd(&ZEROS, stored).expect("small");
    let all = Inputs::new(as_blhd([1, 8, 10, 6]), as_blhd([1, 2, 7, 6]), as_blhd([1, 2, 7, 7]));
    let one = Inputs::new(floats([1, 8, 10, 6]), floats([1, 2, 7, 6]), as_blhd([1, 2, 7, 7]));
    vec![
        mistake(
            5,
            "BHLD as BLHD: all",
            call(Attention::new(), all, [1, 10, 8, 7], &[]),
            "q: 10 heads are no multiple of the 7 heads of k",
        ),
        mistake(5, "BHLD as BLHD: v", call(Attention::new(), one, [1, 8, 10, 7], &[]), "v: heads is 7, but k has 2"),
    ]
}

/// 18: more elements than there are addresses, in one view or in the output.
fn too_large() -> Vec<Mistake> {
    let shape = [usize::MAX, 2, 1, 1];
    let big = 1 << 40;
    let wide = |shape| View::from_strides(&ZEROS, 0, shape, [0; 4]).expect("one element for all");
    let call = inputs(Inputs::new(wide([1, 1, big, 1]), wide([1; 4]), wide([1, 1, 1, 1 << 24])));
    vec![
        mistake(
            18,
            "a size beyond usize",
            outcome(View::bhld(&ZEROS, shape)),
            format!("a view of shape {shape:?} is larger than the address space"),
        ),
        mistake(
            18,
            "an output beyond usize",
            call,
            format!("out: sizes {:?} do not fit the address space", [1, 1, big, 1 << 24]),
        ),
        mistake(
            18,
            "keys longer than any",
            outcome(KvCache::new(1, KvShape { kv_heads: 1, head_dim: (1 << 24) + 1, value_dim: 4 })),
            "cache: head_dim is 16777217, but must be at most 16777216, the largest possible",
        ),
        mistake(
            18,
            "a cache beyond usize",
            outcome(KvCache::new(usize::MAX, KvShape { kv_heads: 1, head_dim: 64, value_dim: 64 })),
            format!("cache: sizes {:?} do not fit the address space", [usize::MAX, 1, 64, 64]),
        ),
        mistake(
            18,
            "a page pool beyond usize",
            outcome(PagePool::new(
                1 << 50,
                16,
                KvShape { kv_heads: 1 << 10, head_dim: 64, value_dim: 48 },
                CacheFormat::Elements(Dtype::F32),
            )),
            format!("page pool: sizes {:?} do not fit the address space", [1usize << 50, 16, 1 << 10, 112]),
        ),
    ]
}
