//! Caches of eight and four bits: what they hold is what the oracle sees, within the errors that the documentation states, and the bits
//! do not depend on how it got there.

mod bits;
mod byte_weights;
mod refusals;

use crate::support::{Rng, Tensor, Tensors, assert_close, execs, largest};
use sdpa::{
    Alignment, Attention, Error, Exec, Inputs, Int4, KeyScales, KeyValues, KvCache, KvShape, Mods, Outputs, Plan,
    Point, Position, Run, View, ViewMut, WeightMod, Window, Workspace, naive,
};

/// Scales of channels that fit unit normal keys, each another.
fn channels(kv_heads: usize, d: usize) -> Vec<f32> {
    (0..kv_heads * d).map(|i| (5.0 + (i % 7) as f32 / 3.0) / 127.0).collect()
}

/// Kind of elements, and their scales.
#[derive(Debug, Clone)]
enum Kind {
    Int8(KeyScales),
    Int4(Int4),
}

impl Kind {
    const PER_TOKEN: Self = Self::Int8(KeyScales::PerToken);

    fn of(&self, cache: KvCache) -> Result<KvCache, Error> {
        match self {
            Self::Int8(scales) => cache.int8(scales.clone()),
            &Self::Int4(numbers) => cache.int4(numbers),
        }
    }

    /// Scales of the keys' channels.
    fn channels(&self) -> Option<&[f32]> {
        if let Self::Int8(KeyScales::PerChannel(scales)) = self { Some(scales) } else { None }
    }
}

/// Both kinds of scales of bytes.
fn scales(kv_heads: usize, d: usize) -> [KeyScales; 2] {
    [KeyScales::PerToken, KeyScales::PerChannel(channels(kv_heads, d))]
}

/// All kinds.
fn kinds(kv_heads: usize, d: usize) -> [Kind; 4] {
    let [token, channel] = scales(kv_heads, d).map(Kind::Int8);
    [token, channel, Kind::Int4(Int4::Symmetric), Kind::Int4(Int4::Centred)]
}

/// An empty cache for such keys and values.
fn empty(t: &Tensors, kind: &Kind) -> KvCache {
    let ([b, h, _, d], e) = (t.k.shape, t.v.shape[3]);
    kind.of(KvCache::new(b, KvShape { kv_heads: h, head_dim: d, value_dim: e }).unwrap()).unwrap()
}

/// A cache of them.
fn filled(t: &Tensors, kind: &Kind) -> KvCache {
    let mut cache = empty(t, kind);
    cache.append(t.k.view(), t.v.view()).unwrap();
    cache
}

/// What the queries are in bytes, as floats.
fn quantised(q: &Tensor, kind: &Kind, kv_heads: usize) -> Tensor {
    let [_, heads, _, d] = q.shape;
    Tensor::from_fn(q.shape, |[b, h, l, i]| {
        let scale = |i: usize| kind.channels().map_or(1.0, |scales| scales[h / (heads / kv_heads) * d + i]);
        let most = (0..d).map(|i| (q.get([b, h, l, i]) * scale(i)).abs()).fold(0.0, f32::max);
        let own = (most / 127.0).max(f32::MIN_POSITIVE);
        (q.get([b, h, l, i]) * scale(i) / own).round_ties_even() * own / scale(i)
    })
}

/// Largest error of an output that comes of rounded weights, given the exact ones, `[batch, heads, rows, keys]`: in each block
/// of 256 keys, half a 32767th of the largest weight times its value's scale, for each unit of the others' integers. Of int4
/// it is a 255th, by thresholds that do not depend on the values: so twice the root of the sum of squares, not the sum.
fn rounding(kind: &Kind, weights: &[f64], [batch, heads, rows]: [usize; 3], kv: &KeyValues<'_>) -> f64 {
    let [_, kv_heads, keys, dim] = kv.v_shape();
    let mut worst = 0.0f64;
    for (head, weights) in weights.chunks_exact(rows * keys).enumerate() {
        let [b, h] = [head / heads % batch, head % heads * kv_heads / heads];
        let held = |j: usize, i: usize| kv.value([b, h, j, i]).map_or(0.0, f64::from);
        let values: Vec<Vec<f64>> = (0..keys).map(|j| (0..dim).map(|i| held(j, i)).collect()).collect();
        // Columns with one scale, and the scale of a value: with a centre, 14 of them, or 13, reach from end to end.
        let (columns, most) = if let Kind::Int4(_) = kind { (32, 7.0) } else { (dim, 127.0) };
        let scale = |x: &[f64]| {
            let [low, high] = [f64::min, f64::max].map(|f| x.iter().copied().fold(x[0], f));
            if let Kind::Int4(Int4::Centred) = kind { (high - low) / 13.0 } else { high.max(-low) / most }
        };
        for (first, row) in (0..dim).step_by(columns).flat_map(|c| weights.chunks_exact(keys).map(move |row| (c, row)))
        {
            let columns = first..dim.min(first + columns);
            let scales: Vec<_> = values.iter().map(|x| scale(&x[columns.clone()])).collect();
            let mut errors = vec![0.0; columns.len()];
            for block in (0..keys).step_by(256).map(|first| first..keys.min(first + 256)) {
                let largest = block.clone().map(|j| row[j] * scales[j]).fold(0.0, f64::max);
                for j in block.filter(|&j| row[j] > 0.0 && scales[j] > 0.0) {
                    for (error, x) in errors.iter_mut().zip(&values[j][columns.clone()]) {
                        let units = if most == 7.0 { most } else { x.abs() / scales[j] };
                        *error += match kind {
                            Kind::Int4(_) => (1.002 / 255.0 * largest * units).powi(2),
                            Kind::Int8(_) => 0.501 / 32767.0 * largest * units,
                        };
                    }
                }
            }
            let all = |error: f64| if let Kind::Int4(_) = kind { 2.0 * error.sqrt() } else { error };
            worst = errors.into_iter().map(all).fold(worst, f64::max);
        }
    }
    worst
}

