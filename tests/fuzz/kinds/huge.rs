//! Calls over huge views that repeat one row: planned, balanced and explained, by definitions of one line; run if rows see few
//! keys.

use crate::fuzzer::kinds::balance::check_rules;
use crate::fuzzer::pieces::any_isa;
use crate::fuzzer::rng::Rng;
use sdpa::{Alignment, Attention, Exec, Explanation, Inputs, Machine, Outputs, Plan, Shape, View, ViewMut, Window};

/// Largest size of a view, as a power of two: a call that looked at each key block would not end.
const LARGEST: u32 = 45;
/// Pairs of rows and keys up to which a call is run.
const FEW: u128 = 1 << 16;
const MACHINE: Machine = Machine { flops: 1e9, bytes: 1e8 };

/// A call's sizes and the rules by which its rows see keys.
#[derive(Debug)]
struct Huge {
    shape: Shape,
    causal: bool,
    /// Left, right and first keys.
    window: Option<([Option<usize>; 2], usize)>,
    offset: isize,
    lens: Option<Vec<usize>>,
}

pub(super) fn check(rng: &mut Rng) {
    let call = Huge::draw(rng);
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = call.shape;
    let one = vec![0.5f32; head_dim.max(value_dim)];
    let view = |heads, rows, dim| {
        View::from_strides(&one, 0, [batch, heads, rows, dim], [0, 0, 0, 1]).expect("one row for all")
    };
    let mut out = vec![f32::NAN; batch * heads * q_len * value_dim];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [batch, heads, q_len, value_dim]).expect("dense"));
    let mut inputs =
        Inputs::new(view(heads, q_len, head_dim), view(kv_heads, kv_len, head_dim), view(kv_heads, kv_len, value_dim));
    inputs = call.lens.as_ref().map_or(inputs, |lens| inputs.kv_lens(lens));
    let exec = Exec::serial().isa(any_isa(rng)).threads(rng.pick(&[1, 2, 16]));
    let what = format!("{exec:?}, {call:?}");
    let problem = call.attention().problem(inputs, outputs).expect("a good call");
    let (plan, workers) = (Plan::new(&problem, exec), rng.pick(&[1, 2, 16, usize::MAX]));
    check_rules(&what, &plan.balance(&problem, workers), workers);
    call.check(&what, &plan.explain(&problem, Some(MACHINE)));
    if call.pairs() > FEW {
        return;
    }
    problem.run_once(exec);
    for (row, out) in out.chunks(value_dim).enumerate() {
        let (b, l) = (row / (heads * q_len), row % q_len);
        let expected = if call.seen(b, l) == 0 { 0.0 } else { 0.5 };
        assert!(out.iter().all(|x| (x - expected).abs() < 1e-6), "{what}: row {l} of sequence {b} is {out:?}");
    }
}

