//! Bounds of what caches of fewer bits cost on a real model's queries, keys and values; `benches/caches.rs` has the figures.

use safetensors::SafeTensors;
use sdpa::{Attention, Dtype, Inputs, Int4, KeyScales, KvCache, KvShape, Outputs, View, ViewMut, naive};
use std::io::Write as _;

const SHAPE: [usize; 4] = [1, 12, 268, 32];

fn view(x: &[f32]) -> View<'_> {
    View::bhld(x, SHAPE).unwrap()
}

/// Largest and root mean square error of outputs, with queries, keys and values of layer 3 on a paragraph.
#[test]
fn errors_on_a_real_models_tensors() {
    let file = std::fs::read(crate::model_folder::fixture("minilm_paragraph.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let [q, k, v] = ["q", "k", "v"].map(|name| {
        let tensor = file.tensor(&format!("layer.3.{name}")).unwrap();
        tensor.data().as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect::<Vec<_>>()
    });
    let exact = naive::oracle(&Attention::new(), &Inputs::new(view(&q), view(&k), view(&v))).unwrap().out;
    let new = || KvCache::new(1, KvShape { kv_heads: SHAPE[1], head_dim: SHAPE[3], value_dim: SHAPE[3] }).unwrap();
    let caches = [
        ("f32", new(), 1e-7),
        ("f16", new().dtype(Dtype::F16).unwrap(), 7e-5),
        ("bf16", new().dtype(Dtype::Bf16).unwrap(), 6e-4),
        ("int8", new().int8(KeyScales::PerToken).unwrap(), 2e-3),
        ("int4 with centres", new().int4(Int4::Centred).unwrap(), 2.5e-2),
        ("int4", new().int4(Int4::Symmetric).unwrap(), 2.8e-2),
    ];
    for (name, mut cache, bound) in caches {
        cache.append(view(&k), view(&v)).unwrap();
        let mut out = vec![0.0; q.len()];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, SHAPE).unwrap());
        sdpa::attention(&Attention::new(), Inputs::cached(view(&q), &cache), outputs).unwrap();
        let off = out.iter().zip(&exact).map(|(&x, exact)| (f64::from(x) - exact).abs());
        let (most, squares) = off.fold((0.0f64, 0.0), |(most, squares), x| (most.max(x), squares + x * x));
        let rms = (squares / out.len() as f64).sqrt();
        let _ = writeln!(std::io::stderr(), "{name}: {most:.1e} at most, {rms:.1e} root mean square");
        assert!(rms < bound, "{name}: {rms:e}");
    }
}
