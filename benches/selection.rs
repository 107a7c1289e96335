//! Selected keys: calls with lists beside dense ones; index scores of a step and of a prompt, as a share of the machine's peak; and
//! lists of the largest scores beside a plain read of them. `cargo bench --bench selection`, with a filter on groups: `-- lists`, `--
//! index`, `-- top`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::random;
use sdpa::{
    Alignment, Attention, Bf16, Dtype, Exec, Inputs, KeyScales, KvCache, KvShape, Outputs, Plan, Precision,
    SelectedKeys, SelectionShape, Shape, TopK, View, ViewMut, Workspace, probe, top_k,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Number of rounds, in each of which every case has a burst of runs.
const ROUNDS: usize = 9;
const BURST: Duration = Duration::from_millis(40);
/// Index heads of DeepSeek V3.2, on one key head.
const HEADS: usize = 64;
const DIM: usize = 128;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let groups: [(&str, fn()); 4] = [
        ("steps with lists", steps),
        ("prompts with lists", prompt),
        ("index scores", index_scores),
        ("top k", largest),
    ];
    for (name, group) in groups {
        if wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str())) {
            group();
        }
    }
}

/// Number of keys of a step, and of those that it selects.
const KEYS: usize = 1 << 17;
const CHOSEN: usize = 2048;
/// Number of lists, and of places of dense calls, that take turns: no cache holds the keys of all.
const TURNS: usize = 16;

/// Random lists of `k` of the units of `keys` keys.
fn lists(shape: SelectionShape<'_>, keys: usize, k: usize, seed: u64) -> SelectedKeys {
    let groups: usize = shape.q_lens.iter().map(|len| len.div_ceil(shape.rows)).sum();
    let (count, units) = (groups * shape.heads, keys / shape.unit);
    let mut numbers = Vec::with_capacity(count * k);
    for list in 0..count as u64 {
        let scores = random(units, seed << 32 | list);
        let mut order: Vec<u32> = (0..units as u32).collect();
        order.select_nth_unstable_by(k - 1, |&a, &b| scores[a as usize].total_cmp(&scores[b as usize]));
        order.truncate(k);
        order.sort_unstable();
        numbers.extend(order);
    }
    let mut selected = SelectedKeys::new();
    selected.fill(shape, &(0..=count).map(|list| list * k).collect::<Vec<_>>(), &numbers, None).expect("good lists");
    selected
}

