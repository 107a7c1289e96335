//! What the contract says and the library once did not do.

mod options_support;
mod support;

use options_support::{Case, Wanted};
use sdpa::{Alignment, Attention, AttnState, Exec, Mods, Outputs, Plan, Point, Position, ViewMut, Workspace, naive};
use support::{Rng, Tensor, UNWRITTEN, execs};

fn plain(rows: usize, keys: usize) -> Case {
    Case::plain(&mut Rng::new(1), [1, 1, 1, rows, keys, 4, 3])
}

/// "−∞ hides" (additive bias), and a score function comes before keys are hidden: it must not bring a key back.
#[test]
fn a_score_function_does_not_show_what_a_bias_hides() {
    let hiding = |[.., j]: [usize; 4]| if j == 2 { f32::NEG_INFINITY } else { 0.0 };
    let case = Case { bias: Some(Tensor::from_fn([1, 1, 1, 5], hiding)), ..plain(2, 5) };
    let mods = Mods::new().score(|score: f32, _: Position| score.max(-1.0));
    let oracle = naive::answer::<f64, _, _, _>(&case.attention(), &case.inputs(), &mods).unwrap();
    for (isa, exec) in execs() {
        let mut full = case.unwritten(Wanted::LEAST);
        let problem = case.attention().problem(case.inputs(), full.outputs()).unwrap();
        let plan = Plan::new(&problem, exec);
        problem.run_with(&plan, &mut Workspace::new(), &mods);
        support::assert_close(&format!("{isa}: out"), &full.out, &oracle.out, 1e-5);
    }
}

/// "Weights: 0 where hidden", in a row that is NaN for another key's sake too.
#[test]
fn hidden_weights_of_a_nan_row_are_zero() {
    let mut case = Case { causal: true, alignment: Some(Alignment::TopLeft), ..plain(5, 5) };
    case.k.fill_row(0, f32::NAN);
    let full = case.run(Exec::serial(), Wanted::ALL);
    let weights = full.points[Point::Weights as usize].as_ref().unwrap();
    assert!(weights.get([0, 0, 2, 1]).is_nan() && weights.get([0, 0, 2, 2]).is_nan());
    for j in 3..5 {
        assert_eq!(weights.get([0, 0, 2, j]).to_bits(), 0, "weight of hidden key {j}");
    }
}

/// A NaN reaches the mass of the keys that its row sees, and no others.
#[test]
fn hidden_keys_of_a_nan_row_have_their_mass() {
    let mut case = Case { causal: true, alignment: Some(Alignment::TopLeft), ..plain(5, 5) };
    // Row 1 alone is NaN; it sees keys 0 and 1.
    case.q.set([0, 0, 1, 0], f32::NAN);
    let full = case.run(Exec::serial(), Wanted::MASS);
    let mass = full.mass.unwrap();
    assert!(mass.get([0, 0, 0, 0]).is_nan() && mass.get([0, 0, 1, 0]).is_nan());
    for j in 2..5 {
        assert!(mass.get([0, 0, j, 0]).is_finite(), "mass of key {j}");
    }
}

/// Nothing visible: there is no term of the sum for a NaN to reach.
#[test]
fn a_nan_sink_and_nothing_visible() {
    let case = Case { sinks: Some(vec![f32::NAN]), kv_lens: Some(vec![0]), ..plain(2, 5) };
    let full = case.run(Exec::serial(), Wanted::LEAST);
    assert_eq!(full.out.data, vec![0.0; 6]);
    assert!(full.lse.data.iter().all(|x| x.is_nan()));
}

/// "No silent default" for the alignment: a state is given none here, and rows and keys differ in number.
#[test]
fn a_causal_state_needs_an_alignment() {
    let case = plain(2, 5);
    for attention in [Attention::new().causal(), Attention::new().window(sdpa::Window::inclusive(Some(1), None))] {
        let state = AttnState::new(attention, case.q.view(), [1, 3], Exec::serial());
        let mut out = vec![0.0; 6];
        let done = state.and_then(|mut state| {
            state.push(case.k.view(), case.v.view())?;
            state.read(Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 3])?))
        });
        assert!(done.is_err(), "read as top-left without a word");
    }
}

