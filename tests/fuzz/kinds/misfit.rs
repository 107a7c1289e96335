//! Calls with parts that do not fit together: refused, whatever is wrong, and nothing written; all others are run.

use crate::fuzzer::array::{At, Layout};
use crate::fuzzer::case::Cover;
use crate::fuzzer::memory::Memory;
use crate::fuzzer::place::Placed;
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::list;
use sdpa::{Alignment, Attention, Exec, Inputs, Mask, Outputs, Point, View};

/// What a call is made of, as far as it can be wrong.
#[derive(Debug, Clone)]
struct Call {
    /// Queries, keys, values, then what is written: `out`, LSE, weights, key mass.
    shapes: [Option<At>; 7],
    /// Bias and mask, and the keys they are for.
    options: [Option<(At, Cover)>; 2],
    period: Option<usize>,
    /// ALiBi slopes and sinks.
    lists: [Option<Vec<f32>>; 2],
    kv_lens: Option<Vec<usize>>,
    ragged: Option<[Vec<usize>; 2]>,
    scale: Option<f32>,
    softcap: Option<f32>,
    causal: bool,
    alignment: Option<Alignment>,
}

/// One call with nothing, one or two things wrong.
pub(super) fn check(rng: &mut Rng) {
    let mut call = Call::good(rng);
    assert!(call.fits(), "{call:?}");
    for _ in 0..rng.below(3) {
        call.spoil(rng);
    }
    let one = [0.25f32];
    let view = |shape: At| View::from_strides(&one, 0, shape, [0; 4]).expect("one element for all");
    let byte = [1u8];
    let bytes = |shape: At| View::from_strides(&byte, 0, shape, [0; 4]).expect("one element for all");
    let [q, k, v, out, rest @ ..] = call.shapes;
    let [q, k, v] = [q, k, v].map(|shape| view(shape.expect("always there")));
    let mut memory = [out, rest[0], rest[1], rest[2]].map(|shape| {
        shape.map(|shape| {
            let layout = Layout::draw(rng, shape);
            Placed::<f32>::blank(rng, layout)
        })
    });
    let lists = call.lists.clone().map(|x| x.map(|x| list(rng, &x)));
    let lens = call.kv_lens.clone().map(|x| list(rng, &x));
    let ends = call.ragged.clone().map(|ends| ends.map(|x| list(rng, &x)));
    let mut inputs = Inputs::new(q, k, v);
    inputs = call.options[0].map_or(inputs, |(shape, cover)| match cover {
        Cover::All => inputs.bias(view(shape)),
        Cover::First => inputs.bias_prefix(view(shape)),
        Cover::Last => inputs.bias_suffix(view(shape)),
    });
    inputs = call.options[1].map_or(inputs, |(shape, cover)| match cover {
        Cover::All => inputs.mask(Mask::keep(bytes(shape))),
        Cover::First => inputs.mask_prefix(Mask::keep(bytes(shape))),
        Cover::Last => inputs.mask_suffix(Mask::keep(bytes(shape))),
    });
    inputs = call.period.map_or(inputs, |period| inputs.batch_period(period));
    inputs = lists[0].as_ref().map_or(inputs, |x| inputs.alibi(x.slice()));
    inputs = lists[1].as_ref().map_or(inputs, |x| inputs.sinks(x.slice()));
    inputs = lens.as_ref().map_or(inputs, |x| inputs.kv_lens(x.slice()));
    inputs = ends.as_ref().map_or(inputs, |[q, k]: &[Memory<usize>; 2]| inputs.ragged(q.slice(), k.slice()));
    let result = call.attention().problem(inputs, outputs(&mut memory)).map(|problem| problem.run_once(Exec::serial()));
    assert_eq!(result.is_ok(), call.fits(), "{call:?}: {result:?}");
    for memory in memory.iter_mut().flatten() {
        if result.is_err() {
            assert!(memory.is_blank(), "a refused call wrote: {call:?}");
        } else {
            let bits = memory.take("a call that fits");
            assert!(bits.data.iter().all(|&bits| bits != u32::MAX), "not all was written: {call:?}");
        }
    }
}