/// Prints the times of dense calls, which take turns, and of calls with lists.
fn beside(name: &str, attention: &Attention, [dense, listed]: [&[Inputs<'_>]; 2]) {
    let Shape { batch, heads, q_len, value_dim, .. } = dense[0].shape().expect("inputs that fit");
    let shape = [batch, heads, q_len, value_dim];
    let run = |inputs: Inputs<'_>, memory: &mut (Vec<f32>, Workspace)| {
        let outputs = Outputs::new(ViewMut::bhld(&mut memory.0, shape).expect("it fits"));
        let problem = attention.problem(inputs, outputs).expect("a good call");
        let plan = Plan::new(&problem, Exec::default());
        problem.run(&plan, &mut memory.1);
    };
    let memory = || (vec![0.0; shape.iter().product()], Workspace::new());
    let (mut turns, mut memories) = ([dense, listed].map(|all| all.iter().cycle()), [memory(), memory()]);
    let mut seconds = [f64::INFINITY; 2];
    for _ in 0..ROUNDS {
        for which in [0, 1] {
            let [least] = fastest([&mut || run(*turns[which].next().expect("a cycle"), &mut memories[which])]);
            seconds[which] = seconds[which].min(least);
        }
    }
    let [dense, listed] = seconds;
    println!("  {name:<42} dense {:9.3} ms  lists {:9.3} ms  {:.3}", dense * 1e3, listed * 1e3, listed / dense);
}

/// Steps over 2,048 of 131,072 keys, beside dense ones over as many that lie together.
fn steps() {
    println!("steps over {CHOSEN} of {KEYS} keys, beside as many together");
    let row = SelectionShape { q_lens: &[1], heads: 1, rows: 1, unit: 1 };
    let single: [SelectedKeys; TURNS] = core::array::from_fn(|turn| lists(row, KEYS, CHOSEN, turn as u64));
    let units: [SelectedKeys; TURNS] =
        core::array::from_fn(|turn| lists(SelectionShape { unit: 64, ..row }, KEYS, CHOSEN / 64, turn as u64));
    let (q, x) = (random(32 * DIM, 1), random(8 * KEYS * DIM, 2));
    let q = View::bhld(&q, [1, 32, 1, DIM]).expect("data of this shape");
    let x = View::bhld(&x, [1, 8, KEYS, DIM]).expect("data of this shape");
    let place = |turn: usize| x.rows(turn * 4 * CHOSEN..(turn * 4 + 1) * CHOSEN).expect("keys that are there");
    let dense: [Inputs<'_>; TURNS] = core::array::from_fn(|turn| Inputs::new(q, place(turn), place(turn)));
    let listed = single.each_ref().map(|list| Inputs::new(q, x, x).selected(list));
    beside("32/8 heads of 128, tensors, f32", &Attention::new(), [&dense, &listed]);
    let shape = KvShape { kv_heads: 8, head_dim: DIM, value_dim: DIM };
    let stored = |x: View<'_>| {
        let mut cache = KvCache::new(1, shape).expect("a cache");
        cache.append(x, x).expect("it fits");
        cache
    };
    let (all, few): (KvCache, [KvCache; TURNS]) = (stored(x), core::array::from_fn(|turn| stored(place(turn))));
    let dense = few.each_ref().map(|cache| Inputs::cached(q, cache));
    let listed = units.each_ref().map(|list| Inputs::cached(q, &all).selected(list));
    beside("the same, cache, units of 64", &Attention::new(), [&dense, &listed]);
    latent_steps(&single);
}

/// Steps of 128 heads over a latent cache of bf16.
fn latent_steps(single: &[SelectedKeys; TURNS]) {
    let (dim, value_dim) = (576, 512);
    let (q, x) = (random(128 * dim, 3), random(KEYS * dim, 4));
    let q = View::bhld(&q, [1, 128, 1, dim]).expect("data of this shape");
    let x = View::bhld(&x, [1, 1, KEYS, dim]).expect("data of this shape");
    let stored = |x: View<'_>| {
        let empty = KvCache::new(1, KvShape { kv_heads: 1, head_dim: dim, value_dim }).expect("a cache");
        let mut cache = empty.dtype(Dtype::Bf16).and_then(KvCache::latent).expect("an empty cache");
        cache.append(x, x.columns(0..value_dim).expect("it has these")).expect("it fits");
        cache
    };
    let place = |turn: usize| x.rows(turn * 4 * CHOSEN..(turn * 4 + 1) * CHOSEN).expect("keys that are there");
    let (all, few): (KvCache, [KvCache; TURNS]) = (stored(x), core::array::from_fn(|turn| stored(place(turn))));
    let dense = few.each_ref().map(|cache| Inputs::cached(q, cache));
    let listed = single.each_ref().map(|list| Inputs::cached(q, &all).selected(list));
    for (name, precision) in [("exact", Precision::Exact), ("native", Precision::Native)] {
        let attention = Attention::new().precision(precision);
        beside(&format!("128 latent heads, bf16, {name}"), &attention, [&dense, &listed]);
    }
}

/// Prompts of 8,192 rows whose rows select units, or single keys.
fn prompt() {
    let (rows, heads, dim) = (8192, 12, 64);
    println!("prompts of {rows} rows, {heads} heads of {dim}, beside dense ones");
    let [q, k, v] = [1, 2, 3].map(|seed| random(heads * rows * dim, seed));
    let [q, k, v] = [&q, &k, &v].map(|x| View::bhld(x, [1, heads, rows, dim]).expect("data of this shape"));
    let inputs = Inputs::new(q, k, v);
    let q_lens = &[rows];
    let tenth = lists(SelectionShape { q_lens, heads, rows: 128, unit: 64 }, rows, rows / 64 / 10, 5);
    let few = lists(SelectionShape { q_lens, heads: 1, rows: 1, unit: 1 }, rows, 64, 6);
    for (name, selected) in [("a tenth in units of 64, 128 rows a list", &tenth), ("64 single keys a row", &few)] {
        beside(name, &Attention::new(), [&[inputs], &[inputs.selected(selected)]]);
    }
}

/// Index scores of rows at the end of their keys, on one thread.
fn index_scores() {
    let exec = Exec::serial();
    let isa = exec.instruction_set();
    let floats = probe::peak_flops(isa);
    println!("index scores, {HEADS} heads of {DIM}, {isa}: peak of FMAs {:.1} GFLOP/s", floats / 1e9);
    for [rows, keys] in [[1, 4096], [1, 131_072], [4, 16_384], [64, 4096]] {
        index_scores_of(rows, keys, exec, floats);
    }
}

