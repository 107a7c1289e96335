//! Backward calls with parts that do not fit together: refused, whatever is wrong, and nothing written; all others are run.

use crate::fuzzer::array::{At, Layout};
use crate::fuzzer::memory::Memory;
use crate::fuzzer::place::Placed;
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::list;
use sdpa::{Alignment, Attention, Exec, Gradients, Inputs, Saved, View};

/// What is read: queries, keys, values, bias, then out, its log-sum-exp, and the gradients in both.
const READ: usize = 8;

/// What a backward call is made of, as far as it can be wrong.
#[derive(Debug, Clone)]
struct Call {
    /// What is read; of it bias and the gradient in the log-sum-exp may not be there.
    read: [Option<At>; READ],
    /// Gradients in queries, keys, values and bias.
    written: [Option<At>; 4],
    /// Numbers of sinks and slopes, then of their gradients.
    lists: [Option<usize>; 4],
    scale: bool,
}

pub(super) fn check(rng: &mut Rng) {
    let mut call = Call::good(rng);
    assert!(call.fits(), "{call:?}");
    for _ in 0..rng.below(3) {
        call.spoil(rng);
    }
    let one = [0.25f32];
    let view = |shape: At| View::from_strides(&one, 0, shape, [0; 4]).expect("one element for all");
    let [q, k, v, bias, out, lse, d_out, d_lse] = call.read.map(|shape| shape.map(view));
    let [sinks, slopes, d_sinks, d_slopes] = call.lists;
    let options = [sinks, slopes].map(|n| n.map(|n| vec![0.5f32; n]));
    let [mut d_sinks, mut d_slopes] =
        [d_sinks, d_slopes].map(|n| n.map(|n| list(rng, &vec![f32::from_bits(u32::MAX); n])));
    let (q, k, v) = (q.expect("there"), k.expect("there"), v.expect("there"));
    let mut inputs = Inputs::new(q, k, v);
    inputs = bias.map_or(inputs, |bias| inputs.bias(bias));
    inputs = options[0].as_ref().map_or(inputs, |sinks| inputs.sinks(sinks));
    inputs = options[1].as_ref().map_or(inputs, |slopes| inputs.alibi(slopes));
    let saved = Saved::new(out.expect("there"), lse.expect("there"), d_out.expect("there"));
    let saved = d_lse.map_or(saved, |d_lse| saved.d_lse(d_lse));
    let mut memory = call.written.map(|shape| {
        shape.map(|shape| {
            let layout = Layout::draw(rng, shape);
            Placed::<f32>::blank(rng, layout)
        })
    });
    let mut scale = call.scale.then(|| f32::from_bits(u32::MAX));
    let gradients = gradients(&mut memory, [&mut d_sinks, &mut d_slopes], &mut scale);
    let attention = Attention::new().align(Alignment::TopLeft);
    let result = attention.backward(inputs, saved, gradients).and_then(|problem| problem.run_once(Exec::serial()));
    assert_eq!(result.is_ok(), call.fits(), "{call:?}: {result:?}");
    let fits = result.is_ok();
    for memory in memory.iter_mut().flatten() {
        assert!(fits || memory.is_blank(), "a refused call wrote: {call:?}");
        let bits = memory.take("a gradient");
        assert!(!fits || bits.data.iter().all(|&bits| bits != u32::MAX), "not all was written: {call:?}");
    }
    for x in [&d_sinks, &d_slopes].into_iter().flatten().flat_map(Memory::slice).chain(&scale) {
        assert_eq!(x.to_bits() != u32::MAX, fits, "{call:?}");
    }
}

fn gradients<'a>(
    memory: &'a mut [Option<Placed<f32>>; 4],
    lists: [&'a mut Option<Memory<f32>>; 2],
    scale: &'a mut Option<f32>,
) -> Gradients<'a> {
    let ([q, k, v, bias], [sinks, slopes]) = (memory.each_mut().map(Option::as_mut), lists.map(Option::as_mut));
    let mut all = Gradients::new();
    all = if let Some(x) = q { all.q(x.view_mut()) } else { all };
    all = if let Some(x) = k { all.k(x.view_mut()) } else { all };
    all = if let Some(x) = v { all.v(x.view_mut()) } else { all };
    all = if let Some(x) = bias { all.bias(x.view_mut()) } else { all };
    all = if let Some(x) = sinks { all.sinks(x.slice_mut()) } else { all };
    all = if let Some(x) = slopes { all.alibi(x.slice_mut()) } else { all };
    if let Some(x) = scale { all.scale(x) } else { all }
}

