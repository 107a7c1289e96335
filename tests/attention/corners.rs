//! What the contract says and the library once did not do.

use crate::options::{Case, Wanted};
use crate::support::{Rng, Tensor, UNWRITTEN, execs};
use sdpa::{
    Alignment, Attention, AttnState, Error, Exec, Inputs, KeyValues, KvShape, Mask, Mods, Outputs, Plan, Point,
    Position, Run, View, ViewMut, Window, Workspace, naive, probe,
};

fn plain(rows: usize, keys: usize) -> Case {
    Case::plain(&mut Rng::new(1), [1, 1, 1, rows, keys, 4, 3])
}

/// "−∞ hides" (additive bias), and a score function comes before keys are hidden: it must not bring a key back.
#[test]
fn a_score_function_does_not_show_what_a_bias_hides() {
    let hiding = |[.., j]: [usize; 4]| if j == 2 { f32::NEG_INFINITY } else { 0.0 };
    let case = Case { bias: Some(Tensor::from_fn([1, 1, 1, 5], hiding).into()), ..plain(2, 5) };
    let mods = Mods::new().score(|score: f32, _: Position| score.max(-1.0));
    let oracle = naive::answer::<f64, _, _, _>(&case.attention(), &case.inputs(), &mods).unwrap();
    for (isa, exec) in execs() {
        let mut full = case.unwritten(Wanted::LEAST);
        let problem = case.attention().problem(case.inputs(), full.outputs()).unwrap();
        let plan = Plan::new(&problem, exec);
        problem.run_with(&plan, &mut Workspace::new(), Run::new().mods(&mods)).expect("functions that fit");
        crate::support::assert_close(&format!("{isa}: out"), &full.out, &oracle.out, 1e-5);
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
        let state = AttnState::new(
            attention,
            case.q.view(),
            KvShape { kv_heads: 1, head_dim: case.k.shape[3], value_dim: 3 },
            Exec::serial(),
        );
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

/// What a message says must be so: `out` has a value_dim of 7 here, and the LSE a last dimension that should be 1 or 2.
#[test]
fn merge_says_what_is_wrong_with_an_lse() {
    let (mut out, mut lse, zeros) = ([0.0; 168], [0.0; 72], [0.0; 168]);
    let mine = (ViewMut::bhld(&mut out, [2, 4, 3, 7]).unwrap(), ViewMut::bhld(&mut lse, [2, 4, 3, 3]).unwrap());
    let view = |shape| sdpa::View::bhld(&zeros, shape).unwrap();
    let error = sdpa::merge(mine, (view([2, 4, 3, 7]), view([2, 4, 3, 1]))).unwrap_err();
    let words = "lse: last dimension is 3, but must be 1 (one value a row), or 2 (and its rounding error)";
    assert_eq!(error.to_string(), words);
}

/// A weight does not depend on how large the scores are that it was made from: a common padding bias, and the lowest.
#[test]
fn key_mass_of_large_scores() {
    for bias in [-1e4, 1e6, 1e8, f32::MIN] {
        let case = Case { bias: Some(Tensor::filled([1, 1, 1, 10], bias).into()), ..plain(1, 10) };
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
    let words = format!("q: head_dim is {}, but must be at most {}, the largest possible", 1u64 << 60, 1 << 24);
    assert_eq!(error.to_string(), words);
    // Without a batch the other dimensions may be anything.
    let none = view([0, 1 << 40, 1 << 40, 8]);
    let inputs = sdpa::Inputs::new(none, view([0, 1 << 40, 7, 8]), view([0, 1 << 40, 7, 1]));
    let shape = [0, 1 << 40, 1 << 40, 1];
    let outputs = Outputs::new(ViewMut::<f32>::from_strides(&mut [], 0, shape, [1; 4]).unwrap());
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

/// Functions of distances are the same in one call over all rows and decoding row by row.
#[test]
fn a_distance_is_the_same_in_prefill_and_decoding() {
    const LEN: usize = 20;
    let case = Case { causal: true, alignment: Some(Alignment::BottomRight), ..plain(LEN, LEN) };
    let near = |p: Position| (0..5).contains(&(p.position - p.key as isize));
    let mods = Mods::new().score(|s: f32, p: Position| s - 0.1 * (p.position - p.key as isize) as f32).mask(near);
    let run = |case: &Case| {
        let mut full = case.unwritten(Wanted::LEAST);
        let problem = case.attention().problem(case.inputs(), full.outputs()).unwrap();
        let plan = Plan::new(&problem, Exec::serial());
        problem.run_with(&plan, &mut Workspace::new(), Run::new().mods(&mods)).expect("functions that fit");
        let oracle = naive::answer::<f64, _, _, _>(&case.attention(), &case.inputs(), &mods).unwrap();
        crate::support::assert_close("against the oracle", &full.out, &oracle.out, 1e-5);
        full.out
    };
    let whole = run(&case);
    for row in 0..LEN {
        let step = Case {
            q: case.q.rows(row..row + 1),
            k: case.k.rows(0..row + 1),
            v: case.v.rows(0..row + 1),
            ..case.clone()
        };
        crate::support::assert_same_bits(&format!("row {row}"), &run(&step), &whole.rows(row..row + 1));
    }
}

/// One column of a mask or bias stands for all keys; fewer than there are keys are those of a mask built too early, unless
/// they are asked for by name.
#[test]
fn columns_of_masks() {
    let case = plain(4, 7);
    let run = |inputs: Inputs<'_>| {
        let mut full = case.unwritten(Wanted::LEAST);
        let problem = case.attention().problem(inputs, full.outputs())?;
        problem.run_once(Exec::serial());
        Ok::<_, Error>(full.out)
    };
    let whole = run(case.inputs()).unwrap();
    // A mask or bias per row alone, as `[1, 1, q_len, 1]`: all rows, then two of them.
    let (ones, some, zeros) = ([1u8; 4], [1u8, 0, 0, 1], [0.0f32; 4]);
    let rows = |data| Mask::keep(View::bhld(data, [1, 1, 4, 1]).unwrap());
    let bias = View::bhld(&zeros, [1, 1, 4, 1]).unwrap();
    crate::support::assert_same_bits("ones", &run(case.inputs().mask(rows(&ones))).unwrap(), &whole);
    crate::support::assert_same_bits("zeros", &run(case.inputs().bias(bias)).unwrap(), &whole);
    let got = run(case.inputs().mask(rows(&some))).unwrap();
    for (i, &keeps) in some.iter().enumerate() {
        let expected = if keeps == 1 { whole.rows(i..i + 1) } else { Tensor::filled([1, 1, 1, 3], 0.0) };
        crate::support::assert_same_bits("rows of a mask", &got.rows(i..i + 1), &expected);
    }
    let short = [1u8; 7];
    for columns in [0, 2, 6] {
        let mask = Mask::keep(View::bhld(&short[..columns], [1, 1, 1, columns]).unwrap());
        let error = run(case.inputs().mask(mask)).unwrap_err().to_string();
        let cause = "mask_prefix and bias_prefix take fewer columns and hide the other keys; mask_suffix and bias_suffix \
        take the columns of the last keys";
        assert_eq!(error, format!("mask: columns is {columns}, but k (rows) has 7; {cause}"));
        let lens = Case { kv_lens: Some(vec![columns]), ..case.clone() };
        crate::support::assert_same_bits(
            "a prefix",
            &run(case.inputs().mask_prefix(mask)).unwrap(),
            &lens.run(Exec::serial(), Wanted::LEAST).out,
        );
    }
    let prefix = run(case.inputs().mask_prefix(rows(&ones))).unwrap();
    let first = Case { kv_lens: Some(vec![1]), ..case.clone() };
    crate::support::assert_same_bits("a prefix of one", &prefix, &first.run(Exec::serial(), Wanted::LEAST).out);
}

/// A batch of 2⁵⁰ sequences without rows has nothing to compute, whatever is asked of it.
#[test]
fn a_huge_batch_without_rows_returns_at_once() {
    // A number for each sequence and key is more memory than addresses of 48 bits reach.
    const BATCH: usize = 1 << 50;
    let one = [0.5f32; 4];
    let floats = |shape: [usize; 4]| View::from_strides(&one, 0, shape, [0, 0, 0, 1]).unwrap();
    let q = floats([BATCH, 1, 0, 4]);
    let window = Window::inclusive(Some(3), Some(0));
    for keys in [0, 3, 300] {
        let kv = floats([BATCH, 1, keys, 4]);
        let mask = [1u8; 300];
        let mask = Mask::keep(View::from_strides(&mask, 0, [BATCH, 1, 0, keys], [0; 4]).unwrap());
        for attention in [Attention::new(), Attention::new().causal(), Attention::new().window(window)] {
            let attention = attention.align(Alignment::BottomRight).softcap(3.0);
            let inputs = Inputs::new(q, kv, kv).mask(mask).bias(floats([BATCH, 1, 0, 1])).alibi(&[0.5]).sinks(&[1.0]);
            let mut none = [[]; 4];
            let [out, lse, weights, mass] = &mut none;
            let mut outputs = Outputs::new(ViewMut::bhld(out, [BATCH, 1, 0, 4]).unwrap())
                .lse(ViewMut::bhl(lse, [BATCH, 1, 0]).unwrap())
                .weights(ViewMut::bhld(weights, [BATCH, 1, 0, keys]).unwrap());
            if keys == 0 {
                outputs = outputs.key_weight_sums(ViewMut::bhld(mass, [BATCH, 1, 0, 1]).unwrap());
            }
            let problem = attention.problem(inputs, outputs).unwrap();
            let plan = Plan::new(&problem, Exec::default());
            let _ = plan.explain(&problem, None);
            problem.run(&plan, &mut Workspace::new());
            let naive = naive::oracle(&attention, &inputs);
            assert!(if keys == 0 { naive.is_ok() } else { matches!(naive, Err(Error::Memory { .. })) });
        }
        let unfused = sdpa_unfused::attention(
            &Attention::new(),
            Inputs::new(q, kv, kv),
            Outputs::new(ViewMut::<f32>::bhld(&mut [], [BATCH, 1, 0, 4]).unwrap()),
            Exec::default(),
        );
        assert!(unfused.is_ok());
    }
}

/// Outputs with dimensions that interleave without sharing an element.
#[test]
fn outputs_may_interleave() {
    // Rows are 2 apart and heads 3: elements 0, 2, 4 and 3, 5, 7.
    let case = Case::plain(&mut Rng::new(1), [1, 2, 2, 3, 5, 4, 1]);
    let expected = case.run(Exec::serial(), Wanted::LEAST).out;
    let mut memory = [f32::from_bits(UNWRITTEN); 8];
    let out = ViewMut::from_strides(&mut memory, 0, [1, 2, 3, 1], [0, 3, 2, 1]).unwrap();
    sdpa::attention(&case.attention(), case.inputs(), Outputs::new(out)).unwrap();
    for (at, &x) in memory.iter().enumerate() {
        let element = (0..2).flat_map(|h| (0..3).map(move |l| (h, l))).find(|(h, l)| 3 * h + 2 * l == at);
        let bits = element.map_or(UNWRITTEN, |(h, l)| expected.get([0, h, l, 0]).to_bits());
        assert_eq!(x.to_bits(), bits, "element {at}");
    }
}

/// Dimensions for which there is no memory are refused where the problem is made: running cannot fail.
#[test]
fn states_beyond_memory_are_refused() {
    let one = [0.5f32];
    let q = |rows| View::from_strides(&one, 0, [1, 1, rows, 1], [0; 4]).unwrap();
    let new = |rows, [kv_heads, value_dim]: [usize; 2]| {
        let keys = KvShape { kv_heads, head_dim: 1, value_dim };
        AttnState::new(Attention::new(), q(rows), keys, Exec::serial()).unwrap_err()
    };
    assert!(matches!(new(1 << 46, [1, 1]), Error::Memory { what: "state", .. }));
    assert!(matches!(new(1, [1 << 60, 1]), Error::TooLarge { what: "state", .. }));
    assert!(matches!(new(1, [1, 1 << 50]), Error::Memory { what: "state", .. }));
}

/// Sizes with a product that wraps, and values that are fewer than keys: refused wherever they come in.
#[test]
fn sizes_that_wrap_or_differ_make_nothing() {
    let panics = |make: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(make)).is_err();
    assert!(panics(&|| _ = probe::Bench::new(0, 16, 1 << 60, || 0.0)));
    let row = [0.5f32; 8];
    let rows = |n| View::from_strides(&row, 0, [1, 1, n, 8], [0, 0, 0, 1]).unwrap();
    assert!(KeyValues::of_tensors(rows(65_536), rows(1)).is_none());
    assert!(KeyValues::of_tensors(rows(3), rows(3)).is_some_and(|kv| probe::read_source(&kv)));
    let error = Inputs::new(rows(1), rows(65_536), rows(1)).key_values().unwrap_err().to_string();
    assert_eq!(error, "v: rows is 1, but k has 65536");
}
