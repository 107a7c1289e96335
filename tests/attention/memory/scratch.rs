//! Scratch is what the plan says, is bounded, and is the same whatever the options and lengths.

use super::rules;
use crate::counting::counted;
use crate::options::mods::{Functions, Keep, Prob, Score};
use crate::options::{Case, MaskData, Wanted};
use crate::support::{Rng, Tensor, Tensors, execs, outputs, unwritten};
use sdpa::{Alignment, Attention, Exec, Isa, Outputs, Plan, ViewMut, Window, Workspace};

/// Tensors in which every row is the same row: any length for the price of one.
fn endless(rows: usize, keys: usize, d: usize, dv: usize) -> Tensors {
    let mut tensors = Tensors::normal([1, 1, 1, 1, 1, d, dv], 0);
    let repeat = |x: &mut Tensor, n| (x.shape[2], x.strides[2]) = (n, 0);
    repeat(&mut tensors.q, rows);
    repeat(&mut tensors.k, keys);
    repeat(&mut tensors.v, keys);
    tensors
}

#[test]
fn a_cold_run_allocates_what_the_plan_says() {
    for (isa, exec) in execs() {
        for (d, dv) in [(1, 1), (64, 64), (80, 33), (128, 128), (300, 600), (1024, 1024)] {
            let tensors = endless(40, 300, d, dv);
            for attention in rules() {
                let mut answer = unwritten(&tensors.inputs());
                let problem = attention.problem(tensors.inputs(), outputs(&mut answer)).unwrap();
                let plan = Plan::new(&problem, exec);
                let mut workspace = Workspace::new();
                let (_, bytes) = counted(|| problem.run(&plan, &mut workspace));
                assert_eq!(workspace.bytes(), plan.scratch_bytes(), "{isa} {d} {dv}");
                // Besides the scratch: the list that holds it.
                let besides = bytes - plan.scratch_bytes();
                assert!(besides <= 256, "{isa} {d} {dv}: {besides} bytes more than the plan says");
            }
        }
    }
}

/// Scratch of a call, as planned, without running it.
fn planned(rows: usize, keys: usize, d: usize, dv: usize, exec: Exec) -> usize {
    let tensors = endless(rows, keys, d, dv);
    // Zeros that nobody touches cost nothing, whatever their number.
    let mut out = vec![0.0; rows * dv];
    let out = ViewMut::bhld(&mut out, [1, 1, rows, dv]).unwrap();
    let problem = Attention::new().problem(tensors.inputs(), Outputs::new(out)).unwrap();
    Plan::new(&problem, exec).scratch_bytes()
}

#[test]
fn scratch_is_bounded() {
    for isa in Isa::available() {
        for d in [1, 16, 64, 65, 128, 256, 257, 512, 581, 1024, 4096] {
            for dv in [1, 16, 64, 65, 128, 256, 257, 512, 581, 1024, 4096] {
                for threads in [1, 2, 8] {
                    let exec = Exec::serial().isa(isa).threads(threads);
                    // Few rows, too: their key blocks are divided.
                    for (rows, keys) in [(1, 1), (256, 256), (8192, 8192), (85, 8192), (128, 8192)] {
                        let bytes = planned(rows, keys, d, dv, exec);
                        assert!(bytes <= 5 << 18, "{isa} {d} {dv} {rows} × {keys}: {bytes} bytes");
                    }
                }
            }
        }
    }
}

#[test]
fn scratch_does_not_grow_with_the_keys() {
    for (isa, exec) in execs() {
        for (d, dv) in [(64, 64), (128, 128), (300, 20), (576, 512), (1024, 1024)] {
            assert_eq!(planned(256, 256, d, dv, exec), planned(256, 8192, d, dv, exec), "{isa} {d} {dv}");
            assert_eq!(planned(1, 256, d, dv, exec), planned(1, 1 << 40, d, dv, exec), "{isa} {d} {dv}");
            assert_eq!(planned(128, 256, d, dv, exec), planned(128, 8192, d, dv, exec.threads(16)), "{isa} {d} {dv}");
        }
    }
}

#[test]
fn a_long_run_takes_what_the_plan_says() {
    let exec = Exec::serial();
    let tensors = endless(8192, 8192, 64, 64);
    let mut answer = unwritten(&tensors.inputs());
    let problem = Attention::new().causal().problem(tensors.inputs(), outputs(&mut answer)).unwrap();
    let plan = Plan::new(&problem, exec);
    let mut workspace = Workspace::new();
    let (_, bytes) = counted(|| problem.run(&plan, &mut workspace));
    assert_eq!(workspace.bytes(), plan.scratch_bytes());
    assert!(bytes <= plan.scratch_bytes() + 256, "{bytes} bytes, planned {}", plan.scratch_bytes());
}

const OPTIONS: [&str; 10] =
    ["scale", "softcap", "causal", "window", "bias", "mask", "alibi", "sinks", "kv_lens", "ragged"];
/// Score, mask and weight functions, and all of them.
const FUNCTIONS: usize = 5;
const HEADS: usize = 2;
/// Not whole vectors: values are copied, as some calls need.
const DIMS: (usize, usize) = (20, 12);

/// One row for all rows, batches and heads.
fn one_row(shape: [usize; 4], rng: &mut Rng) -> Tensor {
    let one = Tensor::normal([1, 1, 1, shape[3]], rng);
    Tensor { shape, strides: [0, 0, 0, 1], ..one }
}