/// Score outputs of ragged calls are as large as the longest sequence; what is beyond a shorter one's rows is written
/// like what is beyond its keys, and as the oracle has it.
#[test]
fn rows_beyond_a_ragged_sequence_are_written() {
    let case = Case { ragged: Some([vec![0, 1, 4], vec![0, 2, 5]]), ..plain(4, 5) };
    let full = case.run(Exec::serial(), Wanted::ALL);
    for point in full.points.iter().flatten() {
        assert!(point.data.iter().all(|x| x.to_bits() != UNWRITTEN), "{:?}", point.data);
    }
}

/// "A second run of the same plan with the same workspace allocates nothing": then the first must have made room for
/// every worker.
#[test]
#[cfg(feature = "rayon")]
fn a_workspace_has_room_for_every_worker_after_one_run() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let case = Case::plain(&mut Rng::new(1), [1, 2, 1, 1024, 1024, 20, 12]);
    // Few keys are seen, so that one worker is often done before the other wakes.
    let case = Case { causal: true, alignment: Some(Alignment::Offset(-1000)), ..case };
    for run in 0..200 {
        let (mut full, mut workspace) = (case.unwritten(Wanted::LEAST), Workspace::new());
        let plan = pool.install(|| case.run_into(Exec::default(), &mut full, &mut workspace));
        assert_eq!(workspace.bytes(), plan.workers() * plan.scratch_bytes(), "run {run}");
    }
}

/// What a message says must be so: `out` has a value_dim of 7 here, and the LSE a last dimension that should be 1.
#[test]
fn merge_says_what_is_wrong_with_an_lse() {
    let (mut out, mut lse, zeros) = ([0.0; 168], [0.0; 48], [0.0; 168]);
    let mine = (ViewMut::bhld(&mut out, [2, 4, 3, 7]).unwrap(), ViewMut::bhld(&mut lse, [2, 4, 3, 2]).unwrap());
    let view = |shape| sdpa::View::bhld(&zeros, shape).unwrap();
    let error = sdpa::merge(mine, (view([2, 4, 3, 7]), view([2, 4, 3, 1]))).unwrap_err();
    assert!(!error.to_string().contains("out has 1"), "{error}");
}

/// A weight does not depend on how large the scores are that it was made from: a common padding bias, and the lowest.
#[test]
fn key_mass_of_large_scores() {
    for bias in [-1e4, 1e6, 1e8, f32::MIN] {
        let case = Case { bias: Some(Tensor::from_fn([1, 1, 1, 10], |_| bias)), ..plain(1, 10) };
        let mass = case.run(Exec::serial(), Wanted::MASS).mass.unwrap();
        let sum: f32 = mass.data.iter().sum();
        assert!((sum - 1.0).abs() < 1e-6, "bias {bias}: {sum}");
    }
}

/// Nothing overflows on the way to the error, and nothing is allocated for it.
#[test]
fn dimensions_beyond_reason() {
    let one = [1.0f32];
    let view = |shape| sdpa::View::from_strides(&one, 0, shape, [0; 4]).unwrap();
    let (mut out, big) = ([0.0f32], [1, 1, 1, 1 << 60]);
    let inputs = sdpa::Inputs::new(view(big), view(big), view([1; 4]));
    let error = Attention::new().problem(inputs, Outputs::new(ViewMut::bhld(&mut out, [1; 4]).unwrap())).unwrap_err();
    let words = format!("q: head_dim is {}, but the largest possible has {}", 1u64 << 60, 1 << 24);
    assert_eq!(error.to_string(), words);
    // Without a batch the other dimensions may be anything.
    let none = view([0, 1 << 40, 1 << 40, 8]);
    let inputs = sdpa::Inputs::new(none, view([0, 1 << 40, 7, 8]), view([0, 1 << 40, 7, 1]));
    let shape = [0, 1 << 40, 1 << 40, 1];
    let outputs = Outputs::new(ViewMut::from_strides(&mut [], 0, shape, [1; 4]).unwrap());
    Attention::new().problem(inputs, outputs).unwrap().run_once(Exec::default());
}

/// More threads asked for than the pool has: no memory for those that cannot come.
#[test]
fn threads_that_are_not_there() {
    let case = plain(4000, 600);
    let mut full = case.unwritten(Wanted::LEAST);
    let mut workspace = Workspace::new();
    let plan = case.run_into(Exec::serial().threads(usize::MAX), &mut full, &mut workspace);
    assert!(workspace.bytes() <= plan.scratch_bytes() * std::thread::available_parallelism().unwrap().get());
}
