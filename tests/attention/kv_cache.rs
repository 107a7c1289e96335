//! Attention from a cache: the same bits as from tensors, whatever was appended, rolled back or shared before.

mod changed_keys;
mod errors;
mod file;
mod growth;
mod history;
mod keep;
#[cfg(feature = "safetensors")]
mod one_sequence;
mod places;
mod ragged;
mod rollback;
mod sliding;

use crate::kv_support::{append_part, cache_of, cuts, empty_cache, same_full, same_oracle};
use crate::options::{Case, Wanted, check_against_oracle, same_rows};
use crate::support::{Rng, Tensor, Tensors, execs, fewer};
use sdpa::{Alignment, Exec, Inputs, KvCache, Plan, View, Window, Workspace};
use std::ops::Range;

/// Refusal of a length to which sequence 0 of a sliding cache cannot be cut.
fn too_short(len: usize, least: usize) -> String {
    format!(
        "length: {len}, but must be at least {least} for sequence 0: the sliding cache has evicted keys that its next row \
         would see (KvCache::rollback_room keeps more)"
    )
}

/// Around panels, blocks and two blocks.
const LENGTHS: [usize; 9] = [1, 15, 16, 17, 255, 256, 257, 511, 513];
/// Around vectors, strips of values (80 makes two) and runs of strips.
const DIMS: [usize; 9] = [1, 3, 8, 16, 17, 33, 64, 80, 272];
const HEADS: [(usize, usize); 4] = [(1, 1), (4, 2), (3, 1), (2, 2)];

/// One sequence of equally many rows and keys, each row at its key, causal, with any other options.
fn causal(seed: u64, length: usize) -> Case {
    let mut rng = Rng::new(seed);
    let (heads, kv_heads) = rng.pick(&HEADS);
    let sizes = [1, heads, kv_heads, length, length, rng.pick(&DIMS), rng.pick(&DIMS)];
    loop {
        let case = Case::of_sizes(&mut rng, sizes);
        if case.ragged.is_none() {
            return Case { causal: true, kv_lens: None, alignment: Some(Alignment::TopLeft), ..case };
        }
    }
}

/// Random cases of each length, on every instruction set.
fn every(cases: u64, mut check: impl FnMut(&str, &mut Rng, &Case, Exec)) {
    for length in LENGTHS {
        for n in 0..fewer(cases) {
            let seed = 1000 * length as u64 + n;
            let case = causal(seed, length);
            for (isa, exec) in execs() {
                check(&format!("length {length}, seed {seed}, {isa}"), &mut Rng::new(!seed), &case, exec);
            }
        }
    }
}

/// Rows against a cache with this number of keys.
fn attend(case: &Case, cache: &KvCache, exec: Exec, wanted: Wanted) -> crate::options::Full {
    case.run_over(Inputs::cached(case.q.view(), cache), exec, wanted)
}

/// How often each option was there: the random cases must not have lost one.
#[test]
fn cases_have_every_option() {
    let mut counts = [0; 14];
    for length in LENGTHS {
        for n in 0..10 {
            let case = causal(1000 * length as u64 + n, length);
            for (count, (_, has)) in counts.iter_mut().zip(crate::options::options_of(&case)) {
                *count += usize::from(has);
            }
        }
    }
    let names = crate::options::options_of(&causal(0, 1)).map(|(name, _)| name);
    for (name, count) in names.into_iter().zip(counts) {
        println!("{name}: {count}");
        assert!(count > 4 || ["kv_lens", "ragged"].contains(&name), "{name}: in {count} cases");
    }
}

#[test]
fn a_step_is_the_last_row_of_the_prefill() {
    every(10, |what, rng, case, exec| {
        let length = case.k.shape[2];
        let whole = case.run(exec, Wanted { mass: false, ..Wanted::ALL });
        let cache = cache_of(case, rng);
        let step = case.chunk(length - 1..length, length);
        let last = |[b, h, _]: [usize; 3]| Some([b, h, length - 1]);
        for wanted in [Wanted::LEAST, Wanted::ALL] {
            // The position in words and in numbers; alone and with all threads.
            let aligned = Case { alignment: Some(Alignment::BottomRight), ..step.clone() };
            for step in [&step, &aligned] {
                for exec in [exec, exec.threads(64)] {
                    same_rows(what, (step, &attend(step, &cache, exec, wanted)), (case, &whole), last);
                }
            }
        }
    });
}

#[test]
fn chunks_are_the_prefill() {
    every(6, |what, rng, case, exec| {
        let length = case.k.shape[2];
        let whole = case.run(exec, Wanted { mass: false, ..Wanted::ALL });
        let mut cache = empty_cache(case);
        for rows in cuts(length, rng) {
            append_part(&mut cache, case, 0, rows.clone());
            let chunk = case.chunk(rows.clone(), rows.end);
            let aligned = Case { alignment: Some(Alignment::BottomRight), ..chunk };
            let wanted = [Wanted::LEAST, Wanted::ALL][rng.below(2)];
            let got = attend(&aligned, &cache, exec, wanted);
            let what = format!("{what}: rows {rows:?}");
            same_rows(&what, (&aligned, &got), (case, &whole), |[b, h, i]| Some([b, h, rows.start + i]));
            // Key weight sums and hidden scores: those of the same rows over tensors.
            same_full(&what, &got, &aligned.run(exec, wanted));
        }
    });
}