/// A call of `length` rows and keys with the options of the bits that are set.
fn case(options: usize, functions: usize, length: usize) -> Case {
    let rng = &mut Rng::new(7);
    let on = |name: &str| options >> OPTIONS.iter().position(|&option| option == name).unwrap() & 1 == 1;
    let square = [1, HEADS, length, length];
    let one = |x: f32| Tensor { shape: square, strides: [0; 4], ..Tensor::filled([1; 4], x) };
    let ragged = on("ragged").then(|| vec![0, length]);
    Case {
        scale: on("scale").then_some(-0.3),
        softcap: on("softcap").then_some(5.0),
        causal: on("causal"),
        window: on("window").then(|| Window::inclusive(Some(60), Some(9)).keep_first(3)),
        alignment: Some(Alignment::BottomRight),
        q: one_row([1, HEADS, length, DIMS.0], rng),
        k: one_row([1, 1, length, DIMS.0], rng),
        v: one_row([1, 1, length, DIMS.1], rng),
        bias: on("bias").then(|| one(0.5).into()),
        mask: on("mask").then(|| MaskData::new(true, true, one(1.0))),
        alibi: on("alibi").then(|| vec![0.01; HEADS]),
        sinks: on("sinks").then(|| vec![0.5; HEADS]),
        kv_lens: on("kv_lens").then(|| vec![length - 3]),
        ragged: ragged.map(|ends| [ends.clone(), ends]),
        functions: Functions {
            score: [1, 4].contains(&functions).then_some(Score::Relative(0.01)),
            mask: [2, 4].contains(&functions).then_some((Keep::Causal(length as isize / 2), true)),
            prob: [3, 4].contains(&functions).then_some(Prob::Tilted),
        },
        ..Case::plain(rng, [0, 1, 1, 0, 0, 1, 1])
    }
}

fn name(options: usize, functions: usize) -> String {
    let on = (0..OPTIONS.len()).filter(|n| options >> n & 1 == 1).map(|n| OPTIONS[n]);
    format!("{:?}, functions {functions}", on.collect::<Vec<_>>())
}

/// The plan of a call, without running it.
fn plan_of(case: &Case, exec: Exec) -> Plan {
    let mut full = case.unwritten(Wanted::LEAST);
    let problem = case.attention().problem(case.inputs(), full.outputs()).unwrap();
    Plan::new(&problem, exec)
}

/// Bytes of scratch of a cold serial run, which must be what its plan says and all that it takes.
fn measured(what: &str, case: &Case, exec: Exec) -> usize {
    let (mut full, mut workspace) = (case.unwritten(Wanted::LEAST), Workspace::new());
    let mut plan = None;
    let (_, bytes) = counted(|| plan = Some(case.run_into(exec, &mut full, &mut workspace)));
    let plan = plan.unwrap();
    assert_eq!(workspace.bytes(), plan.scratch_bytes() * plan.workers(), "{what}");
    // Besides the scratch: the list that holds it.
    let besides = bytes - plan.scratch_bytes();
    assert!(besides <= 256, "{what}: {besides} bytes more than the plan says");
    workspace.bytes()
}

#[test]
fn every_combination_takes_the_scratch_that_none_takes() {
    for (isa, exec) in execs() {
        let expected = measured("no options", &case(0, 0, 256), exec);
        for options in 0..1 << OPTIONS.len() {
            let functions = options * 7 % FUNCTIONS;
            let what = || format!("{isa}: {}", name(options, functions));
            // Planned for both lengths; run for one, and for some of them below for the other.
            assert_eq!(plan_of(&case(options, functions, 8192), exec).scratch_bytes(), expected, "{}", what());
            assert_eq!(plan_of(&case(options, functions, 256), exec).scratch_bytes(), expected, "{}", what());
            if isa == sdpa::Isa::detect() || options.is_power_of_two() {
                assert_eq!(measured(&what(), &case(options, functions, 256), exec), expected);
            }
        }
    }
}

#[test]
fn long_calls_take_what_short_ones_take() {
    let exec = Exec::serial();
    let expected = measured("no options", &case(0, 0, 256), exec);
    let window = 1 << OPTIONS.iter().position(|&option| option == "window").unwrap();
    let alone = (0..OPTIONS.len()).map(|n| (1 << n, 0));
    let functions = (0..FUNCTIONS).map(|functions| (window, functions));
    let all = [(0, 0), ((1 << OPTIONS.len()) - 1, 0), ((1 << OPTIONS.len()) - 1, 4)];
    // Windows keep the rest short: many combinations fit.
    let many = (0..24).map(|n| (((n * 97 + 13) % (1 << OPTIONS.len())) | window, n % FUNCTIONS));
    for (options, functions) in alone.chain(functions).chain(all).chain(many) {
        let what = name(options, functions);
        assert_eq!(measured(&what, &case(options, functions, 2048), exec), expected, "{what}");
    }
}

#[test]
#[cfg(feature = "rayon")]
fn threads_take_at_most_a_scratch_each() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for options in [0, 1, 0x0f, 0x55, 0x3ff] {
        for functions in 0..FUNCTIONS {
            let case = case(options, functions, 1024);
            let (mut full, mut workspace) = (case.unwritten(Wanted::LEAST), Workspace::new());
            let plan = pool.install(|| case.run_into(Exec::default(), &mut full, &mut workspace));
            assert_eq!(plan.workers(), 2);
            // A worker that comes too late for any task takes none.
            let scratch = plan.scratch_bytes();
            assert!([scratch, 2 * scratch].contains(&workspace.bytes()), "{}", name(options, functions));
        }
    }
}
