//! `Precision::Accurate`: projections by a matrix unit, as exact as floats, with one answer however they are run; models take it whole.

use crate::counting::counted;
use crate::support::{Rng, worst};
use crate::tiny_bert::{CONFIG, Reference, model, source};
use crate::vectors::{bits, normal, unwritten};
use sdpa::{Attention, Exec, Isa, Precision};
use sdpa_layers::{
    Activation, Bert, BertInput, Compute, FeedForward, LayerInput, Linear, MultiHeadAttention, MultiHeadInput, Norm,
    NormOrder, Sequences, Transformer, TransformerLayer, Weights,
};

const WIDTH: usize = 24;
/// Width of the memory of cross-attention.
const MEMORY: usize = 10;

/// Instruction sets with a matrix unit, if there are any.
fn units() -> Vec<Isa> {
    let found: Vec<_> = Isa::available().filter(|isa| isa.matrix_unit().is_ok()).collect();
    if found.is_empty() {
        eprintln!("SKIPPED: this machine has no matrix unit");
    }
    found
}

fn linear([outputs, inputs]: [usize; 2], seed: u64) -> Linear {
    let weights: Vec<f32> = normal(outputs * inputs, seed).iter().map(|w| w / (inputs as f32).sqrt()).collect();
    let bias = normal(outputs, 100 + seed);
    Linear::new(Weights::rows(&weights, [outputs, inputs]).unwrap().bias(&bias).unwrap())
}

fn project(layer: &Linear, x: &[f32], exec: Exec) -> Vec<f32> {
    let mut out = unwritten(x.len() / layer.inputs() * layer.outputs());
    layer.forward(x, &mut out, &mut Compute::new(exec)).unwrap();
    out
}

/// Largest errors of rows without a bias and of the naive loop, over Σ|x·w|, in units of `f32`'s rounding.
fn errors([outputs, inputs]: [usize; 2], x: &[f32], w: &[f32], got: &[f32]) -> [f64; 2] {
    let mut worst = [0.0f64; 2];
    for (x, got) in x.chunks_exact(inputs).zip(got.chunks_exact(outputs)) {
        for (w, &got) in w.chunks_exact(inputs).zip(got) {
            let products = || x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
            let (sum, size): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
            let naive: f32 = x.iter().zip(w).fold(0.0, |sum, (x, w)| sum + x * w);
            for (worst, found) in worst.iter_mut().zip([got, naive]) {
                let off = (f64::from(found) - sum).abs() / size / f64::from(f32::EPSILON);
                *worst = worst.max(if off.is_nan() { f64::INFINITY } else { off });
            }
        }
    }
    worst
}

#[test]
fn projections_are_as_exact_as_floats() {
    for isa in units() {
        for (seed, inputs) in [32, 48, 100, 128, 129, 256, 384, 500].into_iter().enumerate() {
            for factor in [1.0, 1e-15, 1e15] {
                let (outputs, rows, seed) = (33, 40, seed as u64);
                let x: Vec<f32> = normal(rows * inputs, seed).iter().map(|x| x * factor).collect();
                let w = normal(outputs * inputs, 50 + seed);
                let layer = Linear::new(Weights::rows(&w, [outputs, inputs]).unwrap()).precision(Precision::Accurate);
                let got = project(&layer, &x, Exec::serial().isa(isa));
                let [ours, naive] = errors([outputs, inputs], &x, &w, &got);
                assert!(ours <= naive, "{inputs} inputs times {factor:e}: {ours} ε, naive {naive} ε, {isa}");
            }
        }
    }
}

