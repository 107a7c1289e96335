//! Caches of fewer bits: for each format of keys and values, in the basis of channels and in the Hadamard basis, without exact first
//! tokens and with four: bits of a number, errors of outputs and of weights, and the time of steps and of appends.
//!
//! `cargo bench --bench caches`, with a filter on groups: `-- bits`, `-- errors`, `-- steps`, `-- appends`.

#[path = "support/cache_samples.rs"]
mod cache_samples;
#[path = "support/cache_times.rs"]
mod cache_times;
#[path = "support/interleaved.rs"]
mod interleaved;
mod support;
#[path = "support/translations.rs"]
mod translations;

use cache_samples::Sample;
use sdpa::{Basis, CacheFormat, Dtype, Inputs, Int4, KvCache, KvFormat, KvShape, Outputs, Point, View, ViewMut, naive};

/// First tokens that are exact.
const EXACT: usize = 4;
/// Bases of keys and of values.
const BASES: [(&str, [Basis; 2]); 3] = [
    ("", [Basis::Channels; 2]),
    (", keys rotated", [Basis::Hadamard, Basis::Channels]),
    (", both rotated", [Basis::Hadamard; 2]),
];
/// Keys and heads of the cache that bits are counted of.
const COUNTED: [usize; 2] = [4096, 8];
const COUNTED_DIM: usize = 128;

/// A way to store keys and values.
struct Variant {
    name: String,
    format: KvFormat<'static>,
}

/// Formats of floats.
fn floats() -> Vec<Variant> {
    let types = [("f32", Dtype::F32), ("f16", Dtype::F16), ("bf16", Dtype::Bf16)];
    let types = types.map(|(name, dtype)| (name, CacheFormat::Elements(dtype)));
    let variant =
        |(name, format): (&str, CacheFormat<'static>)| Variant { name: name.to_owned(), format: format.into() };
    types.into_iter().chain([("e4m3", CacheFormat::E4m3PerToken)]).map(variant).collect()
}

/// Formats of integers, each first as it is, then rotated and with exact tokens.
fn integers() -> [Vec<Variant>; 4] {
    let [symmetric, centred] = [Int4::Symmetric, Int4::Centred].map(CacheFormat::Int4);
    let formats = [
        ("int8", CacheFormat::Int8PerToken.into()),
        ("int4", symmetric.into()),
        ("int4 with centres", centred.into()),
        ("int8 keys, int4 values", KvFormat::new(CacheFormat::Int8PerToken, symmetric)),
    ];
    formats.map(|(name, format)| {
        let variant = |exact: usize, (basis, [keys, values]): (&str, [Basis; 2])| Variant {
            name: format!("{name}{basis}{}", if exact > 0 { format!(", {exact} exact") } else { String::new() }),
            format: format.key_basis(keys).value_basis(values).exact_first(exact),
        };
        [0, EXACT].into_iter().flat_map(|exact| BASES.map(|basis| variant(exact, basis))).collect()
    })
}

/// Returns a cache of this format with these keys and values.
fn filled([k, v]: [View<'_>; 2], format: KvFormat<'_>) -> KvCache {
    let ([sequences, kv_heads, _, head_dim], [.., value_dim]) = (k.shape(), v.shape());
    let empty = KvCache::new(sequences, KvShape { kv_heads, head_dim, value_dim }).expect("good sizes");
    let mut cache = empty.with_format(format).expect("an empty cache");
    cache.append(k, v).expect("they fit");
    cache
}

/// Bits that a number takes in a long cache, scales and exact tokens included.
fn bits(format: KvFormat<'_>) -> f64 {
    let ([keys, heads], numbers) = (COUNTED, COUNTED[0] * COUNTED[1] * COUNTED_DIM);
    let rows = vec![0.5; numbers];
    let rows = View::bhld(&rows, [1, heads, keys, COUNTED_DIM]).expect("data of this shape");
    8.0 * filled([rows; 2], format).bytes() as f64 / (2 * numbers) as f64
}

/// Errors of a call, against the oracle on the numbers that were appended.
struct Errors {
    /// Largest error of any output.
    largest: f64,
    /// Root mean square of outputs' errors, as a share of that of outputs.
    relative: f64,
    /// Root mean square error of the scores that rows see, over that of the scores.
    scores: f64,
    /// Mean over rows of Σ p ln(p/q): p are the oracle's weights, q those that the call writes.
    divergence: f64,
}

impl Errors {
    fn of(sample: &Sample, exact: &naive::Answer<f64>, format: KvFormat<'_>) -> Self {
        let [q, k, v] = sample.views();
        let cache = filled([k, v], format);
        let ([_, heads, rows, dim], keys) = (sample.shapes[0], sample.shapes[1][2]);
        let (mut out, mut weights) = (vec![0.0; exact.out.len()], vec![0.0; heads * rows * keys]);
        let mut scores = weights.clone();
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, heads, rows, dim]).expect("it fits"));
        let outputs = outputs.weights(ViewMut::bhld(&mut weights, [1, heads, rows, keys]).expect("it fits"));
        let outputs = outputs.scores(Point::Raw, ViewMut::bhld(&mut scores, [1, heads, rows, keys]).expect("it fits"));
        sdpa::attention(&sample.attention, Inputs::cached(q, &cache), outputs).expect("a good call");
        let off = |(&x, exact): (&f32, &f64)| (f64::from(x) - exact).abs();
        let largest = out.iter().zip(&exact.out).map(off).fold(0.0, f64::max);
        let [raw, .., seen] = &exact.points;
        let scores = scores.iter().zip(raw).zip(seen).filter(|&(_, &weight)| weight > 0.0).map(|(pair, _)| pair);
        // What f32 has no weight for counts as its smallest normal number.
        let nats =
            |(&p, &q): (&f64, &f32)| if p > 0.0 { p * (p / f64::from(q.max(f32::MIN_POSITIVE))).ln() } else { 0.0 };
        let divergence = exact.points[3].iter().zip(&weights).map(nats).sum::<f64>() / (heads * rows) as f64;
        Self { largest, relative: share(out.iter().zip(&exact.out)), scores: share(scores), divergence }
    }
}

