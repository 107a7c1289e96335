//! Building a cache: sizes, element format, sliding window.

use crate::cache::{KeyScales, KvCache};
use crate::error::{Error, at_most, same};
use crate::shape::KvShape;
use core::num::NonZeroUsize;
use sdpa_kernels::{
    Basis, Cache, CacheFormat, Dtype, Int4, Isa, KvFormat, MAX_EXACT, MAX_INT8_HEAD_DIM, Sliding, is_e4m3_scale,
};
use std::collections::BTreeSet;

/// Need of a latent cache of bytes: a value, of several channels, has one scale.
const SCALES_OF_TOKENS: &str = "keys with a scale for each token, not for each channel (KeyScales::PerToken)";

/// Need of a method that sets one format for keys and values.
const WITHOUT_FORMAT: &str = "a cache without with_format, which is set";

impl KvCache {
    /// Creates an empty `f32` cache for `sequences` sequences.
    ///
    /// # Errors
    /// [`Error::Empty`] for a length of 0, [`Error::Range`] for lengths beyond the largest possible,
    /// [`Error::TooLarge`] or [`Error::Memory`].
    pub fn new(sequences: usize, shape: KvShape) -> Result<Self, Error> {
        Self::with(sequences, shape, None)
    }

    /// Sets the element type. Appended keys and values are rounded to it once and widened again in registers. 16-bit
    /// elements take half the memory of `f32` and half the time to read.
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already or the cache is an int8 or int4 cache.
    pub fn dtype(self, dtype: Dtype) -> Result<Self, Error> {
        self.set(CacheFormat::Elements(dtype))
    }

    /// Makes the cache one of latent heads: values are the first `value_dim` columns of keys. This is multi-head
    /// latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form, where 128 query heads share one key of 576
    /// elements, and the first 512 are the value. Only rows of keys are stored: little more than half the memory of separate keys
    /// and values. In int8 ([`KeyScales::PerToken`]) and int4 a value has the scales of its key, and each call rearranges the
    /// bytes of the keys that it reads.
    ///
    /// Tokens are appended as to any cache, but `v` must be the first columns of `k`
    /// ([`View::columns`](crate::View::columns)). Results have the bits that tensors of the same numbers give; in int8
    /// and int4 their errors are bounded as for [`Self::int8`] and [`Self::int4`], with the scales of the keys.
    ///
    /// ```
    /// use sdpa::{Alignment, Attention, Inputs, KvCache, KvShape, Outputs, View, ViewMut};
    /// let shape = KvShape { kv_heads: 1, head_dim: 24, value_dim: 16 }; // the first 16 of a key are the value
    /// let mut cache = KvCache::new(1, shape)?.latent()?;
    /// let rows = vec![0.5; 5 * 24]; // five tokens: 16 latent elements, then 8 with the position
    /// let k = View::bhld(&rows, [1, 1, 5, 24])?;
    /// cache.append(k, k.columns(0..16).unwrap())?;
    /// let (q, mut out) = (vec![0.1; 32 * 24], vec![0.0; 32 * 16]); // 32 query heads, one row
    /// let inputs = Inputs::cached(View::bhld(&q, [1, 32, 1, 24])?, &cache);
    /// let attention = Attention::new().causal().align(Alignment::BottomRight);
    /// sdpa::attention(&attention, inputs, Outputs::new(ViewMut::bhld(&mut out, [1, 32, 1, 16])?))?;
    /// assert!(out.iter().all(|&x| (x - 0.5).abs() < 1e-6));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already, the channels of keys have scales, or keys and values have formats of
    /// their own or another basis; [`Error::Range`] if values are longer than keys.
    pub fn latent(self) -> Result<Self, Error> {
        self.empty("latent")?;
        refuse_unlike(self.format())?;
        let KvShape { head_dim, value_dim, .. } = self.shape();
        const OF: &str = "the head_dim of keys: values are their first columns";
        at_most("latent", "value_dim", value_dim, head_dim, OF)?;
        Ok(Self { cache: self.cache.with_latent(), ..self })
    }

