//! Keys and values of a case in tensors, in pages, in a cache; and what a cache of bytes makes of them.

use super::array::{Array, indices};
use super::case::Case;
use super::draw::Home;
use super::memory::Memory;
use super::oracle::{Code, Oracle};
use super::place::AnyPlaced;
use super::rng::Rng;
use super::stage::{list, nothing};
use core::ops::Range;
use sdpa::{
    BlockTable, CacheFormat, Dtype, Inputs, KeyScales, KvCache, KvShape, PageError, PagePool, Pages, Tensor, View,
};

#[derive(Debug)]
pub(crate) enum Source {
    Tensors { k: AnyPlaced, v: AnyPlaced },
    Pool(Pool),
    Packed(Packed),
    Cache(KvCache),
}

/// Pools of keys and values, and a table.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) k: AnyPlaced,
    pub(crate) v: AnyPlaced,
    pub(crate) entries: Memory<u32>,
    pub(crate) lens: Memory<usize>,
}

impl Pool {
    pub(crate) fn pages(&self) -> Result<Pages<'_>, PageError> {
        let table = BlockTable { entries: self.entries.slice(), lens: self.lens.slice() };
        Pages::new(self.k.view(), self.v.view(), table)
    }
}

/// A pool of the crate's, and a table.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) pool: PagePool,
    pub(crate) entries: Memory<u32>,
    pub(crate) lens: Memory<usize>,
}

impl Packed {
    pub(crate) fn pages(&self) -> Pages<'_> {
        let table = BlockTable { entries: self.entries.slice(), lens: self.lens.slice() };
        self.pool.pages(table).expect("a good table")
    }
}

pub(crate) fn place(rng: &mut Rng, case: &Case, home: Home) -> Source {
    match home {
        Home::Tensors => {
            let [_, k, v] = case.dtypes;
            Source::Tensors { k: AnyPlaced::of(rng, &case.k, k), v: AnyPlaced::of(rng, &case.v, v) }
        }
        Home::Pages => Source::Pool(pool(rng, case)),
        Home::Pool(dtype) => Source::Packed(packed(rng, case, dtype, CacheFormat::Elements(dtype))),
        Home::IntegerPool(format) => Source::Packed(packed(rng, case, Dtype::F32, format)),
        Home::Cache(dtype) => {
            let cache = empty(case).dtype(dtype).expect("it is empty");
            Source::Cache(filled(rng, case, cache, dtype))
        }
        Home::Bytes { channels } => {
            let by_channel = |most| KeyScales::PerChannel(channel_scales(case.kv_heads() * case.k.shape[3], most));
            let scales = channels.map_or(KeyScales::PerToken, by_channel);
            let cache = empty(case).int8(scales).expect("it is empty");
            Source::Cache(filled(rng, case, cache, Dtype::F32))
        }
        Home::Bits(numbers) => {
            let cache = empty(case).int4(numbers).expect("it is empty");
            Source::Cache(filled(rng, case, cache, Dtype::F32))
        }
    }
}

fn empty(case: &Case) -> KvCache {
    KvCache::new(
        case.batch(),
        KvShape { kv_heads: case.kv_heads(), head_dim: case.k.shape[3], value_dim: case.value_dim() },
    )
    .expect("good sizes")
}

/// Scales of channels: from too small for keys of this size to much too large.
pub(crate) fn channel_scales(channels: usize, most: f32) -> Vec<f32> {
    (0..channels).map(|i| most * (0.5 + (i % 7) as f32) / 127.0).collect()
}

/// Appends every key that exists, in random parts.
fn filled(rng: &mut Rng, case: &Case, mut cache: KvCache, dtype: Dtype) -> KvCache {
    let mut parts: Vec<(usize, Vec<Range<usize>>)> = Vec::new();
    for b in 0..case.batch() {
        let mut cuts = rng.cuts(case.kv_len(b));
        cuts.reverse();
        parts.push((b, cuts));
    }
    while !parts.is_empty() {
        let i = rng.below(parts.len());
        let (b, cuts) = &mut parts[i];
        let (b, Some(keys)) = (*b, cuts.pop()) else {
            parts.swap_remove(i);
            continue;
        };
        append(rng, &mut cache, b, [case.k.part(b, keys.clone()), case.v.part(b, keys)], dtype);
    }
    assert_eq!(cache.lens(), case.kv_lens.as_deref().unwrap_or(&[]));
    cache
}