#[test]
fn one_token_at_a_time_is_the_prefill() {
    for (seed, length) in [(1, 17), (2, 257), (3, 300)] {
        let case = causal(seed, length);
        for (isa, exec) in execs() {
            let whole = case.run(exec, Wanted::LEAST);
            let mut cache = empty_cache(&case);
            let mut workspace = Workspace::new();
            for i in 0..length {
                append_part(&mut cache, &case, 0, i..i + 1);
                let step = case.chunk(i..i + 1, i + 1);
                let mut got = step.unwritten(Wanted::LEAST);
                step.run_over_into(Inputs::cached(step.q.view(), &cache), exec, &mut got, &mut workspace);
                same_rows(&format!("{isa}, token {i}"), (&step, &got), (&case, &whole), |[b, h, _]| Some([b, h, i]));
            }
        }
    }
}

/// Any random case: several sequences, each of its own length, any alignment, not only causal.
#[test]
fn any_call_over_a_cache_is_the_call_over_tensors() {
    for seed in 0..fewer(150) {
        let mut rng = Rng::new(50_000 + seed);
        let case = Case::random(&mut rng, 700_000).side_by_side();
        let cache = cache_of(&case, &mut rng);
        for (isa, exec) in execs() {
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                same_full(
                    &format!("seed {seed}, {isa}"),
                    &attend(&case, &cache, exec, wanted),
                    &case.run(exec, wanted),
                );
            }
        }
    }
}

#[test]
fn the_oracle_sees_the_same_through_a_cache() {
    for seed in 0..fewer(25) {
        let mut rng = Rng::new(60_000 + seed);
        let case = Case::random(&mut rng, 100_000).side_by_side();
        let cache = cache_of(&case, &mut rng);
        let source = || Inputs::cached(case.q.view(), &cache);
        let oracle = case.oracle_over::<f64>(source());
        same_oracle(&format!("seed {seed}"), &oracle, &case.oracle());
        for (isa, exec) in execs() {
            let got = case.run_over(source(), exec, Wanted::ALL);
            check_against_oracle(&format!("seed {seed}, {isa}"), &case, &got, &oracle);
        }
    }
}

#[test]
fn threads_do_not_show() {
    let tensors = Tensors::normal([8, 8, 2, 1, 520, 96, 100], 1);
    let mut case = Case::plain(&mut Rng::new(0), [8, 8, 2, 1, 1, 96, 100]);
    (case.q, case.k, case.v) = (tensors.q, tensors.k, tensors.v);
    case.kv_lens = Some(vec![520, 0, 257, 256, 1, 511, 512, 513]);
    (case.causal, case.alignment) = (true, Some(Alignment::BottomRight));
    case.window = Some(Window::inclusive(Some(300), None).keep_first(2));
    let cache = cache_of(&case, &mut Rng::new(2));
    for (isa, serial) in execs() {
        let expected = case.run(serial, Wanted::MASS);
        let source = || Inputs::cached(case.q.view(), &cache);
        same_full(&format!("{isa}, serial"), &case.run_over(source(), serial, Wanted::MASS), &expected);
        for threads in [2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut full = case.unwritten(Wanted::MASS);
            let problem = case.attention().problem(case.inputs_over(source()), full.outputs()).unwrap();
            let exec = serial.threads(threads);
            assert!(Plan::new(&problem, exec).workers() > 1, "not enough work for this test");
            for repeat in 0..3 {
                let got = pool.install(|| case.run_over(source(), exec, Wanted::MASS));
                same_full(&format!("{isa}, {threads} threads, run {repeat}"), &got, &expected);
            }
        }
    }
}

/// Some rows of a tensor, where they lie.
fn some_rows(x: &Tensor, rows: Range<usize>) -> View<'_> {
    let [b, h, _, d] = x.shape;
    let offset = x.offset.checked_add_signed(rows.start as isize * x.strides[2]).expect("inside the memory");
    View::from_strides(&x.data, offset, [b, h, rows.len(), d], x.strides).expect("inside the tensor")
}

/// However tensors lie that are appended.
#[test]
fn layouts_of_what_is_appended_do_not_show() {
    let mut rng = Rng::new(3);
    for (length, d, dv) in [(5, 3, 15), (40, 16, 33), (300, 33, 20)] {
        let case = Case::plain(&mut rng, [2, 4, 2, 3, length, d, dv]);
        let expected = cache_of(&case, &mut rng);
        for (k, v) in crate::support::LAYOUTS.iter().flat_map(|&k| crate::support::LAYOUTS.map(|v| (k, v))) {
            let (mut cache, k, v) = (empty_cache(&case), case.k.laid_out(k), case.v.laid_out(v));
            // All sequences at once, from a part that starts inside a panel on.
            for rows in [0..3, 3..length] {
                cache.append(some_rows(&k, rows.clone()), some_rows(&v, rows)).unwrap();
            }
            let exec = Exec::serial();
            same_full(
                &format!("{length} keys, {:?} {:?}", k.strides, v.strides),
                &attend(&case, &cache, exec, Wanted::ALL),
                &attend(&case, &expected, exec, Wanted::ALL),
            );
        }
    }
}
