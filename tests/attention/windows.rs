//! Windows over many keys: cost follows what rows see.

use crate::support::{Rng, Tensor, Tensors, assert_same_bits, execs, fewer, run_inputs};
use sdpa::{Alignment, Attention, Exec, Inputs, Mask, Outputs, View, ViewMut, Window};

/// A window that keeps first keys computes no block between: one row, and a task's, at the end of 2⁵⁰ keys that lie in the memory
/// of one. Over all blocks these calls would take weeks.
#[test]
fn keys_between_first_keys_and_a_window_cost_nothing() {
    const DIM: usize = 8;
    let (keys, mut rng) = (1usize << 50, Rng::new(1));
    let [key, value] = [(); 2].map(|()| Tensor::normal([1, 1, 1, DIM], &mut rng).data);
    for rows in [1, 17, 400] {
        let q = Tensor::normal([1, 2, rows, DIM], &mut rng);
        let all = |row| View::from_strides(row, 0, [1, 1, keys, DIM], [0, 0, 0, 1]).expect("one row for all");
        let window = Window::inclusive(Some(511), None).keep_first(300);
        let attention = Attention::new().causal().window(window).align(Alignment::BottomRight);
        for (isa, exec) in execs() {
            let (mut out, mut lse) = (vec![f32::NAN; 2 * rows * DIM], vec![f32::NAN; 2 * rows]);
            let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, rows, DIM]).expect("dense"));
            let outputs = outputs.lse(ViewMut::bhl(&mut lse, [1, 2, rows]).expect("dense"));
            let inputs = Inputs::new(q.view(), all(&key), all(&value));
            attention.problem(inputs, outputs).expect("a good call").run_once(exec);
            for (row, (out, lse)) in out.chunks(DIM).zip(lse).enumerate() {
                let q = &q.data[row * DIM..][..DIM];
                let score: f32 = q.iter().zip(&key).map(|(x, y)| x * y).sum::<f32>() / (DIM as f32).sqrt();
                assert!(
                    (lse - score - 812f32.ln()).abs() < 1e-5,
                    "{isa}, row {row}: {lse} for 300 + 512 keys of {score}"
                );
                assert!(out.iter().zip(&value).all(|(x, y)| (x - y).abs() < 1e-5), "{isa}, row {row}: {out:?}");
            }
        }
    }
}

/// Values with rows on different pages are copied for many rows: the bits are those of dense ones.
#[test]
fn values_far_apart_have_the_bits_of_dense_ones() {
    for (dim, value_dim) in [(16, 16), (8, 40), (16, 300)] {
        for (rows, keys) in [(1, 300), (16, 256), (17, 257), (120, 600)] {
            let tensors = Tensors::normal([1, 2, 1, rows, keys, dim, value_dim], 7);
            let far = 1024usize.next_multiple_of(value_dim);
            let mut spread = vec![f32::NAN; keys * far];
            for (to, row) in spread.chunks_mut(far).zip(tensors.v.data.chunks(value_dim)) {
                to[..value_dim].copy_from_slice(row);
            }
            let strides = [0, 0, far as isize, 1];
            let v = View::from_strides(&spread, 0, [1, 1, keys, value_dim], strides).expect("far");
            let inputs = tensors.inputs();
            let apart = Inputs::new(tensors.q.view(), tensors.k.view(), v);
            for (isa, exec) in execs() {
                let [dense, apart] = [inputs, apart].map(|inputs| run_inputs(&Attention::new(), inputs, exec));
                assert_same_bits(&format!("{isa}, {rows} × {keys}, {value_dim}"), &apart.out, &dense.out);
            }
        }
    }
}

/// Windows and first keys of any sizes around the boundaries of blocks have the bits that a dense mask gives.
#[test]
fn windows_have_the_bits_of_masks() {
    let mut rng = Rng::new(3);
    for (rows, keys) in [(1, 700), (20, 1025), (120, 900)] {
        let tensors = Tensors::normal([1, 2, 1, rows, keys, 16, 16], 5);
        for _ in 0..fewer(12) {
            let [left, right] = [(); 2].map(|()| Some(rng.pick(&[0, 15, 64, 255, 256, 257])));
            let first = rng.pick(&[0, 1, 16, 255, 256, 257, 511, 520]);
            let offset = rng.below(keys) as isize;
            let window = Window::inclusive(left, right).keep_first(first);
            let plain = Attention::new().align(Alignment::Offset(offset));
            let keep: Vec<bool> = (0..rows * keys)
                .map(|at| {
                    let behind = offset as i128 + (at / keys) as i128 - (at % keys) as i128;
                    at % keys < first || window.sees(behind)
                })
                .collect();
            let mask = View::bhld(&keep, [1, 1, rows, keys]).expect("dense");
            let exec = Exec::default();
            let windowed = run_inputs(&plain.window(window), tensors.inputs(), exec);
            let masked = run_inputs(&plain, tensors.inputs().mask(Mask::keep(mask)), exec);
            assert_same_bits(&format!("{window:?} at {offset}, {rows} × {keys}"), &windowed.out, &masked.out);
        }
    }
}