    /// Sets int8 elements: about a quarter of the memory of `f32`, and 0.3 to 0.4 of the time of a step that reads it.
    /// Every value has a scale `s`, and so has every key, or every channel of the keys. An element `x` is stored as the
    /// integer nearest to `x / s`, at most ±127. A query row is quantised in the same way, once for all keys, after it
    /// is multiplied by the scales of the channels if there are any. Weights, multiplied by the scales of their values,
    /// are rounded to 16 bits: in each block of 256 keys, to multiples of a 32767th of the row's largest. Products of
    /// integers are accumulated exactly. Everything else, the softmax included, is computed in `f32`.
    ///
    /// **Accuracy.** Apart from `f32` rounding, the error of an element is at most half its scale: for a value or key,
    /// 1/254 of the largest magnitude in its row. The error of an output is therefore at most half the largest scale of
    /// the values it sees; rounded weights add at most as much again, and commonly a thousandth of that. The error of a
    /// score `c·Σ q·k`, with scales `s` of the query row and `t` of the key, is at most `|c|·(s/2·Σ|k| + t/2·Σ|q| +
    /// s·t·head_dim/4)`. This is the worst case: since the signs of such errors vary, the common error has a factor
    /// near √head_dim in place of head_dim. With scales `tᵢ` of channels, the query row that is quantised is `qᵢ·tᵢ`,
    /// and the bound is `|c|·(s/2·Σ|kᵢ|/tᵢ + Σ|qᵢ|·tᵢ/2 + s·head_dim/4)`, provided that no key is beyond 127 scales.
    /// The error of a score changes the weight by a factor `exp(±error)`.
    ///
    /// The bits are the same on every instruction set with FMA, for any number of threads, for rows computed together
    /// or one by one, and whatever the cache held before. Appending refuses non-finite keys and values. A query row
    /// that is non-finite, or becomes so when multiplied by the scales of the channels, has NaN scores. Non-finite
    /// weights, which only a weight function gives, make the outputs of their row NaN.
    ///
    /// ```
    /// use sdpa::{KeyScales, KvCache, KvShape};
    /// let shape = KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 };
    /// let cache = KvCache::new(1, shape)?.int8(KeyScales::PerToken)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already, another element type was set, or the cache is latent and
    /// channels have scales, [`Error::Range`] for keys longer than 131,072, [`Error::Mismatch`] if there are not `kv_heads × head_dim` scales,
    /// [`Error::Number`] for a scale that is not positive and finite.
    pub fn int8(self, keys: KeyScales) -> Result<Self, Error> {
        let mut cache = self.set(match &keys {
            KeyScales::PerToken => CacheFormat::Int8PerToken,
            KeyScales::PerChannel(scales) => CacheFormat::Int8PerChannel(scales),
        })?;
        cache.cache.reserve_scratch();
        Ok(cache)
    }

    /// Sets elements of four bits: about a seventh of the memory of `f32`, or a sixth with centres, if rows fill their
    /// blocks. Rows are divided into blocks of 32 elements; the last is filled up with zeros. Each block has a scale
    /// `s` and, with [`Int4::Centred`], a centre `m`, the number that the integer 0 stands for (asymmetric
    /// quantisation); both are stored as `f16`. An element `x` is stored as the integer nearest to `(x − m)/s`, at most
    /// ±7. Queries are quantised as for [`Self::int8`]. Weights, multiplied by the scales of their values, are rounded
    /// to bytes: in each block of 256 keys and 32 columns, to multiples of a 255th of the row's largest. Thresholds
    /// that are spread evenly over the keys decide between up and down, so that many small weights keep their sum.
    /// Weights below 0, which only a weight function gives, are rounded separately. Products of integers are
    /// accumulated exactly.
    ///
    /// **Accuracy.** The error of an element is at most half its block's scale: a 14th of the block's largest
    /// magnitude. With centres it is a 28th of the difference between the block's largest and smallest element, plus a
    /// 28,672nd of its largest magnitude, as the centre is rounded to `f16`. Either bound grows by a thousandth, as the
    /// scale is rounded up, and by 3·10⁻⁸, half the smallest step of `f16`. Scores have the bound of [`Self::int8`],
    /// with a block's scale in place of the key's. The error of an output is at most half the largest scale of the
    /// values it sees, plus what rounded weights add. Each weight is off by less than a 255th of the largest: if the
    /// errors of 256 keys all have the signs of their values, this adds seven scales. The signs vary. With normally
    /// distributed values, and one weight far above 255 others of half a unit, rounded weights add, root mean square,
    /// an 18th to the error of the rounded values; with usual weights they add nothing visible. If keys have a few
    /// large channels, rotate them ([`Self::with_format`]), or use [`Self::int8`]. docs/benchmarks.md has errors on real
    /// models' tensors.
    ///
    /// Bits are as stable as those of an [int8](Self::int8) cache.
    ///
    /// ```
    /// use sdpa::{Int4, KvCache, KvShape};
    /// let shape = KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 };
    /// let cache = KvCache::new(1, shape)?.int4(Int4::Symmetric)?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already or another element type was set, [`Error::Range`] for keys
    /// longer than 131,072.
    pub fn int4(self, kind: Int4) -> Result<Self, Error> {
        self.set(CacheFormat::Int4(kind))
    }

