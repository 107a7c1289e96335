//! Divisions of work among any number of workers, of calls of any size: rules that hold for each of them.

use crate::fuzzer::draw::settings;
use crate::fuzzer::rng::Rng;
use sdpa::{Alignment, Attention, Balance, Exec, Inputs, Outputs, Plan, View, ViewMut, Window};

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
    let largest = apart.shares.iter().fold(0.0f64, |most, &share| most.max(share));
    let least = 1.0 / (1.0 + 2.0 * largest * workers.max(1) as f64);
    assert!(balance.efficiency >= least * 0.999, "{what}: {workers} workers, {balance:?}, at least {least}");
    assert!(balance.shares.len() <= apart.shares.len(), "{what}: {workers} workers, {balance:?}");
    assert_eq!(balance.shares.is_empty(), apart.shares.is_empty(), "{what}: {workers} workers, {balance:?}");
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

fn check_rules(what: &str, balance: &Balance, workers: usize) {
    let Balance { shares, efficiency, .. } = balance;
    assert!(shares.len() <= workers, "{what}: {workers} workers, {balance:?}");
    assert!(shares.iter().all(|&share| share > 0.0 && share <= 1.0), "{what}: {workers} workers, {balance:?}");
    let all: f64 = shares.iter().sum();
    assert!(shares.is_empty() || (all - 1.0).abs() < 1e-9, "{what}: {workers} workers have {all}");
    assert!((0.0..=1.0 + 1e-9).contains(efficiency), "{what}: {workers} workers, {efficiency}");
    // All wait at least for the one that has most to do.
    let most = shares.iter().fold(0.0f64, |most, &share| most.max(share));
    let bound = if shares.is_empty() { 1.0 } else { 1.0 / (most * workers as f64) };
    assert!(*efficiency <= bound * 1.000_001, "{what}: {workers} workers, {balance:?}, at most {bound}");
    if workers == 1 {
        assert!((efficiency - 1.0).abs() < 1e-9, "{what}: {balance:?}");
    }
}
