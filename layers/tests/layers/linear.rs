//! Projections: against f64 sums, on every instruction set, and the same bits however they are run.

use crate::counting::counted;
use crate::support::{Rng, UNWRITTEN};
use crate::vectors::{bits, normal, unwritten};
use sdpa::{Bound, Error, Exec, Isa};
use sdpa_layers::{Compute, Linear, Weights};

fn forward(layer: &Linear, x: &[f32], exec: Exec) -> Vec<f32> {
    let mut out = unwritten(x.len() / layer.inputs() * layer.outputs());
    layer.forward(x, &mut out, &mut Compute::new(exec)).unwrap();
    out
}

/// Largest error over Σ|x·w| + |b|, in units of f32's rounding, of rows against f64 sums.
fn error([rows, outputs, inputs]: [usize; 3], x: &[f32], w: &[f32], b: &[f32], got: &[f32]) -> f64 {
    let mut worst = 0.0f64;
    for r in 0..rows {
        for o in 0..outputs {
            let products = (0..inputs).map(|i| f64::from(x[r * inputs + i]) * f64::from(w[o * inputs + i]));
            let (sum, size) = products.fold((f64::from(b[o]), f64::from(b[o]).abs()), |(s, a), p| (s + p, a + p.abs()));
            let off = (f64::from(got[r * outputs + o]) - sum).abs();
            worst = worst.max(if off.is_nan() { f64::INFINITY } else { off / size.max(f64::MIN_POSITIVE) });
        }
    }
    worst / f64::from(f32::EPSILON)
}

