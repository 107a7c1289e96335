//! Cases of 16-bit elements, with the same numbers as `f32` beside them.

use crate::options::Case;
pub(crate) use crate::options::elements::{DTYPES, Elements, Rounded, SHORT, bits, rounded};
use crate::support::{Rng, Tensor, indices};
use sdpa::{Dtype, Inputs, KvCache};
use std::ops::Range;

/// A case with queries, keys and values of these types.
#[derive(Debug, Clone)]
pub(crate) struct Short {
    /// With the same numbers as `f32`.
    pub(crate) wide: Case,
    /// The options to run with [`Self::source`]: those of `wide`, the bias in its own type.
    pub(crate) case: Case,
    pub(crate) qkv: [Rounded; 3],
}

impl Short {
    pub(crate) fn new(case: Case, [q, k, v]: [Dtype; 3]) -> Self {
        let qkv = [Rounded::new(&case.q, q), Rounded::new(&case.k, k), Rounded::new(&case.v, v)];
        let [q, k, v] = qkv.each_ref().map(|x| x.wide.clone());
        let case = Case { q, k, v, ..case };
        let bias = case.bias.as_ref().map(|bias| bias.wide.clone().into());
        Self { wide: Case { bias, ..case.clone() }, case, qkv }
    }

    /// The tensors, and the lengths that belong to them.
    pub(crate) fn source(&self) -> Inputs<'_> {
        let [q, k, v] = self.qkv.each_ref().map(Rounded::view);
        let mut inputs = Inputs::new(q, k, v);
        inputs = self.wide.kv_lens.as_ref().map_or(inputs, |x| inputs.kv_lens(x));
        self.wide.ragged.as_ref().map_or(inputs, |[q, k]| inputs.ragged(q, k))
    }
}

/// Every way to give q, k and v types: the first has none of 16 bits.
pub(crate) fn mixes() -> [[Dtype; 3]; 27] {
    core::array::from_fn(|n| [n / 9, n / 3 % 3, n % 3].map(|i| DTYPES[i]))
}

pub(crate) fn empty_cache(case: &Case, dtype: Dtype) -> KvCache {
    crate::kv_support::empty_cache(case).dtype(dtype).expect("nothing was appended")
}

/// Appends some keys of a sequence of a case, of whatever types, and makes them in the case what the cache has then.
pub(crate) fn append(
    (cache, dtype): (&mut KvCache, Dtype),
    case: &mut Case,
    b: usize,
    keys: Range<usize>,
    rng: &mut Rng,
) {
    let heads = case.kv_heads();
    let mut part = |x: &mut Tensor| {
        let part = Rounded::new(&x.part(b..b + 1, 0..heads, keys.clone()), rng.pick(&DTYPES));
        for [_, h, j, d] in indices(part.wide.shape) {
            x.set([b, h, keys.start + j, d], rounded(part.wide.get([0, h, j, d]), dtype));
        }
        part
    };
    let (k, v) = (part(&mut case.k), part(&mut case.v));
    cache.append_to(b, k.view(), v.view()).expect("fits");
}

/// A cache with the keys of every sequence that exist, appended in random parts of random types.
pub(crate) fn cache_of(case: &mut Case, dtype: Dtype, rng: &mut Rng) -> KvCache {
    let mut cache = empty_cache(case, dtype);
    for b in 0..case.batch() {
        for keys in crate::kv_support::cuts(case.kv_len(b), rng) {
            append((&mut cache, dtype), case, b, keys, rng);
        }
    }
    cache
}
