//! Keys and values of cases put into caches and pages, and exact comparisons of everything a call wrote.
#![allow(dead_code, unreachable_pub, reason = "every test binary compiles this module and uses its part of it")]

use crate::options::{Case, Full, POINTS, Wanted};
use crate::support::{Layout, Rng, Tensor, assert_same_bits, execs, indices};
use core::ops::Range;
use sdpa::{
    Alignment, Basis, BlockTable, CacheFormat, Dtype, Inputs, Int4, KeyScales, KvCache, KvFormat, KvShape, Pages,
    Window,
};

/// An empty cache for the keys and values of a case.
pub fn empty_cache(case: &Case) -> KvCache {
    KvCache::new(
        case.batch(),
        KvShape { kv_heads: case.kv_heads(), head_dim: case.k.shape[3], value_dim: case.v.shape[3] },
    )
    .expect("good sizes")
}

/// Appends some keys of a sequence of a case.
pub fn append_part(cache: &mut KvCache, case: &Case, b: usize, keys: Range<usize>) {
    let part = |x: &Tensor| x.part(b..b + 1, 0..case.kv_heads(), keys.clone());
    cache.append_to(b, part(&case.k).view(), part(&case.v).view()).expect("fits");
}

/// Cuts `0..n` at random places: runs of one, of whole panels, of anything.
pub fn cuts(n: usize, rng: &mut Rng) -> Vec<Range<usize>> {
    let (mut at, mut parts) = (0, Vec::new());
    while at < n {
        let step = match rng.below(4) {
            0 => 1,
            1 => rng.pick(&[15, 16, 17, 48, 256]),
            _ => 1 + rng.below(n),
        };
        let end = n.min(at + step);
        parts.push(at..end);
        at = end;
    }
    parts
}

/// A cache with the keys of every sequence that exist, appended in random parts.
pub fn cache_of(case: &Case, rng: &mut Rng) -> KvCache {
    let mut cache = empty_cache(case);
    for b in 0..case.batch() {
        for keys in cuts(case.kv_len(b), rng) {
            append_part(&mut cache, case, b, keys);
        }
    }
    cache
}

/// Pools of keys and values, and a table.
#[derive(Debug, Clone)]
pub struct Pool {
    pub k: Tensor,
    pub v: Tensor,
    pub entries: Vec<u32>,
    pub lens: Vec<usize>,
}

impl Pool {
    /// The keys of a case that exist, in pages of this size: shuffled, with a few that nobody has. Free pages, the tails of
    /// last pages and whatever else no sequence has are `fill`; entries that no length reaches are no pages at all.
    pub fn of(case: &Case, page: usize, layouts: [Layout; 2], fill: f32, rng: &mut Rng) -> Self {
        let lens: Vec<usize> = (0..case.batch()).map(|b| case.kv_len(b)).collect();
        let used: usize = lens.iter().map(|len| len.div_ceil(page)).sum();
        let pages = used + rng.below(4);
        let mut order: Vec<u32> = (0..pages as u32).collect();
        (1..pages).for_each(|i| order.swap(i, rng.below(i + 1)));
        let width = lens.iter().map(|len| len.div_ceil(page)).max().unwrap_or(0) + rng.below(3);
        let mut entries = vec![u32::MAX; width * lens.len()];
        let mut free = order.into_iter();
        for (b, len) in lens.iter().enumerate() {
            entries[b * width..][..len.div_ceil(page)].fill_with(|| free.next().expect("enough pages"));
        }
        let blank = |dim| Tensor::filled([pages, case.kv_heads(), page, dim], fill);
        let mut pool = Self { k: blank(case.k.shape[3]), v: blank(case.v.shape[3]), entries, lens };
        for b in 0..case.batch() {
            pool.write(case, b, 0..pool.lens[b]);
        }
        let [k, v] = layouts;
        (pool.k, pool.v) = (filled(&pool.k, k, fill), filled(&pool.v, v, fill));
        pool
    }

    /// Writes some keys of a sequence of a case where the table says.
    pub fn write(&mut self, case: &Case, b: usize, keys: Range<usize>) {
        let (page, width) = (self.k.shape[2], self.width());
        for (to, from) in [(&mut self.k, &case.k), (&mut self.v, &case.v)] {
            for [_, h, j, _] in indices([1, case.kv_heads(), keys.len(), 1]) {
                let j = keys.start + j;
                let at = self.entries[b * width + j / page] as usize;
                to.copy_row([at, h, j % page], from, [b, h, j]);
            }
        }
    }