    /// Sets the format of keys, and that of values, in place of [`Self::dtype`], [`Self::int8`] and [`Self::int4`], which
    /// set that of both; the [`Basis`](crate::Basis) of integers; and how many first tokens of a sequence are exact beside their
    /// integers. Rows of either are as accurate as those methods say.
    ///
    /// The Hadamard basis spreads a few large channels over all others, which then have finer integers: docs/guide/caches.md says
    /// when to use it. Scales are made of the largest magnitude of the transformed row. Elements must be below 4095 in int4 and
    /// 1e36 in int8. Each query and each output takes `n log n` additions more.
    ///
    /// E4M3 ([OCP FP8](https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1))
    /// has four bits of exponent and three of fraction: the error of an element is at most a 16th of it, or half a 512th of the
    /// scale. A row's own scale is a 448th of its largest magnitude. With the scale of a head, numbers beyond 448 scales
    /// become 448 scales, and NaN stays NaN. Sums are those of floats, times the scale: with scales of 1, the bits of widening first.
    ///
    /// Exact tokens are kept as `f32`, `4·(head_dim + value_dim)` bytes each a head, of what are integers otherwise; scores and
    /// outputs take these in place of the integers. Softmax often gives the first tokens most of the weight (attention sinks,
    /// arXiv:2309.17453). [`Self::keep`] makes exact rows of integers where it moves a later token among the first.
    ///
    /// ```
    /// use sdpa::{Basis, CacheFormat, Int4, KvCache, KvFormat, KvShape};
    /// let format = KvFormat::new(CacheFormat::Int8PerToken, CacheFormat::Int4(Int4::Symmetric));
    /// let shape = KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 };
    /// let cache = KvCache::new(1, shape)?.with_format(format.key_basis(Basis::Hadamard))?;
    /// assert_eq!(cache.format().values, CacheFormat::Int4(Int4::Symmetric));
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already; for scales of channels of values; for another basis of floats, or of
    /// keys whose channels have scales; for exact tokens where all are floats; for a latent cache, where keys are the values, if
    /// these differ in format, have another basis, are exact, or E4M3. [`Error::Range`] for more than 16 exact tokens. Those of
    /// [`Self::int8`] and [`Self::int4`].
    pub fn with_format<'f>(self, format: impl Into<KvFormat<'f>>) -> Result<Self, Error> {
        let mut cache = self.with_empty_format(format.into())?;
        cache.cache.reserve_scratch();
        Ok(cache)
    }

    /// Sets the format, without memory for appending.
    pub(super) fn with_empty_format(self, format: KvFormat<'_>) -> Result<Self, Error> {
        self.empty("format")?;
        check_format(format, self.shape(), "the cache (kv_heads × head_dim)")?;
        if self.is_latent() {
            refuse_unlike(format)?;
        }
        Ok(Self { cache: self.cache.with_format(format), ..self })
    }

    /// Sets the format of both keys and values, unless another one is set.
    fn set(self, format: CacheFormat<'_>) -> Result<Self, Error> {
        let ([argument, _], [set, needs]) = (setter(format), setter(self.format().keys));
        self.empty(argument)?;
        if self.format() != self.format().keys {
            return Err(Error::Needs { argument, needs: WITHOUT_FORMAT });
        }
        if set != argument && self.format() != CacheFormat::Elements(Dtype::F32) {
            return Err(Error::Needs { argument, needs });
        }
        self.with_empty_format(format.into())
    }

    /// Refuses a setting if something was appended already.
    fn empty(&self, argument: &'static str) -> Result<(), Error> {
        if self.bytes() > 0 { Err(Error::Needs { argument, needs: "an empty cache" }) } else { Ok(()) }
    }

    /// Creates an empty cache for a sliding window. Rows may see the last `last` keys, their own included, and the
    /// first `first`. Keys that no later row can see are evicted in blocks of 256, so some stay for a while. Other
    /// arguments are as for [`Self::new`].
    ///
    /// A call with a window of more last or first keys than these is refused at every length ([`Error::Wider`]). A
    /// call without a window, or with one unbounded on the left, is refused if a row would see an evicted key
    /// ([`Error::Evicted`]).
    ///
    /// ```
    /// use core::num::NonZeroUsize;
    /// use sdpa::{Alignment, Attention, KvCache, KvShape, Window};
    /// let last = NonZeroUsize::new(512).unwrap();
    /// let cache = KvCache::sliding(1, KvShape { kv_heads: 8, head_dim: 64, value_dim: 64 }, last, 4)?;
    /// let window = Window::last_tokens(last).keep_first(4); // no more keys than the cache keeps
    /// let attention = Attention::new().window(window).align(Alignment::BottomRight);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn sliding(sequences: usize, shape: KvShape, last: NonZeroUsize, first: usize) -> Result<Self, Error> {
        Self::with(sequences, shape, Some(Sliding { last: last.get(), first, rollback: 0 }))
    }

    /// Keeps `tokens` more of the last keys than rows may see, so that these tokens can be taken back. For sliding
    /// caches.
    ///
    /// [`Self::truncate`] and [`Self::keep`] can then take a sequence back to any length from `h − tokens` on. `h` is
    /// the greatest length that the sequence had just before an append of at least one token, since it was last empty.
    /// (A fork takes over the `h` of its source.) The tokens of the last append can always be taken back. A rollback
    /// does not change `h`: evicted keys do not come back, so a second rollback may be refused.
    ///
    /// ```
    /// use core::num::NonZeroUsize;
    /// use sdpa::{KvCache, KvShape, View};
    /// let shape = KvShape { kv_heads: 1, head_dim: 1, value_dim: 1 };
    /// let mut cache = KvCache::sliding(1, shape, NonZeroUsize::new(100).unwrap(), 0)?.rollback_room(60)?;
    /// let rows = [0.5; 415];
    /// for n in [415, 1] {
    ///     let rows = View::bhld(&rows, [1, 1, n, 1])?;
    ///     cache.append(rows, rows)?;
    /// }
    /// cache.truncate(0, 355)?; // 60 back from 415, the length before the last append
    /// let row = View::bhld(&rows, [1, 1, 1, 1])?;
    /// cache.append(row, row)?;
    /// cache.truncate(0, 355)?; // what the last append brought
    /// assert!(cache.truncate(0, 354).is_err()); // 61 back from 415
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] if something was appended already or the cache is not a sliding one.
    pub fn rollback_room(self, tokens: usize) -> Result<Self, Error> {
        self.empty("rollback_room")?;
        let cache = self.cache.with_rollback(tokens);
        Ok(Self { cache: cache.ok_or(Error::Needs { argument: "rollback_room", needs: "a sliding cache" })?, ..self })
    }

    fn with(sequences: usize, shape: KvShape, sliding: Option<Sliding>) -> Result<Self, Error> {
        shape.check("cache")?;
        let KvShape { kv_heads, head_dim, value_dim } = shape;
        // Size of a block of 256 keys and values in floats, rows padded to whole vectors.
        let row = head_dim.next_multiple_of(16) + value_dim.next_multiple_of(16);
        let fits = |bytes: &usize| *bytes <= isize::MAX as usize;
        let block = kv_heads.checked_mul(row * 256 * 4).filter(fits);
        let bytes = sequences.checked_mul(Cache::SEQUENCE_BYTES).filter(fits);
        let (Some(_), Some(bytes)) = (block, bytes) else {
            return Err(Error::TooLarge { what: "cache", sizes: [sequences, kv_heads, head_dim, value_dim] });
        };
        let cache = Cache::new(Dtype::F32, [sequences, kv_heads], shape.dims(), sliding);
        Ok(Self {
            cache: cache.ok_or(Error::Memory { what: "cache", bytes })?,
            isa: Isa::detect(),
            removed: BTreeSet::new(),
            sorted: Vec::new(),
        })
    }
}