/// Returns the root mean square of errors, as a share of that of the exact numbers.
fn share<'a>(pairs: impl Iterator<Item = (&'a f32, &'a f64)>) -> f64 {
    let squares = pairs.map(|(&x, exact)| [(f64::from(x) - exact).powi(2), exact * exact]);
    let [errors, exact] = squares.fold([0.0; 2], |sums, squares| [sums[0] + squares[0], sums[1] + squares[1]]);
    (errors / exact).sqrt()
}

/// Prints the errors of all formats on all samples, and those of integers as shares of the same without rotation and exact tokens.
fn errors() {
    for sample in cache_samples::samples() {
        sample.print();
        let exact = naive::oracle(&sample.attention, &sample.inputs()).expect("a good call");
        println!("  {:<46} largest error  of outputs (share)  of scores (share)  divergence (share)", "");
        for group in floats().into_iter().map(|variant| vec![variant]).chain(integers()) {
            let mut plain = None;
            for Variant { name, format } in group {
                let Errors { largest, relative, scores, divergence } = Errors::of(&sample, &exact, format);
                let of = [relative, scores, divergence];
                let plain = plain.get_or_insert(of);
                print!("  {name:<46} {largest:13.1e}");
                of.iter().zip(plain).for_each(|(error, plain)| print!("  {error:9.2e} ({:5.3})", error / *plain));
                println!();
            }
        }
    }
}

/// Prints the bits of a number of all formats.
fn all_bits() {
    let [keys, _] = COUNTED;
    println!("of a number, heads of {COUNTED_DIM}, {keys} tokens");
    for Variant { name, format } in floats().into_iter().chain(integers().into_iter().flatten()) {
        println!("  {name:<46} {:6.2}", bits(format));
    }
}

fn main() {
    support::print_machine();
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let groups: [(&str, fn()); 4] =
        [("bits", all_bits), ("errors", errors), ("steps", cache_times::steps), ("appends", cache_times::appends)];
    for (name, group) in groups {
        if wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str())) {
            println!("\n{name}");
            group();
        }
    }
}