impl Call {
    fn good(rng: &mut Rng) -> Self {
        let [b, g, l, n] = [rng.below(3), rng.below(3), rng.below(4), rng.below(5)];
        let [h, d, dv] = [g * rng.below(3), 1 + rng.below(3), 1 + rng.below(3)];
        let [ob, oh, ol] = [b, rng.pick(&[g, h]), l].map(|n| if rng.one_in(2) { 1 } else { n });
        let bias = rng.one_in(2).then_some([ob, oh, ol, n]);
        let (rows, row) = ([b, h, l, dv], [b, h, l, 1]);
        let d_lse = rng.one_in(2).then_some(row);
        let (q, k, v) = ([b, h, l, d], [b, g, n, d], [b, g, n, dv]);
        let read = [Some(q), Some(k), Some(v), bias, Some(rows), Some(row), Some(rows), d_lse];
        let mut some = |shape: Option<At>| shape.filter(|_| rng.below(3) > 0);
        let written = [some(Some(q)), some(Some(k)), some(Some(v)), some(bias)];
        let options = [rng.one_in(2).then_some(h), rng.one_in(2).then_some(h)];
        let lists =
            [options[0], options[1], options[0].filter(|_| rng.one_in(2)), options[1].filter(|_| rng.one_in(2))];
        Self { read, written, lists, scale: rng.one_in(2) }
    }

    /// Changes something, which may or may not fit afterwards.
    fn spoil(&mut self, rng: &mut Rng) {
        match rng.below(8) {
            0 => {
                let list = rng.below(4);
                self.lists[list] = rng.pick(&[None, Some(0), self.lists[list].map(|n| n + 1), Some(1)]);
            }
            1 => self.written[3] = Some(self.read[3].unwrap_or([1; 4])),
            n => {
                let shapes = if n < 5 { &mut self.read[..] } else { &mut self.written[..] };
                let of = rng.below(shapes.len());
                if let Some(shape) = &mut shapes[of] {
                    let dim = rng.below(4);
                    shape[dim] = rng.pick(&[0, 1, 2, shape[dim] + 1, shape[dim].saturating_sub(1)]);
                }
            }
        }
    }

    /// True if everything fits: the rules, one line each.
    fn fits(&self) -> bool {
        let [q, k, v, bias, out, lse, d_out, d_lse] = self.read;
        let (Some(q @ [b, h, l, d]), Some(k @ [kb, g, n, kd]), Some(v @ [.., dv])) = (q, k, v) else { return false };
        let is = |x: Option<At>, shape: At| x.is_none_or(|x| x == shape);
        let mut good = kb == b && kd == d && v[..3] == k[..3] && d > 0 && dv > 0;
        good &= h == g || g > 0 && h.is_multiple_of(g);
        good &= is(out, [b, h, l, dv])
            && is(d_out, [b, h, l, dv])
            && (is(lse, [b, h, l, 1]) || is(lse, [b, h, l, 2]))
            && is(d_lse, [b, h, l, 1]);
        let fits = |n: usize, to: usize| n == 1 || n == to;
        good &=
            bias.is_none_or(|[ob, oh, ol, on]| fits(ob, b) && (fits(oh, h) || oh == g) && fits(ol, l) && fits(on, n));
        let [dq, dk, dv, d_bias] = self.written;
        good &= is(dq, q) && is(dk, k) && is(dv, v) && d_bias.is_none_or(|x| bias == Some(x));
        let [sinks, slopes, d_sinks, d_slopes] = self.lists;
        good &= self.lists.iter().flatten().all(|&n| n == h);
        good && (d_sinks.is_none() || sinks.is_some()) && (d_slopes.is_none() || slopes.is_some())
    }
}
