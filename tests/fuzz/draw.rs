//! Where random cases come from. Sizes are most often next to where something ends: a vector, a tile, a block.

use super::array::Array;
use super::case::{Case, Cover, Entries, Polarity, Settings, Sides};
use super::functions::{Functions, Hint, Keep, Origin, Prob, Score};
use super::place::rounded;
use super::rng::Rng;
use core::ops::RangeInclusive;
use sdpa::{Alignment, CacheFormat, Dropout, Dtype, Int4, Precision};

/// Around tiles (6 rows, 16 keys), runs of 32 and 64, groups of 96, blocks of 256 and tasks of 384.
const LENGTHS: [usize; 20] = [1, 1, 2, 4, 6, 12, 16, 17, 31, 33, 48, 64, 96, 128, 192, 256, 257, 384, 512, 768];
/// Around vectors, chains of 32, tiles of 64 columns, and what is packed at once.
const DIMS: [usize; 16] = [1, 2, 3, 4, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65, 128, 257];
const HEADS: [(usize, usize); 8] = [(1, 1), (1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (5, 1)];
pub(crate) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Multiplications from which on a call is shared out over two threads, and some more.
pub(crate) const SHARED: usize = 4_500_000;

/// Where keys and values come from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Home {
    Tensors,
    Pages,
    /// Pages of a pool of the crate's.
    Pool(Dtype),
    Cache(Dtype),
    /// A cache of bytes; keys have scales, or their channels, for keys up to about so large.
    Bytes {
        channels: Option<f32>,
    },
    /// A cache of four bits.
    Bits(Int4),
    /// Pages of a pool of the crate's, of integers.
    IntegerPool(CacheFormat<'static>),
}

impl Home {
    /// True if numbers are kept as integers, and what they stand for is not what was appended.
    pub(crate) fn is_integers(self) -> bool {
        matches!(self, Self::Bytes { .. } | Self::Bits(_))
    }

    pub(crate) fn draw(rng: &mut Rng) -> Self {
        match rng.below(10) {
            0..5 => Self::Tensors,
            5 => Self::Pages,
            6 => Self::Pool(rng.pick(&DTYPES)),
            7 | 8 => Self::Cache(rng.pick(&DTYPES)),
            _ => Self::integers(rng),
        }
    }

    /// A random one of integers.
    pub(crate) fn integers(rng: &mut Rng) -> Self {
        match rng.below(4) {
            0 => Self::Bytes { channels: None },
            1 => Self::channels(rng),
            2 => Self::Bits(Int4::Symmetric),
            _ => Self::Bits(Int4::Centred),
        }
    }

    /// A cache of bytes with scales by channel.
    pub(crate) fn channels(rng: &mut Rng) -> Self {
        Self::Bytes { channels: Some(rng.pick(&[0.01, 1.0, 3.0, 1e4])) }
    }

    /// Replaces what is refused where numbers are kept as integers: what is not finite, or too large.
    pub(crate) fn tame(self, data: &mut [f32]) {
        let most = match self {
            Self::Bytes { .. } => 1e20,
            Self::Bits(_) => 6e4,
            _ => return,
        };
        data.iter_mut().for_each(|x| *x = if x.abs() < most { *x } else { 3.0 });
    }
}

/// Batch, heads, key/value heads, rows, keys, and the lengths of a key and a value.
pub(crate) type Sizes = [usize; 7];

fn sizes(rng: &mut Rng) -> Sizes {
    let products = match rng.below(64) {
        0 => SHARED..=2 * SHARED,
        1..4 => 100_000..=1_000_000,
        4..16 => 5_000..=100_000,
        _ => 0..=20_000,
    };
    sizes_of(rng, products)
}

/// Sizes of a call with a number of multiplications in this range.
pub(crate) fn sizes_of(rng: &mut Rng, products: RangeInclusive<usize>) -> Sizes {
    loop {
        let mut near = |sizes: &[usize]| {
            let n = rng.pick(sizes);
            match rng.below(16) {
                0 => n - 1,
                1 | 2 => n + 1,
                3 => 1 + rng.below(2 * n),
                _ => n,
            }
        };
        let (rows, keys, d, dv) = (near(&LENGTHS), near(&LENGTHS), near(&DIMS).max(1), near(&DIMS).max(1));
        let (heads, kv_heads) = rng.pick(&HEADS);
        let heads = rng.or_zero(heads);
        let kv_heads = if heads == 0 { rng.pick(&[0, kv_heads]) } else { kv_heads };
        let batch = if rng.one_in(60) { 0 } else { rng.pick(&[1, 1, 2, 3]) };
        if products.contains(&(batch * heads * rows * keys * (d + dv))) {
            return [batch, heads, kv_heads, rows, keys, d, dv];
        }
    }
}

/// Cumulative lengths of sequences, some empty.
fn ends(rng: &mut Rng, sequences: usize, longest: usize) -> Vec<usize> {
    let mut ends = vec![0];
    for b in 0..sequences {
        let n = if rng.one_in(3) { longest } else { rng.below(longest + 1) };
        ends.push(ends[b] + n);
    }
    ends
}

/// Numbers of this shape as this type has them: normal, of a few values, all alike; some not finite.
pub(crate) fn numbers(rng: &mut Rng, shape: [usize; 4], dtype: Dtype) -> Array {
    let size = rng.pick(&[1.0, 1.0, 1.0, 1.0, 0.01, 6.0, 1e-12, 1e4]);
    let few = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0];
    let mut x = match rng.below(10) {
        0 => Array::from_fn(shape, |_| size * rng.pick(&few)),
        1 => {
            let x = rng.normal();
            Array::from_fn(shape, |_| size * x)
        }
        2 => {
            // The same for every row, or every head.
            let [b, h, l, d] = shape;
            let one = if rng.one_in(2) { [b, h, 1, d] } else { [b, 1, l, d] };
            let one = Array::from_fn(one.map(|n| n.min(isize::MAX as usize)), |_| size * rng.normal());
            Array::from_fn(shape, |at| one.repeated(at))
        }
        _ => Array::from_fn(shape, |_| size * rng.normal()),
    };
    if rng.one_in(8) && !x.data.is_empty() {
        let (odd, many) = (rng.pick(&ODD), x.data.len() / 8);
        let count = if rng.one_in(4) { 1 + rng.below(many + 3) } else { 1 + rng.below(3) };
        for _ in 0..count {
            let at = rng.below(x.data.len());
            x.data[at] = if rng.one_in(2) { odd } else { rng.pick(&ODD) };
        }
    }
    x.data.iter_mut().for_each(|x| *x = rounded(*x, dtype));
    x
}