    /// Entries of a sequence.
    pub fn width(&self) -> usize {
        self.entries.len().checked_div(self.lens.len()).unwrap_or(0)
    }

    pub fn pages(&self) -> Pages<'_> {
        self.try_pages().expect("a good table")
    }

    pub fn try_pages(&self) -> Result<Pages<'_>, sdpa::PageError> {
        Pages::new(self.k.view(), self.v.view(), BlockTable { entries: &self.entries, lens: &self.lens })
    }
}

/// In another layout, with `fill` between the elements.
fn filled(x: &Tensor, layout: Layout, fill: f32) -> Tensor {
    let mut laid = x.laid_out(layout);
    laid.data.fill(fill);
    laid.copy_all(x);
    laid
}

/// Everything that two calls of one shape wrote, bit for bit.
#[track_caller]
pub fn same_full(what: &str, got: &Full, expected: &Full) {
    assert_same_bits(&format!("{what}: out"), &got.out, &expected.out);
    assert_same_bits(&format!("{what}: lse"), &got.lse, &expected.lse);
    for ((point, got), expected) in POINTS.iter().zip(&got.points).zip(&expected.points) {
        assert_eq!(got.is_some(), expected.is_some(), "{what}: {point:?}");
        if let (Some(got), Some(expected)) = (got, expected) {
            assert_same_bits(&format!("{what}: {point:?}"), got, expected);
        }
    }
    assert_eq!(got.mass.is_some(), expected.mass.is_some(), "{what}: key weight sums");
    if let (Some(got), Some(expected)) = (&got.mass, &expected.mass) {
        assert_same_bits(&format!("{what}: key weight sums"), got, expected);
    }
}