/// Appends rows to a sequence, as `f32` or as the cache has them.
pub(crate) fn append(rng: &mut Rng, cache: &mut KvCache, b: usize, kv: [Array; 2], dtype: Dtype) {
    let dtypes = [0, 1].map(|_| if rng.one_in(2) { dtype } else { Dtype::F32 });
    let tokens = Tokens::of(rng, cache, &kv, dtypes);
    cache.append_to(b, tokens.k(), tokens.v()).expect("they fit");
}

/// Rows to be appended. Values of a latent cache are columns of the keys.
pub(crate) struct Tokens {
    k: AnyPlaced,
    v: Option<AnyPlaced>,
    value_dim: usize,
}

impl Tokens {
    pub(crate) fn of(rng: &mut Rng, cache: &KvCache, [k, v]: &[Array; 2], dtypes: [Dtype; 2]) -> Self {
        Self {
            k: AnyPlaced::of(rng, k, dtypes[0]),
            v: (!cache.is_latent()).then(|| AnyPlaced::of(rng, v, dtypes[1])),
            value_dim: v.shape[3],
        }
    }

    pub(crate) fn k(&self) -> Tensor<'_> {
        self.k.view()
    }

    pub(crate) fn v(&self) -> Tensor<'_> {
        self.v.as_ref().map_or_else(|| self.k.columns(self.value_dim), AnyPlaced::view)
    }
}

/// Shuffled pages for the keys that exist, with a few that nobody has; entries that no length reaches are no pages at all.
struct Places {
    pages: usize,
    width: usize,
    entries: Vec<u32>,
    lens: Vec<usize>,
}

impl Places {
    fn draw(rng: &mut Rng, case: &Case, size: usize) -> Self {
        let lens: Vec<usize> = (0..case.batch()).map(|b| case.kv_len(b)).collect();
        let used = lens.iter().map(|len| len.div_ceil(size)).sum::<usize>();
        let pages = used + rng.below(3);
        let width = lens.iter().map(|len| len.div_ceil(size)).max().unwrap_or(0) + rng.below(2);
        let mut free = rng.shuffled(pages).into_iter();
        let mut entries = vec![u32::MAX; width * lens.len()];
        for (b, len) in lens.iter().enumerate() {
            let mine = &mut entries[b * width..][..len.div_ceil(size)];
            mine.fill_with(|| free.next().expect("enough pages") as u32);
        }
        Self { pages, width, entries, lens }
    }

    fn of(&self, b: usize) -> &[u32] {
        &self.entries[b * self.width..][..self.width]
    }
}

/// A pool of the crate's with the keys that exist, appended in random parts; all of it was NaN before.
fn packed(rng: &mut Rng, case: &Case, dtype: Dtype, format: CacheFormat<'_>) -> Packed {
    let size = rng.pick(&[16, 32, 48, 64, 80, 96, 256, 272]);
    let places = Places::draw(rng, case, size);
    let dims = [case.k.shape[3], case.value_dim()];
    let mut pool = PagePool::new(
        places.pages,
        size,
        KvShape { kv_heads: case.kv_heads(), head_dim: dims[0], value_dim: dims[1] },
        format,
    )
    .expect("good sizes");
    let all: Vec<u32> = (0..places.pages as u32).collect();
    let keys = places.pages * size;
    if keys > 0 {
        let [k, v] = dims.map(|dim| {
            let mut rows = nothing([1, case.kv_heads(), keys, dim]);
            if !matches!(format, CacheFormat::Elements(_)) {
                // Integers are refused what is not finite.
                rows.data.fill(5e4);
            }
            AnyPlaced::of(rng, &rows, Dtype::F32)
        });
        pool.append(BlockTable { entries: &all, lens: &[keys] }, k.view(), v.view()).expect("they fit");
    }
    for b in 0..case.batch() {
        for keys in rng.cuts(case.kv_len(b)) {
            let table = BlockTable { entries: places.of(b), lens: &[keys.end] };
            let [k, v] = [case.k.part(b, keys.clone()), case.v.part(b, keys)].map(|x| {
                let dtype = if rng.one_in(2) { dtype } else { Dtype::F32 };
                AnyPlaced::of(rng, &x, dtype)
            });
            pool.append(table, k.view(), v.view()).expect("they fit");
        }
    }
    Packed { pool, entries: list(rng, &places.entries), lens: list(rng, &places.lens) }
}