const ODD: [f32; 12] =
    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e30, -1e30, 1e-30, 1e-40, -1e-45, 65504.0, 3e5];

/// A call, and where its keys are.
pub(crate) fn draw(rng: &mut Rng) -> (Case, Home) {
    let home = Home::draw(rng);
    (draw_at(rng, home), home)
}

/// A call with keys that are there.
pub(crate) fn draw_at(rng: &mut Rng, home: Home) -> Case {
    let sizes = sizes(rng);
    draw_of(rng, home, sizes)
}
/// A call of these sizes.
pub(crate) fn draw_of(rng: &mut Rng, home: Home, sizes: Sizes) -> Case {
    let [batch, heads, kv_heads, rows, mut keys, d, dv] = sizes;
    let (mut q_shape, mut lens, mut ragged) = ([batch, heads, rows, d], None, None);
    let mut kv = [batch, kv_heads, keys];
    if home == Home::Tensors && rng.one_in(4) {
        let both = [ends(rng, batch, rows), ends(rng, batch, keys)];
        q_shape = [1, heads, both[0][batch], d];
        kv = [1, kv_heads, both[1][batch]];
        ragged = Some(both);
    }
    if home != Home::Tensors {
        lens = Some((0..batch).map(|_| if rng.one_in(2) { keys } else { rng.below(keys + 1) }).collect::<Vec<_>>());
        keys = lens.iter().flatten().copied().max().unwrap_or(0);
        kv[2] = keys;
    }
    let dtypes = match home {
        Home::Cache(dtype) | Home::Pool(dtype) => [rng.pick(&DTYPES), dtype, dtype],
        home if home.is_integers() => [rng.pick(&DTYPES), Dtype::F32, Dtype::F32],
        _ if rng.one_in(2) => [Dtype::F32; 3],
        _ => [(); 3].map(|()| rng.pick(&DTYPES)),
    };
    let [b, h, l] = kv;
    let [mut k, mut v] = [([b, h, l, d], dtypes[1]), ([b, h, l, dv], dtypes[2])].map(|(s, t)| numbers(rng, s, t));
    home.tame(&mut k.data);
    home.tame(&mut v.data);
    let q = numbers(rng, q_shape, dtypes[0]);
    let mut settings = settings(rng, rows, keys);
    if home.is_integers() {
        // Nor are two scales of theirs multiplied by one next to 0.
        settings.scale = settings.scale.map(|x| if x.abs() < 1e-6 { 0.0 } else { x });
    }
    let functions = functions(rng, rows, keys);
    let mut case = Case { kv_lens: lens, ragged, functions, ..Case::new([q, k, v], dtypes, settings) };
    options(rng, &mut case);
    case.settle_precision();
    case
}