impl Huge {
    fn draw(rng: &mut Rng) -> Self {
        let size =
            |rng: &mut Rng| (1usize << rng.below(LARGEST as usize + 1)).saturating_add_signed(rng.pick(&[-1, 0, 1]));
        let (batch, (heads, kv_heads)) =
            (rng.pick(&[0, 1, 1, 2, 3]), rng.pick(&[(0, 0), (0, 1), (1, 1), (4, 1), (6, 3)]));
        let (mut q_len, mut kv_len) = (rng.pick(&[0, 1, 1, 2, 3, 16, 17]), size(rng));
        let mut batch = batch;
        match rng.below(8) {
            // Rows without keys, and keys without rows.
            0 => (q_len, kv_len) = (rng.pick(&[1, 100, 500]), 0),
            1 => (batch, q_len, kv_len) = (size(rng) >> 29, 0, kv_len >> 8),
            _ => {}
        }
        let (head_dim, value_dim) = (rng.pick(&[1, 16, 64]), rng.pick(&[1, 16, 33]));
        let ends = [0, 1, 5, 255, 256, 300, kv_len, kv_len.saturating_sub(1), kv_len / 2];
        let mut side = |none: usize| (!rng.one_in(none)).then(|| rng.pick(&ends));
        let (window, first) = ([side(3), side(3)], side(2).unwrap_or(0));
        let lens = rng.one_in(3).then(|| (0..batch).map(|_| rng.pick(&ends).min(kv_len)).collect());
        Self {
            shape: Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim },
            causal: rng.one_in(2),
            window: rng.one_in(2).then_some((window, first)),
            offset: rng.pick(&ends) as isize * rng.pick(&[1, 1, -1]),
            lens,
        }
    }

    fn attention(&self) -> Attention {
        let mut attention = Attention::new().align(Alignment::Offset(self.offset));
        if let Some(([left, right], first)) = self.window {
            attention = attention.window(Window::inclusive(left, right).keep_first(first));
        }
        if self.causal { attention.causal() } else { attention }
    }

    fn len(&self, b: usize) -> usize {
        self.lens.as_ref().map_or(self.shape.kv_len, |lens| lens[b])
    }

    /// Number of keys that a row sees.
    fn seen(&self, b: usize, l: usize) -> u128 {
        let (at, len) = (self.offset as i128 + l as i128, self.len(b) as i128);
        let ([left, right], first) = self.window.unwrap_or(([None, None], 0));
        let own = if self.causal { at + 1 } else { len }.clamp(0, len);
        let start = left.map_or(0, |n| at - n as i128).clamp(0, own);
        let end = right.map_or(own, |n| at + n as i128 + 1).clamp(0, own).max(start);
        let kept = own.min(first as i128);
        // Keys kept and those of the window, each once.
        (kept + end - start - (kept.min(end) - start).max(0)) as u128
    }

    /// Pairs of a row and a key that it sees, of one head each.
    fn pairs(&self) -> u128 {
        let Shape { batch, q_len, .. } = self.shape;
        if q_len == 0 { 0 } else { (0..batch).map(|b| (0..q_len).map(|l| self.seen(b, l)).sum::<u128>()).sum() }
    }

    /// Panics unless an explanation says what the definitions do.
    fn check(&self, what: &str, explained: &Explanation) {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let Explanation {
            plan, blocks: (computed, skipped), useful_flops, computed_flops, bytes, shared_bytes, ..
        } = *explained;
        let (dims, many) = ((head_dim + value_dim) as f64, heads as f64);
        let same = |name: &str, got: f64, expected: f64| {
            assert!((got - expected).abs() <= 1e-9 * expected.abs(), "{what}: {name} {got}, not {expected}");
        };
        same("useful", useful_flops, 2.0 * dims * many * self.pairs() as f64);
        assert!(computed_flops >= useful_flops, "{what}: {computed_flops} of {useful_flops} computed");
        assert!(computed_flops > 0.0 || computed == 0, "{what}: {computed} blocks without work");
        let (tile, _) = plan.isa().tile();
        let blocks = if q_len == 0 || heads == 0 { 0 } else { (0..batch).map(|b| self.len(b).div_ceil(256)).sum() };
        assert_eq!((computed + skipped) as usize, heads * q_len.div_ceil(tile) * blocks, "{what}: blocks");
        let rows = (batch * heads * q_len) as f64 * dims;
        same("bytes", bytes, 4.0 * (rows + (batch * kv_heads) as f64 * kv_len as f64 * dims));
        assert!((0.0..=bytes).contains(&shared_bytes), "{what}: {shared_bytes} of {bytes} bytes shared");
        let arithmetic = useful_flops / MACHINE.flops / plan.workers() as f64;
        let memory = (bytes - shared_bytes) / MACHINE.bytes;
        same("seconds", explained.seconds.expect("the machine is known"), arithmetic.max(memory));
        assert!(!explained.to_string().is_empty(), "{what}");
    }
}