/// All outputs of a call.
#[derive(Debug)]
struct All {
    out: Tensor,
    lse: Tensor,
    raw: Tensor,
    weights: Tensor,
    mass: Tensor,
}

impl All {
    fn blank([b, h, l, _]: [usize; 4], [_, g, keys, e]: [usize; 4]) -> Self {
        let blank = |shape| Tensor::filled(shape, f32::from_bits(crate::support::UNWRITTEN));
        let [out, lse] = [e, 1].map(|e| blank([b, h, l, e]));
        let [raw, weights] = [(); 2].map(|()| blank([b, h, l, keys]));
        Self { out, lse, raw, weights, mass: blank([b, g, keys, 1]) }
    }

    fn outputs(&mut self) -> Outputs<'_> {
        fn view(x: &mut Tensor) -> ViewMut<'_> {
            ViewMut::bhld(&mut x.data, x.shape).unwrap()
        }
        Outputs::new(view(&mut self.out))
            .lse(view(&mut self.lse))
            .scores(Point::Raw, view(&mut self.raw))
            .scores(Point::Weights, view(&mut self.weights))
            .key_weight_sums(view(&mut self.mass))
    }

    fn of(attention: &Attention, inputs: Inputs<'_>, exec: Exec) -> Self {
        let mut all = Self::blank(inputs.queries().shape(), inputs.key_values().unwrap().v_shape());
        let problem = attention.problem(inputs, all.outputs()).unwrap();
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, &mut Workspace::new());
        all
    }

    fn check(&self, what: &str, oracle: &naive::Answer<f64>, value: f64, rounding: f64) {
        let finite = |xs: &[f64]| xs.iter().filter(|x| x.is_finite()).fold(1.0f64, |m, x| m.max(x.abs()));
        let unit = 8.0 * f64::from(f32::EPSILON) * finite(&oracle.points[0]);
        assert_close(&format!("{what}: raw"), &self.raw, &oracle.points[0], unit);
        assert_close(&format!("{what}: lse"), &self.lse, &oracle.lse, unit);
        assert_close(&format!("{what}: weights"), &self.weights, &oracle.points[3], unit);
        assert_close(&format!("{what}: out"), &self.out, &oracle.out, unit * value.max(1.0) + rounding);
        assert_close(
            &format!("{what}: key weight sums"),
            &self.mass,
            &oracle.key_weight_sums,
            unit * finite(&oracle.key_weight_sums),
        );
    }
}

const SIZES: [[usize; 7]; 6] = [
    [1, 1, 1, 1, 1, 1, 1],
    [2, 4, 2, 3, 40, 17, 5],
    [1, 6, 2, 70, 300, 33, 40],
    [2, 2, 1, 5, 513, 128, 64],
    [1, 2, 2, 20, 257, 4, 300],
    [1, 2, 1, 2, 100, 300, 16],
];