/// Gives rows, keys or both of a call positions, in order or not. With slopes none is far away.
pub(crate) fn own_positions(rng: &mut Rng, case: &mut Case) {
    let far = case.alibi.is_none();
    let list = |rng: &mut Rng, n: usize| -> Vec<i32> {
        let (len, first) = (1 + rng.below(n + 1), rng.below(20) as i32 - 9);
        match rng.below(5) {
            0 => (0..n).map(|i| (i % len) as i32).collect(),
            1 => (0..n as i32).map(|i| first + i).collect(),
            2 if far => (0..n).map(|i| if i < len { i32::MAX } else { (i - len) as i32 }).collect(),
            3 if far => (0..n).map(|_| rng.pick(&[i32::MIN, i32::MAX, -1, 0, 1])).collect(),
            _ => (0..n).map(|_| first + rng.below(2 * n) as i32).collect(),
        }
    };
    let which = rng.below(4);
    let rows = (0..case.batch()).map(|b| list(rng, case.rows(b))).collect();
    let keys = (0..case.batch()).map(|b| list(rng, case.kv_len(b))).collect();
    case.positions = [(which != 0).then_some(rows), (which != 1).then_some(keys)];
}

/// Any options over keys and values that are there already, of these lengths.
pub(crate) fn small(rng: &mut Rng, [k, v]: [Array; 2], [k_type, v_type]: [Dtype; 2], lens: Vec<usize>) -> Case {
    let ([batch, kv_heads, keys, d], rows) = (k.shape, rng.pick(&[0, 1, 1, 2, 5, 17]));
    let heads = kv_heads * rng.pick(&[1, 1, 2, 4]);
    let heads = rng.or_zero(heads);
    let q = numbers(rng, [batch, heads, rows, d], Dtype::F32);
    let (settings, functions) = (settings(rng, rows, keys), functions(rng, rows, keys));
    let dtypes = [Dtype::F32, k_type, v_type];
    let mut case = Case { kv_lens: Some(lens), functions, ..Case::new([q, k, v], dtypes, settings) };
    options(rng, &mut case);
    case.settle_precision();
    case
}

pub(crate) fn settings(rng: &mut Rng, rows: usize, keys: usize) -> Settings {
    let alignment = match rng.below(12) {
        0..3 => Alignment::TopLeft,
        3..6 => Alignment::BottomRight,
        6..9 => Alignment::Offset(rng.below(keys + 2) as isize),
        9 | 10 => Alignment::Offset(-(rng.below(rows + 2) as isize)),
        _ => Alignment::Offset(rng.pick(&[isize::MAX, isize::MIN, 1 << (isize::BITS * 5 / 8), -(1 << 24)])),
    };
    let window = rng.one_in(4).then(|| {
        let mut side =
            || rng.pick(&[None, Some(0), Some(1), Some(5), Some(16), Some(100), Some(256), Some(usize::MAX)]);
        let (left, right) = (side(), side());
        Sides { left, right, first: rng.pick(&[0, 0, 1, 4, 20, 256, 260, usize::MAX]) }
    });
    Settings {
        scale: rng.one_in(3).then(|| rng.pick(&[0.0, 1.0, -0.3, 0.05, -1.0, 1e-30])),
        softcap: rng.one_in(4).then(|| rng.pick(&[0.5, 3.0, 30.0, 1e-4, 1e6])),
        causal: rng.one_in(3),
        window,
        alignment: Some(alignment),
        precision: match rng.below(12) {
            0 => Precision::Native,
            1 => Precision::Accurate,
            _ => Precision::Exact,
        },
        dropout: rng.one_in(6).then(|| dropout(rng)),
    }
}

fn dropout(rng: &mut Rng) -> Dropout {
    Dropout { p: rng.pick(&[0.0, 0.1, 0.5, 0.9]), seed: rng.bits(), offset: rng.bits() as u32 }
}

fn functions(rng: &mut Rng, rows: usize, keys: usize) -> Functions {
    let score = match rng.below(16) {
        0 => Some(Score::Relative(0.02)),
        1 => Some(Score::Holes(2 + rng.below(5))),
        _ => None,
    };
    let keep = match rng.below(16) {
        0 => Some(Keep::Bands(1 + rng.below(40))),
        1 => Some(Keep::Diagonal(rng.below(keys + 1) as isize - rng.below(rows + 1) as isize / 2)),
        2 => Some(Keep::Holes(2 + rng.below(5))),
        _ => None,
    };
    let prob = rng.one_in(12).then(|| Prob::Tilted(2 + rng.below(5)));
    let hint = [Hint::Truth, Hint::Nothing, Hint::Keys, Hint::Nothing][rng.below(4)];
    Functions { score, mask: keep.map(|keep| (keep, hint)), prob, origin: Origin::default() }
}

