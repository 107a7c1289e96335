//! Int8 steps one by one, for tests and benchmarks.

use crate::attention::call::tiling::{MAX_ROW_BLOCK, SCORE_STRIDE};
use crate::attention::steps::pv::{ValueSums, Values};
use crate::attention::steps::pv_int8;
use crate::attention::steps::qk_int8::{Int8Queries, IntegerKeys};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::score_run::{ScoreRun, Scores};
use crate::attention::steps::span::Span;
use crate::matmul::int8::{
    self, MAX_HEAD_DIM, QUAD, QuerySize, Row, ValueQuad, pack_keys, panel_bytes, place_key, quads,
};
use crate::matmul::key_code::Int8Keys;
use crate::matmul::prefetch::PrefetchQueue;
use crate::simd::aligned::AlignedBuf;
use crate::simd::isa::Isa;
use crate::simd::{LANES, Query4, Simd};
use crate::tensor::rows::{KEY_BLOCK, MAX_DIM, Rows};
use core::ops::Range;

/// Int8 keys and values of one head, as the steps take them.
pub struct Cache {
    head_dim: usize,
    value_dim: usize,
    len: usize,
    capacity: usize,
    /// Scales of channels, if keys have none.
    channels: Option<Vec<f32>>,
    keys: AlignedBuf,
    key_scales: Vec<f32>,
    values: AlignedBuf,
    value_scales: Vec<f32>,
}

impl core::fmt::Debug for Cache {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Cache").field("len", &self.len).field("head_dim", &self.head_dim).finish_non_exhaustive()
    }
}

impl Cache {
    /// Makes a cache with room for this many tokens. Each key has a scale, or each channel, if scales are given.
    ///
    /// # Panics
    /// If there are scales but not `head_dim` of them, a dimension is 0 or above its limit, or so many tokens exceed
    /// the address space.
    pub fn new(capacity: usize, [head_dim, value_dim]: [usize; 2], channels: Option<Vec<f32>>) -> Self {
        assert!(channels.as_ref().is_none_or(|channels| channels.len() == head_dim));
        assert!((1..=MAX_HEAD_DIM).contains(&head_dim) && (1..=MAX_DIM).contains(&value_dim), "dimensions of no cache");
        let bytes = (head_dim + value_dim).next_multiple_of(LANES).checked_mul(capacity);
        assert!(bytes.is_some_and(|bytes| bytes <= isize::MAX as usize / 4), "tokens beyond memory");
        let capacity = capacity.next_multiple_of(LANES);
        let (mut keys, mut values) = (AlignedBuf::new(), AlignedBuf::new());
        keys.reserve(capacity * quads(head_dim));
        values.reserve(capacity * value_dim.div_ceil(LANES) * LANES / 4);
        let scales = || vec![0.0; capacity];
        let (key_scales, value_scales) = (scales(), scales());
        Self { head_dim, value_dim, len: 0, capacity, channels, keys, key_scales, values, value_scales }
    }