/// Over what a cache holds, with queries in bytes, the answer is that of the formula. Under all options.
#[test]
fn the_oracle_agrees_over_what_is_held() {
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let [_, heads, kv_heads, rows, keys, d, _] = sizes;
        let t = Tensors::normal(sizes, seed as u64);
        let bias = Tensor::normal([1, heads, rows, keys], &mut Rng::new(9));
        let (slopes, sinks) = (vec![0.05; heads], vec![0.5; heads]);
        let plain = Attention::new();
        let ruled = plain.causal().align(Alignment::BottomRight).softcap(3.0).scale(0.4);
        let ruled = ruled.window(Window::inclusive(Some(200), None).keep_first(3));
        for kind in kinds(kv_heads, d) {
            let cache = filled(&t, &kind);
            let q = quantised(&t.q, &kind, kv_heads);
            for (name, attention) in [("plain", plain), ("options", ruled)] {
                let with = |q: View<'_>, check: &mut dyn FnMut(Inputs<'_>)| {
                    let inputs = Inputs::cached(q, &cache);
                    match name {
                        "plain" => check(inputs),
                        _ => check(inputs.bias(bias.view()).alibi(&slopes).sinks(&sinks)),
                    }
                };
                let mut oracle = None;
                with(q.view(), &mut |inputs| oracle = Some(naive::oracle(&attention, &inputs).unwrap()));
                let oracle = oracle.unwrap();
                let mut rounding = 0.0;
                with(q.view(), &mut |inputs| {
                    let [b, h, l, _] = q.shape;
                    rounding = self::rounding(&kind, &oracle.points[3], [b, h, l], &inputs.key_values().unwrap());
                });
                for (isa, exec) in execs() {
                    with(t.q.view(), &mut |inputs| {
                        let what = format!("{sizes:?}, {kind:?}, {name}, {isa}");
                        All::of(&attention, inputs, exec).check(&what, &oracle, largest(&t.v.data), rounding);
                    });
                }
            }
        }
    }
}

/// Keeps even keys, and doubles their weights.
struct Even;

impl WeightMod for Even {
    fn weight(&self, weight: f32, at: Position) -> f32 {
        if at.key.is_multiple_of(2) { 2.0 * weight } else { 0.0 }
    }
}

/// Makes the weights of odd keys negative.
struct Signed;

impl WeightMod for Signed {
    fn weight(&self, weight: f32, at: Position) -> f32 {
        if at.key.is_multiple_of(2) { weight } else { -1.5 * weight }
    }
}

#[test]
fn a_weight_function_sees_weights() {
    sees_weights(Even);
    sees_weights(Signed);
}

fn sees_weights(function: impl WeightMod) {
    let t = Tensors::normal([1, 4, 2, 9, 300, 20, 33], 4);
    let mods = Mods { score: (), mask: (), weight: function };
    for kind in kinds(2, 20) {
        let (cache, q) = (filled(&t, &kind), quantised(&t.q, &kind, 2));
        let oracle: naive::Answer<f64> =
            naive::answer(&Attention::new(), &Inputs::cached(q.view(), &cache), &mods).unwrap();
        let kv = Inputs::cached(q.view(), &cache).key_values().unwrap();
        let rounding = rounding(&kind, &oracle.points[3], [1, 4, 9], &kv);
        for (isa, exec) in execs() {
            let inputs = Inputs::cached(t.q.view(), &cache);
            let mut out = Tensor::filled([1, 4, 9, 33], f32::NAN);
            let outputs = Outputs::new(ViewMut::bhld(&mut out.data, out.shape).unwrap());
            let problem = Attention::new().problem(inputs, outputs).unwrap();
            let plan = Plan::new(&problem, exec);
            problem.run_with(&plan, &mut Workspace::new(), Run::new().mods(&mods)).expect("functions that fit");
            assert_close(&format!("{isa}"), &out, &oracle.out, 2e-5 + 2.0 * rounding);
        }
    }
}

/// Elements are off by half a scale at most.
#[test]
fn rows_are_kept_within_half_a_scale() {
    let mut t = Tensors::normal([1, 2, 2, 1, 300, 37, 21], 5);
    // Rows of any size, the largest and the smallest numbers too.
    for (l, size) in [(3, 1e-30), (4, 1e30), (5, 0.0), (6, 1e-44)] {
        for x in [&mut t.k, &mut t.v] {
            for i in 0..x.shape[3] {
                x.set([0, 1, l, i], size * x.get([0, 1, l, i]));
            }
        }
    }
    t.k.set([0, 0, 7, 0], f32::MAX);
    t.v.set([0, 0, 7, 0], -f32::MAX);
    let tokens = |cache: &KvCache, from: &Tensor, value: bool| {
        let inputs = Inputs::cached(View::bhld(&t.q.data, t.q.shape).unwrap(), cache);
        let held = inputs.key_values().unwrap();
        for [b, h, l, i] in crate::support::indices(from.shape) {
            let scale = (0..from.shape[3]).map(|i| from.get([b, h, l, i]).abs()).fold(0.0, f32::max) / 127.0;
            let (x, at) = (from.get([b, h, l, i]), [b, h, l, i]);
            let got = if value { held.value(at) } else { held.key(at) }.unwrap();
            let error = (f64::from(got) - f64::from(x)).abs();
            assert!(got.is_finite() && error <= 0.500_01 * f64::from(scale) + 1e-38, "{at:?}: {got} for {x}");
        }
    };
    let cache = filled(&t, &Kind::PER_TOKEN);
    tokens(&cache, &t.k, false);
    tokens(&cache, &t.v, true);
    // By channel: half of the channel's, up to where it is cut off.
    let scales = channels(2, 37);
    let cache = filled(&t, &Kind::Int8(KeyScales::PerChannel(scales.clone())));
    let inputs = Inputs::cached(t.q.view(), &cache);
    for at @ [_, h, _, i] in crate::support::indices(t.k.shape) {
        let (scale, got) = (scales[h * 37 + i], inputs.key_values().unwrap().key(at).unwrap());
        let x = t.k.get(at).clamp(-127.0 * scale, 127.0 * scale);
        assert!((got - x).abs() <= 0.500_01 * scale, "{at:?}: {got} for {x}");
    }
}

