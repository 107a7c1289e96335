//! Outputs of 16 bits: those of `f32`, rounded once.

use super::short::{DTYPES, Elements, Rounded, SHORT, Short, bits, mixes};
use crate::options::{Case, Wanted};
use crate::support::{LAYOUTS, Layout, Rng, Tensor, UNWRITTEN, assert_same_bits, execs, indices};
use sdpa::{AttnState, Bf16, Dtype, Exec, F16, KvShape, Outputs, Workspace};

/// Runs into memory of this type and layout, and holds every element against what `f32` gives; those between the
/// elements are as they were. Extra outputs stay `f32`.
fn check(what: &str, short: &Short, exec: Exec, dtype: Dtype, layout: Layout) {
    let expected = short.wide.run(exec, Wanted::MASS);
    let like = Tensor { data: Vec::new(), ..expected.out.laid_out(layout) };
    let size = expected.out.laid_out(layout).data.len();
    let mut memory = Elements::of(&vec![f32::from_bits(UNWRITTEN); size], dtype);
    let mut wanted: Vec<u32> = memory.bits();
    // Where each element lies: less than 2²⁴, so that f32 can say it.
    let numbered = Tensor { data: (0..size).map(|i| i as f32).collect(), ..like.clone() };
    for at in indices(like.shape) {
        wanted[numbered.get(at) as usize] = bits(expected.out.get(at), dtype);
    }
    let mut full = short.wide.unwritten(Wanted::MASS);
    let mass = full.mass.as_mut().expect("it is wanted");
    let outputs = Outputs::new(memory.view_mut(&like))
        .lse(sdpa::ViewMut::bhld(&mut full.lse.data, full.lse.shape).unwrap())
        .key_weight_sums(sdpa::ViewMut::bhld(&mut mass.data, mass.shape).unwrap());
    let inputs = short.case.inputs_over(short.source());
    short.wide.run_outputs(inputs, exec, outputs, &mut Workspace::new());
    let got = memory.bits();
    if let Some(i) = (0..size).find(|&i| got[i] != wanted[i]) {
        panic!("{what}: element {i} of memory is {:#06x}, expected {:#06x}, in {dtype}, {layout:?}", got[i], wanted[i]);
    }
    assert_same_bits(&format!("{what}: lse"), &full.lse, &expected.lse);
    assert_same_bits(&format!("{what}: key weight sums"), &full.mass.unwrap(), &expected.mass.unwrap());
}

#[test]
fn rounded_once() {
    for seed in 0..120 {
        let mut rng = Rng::new(seed);
        let short = Short::new(Case::random(&mut rng, 400_000), rng.pick(&mixes()));
        for dtype in DTYPES {
            let layout = rng.pick(&LAYOUTS);
            for (isa, exec) in execs() {
                for exec in [exec, exec.threads(64)] {
                    check(&format!("seed {seed}, {isa}"), &short, exec, dtype, layout);
                }
            }
        }
    }
}

#[test]
fn every_layout_of_outputs() {
    for (n, sizes) in
        [[2, 4, 2, 9, 40, 20, 33], [1, 2, 1, 1, 300, 8, 16], [1, 3, 3, 30, 17, 5, 1], [1, 1, 1, 7, 9, 16, 95]]
            .into_iter()
            .enumerate()
    {
        let short = Short::new(Case::plain(&mut Rng::new(n as u64), sizes), [Dtype::F32; 3]);
        for layout in LAYOUTS {
            for dtype in SHORT {
                for (isa, exec) in execs() {
                    check(&format!("{sizes:?}, {isa}"), &short, exec, dtype, layout);
                }
            }
        }
    }
}

/// Results that are NaN, infinite, beyond binary16, subnormal there, zero, and ties.
#[test]
fn results_of_every_kind() {
    let kinds = [
        f32::NAN,
        f32::from_bits(0xff81_2345),
        f32::INFINITY,
        f32::NEG_INFINITY,
        65519.0,
        65520.0,
        -1e6,
        3.0e38,
        f32::MAX,
        6e-8,
        -2.9e-8,
        2.99e-8,
        6.1e-5,
        1e-40,
        0.0,
        -0.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        1.0 + 1.0 / 2048.0,
        1.0 + 3.0 / 2048.0,
    ];
    for keys in [1, 2, 40] {
        // Each column of values is one number, so that results are that number, or near.
        let mut case = Case::plain(&mut Rng::new(1), [1, 2, 1, 13, keys, 8, kinds.len()]);
        case.v = Tensor::from_fn(case.v.shape, |[.., d]| kinds[d]);
        let short = Short::new(case, [Dtype::F32; 3]);
        for (isa, exec) in execs() {
            let out = short.wide.run(exec, Wanted::LEAST).out;
            assert!(out.get([0, 0, 0, 0]).is_nan() && out.get([0, 0, 0, 2]) == f32::INFINITY);
            for dtype in SHORT {
                for layout in [Layout::Bhld, Layout::Transposed] {
                    check(&format!("{keys} keys, {isa}"), &short, exec, dtype, layout);
                }
            }
        }
    }
    assert_eq!((F16::from_f32(65519.0).0, F16::from_f32(65520.0).0), (0x7bff, 0x7c00));
    assert_eq!(Bf16::from_f32(f32::MAX).0, 0x7f80);
}

/// Rows without keys.
#[test]
fn nothing_visible() {
    let mut case = Case::plain(&mut Rng::new(1), [2, 2, 1, 5, 20, 8, 17]);
    case.kv_lens = Some(vec![0, 7]);
    for dtype in SHORT {
        let short = Short::new(case.clone(), [dtype; 3]);
        for (isa, exec) in execs() {
            check(&isa.to_string(), &short, exec, dtype, Layout::Padded);
        }
    }
}

/// What was gathered from pieces is written in the type that is asked for, too.
#[test]
fn a_state_is_read_in_any_type() {
    let case = Case::plain(&mut Rng::new(3), [1, 4, 2, 3, 300, 20, 33]);
    for (isa, exec) in execs() {
        let mut state =
            AttnState::new(case.attention(), case.q.view(), KvShape { kv_heads: 2, head_dim: 20, value_dim: 33 }, exec)
                .unwrap();
        for keys in [0..100, 100..300] {
            let part = |x: &Tensor| x.rows(keys.clone());
            state.push(part(&case.k).view(), part(&case.v).view()).unwrap();
        }
        let mut out = case.unwritten(Wanted::LEAST).out;
        let shape = out.shape;
        state.read(Outputs::new(sdpa::ViewMut::bhld(&mut out.data, shape).unwrap())).unwrap();
        for dtype in SHORT {
            let mut short = Rounded::new(&case.unwritten(Wanted::LEAST).out, dtype).elements;
            state.read(Outputs::new(short.view_mut(&out))).unwrap();
            assert_eq!(short.bits(), Elements::of(&out.data, dtype).bits(), "{isa}, {dtype}");
        }
    }
}
