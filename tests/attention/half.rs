//! Elements of 16 bits: the same bits as if everything had been widened before the call and rounded after it.

mod bias;
mod cache;
mod errors;
mod hidden;
mod native;
mod outputs;
pub(crate) mod short;

use crate::kv_support::{Pool, same_full, same_oracle};
use crate::options::{Case, Wanted, check_against_oracle, options_of};
use crate::support::{LAYOUTS, Rng, execs};
use sdpa::{
    Alignment, Attention, Bf16, BlockTable, Dtype, F16, Inputs, Outputs, Pages, Plan, View, ViewMut, Workspace,
};
use short::{Rounded, SHORT, Short, mixes};

/// Rows and keys as a decoder has them, around panels and blocks, and dims around vectors.
const DECODE: [[usize; 7]; 7] = [
    [1, 1, 1, 1, 1, 1, 1],
    [2, 4, 2, 1, 17, 16, 15],
    [1, 8, 2, 1, 257, 64, 64],
    [3, 6, 2, 1, 300, 20, 33],
    [1, 4, 1, 2, 513, 65, 17],
    [1, 2, 2, 4, 256, 128, 48],
    [2, 12, 2, 1, 515, 31, 100],
];

/// A slice of `half`'s elements is all a user needs.
#[test]
fn slices_of_half() {
    let numbers = [1.0, -2.0, 0.5, 3.0];
    let (q, k) = (numbers.map(half::bf16::from_f32), numbers.map(half::f16::from_f32));
    let (shape, mut out) = ([1, 1, 2, 2], [half::f16::ZERO; 4]);
    let wide = || View::bhld(&numbers, shape).unwrap();
    let inputs = Inputs::new(View::bhld(&q, shape).unwrap(), View::bhld(&k, shape).unwrap(), wide());
    assert_eq!(inputs.queries().dtype(), Dtype::Bf16);
    sdpa::attention(&Attention::new(), inputs, Outputs::new(ViewMut::bhld(&mut out, shape).unwrap())).unwrap();
    let mut expected = [0.0; 4];
    let outputs = Outputs::new(ViewMut::bhld(&mut expected, shape).unwrap());
    sdpa::attention(&Attention::new(), Inputs::new(wide(), wide(), wide()), outputs).unwrap();
    assert_eq!(out, expected.map(half::f16::from_f32));
}

/// Their views are views of ours, offset and strides included.
#[test]
fn views_of_half() {
    let mut data: [half::bf16; 24] = core::array::from_fn(|i| half::bf16::from_f32(i as f32));
    let shape = ([1, 2, 3, 2], [0, -12, 4, 1]);
    let theirs = View::from_strides(&data, 13, shape.0, shape.1).unwrap();
    let ours = View::<Bf16>::from(theirs);
    assert_eq!((ours.shape(), ours.strides()), shape);
    for at in crate::support::indices(shape.0) {
        assert_eq!(ours.get(at).unwrap().to_f32(), theirs.get(at).unwrap().to_f32());
    }
    let theirs = ViewMut::from_strides(&mut data, 13, shape.0, shape.1).unwrap();
    let mut ours = ViewMut::<Bf16>::from(theirs);
    *ours.get_mut([0, 1, 2, 1]).unwrap() = Bf16::from_f32(-7.5);
    assert_eq!((data[10].to_f32(), data[9].to_f32()), (-7.5, 9.0));
    let data = [half::f16::from_f32(0.1)];
    let ours = View::<F16>::from(View::bhld(&data, [1; 4]).unwrap());
    assert_eq!(ours.get([0; 4]).unwrap().0, data[0].to_bits());
    assert!(View::<F16>::from(View::<half::f16>::bhld(&[], [0; 4]).unwrap()).get([0; 4]).is_none());
}