/// Oracle's answers from two sources, bit for bit.
#[track_caller]
pub fn same_oracle(what: &str, got: &sdpa::naive::Answer<f64>, expected: &sdpa::naive::Answer<f64>) {
    let parts = |x: &sdpa::naive::Answer<f64>| {
        let all = [&x.out, &x.lse, &x.key_weight_sums].into_iter().chain(&x.points).cloned();
        all.map(|x| x.into_iter().map(f64::to_bits).collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    assert!(parts(got) == parts(expected), "{what}: the oracle's answers differ");
}

/// An empty cache in every format, and some with a format each for keys and values or in another basis.
pub fn every_format(empty: &KvCache) -> [(&'static str, KvCache); 12] {
    let dtype = |dtype| empty.clone().dtype(dtype).expect("an empty cache");
    let int8 = |scales| empty.clone().int8(scales).expect("an empty cache");
    let int4 = |numbers| empty.clone().int4(numbers).expect("an empty cache");
    let apart = |format: KvFormat<'_>| empty.clone().with_format(format).expect("an empty cache");
    let KvShape { kv_heads, head_dim, .. } = empty.shape();
    let bf16 = CacheFormat::Elements(Dtype::Bf16);
    let channels = (0..kv_heads * head_dim).map(|i| (4.0 + (i % 5) as f32) / 127.0).collect();
    [
        ("f32", dtype(Dtype::F32)),
        ("bf16", dtype(Dtype::Bf16)),
        ("f16", dtype(Dtype::F16)),
        ("int8 per token", int8(KeyScales::PerToken)),
        ("int8 per channel", int8(KeyScales::PerChannel(channels))),
        ("int4", int4(Int4::Symmetric)),
        ("int4 with centres", int4(Int4::Centred)),
        ("e4m3", apart(CacheFormat::E4m3PerToken.into())),
        (
            "int8 and e4m3 per head",
            apart(KvFormat::new(CacheFormat::Int8PerToken, CacheFormat::E4m3PerHead(&[0.02; 8][..kv_heads]))),
        ),
        ("bf16 and int8", apart(KvFormat::new(bf16, CacheFormat::Int8PerToken))),
        ("int8 and int4", apart(KvFormat::new(CacheFormat::Int8PerToken, CacheFormat::Int4(Int4::Centred)))),
        (
            "int4 and int8 in the Hadamard basis",
            apart(
                KvFormat::new(CacheFormat::Int4(Int4::Symmetric), CacheFormat::Int8PerToken)
                    .key_basis(Basis::Hadamard)
                    .value_basis(Basis::Hadamard),
            ),
        ),
    ]
}

/// An empty cache in every format, and some whose first tokens are exact: these take memory of their own, and a later token that
/// moves among them stays as inexact as it was.
pub fn exact_and_others(empty: &KvCache) -> Vec<(&'static str, KvCache)> {
    let exact =
        |format: KvFormat<'_>, tokens| empty.clone().with_format(format.exact_first(tokens)).expect("an empty cache");
    let int4 = KvFormat::from(CacheFormat::Int4(Int4::Centred)).key_basis(Basis::Hadamard);
    let exact = [
        ("int8 with 5 exact tokens", exact(CacheFormat::Int8PerToken.into(), 5)),
        ("int4 in the Hadamard basis with 16 exact tokens", exact(int4.value_basis(Basis::Hadamard), 16)),
    ];
    every_format(empty).into_iter().chain(exact).collect()
}

/// Rows `[1, kv_heads, n, dim]` of keys and values of the right sizes.
pub fn new_tokens(cache: &KvCache, n: usize, rng: &mut Rng) -> [Tensor; 2] {
    let KvShape { kv_heads, head_dim, value_dim } = cache.shape();
    [head_dim, value_dim].map(|dim| Tensor::normal([1, kv_heads, n, dim], rng))
}

/// Some rows of tokens, in this order.
pub fn picked([k, v]: &[Tensor; 2], rows: &[usize]) -> [Tensor; 2] {
    let pick = |x: &Tensor| {
        let [b, h, _, dim] = x.shape;
        Tensor::from_fn([b, h, rows.len(), dim], |[b, h, j, d]| x.get([b, h, rows[j], d]))
    };
    [pick(k), pick(v)]
}

/// Appends tokens to a sequence.
pub fn append_tokens(cache: &mut KvCache, sequence: usize, [k, v]: &[Tensor; 2]) {
    cache.append_to(sequence, k.view(), v.view()).expect("they fit");
}

/// Distance of the tokens, and of the elements, that [`same_cache`] reads one by one.
const STRIDE: usize = 5;

/// Two caches that hold the same bits, and give them: under the window they were made for, on every instruction set.
#[track_caller]
pub fn same_cache(what: &str, got: &KvCache, expected: &KvCache) {
    assert_eq!(got.lens(), expected.lens(), "{what}");
    let (batch, longest) = (got.sequences(), got.lens().iter().copied().max().unwrap_or(0));
    let KvShape { kv_heads, head_dim: d, value_dim: dv } = got.shape();
    let mut case = Case::plain(&mut Rng::new(77), [batch, 2 * kv_heads, kv_heads, 1, 0, d, dv]);
    let empty = |dim| Tensor::filled([0, kv_heads, longest, dim], 0.0);
    (case.k, case.v, case.alignment) = (empty(d), empty(dv), Some(Alignment::BottomRight));
    case.window = got.sliding_window().map(|keys| Window::last_tokens(keys.last).keep_first(keys.first));
    let wanted = if case.window.is_some() { Wanted::LEAST } else { Wanted::ALL };
    for (isa, exec) in execs() {
        let [got, expected] = [got, expected].map(|x| case.run_over(Inputs::cached(case.q.view(), x), exec, wanted));
        same_full(&format!("{what}, {isa}"), &got, &expected);
    }
    // All that is stored is in a file, if both store it in one form; what is read of it one by one, slowly, need not be all.
    let in_one_form =
        cfg!(feature = "safetensors") && got.format() == expected.format() && got.is_latent() == expected.is_latent();
    let stride = if in_one_form { STRIDE } else { 1 };
    #[cfg(feature = "safetensors")]
    for b in (0..batch).filter(|&b| in_one_form && got.has_sequence(b) && expected.has_sequence(b)) {
        assert!(
            got.export_sequence(b) == expected.export_sequence(b),
            "{what}: what is stored of sequence {b} differs"
        );
    }
    let held = [got, expected].map(|x| Inputs::cached(case.q.view(), x).key_values().expect("a cache"));
    for [b, h, j, c] in indices([batch, kv_heads, longest.div_ceil(stride), d.max(dv).div_ceil(stride)]) {
        let at = [b, h, stride * j, (stride * c + j) % d.max(dv)];
        let [got, expected] = held.map(|held| [held.key(at), held.value(at)].map(|x| x.map(f32::to_bits)));
        assert_eq!(got, expected, "{what}: token {} of sequence {b}", stride * j);
    }
    for b in (0..batch).filter(|&b| got.has_sequence(b)) {
        assert_eq!(got.evicted(b), expected.evicted(b), "{what}");
    }
}
