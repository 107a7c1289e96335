//! Times of steps over caches of integers and of appends to them: formats that rotate or have exact tokens beside the same without.

use crate::interleaved::{random, shuffled, spread};
use crate::{Variant, filled, integers, support};
use sdpa::{Alignment, Attention, Inputs, KvCache, Outputs, Plan, View, ViewMut, Workspace};
use std::hint::black_box;

const HEADS: [usize; 2] = [32, 8];
const DIM: usize = 128;
/// Tokens that are appended one by one in a run, within the last block.
const TOKENS: usize = 64;
/// Numbers of keys. Those of one format fit the last level of most machines' caches, and stay there during a burst.
const LENGTHS: [usize; 2] = [512, 4096];

fn rounds() -> usize {
    if support::test_mode() { 1 } else { 25 }
}

fn view(data: &[f32], heads: usize, rows: usize) -> View<'_> {
    View::bhld(data, [1, heads, rows, DIM]).expect("data of this shape")
}

/// Returns a cache of random keys and values.
fn random_cache(keys: usize, variant: &Variant) -> KvCache {
    let [k, v] = [1, 2].map(|seed| random(HEADS[1] * keys * DIM, seed));
    filled([view(&k, HEADS[1], keys), view(&v, HEADS[1], keys)], variant.format)
}

/// Runs cases in shuffled turns; prints the time of each, and its share of the first's in the same round.
fn beside(names: &[Variant], per_run: f64, cases: &mut [Box<dyn FnMut() + '_>]) {
    let rounds = shuffled(rounds(), cases);
    for (variant, times) in names.iter().zip(&rounds) {
        let mut shares: Vec<_> = times.iter().zip(&rounds[0]).map(|(time, first)| time / first).collect();
        let [low, share, high] = spread(&mut shares);
        let [_, time, _] = spread(&mut times.clone());
        println!("  {:<46} {:9.2} µs  {share:.3} ({low:.3} to {high:.3})", variant.name, time * 1e6 / per_run);
    }
}

/// Prints the times of steps of one row on one thread.
pub(crate) fn steps() {
    let q = random(HEADS[0] * DIM, 3);
    for keys in LENGTHS {
        println!("one row, {}/{} heads of {DIM}, {keys} keys: time, share of the first", HEADS[0], HEADS[1]);
        for group in integers() {
            let caches: Vec<_> = group.iter().map(|variant| random_cache(keys, variant)).collect();
            let query = view(&q, HEADS[0], 1);
            let mut cases: Vec<_> = caches.iter().map(|cache| one_row(query, cache)).collect();
            beside(&group, 1.0, &mut cases);
        }
    }
}

/// Returns a run that attends with one row.
fn one_row<'a>(q: View<'a>, cache: &'a KvCache) -> Box<dyn FnMut() + 'a> {
    let (mut out, mut workspace) = (vec![0.0; HEADS[0] * DIM], Workspace::new());
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    Box::new(move || {
        let inputs = Inputs::cached(q, cache);
        let out = ViewMut::bhld(&mut out, [1, HEADS[0], 1, DIM]).expect("it fits");
        let problem = attention.problem(black_box(inputs), Outputs::new(out)).expect("a good call");
        let plan = Plan::new(&problem, support::exec(1));
        problem.run(&plan, &mut workspace);
    })
}

/// Prints the times of appends of a token.
pub(crate) fn appends() {
    println!("one token, {} heads of {DIM}: time, share of the first", HEADS[1]);
    let [k, v] = [4, 5].map(|seed| random(HEADS[1] * TOKENS * DIM, seed));
    let (k, v) = (view(&k, HEADS[1], TOKENS), view(&v, HEADS[1], TOKENS));
    let keys = 1024 + 100;
    for group in integers() {
        let mut caches: Vec<_> = group.iter().map(|variant| random_cache(keys, variant)).collect();
        let append = |cache: &mut KvCache| {
            for token in 0..TOKENS {
                let [k, v] = [k, v].map(|rows| rows.rows(token..token + 1).expect("tokens that are there"));
                cache.append(black_box(k), black_box(v)).expect("they fit");
            }
            cache.truncate(0, keys).expect("tokens that are there");
        };
        let cases = caches.iter_mut().map(|cache| Box::new(move || append(cache)) as Box<dyn FnMut()>);
        beside(&group, TOKENS as f64, &mut cases.collect::<Vec<_>>());
    }
}