/// Every mix of types, all options, any layout.
#[test]
fn any_mix_is_the_widened_call() {
    let mut counts = [0; 14];
    for (n, mix) in mixes().into_iter().enumerate() {
        for i in 0..10 {
            let seed = 100 * n as u64 + i;
            let mut rng = Rng::new(seed);
            let short = Short::new(Case::random(&mut rng, 700_000), mix);
            for (count, (_, has)) in counts.iter_mut().zip(options_of(&short.wide)) {
                *count += usize::from(has);
            }
            for (isa, exec) in execs() {
                for wanted in [Wanted::LEAST, Wanted::ALL] {
                    let what = format!("{mix:?}, seed {seed}, {isa}");
                    let expected = short.wide.run(exec, wanted);
                    same_full(&what, &short.case.run_over(short.source(), exec, wanted), &expected);
                    let threads = short.case.run_over(short.source(), exec.threads(64), wanted);
                    same_full(&format!("{what}, threads"), &threads, &expected);
                }
            }
        }
    }
    assert!(counts.iter().all(|&n| n > 15), "options are missing: {counts:?}");
}

/// Few rows: their keys and values are not packed.
#[test]
fn any_mix_decodes_like_the_widened_call() {
    for (n, mix) in mixes().into_iter().enumerate() {
        for (m, sizes) in DECODE.into_iter().enumerate() {
            let mut rng = Rng::new((10 * n + m) as u64);
            let mut case = Case::plain(&mut rng, sizes);
            (case.causal, case.alignment) = (true, Some(Alignment::BottomRight));
            // As they come, and otherwise: keys and values of a projection are the second layout.
            for layout in [LAYOUTS[0], LAYOUTS[1], rng.pick(&LAYOUTS)] {
                for x in [&mut case.q, &mut case.k, &mut case.v] {
                    *x = x.laid_out(layout);
                }
                let short = Short::new(case.clone(), mix);
                for (isa, exec) in execs() {
                    let what = format!("{mix:?}, {sizes:?}, {layout:?}, {isa}");
                    let got = short.case.run_over(short.source(), exec, Wanted::LEAST);
                    same_full(&what, &got, &short.wide.run(exec, Wanted::LEAST));
                }
            }
        }
    }
}

#[test]
fn every_layout() {
    for dtype in SHORT {
        for (n, layouts) in LAYOUTS.iter().flat_map(|&k| LAYOUTS.map(|v| [k, v])).enumerate() {
            let mut rng = Rng::new(n as u64);
            for sizes in [[2, 4, 2, 9, 270, 20, 33], [1, 2, 1, 100, 40, 64, 17], [1, 2, 1, 1, 270, 33, 16]] {
                let mut case = Case::plain(&mut rng, sizes);
                case.q = case.q.laid_out(rng.pick(&LAYOUTS));
                (case.k, case.v) = (case.k.laid_out(layouts[0]), case.v.laid_out(layouts[1]));
                let short = Short::new(case, [dtype; 3]);
                for (isa, exec) in execs() {
                    let what = format!("{dtype}, {sizes:?}, {layouts:?}, {isa}");
                    let got = short.case.run_over(short.source(), exec, Wanted::LEAST);
                    same_full(&what, &got, &short.wide.run(exec, Wanted::LEAST));
                }
            }
        }
    }
}

#[test]
fn threads_do_not_show() {
    for (n, sizes) in [[8, 8, 2, 1, 520, 96, 100], [1, 6, 2, 300, 300, 64, 65]].into_iter().enumerate() {
        for mix in [[Dtype::F16, Dtype::Bf16, Dtype::F16], [Dtype::Bf16; 3], [Dtype::F32, Dtype::F16, Dtype::Bf16]] {
            let mut case = Case::plain(&mut Rng::new(n as u64), sizes);
            (case.causal, case.alignment) = (true, Some(Alignment::BottomRight));
            let short = Short::new(case, mix);
            for (isa, serial) in execs() {
                let expected = short.wide.run(serial, Wanted::MASS);
                for threads in [2, 3, 8] {
                    let exec = serial.threads(threads);
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let mut full = short.wide.unwritten(Wanted::MASS);
                    let problem = short.wide.attention().problem(short.source(), full.outputs()).unwrap();
                    assert!(Plan::new(&problem, exec).workers() > 1, "not enough work for this test");
                    let got = pool.install(|| short.case.run_over(short.source(), exec, Wanted::MASS));
                    same_full(&format!("{mix:?}, {sizes:?}, {isa}, {threads} threads"), &got, &expected);
                }
            }
        }
    }
}