/// Tiles, panels, steps and pieces that are not whole.
#[test]
fn every_boundary_is_right() {
    let rows = [1, 2, 15, 16, 17, 31, 32, 33, 64, 95, 96, 97, 130];
    let outputs = [1, 15, 16, 17, 31, 32, 33, 48, 49, 100];
    let inputs = [1, 2, 15, 16, 17, 31, 32, 33, 65, 127, 128, 129, 160, 260];
    let mut rng = Rng::new(1);
    for isa in units() {
        for _ in 0..80 {
            let [rows, outputs, inputs] = [rng.pick(&rows), rng.pick(&outputs), rng.pick(&inputs)];
            let (x, w) = (normal(rows * inputs, 2), normal(outputs * inputs, 3));
            let layer = Linear::new(Weights::rows(&w, [outputs, inputs]).unwrap()).precision(Precision::Accurate);
            let exec = Exec::serial().isa(isa);
            let plain = project(&layer, &x, exec);
            let [off, _] = errors([outputs, inputs], &x, &w, &plain);
            assert!(off < 3.0, "{rows} × {outputs} × {inputs} on {isa}: {off} ε");
            // Bias and activation come after the sum.
            let b = normal(outputs, 4);
            let layer = Linear::new(Weights::rows(&w, [outputs, inputs]).unwrap().bias(&b).unwrap());
            let got = project(&layer.then(Activation::Silu).precision(Precision::Accurate), &x, exec);
            let mut expected: Vec<f32> = plain.iter().enumerate().map(|(n, sum)| sum + b[n % outputs]).collect();
            Activation::Silu.apply(isa, &mut expected);
            assert_eq!(bits(&got), bits(&expected), "{rows} × {outputs} × {inputs} on {isa}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_however_it_is_computed() {
    for [rows, outputs, inputs] in [[5, 33, 100], [200, 100, 40], [97, 65, 133], [40, 600, 64]] {
        let (x, layer) = (normal(rows * inputs, 2), linear([outputs, inputs], 3).precision(Precision::Accurate));
        let mut by_isa = Vec::new();
        for isa in units() {
            let exec = Exec::serial().isa(isa);
            let whole = project(&layer, &x, exec);
            for threads in [2, 3, 8] {
                let shared = project(&layer, &x, exec.threads(threads));
                assert_eq!(bits(&shared), bits(&whole), "{threads} threads, {isa}");
            }
            for count in [1, 7, 16, 33, 50] {
                for (n, part) in x.chunks(count * inputs).enumerate() {
                    let expected = &whole[n * count * outputs..][..part.len() / inputs * outputs];
                    assert_eq!(bits(&project(&layer, part, exec)), bits(expected), "part {n} of {count} rows, {isa}");
                }
            }
            by_isa.push(bits(&whole));
        }
        assert!(by_isa.windows(2).all(|pair| pair[0] == pair[1]), "bits differ between instruction sets");
    }
}

/// Exact without a unit, for `Native`, and after `Exact`; the unit has other bits.
#[test]
fn a_unit_is_used_where_it_is_asked_for_and_there() {
    let (x, of) = (normal(50 * 300, 2), || linear([70, 300], 3));
    for isa in Isa::available() {
        let exec = Exec::serial().isa(isa);
        let exact = bits(&project(&of(), &x, exec));
        let found = |layer: Linear| bits(&project(&layer, &x, exec));
        assert_eq!(found(of().precision(Precision::Native)), exact, "{isa}");
        assert_eq!(found(of().precision(Precision::Accurate).precision(Precision::Exact)), exact, "{isa}");
        let accurate = found(of().precision(Precision::Accurate));
        assert_eq!(accurate == exact, isa.matrix_unit().is_err(), "{isa}");
    }
}

fn attention(memory: usize, seed: u64) -> MultiHeadAttention {
    let projections = [[24, WIDTH], [12, memory], [12, memory], [WIDTH, 24]];
    MultiHeadAttention::new([4, 2], projections.map(|sizes| linear(sizes, seed))).unwrap()
}

fn layers() -> [TransformerLayer; 2] {
    let norm = |seed| Norm::layer(normal(WIDTH, 200 + seed), 1e-5).unwrap();
    let own = |seed| (attention(WIDTH, seed).attention(Attention::new().causal()), norm(seed));
    let gated =
        FeedForward::gated(Activation::Silu, linear([40, WIDTH], 5), linear([40, WIDTH], 6), linear([WIDTH, 40], 7));
    let plain = FeedForward::new(Activation::Gelu, linear([40, WIDTH], 8), linear([WIDTH, 40], 9));
    let cross = (attention(MEMORY, 3), norm(3));
    [
        TransformerLayer::encoder(NormOrder::Pre, own(1), (gated.unwrap(), norm(4))).unwrap(),
        TransformerLayer::decoder(NormOrder::Post, own(2), cross, (plain.unwrap(), norm(5))).unwrap(),
    ]
}

/// The setting of a layer is that of its parts, whichever is set first.
#[test]
fn a_layer_sets_all_its_parts() {
    let (rows, x, memory) = (70, normal(70 * WIDTH, 1), normal(90 * MEMORY, 2));
    let forward = |layer: &MultiHeadAttention, isa| {
        let mut out = unwritten(x.len());
        let mut compute = Compute::new(Exec::serial().isa(isa));
        layer.forward(MultiHeadInput::new(&x, Sequences::one(rows)), &mut out, &mut compute).unwrap();
        bits(&out)
    };
    for isa in Isa::available() {
        let exact = forward(&attention(WIDTH, 1), isa);
        let settings = Attention::new().precision(Precision::Accurate);
        let projections = [[24, WIDTH], [12, WIDTH], [12, WIDTH], [WIDTH, 24]];
        let projections = projections.map(|sizes| linear(sizes, 1).precision(Precision::Accurate));
        let parts = MultiHeadAttention::new([4, 2], projections).unwrap();
        let accurate = forward(&parts.attention(settings), isa);
        assert_eq!(exact == accurate, isa.matrix_unit().is_err(), "{isa}");
        for (layer, expected) in [
            (attention(WIDTH, 1).precision(Precision::Accurate), &accurate),
            (attention(WIDTH, 1).precision(Precision::Accurate).attention(Attention::new()), &accurate),
            (attention(WIDTH, 1).attention(settings).precision(Precision::Exact), &exact),
        ] {
            assert_eq!(&forward(&layer, isa), expected, "{isa}");
        }
    }
    for isa in units() {
        let mut compute = Compute::new(Exec::serial().isa(isa));
        for (layer, wide) in layers().into_iter().zip(layers()) {
            let mut run = |layer: &TransformerLayer| {
                let (x, mut out) = (LayerInput::new(&x, Sequences::one(rows)), unwritten(x.len()));
                let done = match layer.cross_attention() {
                    None => layer.forward(x, &mut out, &mut compute),
                    Some(_) => {
                        let memory = LayerInput::new(&memory, Sequences::one(90));
                        layer.forward_with_memory(x, memory, &mut out, &mut compute)
                    }
                };
                done.unwrap();
                out
            };
            let (exact, accurate) = (run(&wide), run(&layer.precision(Precision::Accurate)));
            let exact: Vec<f64> = exact.into_iter().map(f64::from).collect();
            let (error, at) = worst(&accurate, &exact);
            assert!(error > 0.0 && error < 1e-5, "element {at} is {}, exactly {}, {isa}", accurate[at], exact[at]);
        }
    }
}

#[test]
fn decoding_has_the_bits_of_the_whole_sequence() {
    let [layer, _] = layers();
    let decoder = Transformer::new(vec![layer]).unwrap().precision(Precision::Accurate);
    let (rows, x) = (300, normal(300 * WIDTH, 1));
    for isa in units() {
        let mut compute = Compute::new(Exec::serial().isa(isa));
        let (mut whole, mut steps) = (unwritten(x.len()), unwritten(x.len()));
        decoder.forward(LayerInput::new(&x, Sequences::one(rows)), &mut whole, &mut compute).unwrap();
        let (mut caches, mut first) = (decoder.caches(1).unwrap(), 0);
        for count in [1, 30, 1, 1, 220, 7, 1, 1, 1, 37] {
            let part = first * WIDTH..(first + count) * WIDTH;
            decoder.decode(&x[part.clone()], &mut caches, &mut steps[part], &mut compute).unwrap();
            first += count;
        }
        assert_eq!(first, rows);
        assert_eq!(bits(&steps), bits(&whole), "{isa}");
    }
}

#[test]
fn a_bert_is_that_of_the_model_in_f64() {
    let (model, width) = (model(), CONFIG.hidden_size);
    let (mut rng, ends) = (Rng::new(5), [0, 20, 21, 34]);
    let tokens: Vec<u32> = (0..34).map(|_| rng.below(CONFIG.vocab_size) as u32).collect();
    let input = BertInput::new(&tokens, Sequences::Ragged(&ends));
    let run = |bert: &Bert, isa| {
        let mut out = unwritten(34 * width);
        bert.forward(input, &mut out, &mut Compute::new(Exec::serial().isa(isa))).unwrap();
        out
    };
    let exact = Bert::new(CONFIG, &source(&model)).unwrap();
    let accurate = Bert::new(CONFIG, &source(&model)).unwrap().precision(Precision::Accurate);
    for isa in Isa::available() {
        let got = run(&accurate, isa);
        assert_eq!(bits(&got) == bits(&run(&exact, isa)), isa.matrix_unit().is_err(), "{isa}");
        for text in ends.windows(2) {
            let expected = Reference(&model).hidden(CONFIG.num_hidden_layers, &tokens[text[0]..text[1]], &[0; 20]);
            let (error, at) = worst(&got[text[0] * width..text[1] * width], &expected);
            assert!(error < 1e-5, "{isa}: element {at} should be {}", expected[at]);
        }
    }
}

#[test]
fn a_warm_call_allocates_nothing() {
    let layer = linear([100, 300], 1).precision(Precision::Accurate);
    let (x, mut out, mut compute) = (normal(50 * 300, 2), unwritten(5000), Compute::new(Exec::serial()));
    layer.forward(&x, &mut out, &mut compute).unwrap();
    assert_eq!(counted(|| layer.forward(&x, &mut out, &mut compute).unwrap()), (0, 0));
}
