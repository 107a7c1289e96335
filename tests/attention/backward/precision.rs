//! Gradients by products of bfloat16, whole numbers and parts: near the oracle's, with the same bits for any threads and layouts; exact
//! ones where there are no such products.

use super::oracle::{check, error};
use super::support::Back;
use crate::options::Case;
use crate::options::elements::{Elements, Rounded};
use crate::support::{LAYOUTS, Rng, Tensor, execs};
use sdpa::{Dropout, Dtype, Exec, Gradients, Inputs, Isa, Precision, Saved, ViewMut};

/// Sizes with several key blocks and row blocks, and with parts of steps.
const SIZES: [[usize; 7]; 5] = [
    [1, 1, 1, 200, 300, 16, 16],
    [2, 4, 2, 97, 257, 33, 48],
    [1, 2, 2, 130, 130, 64, 64],
    [2, 2, 2, 5, 270, 8, 80],
    [1, 1, 1, 1, 1, 3, 5],
];

fn of_precision(precision: Precision, back: Back) -> Back {
    Back { case: Case { precision, ..back.case }, ..back }
}

/// Instruction sets with a matrix unit. Says so if there are none.
fn units() -> Vec<(Isa, Exec<'static>)> {
    let found: Vec<_> = execs().filter(|(isa, _)| isa.matrix_unit().is_ok()).collect();
    if found.is_empty() {
        eprintln!("SKIPPED: this machine has no matrix unit");
    }
    found
}

#[test]
fn parts_have_the_gradients_of_the_oracle() {
    for seed in 0..60 {
        let back = Back::random(&mut Rng::new(seed), 200_000);
        check(&format!("seed {seed}"), &of_precision(Precision::Accurate, back));
    }
}

/// On larger calls parts are no worse than the plain passes in `f32`.
#[test]
fn errors_of_parts_are_no_larger_than_those_of_plain_passes() {
    for (seed, sizes) in [(1, [1, 2, 2, 300, 300, 64, 64]), (2, [1, 2, 1, 200, 520, 128, 64])] {
        let mut rng = Rng::new(seed);
        let case = Case::plain(&mut rng, sizes);
        let back = of_precision(Precision::Accurate, Back { d_lse: None, ..Back::of(&mut rng, case) });
        let (expected, plain) = (back.oracle::<f64>(), back.oracle::<f32>());
        for (isa, exec) in units() {
            let got = back.run(exec);
            for (((name, got), (_, expected)), (_, plain)) in got.named().into_iter().zip(&expected).zip(&plain).take(3)
            {
                let (fused, plain) = (error(&got.data, expected), error(plain, expected));
                assert!(fused <= plain, "{isa}, {name}: {fused:e} fused, {plain:e} in plain passes");
            }
        }
    }
}

#[test]
fn threads_and_layouts_do_not_show() {
    for (n, sizes) in SIZES.into_iter().enumerate() {
        let mut rng = Rng::new(n as u64);
        let case = Case::of_sizes(&mut rng, sizes);
        let dropout = (n == 3).then_some(Dropout { p: 0.2, seed: 7, offset: 1 });
        let back = of_precision(Precision::Accurate, Back { dropout, ..Back::of(&mut rng, case) });
        for (isa, exec) in execs() {
            let (what, expected) = (format!("{sizes:?}, {isa}"), back.run(exec));
            expected.same(&what, &back.run(exec.threads(3)));
            let other = |x: &Tensor, rng: &mut Rng| x.laid_out(rng.pick(&LAYOUTS));
            let Case { q, k, v, .. } = &back.case;
            let case =
                Case { q: other(q, &mut rng), k: other(k, &mut rng), v: other(v, &mut rng), ..back.case.clone() };
            let laid = Back { case, d_out: other(&back.d_out, &mut rng), ..back.clone() };
            expected.same(&what, &laid.run(exec));
        }
    }
}

/// Weights and gradients of scores are rounded where bfloat16 is multiplied, and nowhere else.
#[test]
fn native_gradients_are_near_exact_ones() {
    let largest = |x: &[f32]| x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    for (n, sizes) in SIZES.into_iter().enumerate() {
        let mut rng = Rng::new(n as u64);
        let case = Case::plain(&mut rng, sizes);
        let back = of_precision(Precision::Native, Back::of(&mut rng, case));
        for (isa, exec) in execs() {
            let [short, wide] = back.run_as(Dtype::Bf16, exec);
            let as_floats = |x: &Elements| match x {
                Elements::Bf16(x) => x.iter().map(|x| x.to_f32()).collect::<Vec<_>>(),
                _ => unreachable!("another type"),
            };
            for (short, wide) in short.iter().zip(&wide) {
                let (short, wide) = (as_floats(short), as_floats(wide));
                let off = short.iter().zip(&wide).fold(0.0f32, |off, (a, b)| off.max((a - b).abs()));
                let bound = if isa.has_native_bf16() { largest(&wide) / 32.0 } else { 0.0 };
                assert!(off <= bound, "{sizes:?}, {isa}: off by {off}, of {}", largest(&wide));
            }
        }
    }
}

/// Output gradients that are finite stay so when they are rounded: rows show nothing to the keys that they do not see.
#[test]
fn large_output_gradients_stay_in_their_rows() {
    let sizes = [1, 1, 1, 6, 6, 16, 16];
    let mut case = Case::plain(&mut Rng::new(1), sizes);
    (case.causal, case.precision) = (true, Precision::Native);
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| Rounded::new(x, Dtype::Bf16));
    (case.q, case.k, case.v) = (q.wide.clone(), k.wide.clone(), v.wide.clone());
    let (mut d_out, mut dv) = (Tensor::filled([1, 1, 6, 16], 1.0), Tensor::filled([1, 1, 6, 16], 0.0));
    d_out.data[0] = 3.4e38;
    for (isa, exec) in execs() {
        let [out, lse] = Back { case: case.clone(), d_out: d_out.clone(), d_lse: None, dropout: None }.forward(exec);
        let saved = Saved::new(out.view(), lse.view(), d_out.view());
        let gradients = Gradients::new().v(ViewMut::bhld(&mut dv.data, dv.shape).unwrap());
        let problem = case.attention().backward(Inputs::new(q.view(), k.view(), v.view()), saved, gradients);
        problem.expect("a good call").run_once(exec).expect("memory");
        assert!(dv.data[1..].iter().all(|x| x.is_finite()), "{isa}: {:?}", &dv.data[..32]);
    }
}