/// The bounds of the documentation, and that they are not empty: errors are a good deal smaller, as said.
#[test]
fn errors_are_within_the_documented_bounds() {
    for d in [16, 64, 128] {
        let t = Tensors::normal([1, 4, 2, 6, 500, d, 48], d as u64);
        let scale = 1.0 / (d as f64).sqrt();
        let most = |x: &Tensor, at: [usize; 3]| {
            (0..x.shape[3]).map(|i| f64::from(x.get([at[0], at[1], at[2], i]).abs())).fold(0.0, f64::max)
        };
        for kind in scales(2, d).map(Kind::Int8) {
            let all = All::of(&Attention::new(), Inputs::cached(t.q.view(), &filled(&t, &kind)), Exec::default());
            let (mut squares, mut bounds) = (0.0, 0.0);
            for [_, h, l, j] in crate::support::indices(all.raw.shape) {
                let pairs = (0..d).map(|i| [t.q.get([0, h, l, i]), t.k.get([0, h / 2, j, i])].map(f64::from));
                // Scales of channels belong to the query, and keys are in units of them.
                let unit = |i: usize| kind.channels().map_or(1.0, |scales| f64::from(scales[h / 2 * d + i]));
                let pairs: Vec<_> = pairs.enumerate().map(|(i, [q, k])| [q * unit(i), k / unit(i)]).collect();
                let sq = pairs.iter().map(|[q, _]| q.abs()).fold(0.0, f64::max) / 127.0;
                let sk = if kind.channels().is_some() { 1.0 } else { most(&t.k, [0, h / 2, j]) / 127.0 };
                let (mut exact, mut bound) = (0.0, sq * sk * d as f64 / 4.0);
                for [q, k] in pairs {
                    exact += q * k;
                    bound += sq / 2.0 * k.abs() + sk / 2.0 * q.abs();
                }
                let error = (f64::from(all.raw.get([0, h, l, j])) - scale * exact).abs();
                assert!(error <= scale * bound + 1e-5, "head {h}, row {l}, key {j}: {error}, bound {bound}");
                squares += error * error;
                bounds += scale * bound;
            }
            let n = all.raw.data.len() as f64;
            assert!((squares / n).sqrt() < 0.3 * bounds / n, "errors are usually far below the bound");
        }
        // With all weights alike: half the largest scale of the values.
        let even = Attention::new().scale(0.0);
        let bytes = All::of(&even, Inputs::cached(t.q.view(), &filled(&t, &Kind::PER_TOKEN)), Exec::default());
        let mut floats = KvCache::new(1, KvShape { kv_heads: 2, head_dim: d, value_dim: 48 }).unwrap();
        floats.append(t.k.view(), t.v.view()).unwrap();
        let floats = All::of(&even, Inputs::cached(t.q.view(), &floats), Exec::default());
        let bound = largest(&t.v.data) as f32 / 254.0;
        let off = bytes.out.data.iter().zip(&floats.out.data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off > 0.0 && off <= bound, "{off}, bound {bound}");
    }
}

#[test]
fn memory_is_a_quarter_or_a_seventh() {
    let (k, v) = (vec![0.5; 8 * 512 * 128], vec![0.5; 8 * 512 * 128]);
    let bytes = |cache: KvCache| {
        let mut cache = cache;
        let view = |x| View::bhld(x, [1, 8, 512, 128]).unwrap();
        cache.append(view(&k), view(&v)).unwrap();
        cache.bytes() as f64
    };
    let new = || KvCache::new(1, KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 }).unwrap();
    let floats = bytes(new());
    for (kind, [least, most]) in kinds(8, 128).into_iter().zip([[3.85, 4.0], [3.9, 4.0], [7.1, 7.12], [6.39, 6.41]]) {
        let ratio = floats / bytes(kind.of(new()).unwrap());
        assert!((least..most).contains(&ratio), "{kind:?}: {ratio}");
    }
}
