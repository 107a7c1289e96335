//! A layer of a real model: layer 3 of all-MiniLM-L6-v2, a BERT, on a sentence.

use crate::fixture::{Fixture, assert_close};
use sdpa::{Exec, Isa};
use sdpa_layers::{
    Activation, Compute, FeedForward, LayerInput, Linear, MultiHeadAttention, Norm, NormOrder, Sequences,
    TransformerLayer, Weights,
};

/// Of hidden states of size 1: PyTorch's own rounding and ours, through 1536 hidden numbers.
const TOLERANCE: f64 = 2e-5;

fn linear(file: &Fixture, name: &str) -> Linear {
    let (weight, bias) = (file.floats(&format!("{name}.weight")), file.floats(&format!("{name}.bias")));
    Linear::new(Weights::rows(&weight, file.shape(&format!("{name}.weight"))).unwrap().bias(&bias).unwrap())
}

fn norm(file: &Fixture, name: &str) -> Norm {
    let [gain, bias] = ["weight", "bias"].map(|part| file.floats(&format!("{name}.{part}")));
    Norm::layer(gain, 1e-12).unwrap().bias(bias).unwrap()
}

#[test]
fn a_bert_layer() {
    let file = Fixture::open("minilm_layer3.safetensors", "SDPA_MINILM_LAYER");
    let projections = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
        .map(|name| linear(&file, name));
    let attention = MultiHeadAttention::new([12, 12], projections).unwrap();
    let feed_forward =
        FeedForward::new(Activation::Gelu, linear(&file, "intermediate.dense"), linear(&file, "output.dense")).unwrap();
    let layer = TransformerLayer::encoder(
        NormOrder::Post,
        (attention, norm(&file, "attention.output.LayerNorm")),
        (feed_forward, norm(&file, "output.LayerNorm")),
    )
    .unwrap();
    let [batch, len, _] = file.shape("input");
    let (x, expected) = (file.floats("input"), file.floats("output"));
    for isa in Isa::available() {
        for exec in [Exec::serial().isa(isa), Exec::default().isa(isa)] {
            let mut out = vec![f32::NAN; x.len()];
            let input = LayerInput::new(&x, Sequences::Even { batch, len });
            layer.forward(input, &mut out, &mut Compute::new(exec)).unwrap();
            let off = assert_close(&format!("output on {isa}"), &out, &expected, TOLERANCE);
            println!("{isa}: {off:.2e}");
        }
    }
}