/// The keys that exist in pages. Of what no sequence has, all is NaN.
fn pool(rng: &mut Rng, case: &Case) -> Pool {
    let size = rng.pick(&[1, 2, 3, 7, 16, 17, 64, 256, 300]);
    let places = Places::draw(rng, case, size);
    let Places { pages, ref lens, .. } = places;
    let [mut k, mut v] = [&case.k, &case.v].map(|x| nothing([pages, case.kv_heads(), size, x.shape[3]]));
    for (b, len) in lens.iter().enumerate() {
        let mine = places.of(b);
        for (to, from) in [(&mut k, &case.k), (&mut v, &case.v)] {
            for j in 0..*len {
                for h in 0..case.kv_heads() {
                    to.row_mut(mine[j / size] as usize, h, j % size).copy_from_slice(from.row(b, h, j));
                }
            }
        }
    }
    let (entries, lens) = (list(rng, &places.entries), list(rng, &places.lens));
    let [_, k_type, v_type] = case.dtypes;
    Pool { k: AnyPlaced::of(rng, &k, k_type), v: AnyPlaced::of(rng, &v, v_type), entries, lens }
}

/// The numbers of a case as a cache of integers has them: keys and values as it says, within half a scale of what they
/// were; queries rounded to bytes.
pub(crate) fn in_integers<'c>(case: &'c Case, cache: &KvCache, home: Home) -> Oracle<'c> {
    let (code, scales) = match home {
        Home::Bytes { channels } => {
            (Code::Bytes, channels.map(|most| channel_scales(case.kv_heads() * case.k.shape[3], most)))
        }
        Home::Bits(numbers) => (Code::Bits(numbers), None),
        _ => unreachable!("{home:?} has no integers"),
    };
    let mut oracle = Oracle { code: Some(code), ..Oracle::of(case) };
    let none = View::<f32>::bhld(&[], [case.batch(), 0, 0, 1]).expect("nothing");
    let inputs = Inputs::cached(none, cache);
    let held = inputs.key_values().expect("a value for each key");
    let d = case.k.shape[3];
    for (of, x, wide) in [(0, &case.k, &mut oracle.k), (1, &case.v, &mut oracle.v)] {
        for at @ [b, h, j, c] in indices(x.shape).filter(|&[b, _, j, _]| j < case.kv_len(b)) {
            let was = x.get(at);
            let (scale, was) = match &scales {
                Some(scales) if of == 0 => {
                    let scale = scales[h * d + c];
                    (scale, was.clamp(-127.0 * scale, 127.0 * scale))
                }
                _ => (code.scale(x.row(b, h, j), c), was),
            };
            let is = if of == 0 { held.key(at) } else { held.value(at) }.expect("it is there");
            let off = (f64::from(is) - f64::from(was)).abs();
            assert!(off <= 0.500_01 * f64::from(scale) + code.least(), "{at:?} is held as {is:e}, was {was:e}");
            wide.set(at, is.into());
        }
    }
    let channel = |h: usize, c: usize| scales.as_ref().map_or(1.0, |scales| scales[h / case.sharing() * d + c]);
    let [b, h, l, _] = case.q.shape;
    for [b, h, l, _] in indices([b, h, l, 1]) {
        let row: Vec<f32> = case.q.row(b, h, l).iter().enumerate().map(|(c, x)| x * channel(h, c)).collect();
        let most = row.iter().fold(0.0f32, |most, x| if x.abs() > most || x.is_nan() { x.abs() } else { most });
        let scale = (most / 127.0).clamp(f32::MIN_POSITIVE, f32::MAX / 127.0);
        for (c, x) in row.iter().enumerate() {
            // A row that is not finite has no bytes.
            let bytes = if most.is_finite() { f64::from((x / scale).round_ties_even()) } else { f64::NAN };
            oracle.q.set([b, h, l, c], bytes * f64::from(scale) / f64::from(channel(h, c)));
        }
    }
    oracle
}
