//! Tensors of 16-bit elements, with the same numbers as `f32` beside them. The crate `half` does the rounding here.

use crate::options::Case;
use crate::support::{Rng, Tensor, indices};
use half::{bf16, f16};
use sdpa::{Dtype, Inputs, KvCache, View, ViewMut};
use std::ops::Range;

pub(crate) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];
pub(crate) const SHORT: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// A number as an element of this type has it.
pub(crate) fn rounded(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        Dtype::F16 => f16::from_f32(x).to_f32(),
    }
}

/// The bits of that element, as the last of these 32.
pub(crate) fn bits(x: f32, dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => x.to_bits(),
        Dtype::Bf16 => bf16::from_f32(x).to_bits().into(),
        Dtype::F16 => f16::from_f32(x).to_bits().into(),
    }
}

/// Memory of elements of a type.
#[derive(Debug, Clone)]
pub(crate) enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Elements {
    pub(crate) fn of(data: &[f32], dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(data.to_vec()),
            Dtype::Bf16 => Self::Bf16(data.iter().map(|&x| bf16::from_f32(x)).collect()),
            Dtype::F16 => Self::F16(data.iter().map(|&x| f16::from_f32(x)).collect()),
        }
    }

    pub(crate) fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(data) => data.iter().map(|x| x.to_bits()).collect(),
            Self::Bf16(data) => data.iter().map(|x| x.to_bits().into()).collect(),
            Self::F16(data) => data.iter().map(|x| x.to_bits().into()).collect(),
        }
    }

    /// A writable tensor that lies like `like`.
    pub(crate) fn view_mut(&mut self, like: &Tensor) -> sdpa::TensorMut<'_> {
        let &Tensor { offset, shape, strides, .. } = like;
        let fits = "it fits its memory";
        match self {
            Self::F32(data) => ViewMut::from_strides(data, offset, shape, strides).expect(fits).into(),
            Self::Bf16(data) => ViewMut::from_strides(data, offset, shape, strides).expect(fits).into(),
            Self::F16(data) => ViewMut::from_strides(data, offset, shape, strides).expect(fits).into(),
        }
    }
}

/// A tensor rounded to a type, as elements of it and widened again.
#[derive(Debug, Clone)]
pub(crate) struct Rounded {
    pub(crate) elements: Elements,
    pub(crate) wide: Tensor,
}

impl Rounded {
    pub(crate) fn new(x: &Tensor, dtype: Dtype) -> Self {
        let data = x.data.iter().map(|&x| rounded(x, dtype)).collect();
        Self { elements: Elements::of(&x.data, dtype), wide: Tensor { data, ..x.clone() } }
    }

    pub(crate) fn view(&self) -> sdpa::Tensor<'_> {
        let Tensor { offset, shape, strides, .. } = self.wide;
        let fits = "it fits its memory";
        match &self.elements {
            Elements::F32(data) => View::from_strides(data, offset, shape, strides).expect(fits).into(),
            Elements::Bf16(data) => View::from_strides(data, offset, shape, strides).expect(fits).into(),
            Elements::F16(data) => View::from_strides(data, offset, shape, strides).expect(fits).into(),
        }
    }
}

/// A case whose tensors are of these types.
#[derive(Debug, Clone)]
pub(crate) struct Short {
    /// With the same numbers as `f32`.
    pub(crate) wide: Case,
    pub(crate) qkv: [Rounded; 3],
}

impl Short {
    pub(crate) fn new(case: Case, [q, k, v]: [Dtype; 3]) -> Self {
        let qkv = [Rounded::new(&case.q, q), Rounded::new(&case.k, k), Rounded::new(&case.v, v)];
        let [q, k, v] = qkv.each_ref().map(|x| x.wide.clone());
        Self { wide: Case { q, k, v, ..case }, qkv }
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
