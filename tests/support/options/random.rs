//! Where random cases come from.

use super::elements::{DTYPES, Rounded};
use super::mods::{Functions, Keep, Place, Prob, Score};
use super::{Case, MaskData};
use crate::support::{LAYOUTS, Rng, Sizes, Tensor};
use core::num::NonZeroUsize;
use sdpa::{Alignment, Window};

/// Around tiles (6 rows, 16 keys), vectors, and blocks of 256.
const LENGTHS: [usize; 18] = [1, 2, 5, 6, 7, 15, 16, 17, 63, 64, 65, 66, 255, 256, 257, 258, 511, 513];
const DIMS: [usize; 13] = [1, 2, 3, 5, 8, 15, 16, 17, 24, 33, 63, 64, 65];
const HEADS: [(usize, usize); 8] = [(1, 1), (1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (5, 1)];

impl Case {
    /// Any options on any sizes for which QKᵀ and PV take no more than `most` products; half the time, more than a tenth of
    /// that, since most sizes are small ones.
    pub fn random(rng: &mut Rng, most: usize) -> Self {
        let least = rng.below(2) * most / 10;
        loop {
            let (heads, kv_heads) = rng.pick(&HEADS);
            let empty = |n: usize, rng: &mut Rng| if rng.below(40) == 0 { 0 } else { n };
            let (rows, keys) = (rng.pick(&LENGTHS), rng.pick(&LENGTHS));
            let (rows, keys) = (empty(rows, rng), empty(keys, rng));
            let batch = 1 + rng.below(3);
            let sizes = [batch, heads, kv_heads, rows, keys, rng.pick(&DIMS), rng.pick(&DIMS)];
            if (least..=most).contains(&(batch * heads * rows * keys * (sizes[5] + sizes[6]))) {
                return Self::of_sizes(rng, sizes);
            }
        }
    }

    /// Any options on these sizes. If sequences turn out ragged, these are the most they may have.
    pub fn of_sizes(rng: &mut Rng, sizes: Sizes) -> Self {
        let [batch, heads, kv_heads, rows, keys, d, dv] = sizes;
        let mut case = Self::plain(rng, sizes);
        let some = |rng: &mut Rng, one_in: usize| rng.below(one_in) == 0;
        if some(rng, 4) {
            let mut ends = |n: usize| {
                let mut ends = vec![0];
                (0..batch).for_each(|b| ends.push(ends[b] + if rng.below(3) == 0 { n } else { rng.below(n + 1) }));
                ends
            };
            let (q, k) = (ends(rows), ends(keys));
            case.q = Tensor::normal([1, heads, q[batch], d], rng);
            case.k = Tensor::normal([1, kv_heads, k[batch], d], rng);
            case.v = Tensor::normal([1, kv_heads, k[batch], dv], rng);
            case.ragged = Some([q, k]);
        }
        if some(rng, 2) {
            case.q = case.q.laid_out(rng.pick(&LAYOUTS));
            case.k = case.k.laid_out(rng.pick(&LAYOUTS));
            case.v = case.v.laid_out(rng.pick(&LAYOUTS));
        }
        case.scale = some(rng, 3).then(|| rng.pick(&[0.0, 1.0, -0.3, 0.05, -1.0]));
        case.softcap = some(rng, 3).then(|| rng.pick(&[0.5, 3.0, 30.0]));
        case.causal = some(rng, 3);
        case.window = some(rng, 4).then(|| window(rng));
        case.alibi = some(rng, 4).then(|| (0..heads).map(|_| 0.2 * rng.normal()).collect());
        case.alignment = Some(match rng.below(4) {
            0 => Alignment::TopLeft,
            1 => Alignment::BottomRight,
            2 => Alignment::Offset(rng.below(keys + 2) as isize),
            _ => Alignment::Offset(-(rng.below(rows + 2) as isize)),
        });
        case.sinks = some(rng, 4).then(|| (0..heads).map(|_| 2.0 * rng.normal()).collect());
        case.kv_lens = some(rng, 4).then(|| {
            let len = |b| rng.below(case.keys(b) + 1);
            (0..batch).map(len).collect()
        });
        let (rows, keys) = case.longest();
        if some(rng, 4) {
            case.bias = Some(bias(rng, [batch, heads, rows], keys).into());
        }
        if some(rng, 4) {
            case.mask = Some(mask(rng, [batch, heads, rows], keys));
        }
        case.functions = functions(rng, rows, keys);
        // Last, whether there is one or not: the other draws are the same for every type.
        let dtype = rng.pick(&DTYPES);
        case.bias = case.bias.map(|bias| Rounded::new(&bias.wide, dtype));
        case
    }

    /// No options.
    pub fn plain(rng: &mut Rng, [batch, heads, kv_heads, rows, keys, d, dv]: Sizes) -> Self {
        Self {
            scale: None,
            softcap: None,
            causal: false,
            window: None,
            alignment: None,
            q: Tensor::normal([batch, heads, rows, d], rng),
            k: Tensor::normal([batch, kv_heads, keys, d], rng),
            v: Tensor::normal([batch, kv_heads, keys, dv], rng),
            bias: None,
            mask: None,
            suffix: false,
            period: None,
            alibi: None,
            sinks: None,
            kv_lens: None,
            ragged: None,
            functions: Functions::default(),
            place: Place::WHOLE,
            precision: sdpa::Precision::Exact,
            positions: [None; 2],
            selected: None,
        }
    }

    /// The call with a bias and a mask by key/value head, over the last keys or with a period over the batch, or all of these.
    pub fn partial(self, rng: &mut Rng) -> Self {
        let (batch, heads, kv_heads, (rows, keys)) = (self.batch(), self.heads(), self.kv_heads(), self.longest());
        let divisors: Vec<usize> = (1..=batch).filter(|&n| batch.is_multiple_of(n)).collect();
        let (period, suffix) = (rng.pick(&divisors), rng.below(2) == 0);
        let shape = |rng: &mut Rng| {
            let some = rng.below(keys + 1);
            let columns = if suffix { rng.pick(&[keys, 0, keys.min(1), some]) } else { rng.pick(&[keys, keys, 1]) };
            [
                rng.pick(&[1, period, period, batch]),
                rng.pick(&[1, kv_heads, kv_heads, heads]),
                rng.pick(&[1, rows]),
                columns,
            ]
        };
        let bias = Tensor::from_fn(shape(rng), |_| if rng.below(9) == 0 { f32::NEG_INFINITY } else { rng.normal() });
        let mask = Tensor::from_fn(shape(rng), |_| f32::from(rng.below(4) > 0));
        let (bias, mask) = [bias, mask].map(|x| x.laid_out(rng.pick(&LAYOUTS))).into();
        Self {
            bias: (rng.below(4) > 0).then(|| Rounded::new(&bias, rng.pick(&DTYPES))),
            mask: (rng.below(2) > 0).then(|| MaskData::new(rng.below(2) == 0, false, mask)),
            period: Some(period),
            suffix,
            ..self
        }
    }
}

fn window(rng: &mut Rng) -> Window {
    let mut side = || rng.pick(&[None, Some(0), Some(1), Some(5), Some(16), Some(100), Some(300)]);
    let inclusive = Window::inclusive(side(), side());
    let window = match NonZeroUsize::new(rng.below(3) * (1 + rng.below(70))) {
        Some(n) => Window::last_tokens(n),
        None => inclusive,
    };
    if rng.below(2) == 0 { window.keep_first(rng.pick(&[1, 4, 20, 260])) } else { window }
}

/// A shape that broadcasts to the call's, sometimes with one column, sometimes with fewer than there are keys.
fn broadcast(rng: &mut Rng, whole: [usize; 3], keys: usize) -> [usize; 4] {
    let [b, h, l] = whole.map(|n| if rng.below(2) == 0 { 1 } else { n });
    let columns = match rng.below(6) {
        0 => 1,
        1 | 2 => rng.below(keys + 1),
        _ => keys,
    };
    [b, h, l, columns]
}

fn functions(rng: &mut Rng, rows: usize, keys: usize) -> Functions {
    let offset = |rng: &mut Rng| rng.below(keys + 1) as isize - rng.below(rows + 1) as isize / 2;
    let score = match rng.below(12) {
        0 => Some(Score::Relative(0.02)),
        1 => Some(Score::Holes(2 + rng.below(5))),
        2 => Some(Score::Causal(offset(rng))),
        3 => Some(Score::Bent),
        _ => None,
    };
    let mask = match rng.below(12) {
        0 => Some(Keep::Bands(1 + rng.below(40))),
        1 => Some(Keep::Causal(offset(rng))),
        2 => Some(Keep::Holes(2 + rng.below(5))),
        _ => None,
    };
    let prob = match rng.below(12) {
        0 => Some(Prob::Tilted),
        1 => Some(Prob::Dropped(2 + rng.below(5))),
        _ => None,
    };
    Functions { score, mask: mask.map(|keep| (keep, rng.below(2) == 0)), prob }
}

/// Normal numbers; or one in five is −∞.
fn bias(rng: &mut Rng, sizes: [usize; 3], keys: usize) -> Tensor {
    let hides = rng.below(2) * 5;
    let shape = broadcast(rng, sizes, keys);
    let bias = Tensor::from_fn(shape, |_| match hides {
        n if n > 0 && rng.below(n) == 0 => f32::NEG_INFINITY,
        _ => rng.normal(),
    });
    bias.laid_out(rng.pick(&LAYOUTS))
}

/// Nearly all nonzero, half, or nearly none; or blocks of either, so that some are wholly hidden.
fn mask(rng: &mut Rng, sizes: [usize; 3], keys: usize) -> MaskData {
    let (share, blocks) = (rng.pick(&[1, 8, 15]), rng.below(2) * 64);
    let shape = broadcast(rng, sizes, keys);
    let seed = rng.below(16);
    let mask = Tensor::from_fn(shape, |[b, h, l, j]| {
        let set = match blocks {
            0 => rng.below(16) < share,
            n => (seed + b + h + l / n + j / n) % 3 < 2,
        };
        if set { 1.0 + rng.below(255) as f32 } else { 0.0 }
    });
    let (keep, bools) = (rng.below(2) == 0, rng.below(2) == 0);
    MaskData::new(keep, bools, mask.laid_out(rng.pick(&LAYOUTS)))
}
