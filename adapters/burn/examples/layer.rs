//! A layer of a real model on burn's tensors: layer 3 of all-MiniLM-L6-v2, with burn's attention and with this one.
//!
//! Projections, norms and feed-forward are burn's; heads are swapped in place, without copies. Both outputs are compared
//! with what the model itself made of the sentence.
//!
//! ```text
//! cargo run --release --example layer
//! ```

use burn_tensor::activation::gelu;
use burn_tensor::module::{attention as burns_attention, layer_norm, linear};
use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{Device, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors};
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;
/// Attention of queries, keys and values.
type Attends<'a> = &'a dyn Fn([Tensor<4>; 3]) -> Result<Tensor<4>>;

const HEADS: usize = 12;
const EPSILON: f64 = 1e-12;
/// Largest error of hidden states of size 1: the weights are rounded to f16, and so are those the answer was made with.
const BOUND: f32 = 2e-5;

fn main() -> Result<()> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/minilm_layer3.safetensors");
    let file = std::fs::read(path).map_err(|e| format!("{path}: {e}"))?;
    let layer = Layer(SafeTensors::deserialize(&file)?);
    let x: Tensor<3> = layer.tensor("input")?;
    let expected: Tensor<3> = layer.tensor("output")?;
    let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: false };

    println!("attention  largest error against the model's own output");
    let attentions: [(&str, Attends<'_>); 2] = [
        ("burn's", &|[q, k, v]| Ok(burns_attention(q, k, v, None, None, options))),
        ("sdpa's", &|[q, k, v]| Ok(sdpa_burn::attention(q, k, v, None, None, options)?)),
    ];
    for (name, attention) in attentions {
        let error: f32 = (layer.forward(x.clone(), attention)? - expected.clone()).abs().max().into_scalar();
        println!("{name:<9}  {error:.1e}");
        if error > BOUND || error.is_nan() {
            return Err(format!("{name}: {error:e} is beyond {BOUND:e}").into());
        }
    }
    Ok(())
}

/// The layer's tensors, by their names in the model.
struct Layer<'a>(SafeTensors<'a>);

impl Layer<'_> {
    fn forward(&self, x: Tensor<3>, attention: Attends<'_>) -> Result<Tensor<3>> {
        let [batch, rows, width] = x.dims();
        let project = |name: &str| -> Result<Tensor<4>> {
            let projected = self.linear(&format!("attention.self.{name}"), x.clone())?;
            Ok(projected.reshape([batch, rows, HEADS, width / HEADS]).swap_dims(1, 2))
        };
        let context = attention([project("query")?, project("key")?, project("value")?])?;
        let context = context.swap_dims(1, 2).reshape([batch, rows, width]);
        let x = self.norm("attention.output.LayerNorm", x.clone() + self.linear("attention.output.dense", context)?)?;
        let inner = gelu(self.linear("intermediate.dense", x.clone())?);
        self.norm("output.LayerNorm", x + self.linear("output.dense", inner)?)
    }

    fn linear(&self, name: &str, x: Tensor<3>) -> Result<Tensor<3>> {
        let weight: Tensor<2> = self.tensor(&format!("{name}.weight"))?;
        Ok(linear(x, weight.transpose(), Some(self.tensor(&format!("{name}.bias"))?)))
    }

    fn norm(&self, name: &str, x: Tensor<3>) -> Result<Tensor<3>> {
        let (gain, bias) = (self.tensor(&format!("{name}.weight"))?, self.tensor(&format!("{name}.bias"))?);
        Ok(layer_norm(x, gain, Some(bias), EPSILON))
    }

    fn tensor<const D: usize>(&self, name: &str) -> Result<Tensor<D>> {
        let tensor = self.0.tensor(name)?;
        let numbers: Vec<f32> = match tensor.dtype() {
            Dtype::F32 => tensor.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
            Dtype::F16 => tensor.data().as_chunks().0.iter().map(|&b| half::f16::from_le_bytes(b).to_f32()).collect(),
            other => return Err(format!("{name}: elements are {other:?}").into()),
        };
        Ok(Tensor::from_data(TensorData::new(numbers, tensor.shape().to_vec()), &Device::default()))
    }
}
