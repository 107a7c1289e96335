//! Divisions of work among any number of workers, of calls of any size: rules that hold for each of them.

use crate::fuzzer::draw::settings;
use crate::fuzzer::rng::Rng;
use sdpa::{Alignment, Attention, Exec, Inputs, Outputs, Plan, View, ViewMut, Window};

pub(super) fn check(rng: &mut Rng) {
    let batch = rng.pick(&[0, 1, 1, 2, 5]);
    let (heads, kv_heads) = rng.pick(&[(0, 0), (1, 1), (4, 1), (8, 2), (12, 12)]);
    let rows = rng.pick(&[0, 1, 1, 3, 16, 17, 100, 384, 1000]);
    let keys = rng.pick(&[0, 1, 5, 256, 257, 4096, 10_000, 1 << 20]);
    let (d, dv) = (rng.pick(&[1, 64, 128, 576]), rng.pick(&[1, 64, 128]));
    // One row that is read again and again: only plans are made of it.
    let one = vec![0.5f32; d.max(dv)];
    let view = |heads, rows, dim| {
        View::from_strides(&one, 0, [batch, heads, rows, dim], [0, 0, 0, 1]).expect("one row for all")
    };
    let mut out = vec![0.0; batch * heads * rows * dv];
    let out = ViewMut::bhld(&mut out, [batch, heads, rows, dv]).expect("dense");
    let lens: Vec<usize> = (0..batch).map(|_| rng.below(keys + 1)).collect();
    let mut inputs = Inputs::new(view(heads, rows, d), view(kv_heads, keys, d), view(kv_heads, keys, dv));
    if rng.one_in(3) {
        inputs = inputs.kv_lens(&lens);
    }
    let attention = attention(rng, rows, keys);
    let problem = attention.problem(inputs, Outputs::new(out)).expect("a good call");
    let plan = Plan::new(&problem, Exec::serial().threads(rng.pick(&[1, 2, 16, 100])));
    let workers = rng.pick(&[0, 1, 2, 3, 16, 1000, usize::MAX]);
    let what = format!("{:?}, {attention:?}, {plan:?}", problem.shape());
    let balance = plan.balance(&problem, workers);
    check_rules(&what, &balance, workers.max(1));
    // No worker waits longer than one piece of work of each of the two steps takes.
    let apart = plan.balance(&problem, usize::MAX);
    let all: f64 = apart.iter().sum();
    let largest = apart.iter().fold(0.0f64, |most, &busy| most.max(busy / all));
    let least = 1.0 / (1.0 + 2.0 * largest * workers.max(1) as f64);
    let efficiency = efficiency(&balance, workers.max(1));
    assert!(efficiency >= least * 0.999, "{what}: {workers} workers, {balance:?}, at least {least}");
    assert!(balance.len() <= apart.len(), "{what}: {workers} workers, {balance:?}");
    assert_eq!(balance.is_empty(), apart.is_empty(), "{what}: {workers} workers, {balance:?}");
    assert!(!plan.explain(&problem, None).to_string().is_empty());
}

fn attention(rng: &mut Rng, rows: usize, keys: usize) -> Attention {
    let settings = settings(rng, rows, keys);
    let mut attention = Attention::new().align(settings.alignment.unwrap_or(Alignment::TopLeft));
    if let Some(sides) = settings.window {
        attention = attention.window(Window::inclusive(sides.left, sides.right).keep_first(sides.first));
    }
    if settings.causal { attention.causal() } else { attention }
}

/// Returns the fraction of the workers' time in which they work.
fn efficiency(busy: &[f64], workers: usize) -> f64 {
    if busy.is_empty() { 1.0 } else { busy.iter().sum::<f64>() / workers as f64 }
}

/// Panics unless the fractions in which workers work are ones.
pub(super) fn check_rules(what: &str, busy: &[f64], workers: usize) {
    assert!(busy.len() <= workers, "{what}: {workers} workers, {busy:?}");
    assert!(busy.iter().all(|&busy| busy > 0.0 && busy <= 1.0), "{what}: {workers} workers, {busy:?}");
    let efficiency = efficiency(busy, workers);
    assert!((0.0..=1.0 + 1e-9).contains(&efficiency), "{what}: {workers} workers, {efficiency}");
    if workers == 1 {
        assert!((efficiency - 1.0).abs() < 1e-9, "{what}: {busy:?}");
    }
}
