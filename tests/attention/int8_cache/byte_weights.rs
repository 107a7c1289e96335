//! Weights of int4 values are rounded to bytes as the documentation says.

use super::Kind;
use crate::support::{Rng, Tensor, Tensors, execs};
use sdpa::{Attention, Inputs, Int4, KvCache, KvShape, Outputs, Plan, ViewMut, Workspace};

const KEYS: usize = 256;
/// Columns that have a scale, and so a unit of weights, of their own.
const BLOCK: usize = 32;

/// Value `j` is 0 but in column `j`, where the output then is that key's weight as it was multiplied.
#[test]
fn each_key_has_its_threshold() {
    let mut t = Tensors::normal([1, 1, 1, 3, KEYS, 16, KEYS], 1);
    let mut rng = Rng::new(2);
    for j in 0..KEYS {
        for c in 0..KEYS {
            let size = if c == j { 1.0 + rng.below(50) as f32 } else { 0.0 };
            t.v.set([0, 0, j, c], size);
        }
    }
    let kind = Kind::Int4(Int4::Symmetric);
    let mut cache = kind.of(KvCache::new(1, KvShape { kv_heads: 1, head_dim: 16, value_dim: KEYS }).unwrap()).unwrap();
    cache.append(t.k.view(), t.v.view()).unwrap();
    for (isa, exec) in execs() {
        let inputs = Inputs::cached(t.q.view(), &cache);
        let held = |j: usize| inputs.key_values().unwrap().value([0, 0, j, j]).unwrap();
        let [mut out, mut weights] = [(); 2].map(|()| Tensor::filled([1, 1, 3, KEYS], f32::NAN));
        let outputs = Outputs::new(ViewMut::bhld(&mut out.data, out.shape).unwrap());
        let outputs = outputs.weights(ViewMut::bhld(&mut weights.data, weights.shape).unwrap());
        let problem = Attention::new().problem(inputs, outputs).unwrap();
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, &mut Workspace::new());
        let mut certain = 0;
        for (row, first) in (0..3).flat_map(|row| (0..KEYS).step_by(BLOCK).map(move |first| (row, first))) {
            let exact = |j: usize| f64::from(weights.get([0, 0, row, j])) * f64::from(held(j));
            let unit = (first..first + BLOCK).map(exact).fold(0.0, f64::max) / 255.0;
            for j in first..first + BLOCK {
                // Rounded up from this fraction on.
                let threshold = 1.0 - ((j * 159 % 256) as f64 + 0.5) / 256.0;
                let (whole, fraction) = ((exact(j) / unit).floor(), (exact(j) / unit).fract());
                let got = f64::from(out.get([0, 0, row, j])) / unit;
                // Sums of `f32`, and 2⁻¹⁰ of what is added to find the integer.
                if (fraction - threshold).abs() < 2e-3 || fraction.min(1.0 - fraction) < 1e-3 {
                    assert!((got - exact(j) / unit).abs() < 1.01, "{isa}, row {row}, key {j}");
                    continue;
                }
                let expected = whole + f64::from(u8::from(fraction >= threshold));
                assert!((got - expected).abs() < 1e-3, "{isa}, row {row}, key {j}: {got}, not {expected}");
                certain += 1;
            }
        }
        assert!(certain > 700, "{certain} of {} are no matter of rounding", 3 * KEYS);
    }
}