fn index_scores_of(rows: usize, keys: usize, exec: Exec, floats: f64) {
    let (q, k) = (random(HEADS * rows * DIM, 1), random(keys * DIM, 2));
    let weights = random(HEADS * rows, 3);
    let short = |x: &[f32]| x.iter().map(|&x| Bf16::from_f32(x)).collect::<Vec<_>>();
    let (short_q, short_k) = (short(&q), short(&k));
    let shapes = [[1, HEADS, rows, DIM], [1, 1, keys, DIM]];
    let view = |x, shape| View::bhld(x, shape).expect("data of this shape");
    let (q, k) = (view(&q, shapes[0]), view(&k, shapes[1]));
    let short_k = View::bhld(&short_k, shapes[1]).expect("data of this shape");
    let short_q = View::bhld(&short_q, shapes[0]).expect("data of this shape");
    let empty = || KvCache::new(1, KvShape { kv_heads: 1, head_dim: DIM, value_dim: 1 }).expect("a cache");
    let ones = vec![1.0; keys];
    let caches = [empty().dtype(Dtype::Bf16), empty().int8(KeyScales::PerToken)].map(|cache| {
        let mut cache = cache.expect("a format");
        cache.append(k, view(&ones, [1, 1, keys, 1])).expect("it fits");
        cache
    });
    let cases = [
        ("f32", Inputs::new(q, k, k), Precision::Exact),
        ("bf16, exact", Inputs::new(short_q, short_k, short_k), Precision::Exact),
        ("bf16, native", Inputs::new(short_q, short_k, short_k), Precision::Native),
        ("cache, bf16, native", Inputs::cached(short_q, &caches[0]), Precision::Native),
        ("cache, int8", Inputs::cached(q, &caches[1]), Precision::Exact),
    ];
    let mut out = vec![0.0; rows * keys];
    for (name, inputs, precision) in cases {
        let attention = Attention::new().causal().align(Alignment::BottomRight).precision(precision);
        let indexer = attention.indexer(inputs, view(&weights, [1, HEADS, rows, 1])).expect("a good call");
        let mut workspace = Workspace::new();
        let [seconds] = fastest([&mut || {
            let out = ViewMut::bhld(&mut out, [1, 1, rows, keys]).expect("it fits");
            indexer.scores(out, exec, &mut workspace).expect("memory");
        }]);
        let seen: usize = (0..rows).map(|i| keys - rows + 1 + i).sum();
        let flops = 2.0 * (HEADS * DIM * seen) as f64 / seconds;
        println!(
            "  {rows} × {keys}, {name:<20} {:9.3} ms  {:7.1} GFLOP/s  {:.2} of FMAs",
            seconds * 1e3,
            flops / 1e9,
            flops / floats
        );
    }
}

/// Lists of the largest of given scores, beside a read of the scores.
fn largest() {
    let exec = Exec::serial();
    println!("top k, {}, beside a read of the scores", exec.instruction_set());
    for [rows, keys, k] in
        [[1, 4096, 512], [1, 32_768, 2048], [1, 131_072, 2048], [8, 131_072, 2048], [1, 131_072, 65_536]]
    {
        let scores = random(rows * keys, 4);
        let view = View::bhld(&scores, [1, 1, rows, keys]).expect("data of this shape");
        let (mut workspace, mut selected) = (Workspace::new(), SelectedKeys::new());
        let [chosen, read] = fastest([
            &mut || top_k(view, &TopK::new(k), exec, &mut workspace, &mut selected).expect("a good rule"),
            &mut || assert!(!probe::read(black_box(&scores)) || !scores.is_empty()),
        ]);
        println!(
            "  {k} of {keys}, {rows} row(s)  {:8.1} µs  read {:8.1} µs  {:.2}",
            chosen * 1e6,
            read * 1e6,
            chosen / read
        );
    }
}

/// Least seconds of each case, in turn: what else runs on the machine only adds to them.
fn fastest<const N: usize>(mut cases: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut seconds = [f64::INFINITY; N];
    for _ in 0..ROUNDS {
        for (case, seconds) in cases.iter_mut().zip(&mut seconds) {
            let burst = Instant::now();
            while burst.elapsed() < BURST {
                let start = Instant::now();
                case();
                *seconds = seconds.min(start.elapsed().as_secs_f64());
            }
        }
    }
    seconds
}