/// Scratch that calls of other types have used.
#[test]
fn a_workspace_for_all_types() {
    for (isa, exec) in execs() {
        let (mut workspace, mut rng) = (Workspace::new(), Rng::new(5));
        for round in 0..3 {
            for mix in mixes() {
                let short = Short::new(Case::random(&mut rng, 200_000), mix);
                let mut got = short.wide.unwritten(Wanted::LEAST);
                short.case.run_over_into(short.source(), exec, &mut got, &mut workspace);
                same_full(&format!("round {round}, {mix:?}, {isa}"), &got, &short.wide.run(exec, Wanted::LEAST));
            }
        }
    }
}

/// Largest and smallest numbers, zeros of both signs, NaN and ∞, anywhere.
#[test]
fn elements_of_every_kind() {
    let kinds =
        [0.0, -0.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 3e38, 1e-40, f32::NAN, f32::INFINITY, -f32::INFINITY];
    for (n, mix) in mixes().into_iter().enumerate() {
        for i in 0..6 {
            let mut rng = Rng::new(100 * n as u64 + i);
            let mut case = Case::random(&mut rng, 100_000);
            // Where anything may be, rarely; numbers alone, often.
            let (kinds, one_in) = if i < 3 { (&kinds[..], 200) } else { (&kinds[..7], 4) };
            for x in [&mut case.q, &mut case.k, &mut case.v].into_iter().flat_map(|x| &mut x.data) {
                if rng.below(one_in) == 0 {
                    *x = rng.pick(kinds);
                }
            }
            let short = Short::new(case, mix);
            for (isa, exec) in execs() {
                let what = format!("{mix:?}, case {i}, {isa}");
                let got = short.case.run_over(short.source(), exec, Wanted::ALL);
                same_full(&what, &got, &short.wide.run(exec, Wanted::ALL));
            }
        }
    }
}

#[test]
fn the_oracle_sees_the_same() {
    for (n, mix) in mixes().into_iter().enumerate() {
        for i in 0..2 {
            let seed = 70_000 + 10 * n as u64 + i;
            let short = Short::new(Case::random(&mut Rng::new(seed), 100_000), mix);
            let oracle = short.case.oracle_over::<f64>(short.source());
            same_oracle(&format!("{mix:?}, seed {seed}"), &oracle, &short.wide.oracle());
            for (isa, exec) in execs() {
                let got = short.case.run_over(short.source(), exec, Wanted::ALL);
                check_against_oracle(&format!("{mix:?}, seed {seed}, {isa}"), &short.wide, &got, &oracle);
            }
        }
    }
}

/// Pools of any two types, under queries of any; what nobody has is NaN or ∞.
#[test]
fn pages_of_any_types() {
    for (n, page) in [1, 3, 16, 17, 64, 256, 300].into_iter().enumerate() {
        for (m, [q, k, v]) in mixes().into_iter().enumerate() {
            let seed = 100 * n as u64 + m as u64;
            let mut rng = Rng::new(seed);
            let case = Case::random(&mut rng, 400_000).side_by_side();
            let short = Short::new(case, [q, k, v]);
            let layouts = [rng.pick(&LAYOUTS), rng.pick(&LAYOUTS)];
            let fill = rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38]);
            let pool = Pool::of(&short.wide, page, layouts, fill, &mut rng);
            let (k, v) = (Rounded::new(&pool.k, k), Rounded::new(&pool.v, v));
            let table = BlockTable { entries: &pool.entries, lens: &pool.lens };
            let pages = Pages::new(k.view(), v.view(), table).expect("a good table");
            for (isa, exec) in execs() {
                for wanted in [Wanted::LEAST, Wanted::ALL] {
                    let what = format!("pages of {page}, {layouts:?}, seed {seed}, {isa}");
                    let expected = short.wide.run(exec, wanted);
                    for exec in [exec, exec.threads(64)] {
                        let source = Inputs::paged(short.qkv[0].view(), pages);
                        same_full(&what, &short.case.run_over(source, exec, wanted), &expected);
                    }
                }
            }
            let source = Inputs::paged(short.qkv[0].view(), pages);
            if m % 9 == 4 {
                same_oracle(
                    &format!("pages of {page}, seed {seed}"),
                    &short.case.oracle_over(source),
                    &short.wide.oracle(),
                );
            }
        }
    }
}
