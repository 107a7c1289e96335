//! Every element of every output is written by a call that is no error, however small its sizes; a call that is an error writes
//! none.

use crate::kv_support::{Pool, cache_of};
use crate::options::{Case, Full, POINTS, Wanted};
use crate::support::{Layout, Rng, Sizes, Tensor, UNWRITTEN, execs};
use sdpa::{Attention, AttnState, Error, Exec, Inputs, KvShape, Outputs, Run, ViewMut};

/// Sizes of 0, 1 and 2; 0, 1 or 2 query heads for each key/value head. Dimensions of 0, which are errors, are rare.
fn sizes(rng: &mut Rng) -> Sizes {
    let dim = |rng: &mut Rng| if rng.below(10) == 0 { 0 } else { 1 + rng.below(2) };
    let kv_heads = rng.below(3);
    [rng.below(3), kv_heads * rng.below(3), kv_heads, rng.below(3), rng.below(3), dim(rng), dim(rng)]
}

/// Random cases of such sizes, with any options.
pub(crate) fn cases(count: u64) -> impl Iterator<Item = (String, Case, Rng)> {
    (0..count).map(|seed| {
        let mut rng = Rng::new(seed);
        let sizes = sizes(&mut rng);
        let case = Case::of_sizes(&mut rng, sizes);
        (format!("seed {seed}, {sizes:?}, ragged {:?}, lengths {:?}", case.ragged, case.kv_lens), case, rng)
    })
}

/// All elements written, or after an error none.
#[track_caller]
pub(crate) fn check<'t, E>(
    what: &str,
    done: Result<(), E>,
    outputs: impl IntoIterator<Item = (&'static str, &'t Tensor)>,
) {
    for (name, output) in outputs {
        let kept = output.data.iter().filter(|x| x.to_bits() == UNWRITTEN).count();
        let expected = if done.is_ok() { 0 } else { output.data.len() };
        assert!(kept == expected, "{what}: {kept} of {} elements of {name} are as they were", output.data.len());
    }
}

fn outputs(full: &Full) -> impl Iterator<Item = (&'static str, &Tensor)> {
    let points = ["raw", "softcapped", "masked", "weights"].into_iter().zip(&full.points);
    let points = points.filter_map(|(name, point)| Some((name, point.as_ref()?)));
    let sums = full.mass.as_ref().map(|sums| ("key weight sums", sums));
    [("out", &full.out), ("lse", &full.lse)].into_iter().chain(points).chain(sums)
}

fn blank(shape: [usize; 4]) -> Tensor {
    Tensor::filled(shape, f32::from_bits(UNWRITTEN))
}

fn view(x: &mut Tensor) -> ViewMut<'_> {
    ViewMut::bhld(&mut x.data, x.shape).expect("dense")
}

/// Runs a call, if it is no error.
fn call(case: &Case, inputs: Inputs<'_>, exec: Exec, full: &mut Full) -> Result<(), Error> {
    let problem = case.attention().problem(inputs, full.outputs())?;
    crate::options::mods::with_mods!(case, |mods| problem.run_once_with(exec, Run::new().mods(&mods)))
        .expect("functions that fit");
    Ok(())
}

#[test]
fn every_output_of_a_call_is_written_whatever_its_sizes() {
    for (what, case, _) in cases(2000) {
        for (isa, exec) in execs() {
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                let mut full = case.unwritten(wanted);
                let done = call(&case, case.inputs(), exec, &mut full);
                check(&format!("{what}, {isa}"), done, outputs(&full));
            }
        }
    }
}

#[test]
fn every_output_of_a_call_over_caches_and_pages_is_written_whatever_its_sizes() {
    for (what, mut case, mut rng) in cases(2000) {
        if case.ragged.is_some() || case.k.shape[3] == 0 || case.v.shape[3] == 0 {
            continue;
        }
        // Pages are in tables as wide as the longest sequence.
        let (cache, pool) = (cache_of(&case, &mut rng), Pool::of(&case, 2, [Layout::Bhld; 2], 0.5, &mut rng));
        let longest = (0..case.batch()).map(|b| case.kv_len(b)).max().unwrap_or(0);
        (case.k, case.v) = (case.k.rows(0..longest), case.v.rows(0..longest));
        let (rows, batch) = (case.q.shape[2], case.batch());
        let [q, ends] = [case.q.clone(), Tensor::filled([1, case.heads(), rows * batch, case.q.shape[3]], 0.5)];
        let ragged: Vec<usize> = (0..=batch).map(|b| b * rows).collect();
        let sources = [("cache", Inputs::cached(q.view(), &cache)), ("pages", Inputs::paged(q.view(), pool.pages()))];
        for (name, source) in sources {
            for (isa, exec) in execs() {
                let mut full = case.unwritten(Wanted::ALL);
                let done = call(&case, case.inputs_over(source), exec, &mut full);
                check(&format!("{what}, {name}, {isa}"), done, outputs(&full));
            }
        }
        let all: Vec<usize> = (0..batch).collect();
        let inputs = Inputs::cached(ends.view(), &cache).sequences(&all).ragged_queries(&ragged);
        let mut full =
            Full { out: blank([1, case.heads(), rows * batch, case.v.shape[3]]), ..case.unwritten(Wanted::ALL) };
        full.lse = blank([1, case.heads(), rows * batch, 1]);
        let rows_of_longest = if batch == 0 { 0 } else { rows };
        full.points = POINTS.map(|_| Some(blank([batch, case.heads(), rows_of_longest, longest])));
        let done = case.attention().problem(inputs, full.outputs());
        let done = done.map(|problem| problem.run_once(Exec::serial()));
        check(&format!("{what}, ragged queries"), done, outputs(&full));
    }
}

#[test]
fn every_output_of_a_state_and_of_the_baseline_is_written_whatever_its_sizes() {
    for (what, case, _) in cases(1000) {
        let plain = Attention::new();
        let ([_, kv_heads, _, value_dim], head_dim) = (case.v.shape, case.k.shape[3]);
        let pushes = |times: usize, full: &mut Full| {
            let mut state =
                AttnState::new(plain, case.q.view(), KvShape { kv_heads, head_dim, value_dim }, Exec::serial())?;
            (0..times).try_for_each(|_| state.push(case.k.view(), case.v.view()))?;
            state.read(Outputs::new(view(&mut full.out)).lse(view(&mut full.lse)))
        };
        for times in 0..3 {
            let mut full = case.unwritten(Wanted::LEAST);
            let done = pushes(times, &mut full);
            check(&format!("{what}, {times} pushes"), done, outputs(&full));
        }
        for attention in [plain, case.attention()] {
            let mut full = case.unwritten(Wanted::LEAST);
            let done = sdpa_unfused::attention(&attention, case.inputs(), full.outputs(), Exec::serial());
            check(&format!("{what}, unfused"), done, outputs(&full));
        }
    }
}