fn outputs(memory: &mut [Option<Placed<f32>>; 4]) -> Outputs<'_> {
    let [out, lse, weights, mass] = memory.each_mut().map(|x| x.as_mut().map(Placed::view_mut));
    let mut outputs = Outputs::new(out.expect("always there"));
    outputs = match lse {
        Some(lse) => outputs.lse(lse),
        None => outputs,
    };
    outputs = match weights {
        Some(weights) => outputs.scores(Point::Weights, weights),
        None => outputs,
    };
    match mass {
        Some(mass) => outputs.key_weight_sums(mass),
        None => outputs,
    }
}

impl Call {
    fn good(rng: &mut Rng) -> Self {
        let [mut b, g, mut l, mut n] = [rng.below(3), rng.below(3), rng.below(4), rng.below(5)];
        let [h, d, dv] = [g * rng.up_to(3), 1 + rng.below(3), 1 + rng.below(3)];
        let (mut sequences, mut longest) = (b, [l, n]);
        let ragged = rng.one_in(4).then(|| {
            sequences = rng.below(3);
            [(); 2].map(|()| {
                let mut ends = vec![0];
                (0..sequences).for_each(|b| ends.push(ends[b] + rng.below(4)));
                ends
            })
        });
        if let Some([q, k]) = &ragged {
            (b, l, n) = (1, q[sequences], k[sequences]);
            longest = [q, k].map(|ends| ends.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0));
        }
        let [rows, keys] = longest;
        let mut some = |shape: At| rng.one_in(2).then_some(shape);
        let outs = [some([b, h, l, 1]), some([sequences, h, rows, keys]), some([b, g, n, 1])];
        let shapes = [
            Some([b, h, l, d]),
            Some([b, g, n, d]),
            Some([b, g, n, dv]),
            Some([b, h, l, dv]),
            outs[0],
            outs[1],
            outs[2],
        ];
        let options = [(); 2].map(|()| {
            let [b, h, l] = [sequences, rng.pick(&[g, h]), rows].map(|n| if rng.one_in(2) { 1 } else { n });
            let cover = rng.pick(&[Cover::All, Cover::First, Cover::Last]);
            rng.one_in(3).then_some(([b, h, l, keys], cover))
        });
        let lists = [(); 2].map(|()| rng.one_in(3).then(|| vec![0.5; h]));
        let most = |b: usize| ragged.as_ref().map_or(n, |[_, k]| k[b + 1] - k[b]);
        let kv_lens = rng.one_in(3).then(|| (0..sequences).map(|b| rng.below(most(b) + 1)).collect());
        let alignments = [Alignment::TopLeft, Alignment::BottomRight, Alignment::Offset(1)];
        let (scale, softcap, alignment) = (Some(0.5), Some(2.0), Some(rng.pick(&alignments)));
        let causal = rng.one_in(2);
        let period = rng.one_in(3).then(|| rng.pick(&[1, sequences.max(1)]));
        Self { shapes, options, period, lists, kv_lens, ragged, scale, softcap, causal, alignment }
    }

    /// Changes something, which may or may not fit afterwards.
    fn spoil(&mut self, rng: &mut Rng) {
        let shape = |rng: &mut Rng, shape: &mut Option<At>| {
            if let Some(shape) = shape {
                let dim = rng.below(4);
                shape[dim] = rng.pick(&[0, 1, 2, shape[dim] + 1, shape[dim].saturating_sub(1)]);
            }
        };
        let number = |rng: &mut Rng| Some(rng.pick(&[0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40]));
        match rng.below(8) {
            0..3 => {
                let of = rng.below(7);
                shape(rng, &mut self.shapes[of]);
            }
            3 => {
                let of = rng.below(2);
                if let Some((x, cover)) = self.options[of] {
                    let mut x = Some(x);
                    shape(rng, &mut x);
                    self.options[of] = x.map(|x| (x, cover));
                }
            }
            4 => {
                if let Some(list) = &mut self.lists[rng.below(2)] {
                    list.push(rng.pick(&[0.5, f32::NAN]));
                    list.swap_remove(0);
                    list.truncate(list.len() - rng.below(2).min(list.len()));
                }
            }
            5 => match (&mut self.kv_lens, rng.below(3)) {
                (Some(lens), 0) => lens.push(0),
                (Some(lens), _) if !lens.is_empty() => lens[0] = rng.pick(&[0, 5, lens[0] + 1, usize::MAX]),
                _ => self.alignment = None,
            },
            6 => match &mut self.ragged {
                Some(both) => {
                    let ends = &mut both[rng.below(2)];
                    match (ends.len(), rng.below(3)) {
                        (0, _) | (_, 0) => ends.push(rng.below(6)),
                        (n, 1) => ends[rng.below(n)] = rng.pick(&[0, 1, 3, usize::MAX]),
                        _ => ends.truncate(rng.below(ends.len())),
                    }
                }
                None => self.alignment = None,
            },
            _ if rng.one_in(2) => self.scale = number(rng),
            _ => self.softcap = number(rng),
        }
    }

    fn attention(&self) -> Attention {
        let mut attention = Attention::new();
        attention = self.scale.map_or(attention, |x| attention.scale(x));
        attention = self.softcap.map_or(attention, |x| attention.softcap(x));
        attention = self.alignment.map_or(attention, |x| attention.align(x));
        if self.causal { attention.causal() } else { attention }
    }

    /// True if everything fits: the rules, one line each.
    fn fits(&self) -> bool {
        let [q, k, v, out, lse, weights, mass] = self.shapes;
        let (Some([b, h, l, d]), Some([kb, g, n, kd]), Some([vb, vh, vn, dv]), Some(out)) = (q, k, v, out) else {
            return false;
        };
        let mut good = kb == b && kd == d && [vb, vh, vn] == [kb, g, n] && d > 0 && dv > 0;
        good &= h == g || g > 0 && h.is_multiple_of(g);
        let (mut sequences, mut longest) = (b, [l, n]);
        let mut lengths: Vec<[usize; 2]> = vec![[l, n]; b];
        if let Some(both) = &self.ragged {
            let rising = |ends: &[usize]| ends.windows(2).all(|w| w[0] <= w[1]);
            let whole = |ends: &[usize], n| ends.first() == Some(&0) && ends.last() == Some(&n) && rising(ends);
            good &= b == 1 && whole(&both[0], l) && whole(&both[1], n) && both[0].len() == both[1].len();
            if !good {
                return false;
            }
            let [q, k] = both.each_ref().map(|ends| ends.windows(2).map(|w| w[1] - w[0]).collect::<Vec<_>>());
            lengths = q.into_iter().zip(k).map(|(q, k)| [q, k]).collect();
            sequences = lengths.len();
            longest = [0, 1].map(|of| lengths.iter().map(|both| both[of]).max().unwrap_or(0));
        }
        if let Some(lens) = &self.kv_lens {
            good &= lens.len() == sequences && lens.iter().zip(&lengths).all(|(&len, [_, keys])| len <= *keys);
            lengths.iter_mut().zip(lens).for_each(|(both, &len)| both[1] = len);
        }
        let [rows, keys] = longest;
        good &= out == [b, h, l, dv] && lse.is_none_or(|x| x == [b, h, l, 1] || x == [b, h, l, 2]);
        good &= weights.is_none_or(|x| x == [sequences, h, rows, keys]) && mass.is_none_or(|x| x == [b, g, n, 1]);
        for ([ob, oh, ol, columns], cover) in self.options.into_iter().flatten() {
            let fits = |n: usize, to: usize| n == 1 || n == to;
            let columns = if cover == Cover::All { fits(columns, keys) } else { columns <= keys };
            let batch = fits(ob, sequences) || ob > 0 && self.period == Some(ob);
            good &= batch && (fits(oh, h) || oh == g) && fits(ol, rows) && columns;
        }
        good &= self.period.is_none_or(|period| sequences.is_multiple_of(period));
        good &= self.lists.iter().flatten().all(|list| list.len() == h);
        good &= self.lists[0].iter().flatten().all(|slope| slope.is_finite());
        good &= self.scale.is_none_or(f32::is_finite) && self.softcap.is_none_or(|c| c.is_finite() && c > 0.0);
        let placed = self.causal || self.lists[0].is_some();
        good && (self.alignment.is_some() || !placed || lengths.iter().all(|[rows, keys]| rows == keys))
    }
}