    /// Makes a cache of the tokens of dense rows, packed at once.
    ///
    /// # Panics
    /// If the rows are not whole, or keys and values differ in number.
    pub fn pack(isa: Isa, [keys, values]: [&[f32]; 2], dims: [usize; 2], channels: Option<Vec<f32>>) -> Self {
        struct Pack<'a>(&'a mut Cache, &'a [f32], &'a [f32]);
        impl Pack<'_> {
            fn run<S: Simd>(self, s: S) {
                let Self(cache, keys, values) = self;
                let d = cache.head_dim;
                let mut bytes = vec![0; keys.len()];
                for (j, (key, bytes)) in keys.chunks_exact(d).zip(bytes.chunks_exact_mut(d)).enumerate() {
                    cache.quantise_key(s, j, key, bytes);
                }
                pack_keys(&bytes, d, cache.keys.elements_mut::<i8>());
                for (j, value) in values.chunks_exact(cache.value_dim).enumerate() {
                    cache.put_value(s, j, value);
                }
            }
        }
        assert!(dims[0] > 0, "keys need a length");
        let len = keys.len() / dims[0];
        assert!(
            keys.len() == len * dims[0] && len.checked_mul(dims[1]) == Some(values.len()),
            "rows that are not whole"
        );
        let mut cache = Self { len, ..Self::new(len, dims, channels) };
        dispatch!(isa, |s| Pack(&mut cache, keys, values).run(s));
        cache
    }

    fn quantise_key<S: Simd>(&mut self, s: S, j: usize, key: &[f32], bytes: &mut [i8]) {
        match &self.channels {
            Some(channels) => assert!(int8::quantise_by_channel(s, key, channels, bytes), "a finite key"),
            None => self.key_scales[j] = int8::quantise(s, key, bytes),
        }
    }

    fn put_value<S: Simd>(&mut self, s: S, j: usize, value: &[f32]) {
        let mut bytes = vec![0; self.width()];
        self.value_scales[j] = int8::quantise(s, value, &mut bytes);
        for (i, byte) in bytes.into_iter().enumerate() {
            let at = self.value_at(j, i);
            self.values.elements_mut::<i8>()[at] = byte;
        }
    }

    /// Returns the number of tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of bytes of the packed keys.
    pub fn key_bytes(&self) -> usize {
        self.len.div_ceil(LANES) * panel_bytes(self.head_dim)
    }

    /// Returns the number of bytes of the values.
    pub fn value_bytes(&self) -> usize {
        self.len * self.width()
    }

    fn width(&self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Returns element `i` of key `j` as it is stored, and its scale, without that of its channel.
    pub fn key(&self, j: usize, i: usize) -> (i8, f32) {
        let at = j / LANES * panel_bytes(self.head_dim) + i / 4 * 4 * LANES + j % LANES * 4 + i % 4;
        (self.keys.elements::<i8>()[at], self.channels.as_ref().map_or(self.key_scales[j], |_| 1.0))
    }

    /// Returns element `i` of value `j` as it is stored, and its scale.
    pub fn value(&self, j: usize, i: usize) -> (i8, f32) {
        (self.values.elements::<i8>()[self.value_at(j, i)], self.value_scales[j])
    }

    fn value_at(&self, j: usize, i: usize) -> usize {
        (j / QUAD * self.width() + i) * QUAD + j % QUAD
    }

    /// Appends a token.
    ///
    /// # Panics
    /// If the token has other dimensions, or there is no room.
    pub fn push(&mut self, isa: Isa, key: &[f32], value: &[f32]) {
        struct Push<'a>(&'a mut Cache, &'a [f32], &'a [f32]);
        impl Push<'_> {
            fn run<S: Simd>(self, s: S) {
                let Self(cache, key, value) = self;
                let (j, mut bytes) = (cache.len, vec![0; key.len()]);
                cache.quantise_key(s, j, key, &mut bytes);
                place_key(&bytes, j, cache.keys.elements_mut::<i8>());
                cache.put_value(s, j, value);
                cache.len += 1;
            }
        }
        assert!(self.len < self.capacity && key.len() == self.head_dim && value.len() == self.value_dim);
        dispatch!(isa, |s| Push(self, key, value).run(s));
    }

    /// Computes scores of up to 96 dense query rows against some of the keys, from the first of a block on:
    /// `[row][keys]`.
    ///
    /// # Panics
    /// If rows, keys and scores do not fit.
    pub fn scores(&self, isa: Isa, queries: &[f32], scale: f32, keys: Range<usize>, out: &mut [f32]) {
        struct Run<'a>(&'a Cache, &'a [f32], f32, Range<usize>, &'a mut [f32]);
        impl Run<'_> {
            fn run<S: Simd>(self, s: S) {
                let Self(cache, queries, scale, keys, out) = self;
                let (d, rows) = (cache.head_dim, queries.len() / cache.head_dim);
                let mut bytes = vec![Query4::ZERO; rows * quads(d)];
                let mut factors = vec![Row::default(); rows];
                for (r, (row, bytes)) in queries.chunks_exact(d).zip(bytes.chunks_exact_mut(quads(d))).enumerate() {
                    factors[r] = match &cache.channels {
                        Some(channels) => {
                            let row: Vec<_> = row.iter().zip(channels).map(|(x, scale)| x * scale).collect();
                            int8::quantise_query(s, &row, scale, bytes)
                        }
                        None => int8::quantise_query(s, row, scale, bytes),
                    };
                }
                let mut block = vec![0.0; rows * SCORE_STRIDE];
                for first in keys.clone().step_by(KEY_BLOCK) {
                    let here = KEY_BLOCK.min(keys.end - first);
                    let panels = here.div_ceil(LANES);
                    let packed =
                        &cache.keys.elements::<i8>()[first / LANES * panel_bytes(d)..][..panels * panel_bytes(d)];
                    // SAFETY: `packed` holds these panels.
                    unsafe {
                        let panels = Rows::strided(packed.as_ptr(), panel_bytes(d) as isize, 1);
                        let code = Int8Keys(cache.channels.is_none().then_some(&cache.key_scales[first..]));
                        let run = &mut ScoreRun {
                            rows,
                            panels: 0..here.div_ceil(LANES),
                            spans: &spans::<S>(rows, here),
                            next_bias: None,
                            prefetch: &mut PrefetchQueue::nothing(),
                            out: &mut block,
                        };
                        let queries = Int8Queries { quads: &bytes, rows: &factors, size: QuerySize::int8(d) };
                        s.with_int8_dot(Scores { queries, keys: IntegerKeys { panels, code }, run });
                    }
                    for (out, block) in out.chunks_exact_mut(keys.len()).zip(block.chunks_exact(SCORE_STRIDE)) {
                        out[first - keys.start..][..here].copy_from_slice(&block[..here]);
                    }
                }
            }
        }
        let rows = queries.len() / self.head_dim;
        assert!(rows <= MAX_ROW_BLOCK && queries.len() == rows * self.head_dim && out.len() == rows * keys.len());
        assert!(keys.start.is_multiple_of(KEY_BLOCK) && keys.end <= self.len);
        dispatch!(isa, |s| Run(self, queries, scale, keys, out).run(s));
    }

    /// Adds some of the values, with weights `[row][keys]`, to `out`, `[row][value_dim in whole 16s]`. Limits as for
    /// [`Self::scores`].
    ///
    /// # Panics
    /// If weights, keys and sums do not fit.
    pub fn values(&self, isa: Isa, weights: &[f32], keys: Range<usize>, out: &mut [f32]) {
        struct Run<'a>(&'a Cache, &'a [f32], Range<usize>, &'a mut [f32]);
        impl Run<'_> {
            fn run<S: Simd>(self, s: S) {
                let Self(cache, weights, keys, out) = self;
                let (width, rows) = (cache.width(), weights.len() / keys.len());
                let mut block = vec![0.0; rows * SCORE_STRIDE];
                let ones = vec![1.0; rows];
                for first in keys.clone().step_by(KEY_BLOCK) {
                    let here = KEY_BLOCK.min(keys.end - first);
                    block.fill(0.0);
                    for (block, weights) in block.chunks_exact_mut(SCORE_STRIDE).zip(weights.chunks_exact(keys.len())) {
                        block[..here].copy_from_slice(&weights[first - keys.start..][..here]);
                    }
                    let spans = spans::<S>(rows, here);
                    let row_block = ScoreBlock { scores: &mut block, spans: &spans, rows };
                    pv_int8::round_weights(s, row_block, &cache.value_scales[first..]);
                    let values = &cache.values.elements::<ValueQuad>()[first / QUAD * width..];
                    let values = &values[..here.div_ceil(QUAD) * width];
                    // SAFETY: `values` holds `here` rows of whole vectors, in fours; weights were rounded just now.
                    unsafe {
                        let values = Rows::strided(values.as_ptr(), width as isize, 1);
                        let sums = &mut ValueSums {
                            weights: &block,
                            cols: width,
                            spans: &spans,
                            rows,
                            rescale_prev: &ones,
                            rescale_block: &ones,
                            fresh: false,
                            out,
                            out_stride: width,
                            ends: None,
                            prefetch: &mut PrefetchQueue::nothing(),
                        };
                        s.with_int8_dot(Values { values, sums });
                    }
                }
            }
        }
        assert!(keys.start.is_multiple_of(KEY_BLOCK) && keys.end <= self.len && !keys.is_empty());
        let rows = weights.len() / keys.len();
        assert!(rows <= MAX_ROW_BLOCK && weights.len() == rows * keys.len() && out.len() == rows * self.width());
        dispatch!(isa, |s| Run(self, weights, keys, out).run(s));
    }
}

fn spans<S: Simd>(rows: usize, keys: usize) -> Vec<Span> {
    vec![Span::new(0, keys, false); rows.div_ceil(S::TILE_ROWS)]
}