#[test]
fn every_boundary_is_right_on_every_instruction_set() {
    let rows = [1, 2, 5, 6, 7, 12, 13, 95, 96, 97, 200];
    let widths = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100];
    let mut rng = Rng::new(1);
    for isa in Isa::available() {
        for _ in 0..120 {
            let sizes @ [rows, outputs, inputs] = [rng.pick(&rows), rng.pick(&widths), rng.pick(&widths)];
            let (x, w, b) = (normal(rows * inputs, 2), normal(outputs * inputs, 3), normal(outputs, 4));
            let layer = Linear::new(Weights::rows(&w, [outputs, inputs]).unwrap().bias(&b).unwrap());
            let got = forward(&layer, &x, Exec::serial().isa(isa));
            let off = error(sizes, &x, &w, &b, &got);
            assert!(off < 6.0, "{sizes:?} on {isa}: {off} ε");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_however_it_is_computed() {
    for [rows, outputs, inputs] in [[1, 70, 768], [5, 33, 100], [200, 100, 40], [97, 65, 33], [13, 256, 64]] {
        let (x, w, b) = (normal(rows * inputs, 2), normal(outputs * inputs, 3), normal(outputs, 4));
        let layer = Linear::new(Weights::rows(&w, [outputs, inputs]).unwrap().bias(&b).unwrap());
        let mut by_isa = Vec::new();
        for isa in Isa::available() {
            let exec = Exec::serial().isa(isa);
            let whole = forward(&layer, &x, exec);
            for threads in [2, 3, 8] {
                assert_eq!(bits(&forward(&layer, &x, exec.threads(threads))), bits(&whole), "{threads} threads, {isa}");
            }
            for (r, row) in x.chunks_exact(inputs).enumerate() {
                let alone = forward(&layer, row, exec);
                assert_eq!(bits(&alone), bits(&whole[r * outputs..][..outputs]), "row {r}, {isa}");
            }
            if isa.name() != "portable" || cfg!(target_feature = "fma") {
                by_isa.push(bits(&whole));
            }
        }
        assert!(by_isa.windows(2).all(|pair| pair[0] == pair[1]), "bits differ between instruction sets");
    }
}

#[test]
fn more_than_one_thread_really_works_at_it() {
    // Large enough to be shared out; rows, columns and both.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    for [rows, outputs, inputs] in [[300, 256, 512], [3, 1500, 2000], [100, 1000, 500]] {
        let (x, w) = (normal(rows * inputs, 2), normal(outputs * inputs, 3));
        let layer = Linear::new(Weights::rows(&w, [outputs, inputs]).unwrap());
        let serial = forward(&layer, &x, Exec::serial());
        let shared = pool.install(|| forward(&layer, &x, Exec::default()));
        assert_eq!(bits(&shared), bits(&serial));
    }
}

#[test]
fn columns_and_parts_are_the_same_weights() {
    let (outputs, inputs, rows) = (37, 21, 4);
    let (x, w, b) = (normal(rows * inputs, 2), normal(outputs * inputs, 3), normal(outputs, 4));
    let transposed: Vec<f32> = (0..inputs * outputs).map(|i| w[i % outputs * inputs + i / outputs]).collect();
    let by_rows = Weights::rows(&w, [outputs, inputs]).unwrap().bias(&b).unwrap();
    let by_columns = Weights::columns(&transposed, [inputs, outputs]).unwrap().bias(&b).unwrap();
    let want = forward(&Linear::new(by_rows), &x, Exec::serial());
    assert_eq!(bits(&forward(&Linear::new(by_columns), &x, Exec::serial())), bits(&want));
    for weights in [by_rows, by_columns] {
        for part in [0..outputs, 0..5, 5..6, 30..outputs, 7..7] {
            let got = forward(&Linear::new(weights.part(part.clone()).unwrap()), &x, Exec::serial());
            let want: Vec<f32> = want.chunks_exact(outputs).flat_map(|row| row[part.clone()].to_vec()).collect();
            assert_eq!(bits(&got), bits(&want), "{part:?}");
        }
    }
}

#[test]
fn no_rows_are_no_work() {
    let layer = Linear::new(Weights::rows(&[1.0; 6], [2, 3]).unwrap());
    assert!(forward(&layer, &[], Exec::default()).is_empty());
    let none = Linear::new(Weights::rows(&[], [0, 3]).unwrap());
    assert!(forward(&none, &[0.0; 6], Exec::default()).is_empty());
}

#[test]
fn a_warm_call_allocates_nothing() {
    let layer = Linear::new(Weights::rows(&normal(100 * 64, 1), [100, 64]).unwrap());
    let (x, mut out, mut compute) = (normal(50 * 64, 2), unwritten(5000), Compute::new(Exec::serial()));
    layer.forward(&x, &mut out, &mut compute).unwrap();
    assert_eq!(counted(|| layer.forward(&x, &mut out, &mut compute).unwrap()), (0, 0));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let w = normal(6, 1);
    let mismatch = |argument, what, got, expected, of| Error::Mismatch { argument, what, got, expected, of };
    let range = |argument, what, got, (bound, limit), of| Error::Range { argument, what, got, bound, limit, of };
    let weights = Weights::rows(&w, [2, 3]).unwrap();
    assert_eq!(
        Weights::rows(&w, [2, 4]).unwrap_err(),
        range("weights", "length", 6, (Bound::Exactly, 8), "outputs × inputs")
    );
    assert_eq!(
        Weights::columns(&w, [7, 1]).unwrap_err(),
        range("weights", "length", 6, (Bound::Exactly, 7), "outputs × inputs")
    );
    assert_eq!(Weights::rows(&w, [2, 0]).unwrap_err(), Error::Empty { argument: "weights", what: "inputs" });
    assert!(matches!(Weights::rows(&w, [usize::MAX, 3]).unwrap_err(), Error::TooLarge { .. }));
    // No outputs take no numbers, but rows of x must be possible, and packed weights.
    for inputs in [usize::MAX, 1 << 63, 1 << 57] {
        let error = Error::TooLarge { what: "weights", sizes: [0, inputs, 1, 1] };
        assert_eq!(Weights::rows(&[], [0, inputs]).unwrap_err(), error);
        assert_eq!(Weights::columns(&[], [inputs, 0]).unwrap_err(), error);
    }
    let none = Linear::new(Weights::rows(&[], [0, (1 << 57) - 1]).unwrap());
    none.forward(&[], &mut [], &mut Compute::default()).unwrap();
    assert_eq!(weights.bias(&w).unwrap_err(), mismatch("bias", "length", 6, 2, "the weights (outputs)"));
    assert_eq!(
        weights.part(1..3).unwrap_err(),
        range("part", "end", 3, (Bound::AtMost, 2), "the outputs of the weights")
    );
    let layer = Linear::new(weights);
    let mut out = unwritten(4);
    for (x, len, error) in [
        (&[0.0; 7][..], 4, range("x", "length", 7, (Bound::MultipleOf, 3), "the width of a row")),
        (&[0.0; 6][..], 3, range("out", "length", 3, (Bound::Exactly, 4), "the number of rows × their width")),
    ] {
        assert_eq!(layer.forward(x, &mut out[..len], &mut Compute::default()).unwrap_err(), error);
    }
    assert!(out.iter().all(|x| x.to_bits() == UNWRITTEN), "a refused call wrote");
}

#[test]
fn an_activation_is_that_of_the_results() {
    use sdpa_layers::Activation;
    for [rows, outputs, inputs] in [[1, 70, 33], [7, 32, 16], [100, 45, 20]] {
        let (x, w, b) = (normal(rows * inputs, 2), normal(outputs * inputs, 3), normal(outputs, 4));
        let weights = Weights::rows(&w, [outputs, inputs]).unwrap().bias(&b).unwrap();
        for isa in Isa::available() {
            let exec = Exec::serial().isa(isa);
            let plain = forward(&Linear::new(weights), &x, exec);
            for activation in [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu] {
                let got = forward(&Linear::new(weights).then(activation), &x, exec);
                let mut want = plain.clone();
                activation.apply(isa, &mut want);
                assert_eq!(bits(&got), bits(&want), "{activation:?} on {isa}");
            }
        }
    }
}