/// Name of the method that sets a format, and the need of a cache for which it was not called.
fn setter(format: CacheFormat<'_>) -> [&'static str; 2] {
    match format {
        CacheFormat::Elements(_) => ["dtype", "a cache without dtype, which is set"],
        CacheFormat::Int4(_) => ["int4", "a cache without int4, which is set"],
        CacheFormat::E4m3PerToken | CacheFormat::E4m3PerHead(_) => ["format", WITHOUT_FORMAT],
        _ => ["int8", "a cache without int8, which is set"],
    }
}

/// Refuses formats of latent keys, which are the values, that tell the two apart.
fn refuse_unlike(format: KvFormat<'_>) -> Result<(), Error> {
    let needs = match format {
        KvFormat { keys: CacheFormat::Int8PerChannel(_), .. } => SCALES_OF_TOKENS,
        KvFormat { keys: CacheFormat::E4m3PerToken | CacheFormat::E4m3PerHead(_), .. } => "floats or integers",
        _ if format != format.values => "keys and values of one format, in the basis of their channels, none exact",
        _ => return Ok(()),
    };
    Err(Error::Needs { argument: "latent", needs })
}

/// Refuses a format that keys and values of this shape, those of `of`, cannot have: integer keys if they are too long to be
/// multiplied, scales of channels that do not fit, and another basis of what is not integers with a scale for each row.
pub(crate) fn check_format(format: KvFormat<'_>, shape: KvShape, of: &'static str) -> Result<(), Error> {
    let KvShape { kv_heads, head_dim, .. } = shape;
    let KvFormat { keys, values, key_basis, value_basis, exact_first, .. } = format;
    at_most("exact_first", "number of tokens", exact_first, MAX_EXACT, "the most that can be exact")?;
    if exact_first > 0 && !keys.is_integer() && !values.is_integer() {
        return Err(Error::Needs { argument: "exact_first", needs: "integer keys or values" });
    }
    let [argument, _] = setter(keys);
    if keys.is_integer() {
        at_most(argument, "head_dim", head_dim, MAX_INT8_HEAD_DIM, "the largest possible of integers")?;
    }
    if let CacheFormat::Int8PerChannel(_) = values {
        return Err(Error::Needs { argument: "values", needs: "a scale for each token (CacheFormat::Int8PerToken)" });
    }
    for (argument, format, basis) in [("key_basis", keys, key_basis), ("value_basis", values, value_basis)] {
        let integers = matches!(format, CacheFormat::Int8PerToken | CacheFormat::Int4(_));
        if basis != Basis::Channels && !integers {
            return Err(Error::Needs { argument, needs: "int8 with a scale for each token, or int4" });
        }
    }
    let (of_channels, of_heads) = (kv_heads.saturating_mul(head_dim), "the key/value heads");
    for (argument, format) in [("key scales", keys), ("value scales", values)] {
        let (scales, all, of) = match format {
            CacheFormat::Int8PerChannel(scales) => (scales, of_channels, of),
            CacheFormat::E4m3PerHead(scales) => (scales, kv_heads, of_heads),
            _ => continue,
        };
        same(argument, "length", scales.len(), all, of)?;
        if let Some(&got) = scales.iter().find(|scale| !(**scale > 0.0 && scale.is_finite())) {
            return Err(Error::Number { argument, got, expected: "positive and finite" });
        }
        let codes = matches!(format, CacheFormat::E4m3PerHead(_));
        if let Some(&got) = scales.iter().find(|&&scale| codes && !is_e4m3_scale(scale)) {
            return Err(Error::Number { argument, got, expected: "one with which every code is a finite f32" });
        }
    }
    Ok(())
}