/// Whatever comes as a tensor or a list.
pub(crate) fn options(rng: &mut Rng, case: &mut Case) {
    let (heads, batch, (rows, keys)) = (case.heads(), case.batch(), case.longest());
    // Each may be 1, and the first keys may be all that are seen.
    let shape = |rng: &mut Rng| {
        let [b, h, l] = [batch, heads, rows].map(|n| if rng.one_in(2) { 1 } else { n });
        match rng.below(6) {
            0 => ([b, h, l, 1], Cover::All),
            1 => ([b, h, l, rng.below(keys + 1)], Cover::First),
            _ => ([b, h, l, keys], Cover::All),
        }
    };
    if rng.one_in(4) {
        let ((shape, cover), hides, odd) = (shape(rng), 3 * rng.below(3), rng.one_in(8));
        let dtype = rng.pick(&DTYPES);
        let of = Array::from_fn(shape, |_| {
            let x = match hides {
                n if n > 0 && rng.one_in(n) => f32::NEG_INFINITY,
                _ if odd && rng.one_in(20) => rng.pick(&[f32::NAN, f32::INFINITY, f32::MIN, 1e30, -1e30]),
                _ => rng.normal(),
            };
            rounded(x, dtype)
        });
        case.bias = Some((Entries { of, cover }, dtype));
    }
    if rng.one_in(4) {
        // Nearly all nonzero, half, or nearly none; or stretches of either, so that some blocks are wholly hidden.
        let ((shape, cover), share) = (shape(rng), rng.pick(&[1, 8, 15]));
        let stretch = rng.pick(&[0, 0, 16, 64, 256]);
        let of = Array::from_fn(shape, |[b, h, l, j]| {
            let set = match stretch {
                0 => rng.below(16) < share,
                n => (share + b + h + l / n + j / n) % 3 < 2,
            };
            if set { 1.0 + rng.below(255) as f32 } else { 0.0 }
        });
        let polarity = if rng.one_in(2) { Polarity::NonzeroKeeps } else { Polarity::NonzeroHides };
        case.mask = Some((Entries { of, cover }, polarity));
    }
    if rng.one_in(4) {
        case.alibi = Some((0..heads).map(|_| rng.pick(&[0.2, -0.1, 1.0, 0.0]) * rng.normal()).collect());
    }
    if rng.one_in(4) {
        let odd = rng.one_in(6);
        let odds = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 1e30, -1e30, 88.0, -0.0];
        let one = |_| if odd { rng.pick(&odds) } else { 2.0 * rng.normal() };
        case.sinks = Some((0..heads).map(one).collect());
    }
    if case.kv_lens.is_none() && rng.one_in(4) {
        case.kv_lens = Some((0..batch).map(|b| rng.below(case.keys(b) + 1)).collect());
    }
    let even = (0..batch).all(|b| case.rows(b) == case.kv_len(b));
    if even && rng.one_in(2) {
        case.settings.alignment = None;
    }
}

/// True if a number and its products are no source of large errors.
pub(crate) fn is_tame(x: f32) -> bool {
    x == 0.0 || (1e-6..=20.0).contains(&x.abs())
}

/// A number that is no extreme, in whatever type it is.
pub(crate) fn tame_one(x: &mut f32) {
    *x = if is_tame(*x) { *x } else { 0.5 };
}

impl Case {
    /// Takes [`Precision::Accurate`] back where scores may be infinite or lose subnormal numbers: there it differs.
    pub(crate) fn settle_precision(&mut self) {
        let scores = self.q.data.iter().chain(&self.k.data).all(|&x| is_tame(x));
        let fits = scores && self.v.data.iter().all(|&x| is_tame(x) || !x.is_finite());
        if self.settings.precision == Precision::Accurate && !fits {
            self.settings.precision = Precision::Exact;
        }
    }

    /// Takes extreme numbers out.
    pub(crate) fn make_tame(&mut self) {
        [&mut self.q, &mut self.k, &mut self.v].into_iter().flat_map(|x| &mut x.data).for_each(tame_one);
        self.sinks.iter_mut().flatten().for_each(tame_one);
        let bias = self.bias.iter_mut().flat_map(|(x, _)| &mut x.of.data);
        bias.filter(|x| **x != f32::NEG_INFINITY).for_each(tame_one);
    }
}
