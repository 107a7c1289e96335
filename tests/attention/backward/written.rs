//! Every element of every gradient is written, however small the sizes of the call.

use super::support::Back;
use crate::options::Wanted;
use crate::support::{Tensor, UNWRITTEN, execs};
use crate::written::{cases, check};
use sdpa::parts::{BackwardState, KeyGradientShape, KeyGradientSums};
use sdpa::{Attention, BackwardPlan, Bf16, Error, Exec, Gradients, Inputs, Isa, Saved, View, ViewMut, Workspace};

#[test]
fn every_gradient_is_written_whatever_the_sizes() {
    for (what, case, mut rng) in cases(2000) {
        let back = Back::of(&mut rng, case);
        if back.attention().problem(back.case.inputs(), back.case.unwritten(Wanted::LEAST).outputs()).is_err() {
            continue;
        }
        let oracle = back.oracle::<f64>();
        for (isa, exec) in execs().chain([(Isa::detect(), Exec::default().threads(2))]) {
            let full = back.run(exec);
            check(&format!("{what}, {isa}"), Ok::<_, Error>(()), full.named());
            // What no pair of a row and a key adds to is 0.
            for ((name, got), (_, exact)) in full.named().into_iter().zip(&oracle) {
                let zeros = exact.iter().all(|&x| x == 0.0) && got.data.iter().any(|&x| x.abs() > 1e-5);
                assert!(!zeros, "{what}, {isa}: gradient in {name} {:?}, expected zeros", got.data);
            }
        }
    }
}

#[test]
fn gradients_of_keys_that_no_query_head_shares_are_zeros() {
    let (kv, mut dk, mut dv) = ([0.5; 2 * 3 * 4], [f32::from_bits(UNWRITTEN); 2 * 3 * 4], [7.0; 2 * 3 * 4]);
    let (none, kv) = (View::bhld(&[0.0; 0], [1, 0, 5, 4]).unwrap(), View::bhld(&kv, [1, 2, 3, 4]).unwrap());
    let saved = Saved::new(none, View::bhld(&[0.0; 0], [1, 0, 5, 1]).unwrap(), none);
    fn view(x: &mut [f32]) -> ViewMut<'_> {
        ViewMut::bhld(x, [1, 2, 3, 4]).unwrap()
    }
    let gradients = Gradients::new().k(view(&mut dk)).v(view(&mut dv));
    sdpa::attention_backward(&Attention::new(), Inputs::new(none, kv, kv), saved, gradients).unwrap();
    assert_eq!((dk, dv), ([0.0; 24], [0.0; 24]));
    // The same of keys that come in parts; in rows that lie apart, too.
    let shape = KeyGradientShape { batch: 1, heads: 0, keys: 3, head_dim: 4, value_dim: 4 };
    for (isa, exec) in execs() {
        let (mut dk, mut dv) = ([7.0f32; 24], [Bf16::from_f32(7.0); 2 * 24]);
        let mut sums = KeyGradientSums::new(shape).unwrap();
        let mut state = BackwardState::new(Attention::new(), Inputs::new(none, kv, kv), saved, exec).unwrap();
        state.push(kv, kv, &mut sums).unwrap();
        let apart = ViewMut::from_strides(&mut dv, 1, [1, 2, 3, 4], [48, 24, 8, 2]).unwrap();
        sums.write(&Attention::new(), Gradients::new().k(view(&mut dk)).v(apart), exec).unwrap();
        assert_eq!(dk, [0.0; 24], "{isa}");
        let expected = |(i, x): (usize, &Bf16)| x.to_f32() == if i % 2 == 1 { 0.0 } else { 7.0 };
        assert!(dv.iter().enumerate().all(expected), "{isa}: {dv:?}");
    }
}

/// Its strides are of no use to anybody, and may be any.
#[test]
fn a_bias_without_columns_has_a_gradient_of_no_elements() {
    let (x, rows, mut dq) = ([0.5; 2 * 3 * 4], [0.0; 2 * 3], [f32::from_bits(UNWRITTEN); 2 * 3 * 4]);
    let [q, kv] = [2, 1].map(|heads| View::bhld(&x[..heads * 12], [1, heads, 3, 4]).unwrap());
    let (shape, strides) = ([1, 2, 3, 0], [isize::MAX / 2, isize::MAX, isize::MAX, 1]);
    let inputs = Inputs::new(q, kv, kv).bias_prefix(View::from_strides(&[0.0; 0], 0, shape, strides).unwrap());
    let saved = Saved::new(q, View::bhl(&rows, [1, 2, 3]).unwrap(), q);
    for (isa, exec) in execs() {
        let bias = ViewMut::from_strides(&mut [0.0; 0], 0, shape, strides).unwrap();
        let gradients = Gradients::new().q(ViewMut::bhld(&mut dq, [1, 2, 3, 4]).unwrap()).bias(bias);
        let problem = Attention::new().backward(inputs, saved, gradients).unwrap();
        let plan = BackwardPlan::new(&problem, exec);
        problem.run(&plan, &mut Workspace::new()).unwrap();
        assert_eq!(dq, [0.0; 24], "{isa}");
    }
}

#[test]
fn every_gradient_of_the_baseline_is_written_whatever_the_sizes() {
    for (what, case, mut rng) in cases(1000) {
        let back = Back::of(&mut rng, case);
        let mut full = back.unwritten();
        let [out, lse] =
            [&back.d_out, &Tensor::filled([back.d_out.shape[0], back.d_out.shape[1], back.d_out.shape[2], 1], 0.0)];
        let saved = Saved::new(out.view(), lse.view(), back.d_out.view());
        fn view(x: &mut Tensor) -> ViewMut<'_> {
            ViewMut::bhld(&mut x.data, x.shape).unwrap()
        }
        let gradients = Gradients::new().q(view(&mut full.q)).k(view(&mut full.k)).v(view(&mut full.v));
        let done =
            sdpa_unfused::attention_backward(&Attention::new(), back.case.inputs(), saved, gradients, Exec::serial());
        check(&what, done, full.named().into_iter().take(3));
    }
}
