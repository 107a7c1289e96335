//! A BERT of a few dimensions with random weights, and the same model written out in f64.
#![allow(dead_code, unreachable_pub, reason = "compiled into each test of BERT; none uses all of it")]

use crate::support::Rng;
use sdpa_layers::{Activation, BertConfig, Tensor};
use std::collections::{BTreeMap, HashMap};

/// Sizes that are all different, so that none can stand in for another.
pub const CONFIG: BertConfig = BertConfig {
    vocab_size: 50,
    hidden_size: 24,
    num_hidden_layers: 2,
    num_attention_heads: 3,
    intermediate_size: 41,
    hidden_act: Activation::Gelu,
    max_position_embeddings: 20,
    type_vocab_size: 2,
    layer_norm_eps: 1e-12,
};

/// The same, as a file says it.
pub const JSON: &str = r#"{
    "model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "position_embedding_type": "absolute",
    "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 41,
    "max_position_embeddings": 20, "type_vocab_size": 2, "hidden_dropout_prob": 0.1, "use_cache": true
}"#;

/// Tensors by name, in order: shape and numbers.
pub type Model = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Every tensor of that model.
pub fn model() -> Model {
    let (hidden, middle) = (CONFIG.hidden_size, CONFIG.intermediate_size);
    let mut rng = Rng::new(11);
    let mut model = Model::new();
    let mut add = |name: String, shape: &[usize], around: f32| {
        let spread = if shape.len() == 2 { 1.0 / (shape[1] as f32).sqrt() } else { 0.3 };
        let data = (0..shape.iter().product()).map(|_| around + spread * rng.normal()).collect();
        model.insert(name, (shape.to_vec(), data));
    };
    add("embeddings.word_embeddings.weight".into(), &[CONFIG.vocab_size, hidden], 0.0);
    add("embeddings.position_embeddings.weight".into(), &[CONFIG.max_position_embeddings, hidden], 0.0);
    add("embeddings.token_type_embeddings.weight".into(), &[CONFIG.type_vocab_size, hidden], 0.0);
    add("embeddings.LayerNorm.weight".into(), &[hidden], 1.0);
    add("embeddings.LayerNorm.bias".into(), &[hidden], 0.0);
    for layer in 0..CONFIG.num_hidden_layers {
        let mut linear = |name: &str, outputs, inputs| {
            add(format!("encoder.layer.{layer}.{name}.weight"), &[outputs, inputs], 0.0);
            add(format!("encoder.layer.{layer}.{name}.bias"), &[outputs], 0.0);
        };
        for name in ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"] {
            linear(name, hidden, hidden);
        }
        linear("intermediate.dense", middle, hidden);
        linear("output.dense", hidden, middle);
        for name in ["attention.output.LayerNorm", "output.LayerNorm"] {
            add(format!("encoder.layer.{layer}.{name}.weight"), &[hidden], 1.0);
            add(format!("encoder.layer.{layer}.{name}.bias"), &[hidden], 0.0);
        }
    }
    model
}

/// What `Bert::new` takes.
pub fn source(model: &Model) -> HashMap<String, Tensor<'_>> {
    let tensor = |(shape, data): &'_ (Vec<usize>, Vec<f32>)| Tensor::new(shape.clone(), data.clone()).unwrap();
    model.iter().map(|(name, both)| (name.clone(), tensor(both))).collect()
}

/// x·Φ(x), by a series of positive terms.
fn gelu(x: f64) -> f64 {
    let z = x.abs() / core::f64::consts::SQRT_2;
    let (mut term, mut sum) = (z, 0.0);
    let mut n = 1.0;
    while term > sum * 1e-18 {
        sum += term;
        term *= 2.0 * z * z / (2.0 * n + 1.0);
        n += 1.0;
    }
    let erf = (2.0 / core::f64::consts::PI.sqrt() * (-z * z).exp() * sum).min(1.0);
    0.5 * x * (1.0 + erf.copysign(x))
}

/// The model in f64, one sequence at a time.
pub struct Reference<'m>(pub &'m Model);

impl Reference<'_> {
    fn get(&self, name: &str) -> Vec<f64> {
        self.0[name].1.iter().map(|&x| f64::from(x)).collect()
    }

    fn row(&self, table: &str, row: usize) -> Vec<f64> {
        self.get(table)[row * CONFIG.hidden_size..][..CONFIG.hidden_size].to_vec()
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let (weight, bias) = (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let dot = |w: &[f64]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
        weight.chunks_exact(x.len()).zip(bias).map(|(w, b)| dot(w) + b).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let (gain, bias) = (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (variance + f64::from(CONFIG.layer_norm_eps)).sqrt();
        x.iter().zip(gain.iter().zip(bias)).map(|(x, (g, b))| (x - mean) * scale * g + b).collect()
    }

    /// Hidden states of one sequence after the first layers, `[tokens, hidden]`.
    pub fn hidden(&self, layers: usize, tokens: &[u32], types: &[u32]) -> Vec<f64> {
        let add = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
        let embed = |(position, (&token, &kind)): (usize, (&u32, &u32))| {
            let word = self.row("embeddings.word_embeddings.weight", token as usize);
            let kind = self.row("embeddings.token_type_embeddings.weight", kind as usize);
            let position = self.row("embeddings.position_embeddings.weight", position);
            self.norm("embeddings.LayerNorm", &add(&add(&word, &kind), &position))
        };
        let mut x: Vec<Vec<f64>> = tokens.iter().zip(types).enumerate().map(embed).collect();
        let dim = CONFIG.hidden_size / CONFIG.num_attention_heads;
        for layer in 0..layers {
            let at = |name: &str| format!("encoder.layer.{layer}.{name}");
            let project = |name: &str| x.iter().map(|x| self.linear(&at(name), x)).collect::<Vec<_>>();
            let [q, k, v] = ["query", "key", "value"].map(|name| project(&format!("attention.self.{name}")));
            let mut next = Vec::new();
            for (x, q) in x.iter().zip(&q) {
                let mut attended = Vec::new();
                for head in (0..CONFIG.hidden_size).step_by(dim) {
                    let score = |k: &Vec<f64>| (0..dim).map(|c| q[head + c] * k[head + c]).sum::<f64>();
                    let weights: Vec<f64> = k.iter().map(|k| (score(k) / (dim as f64).sqrt()).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    attended.extend(
                        (0..dim).map(|c| weights.iter().zip(&v).map(|(w, v)| w * v[head + c]).sum::<f64>() / sum),
                    );
                }
                let attended = self.linear(&at("attention.output.dense"), &attended);
                let x = self.norm(&at("attention.output.LayerNorm"), &add(x, &attended));
                let middle: Vec<f64> = self.linear(&at("intermediate.dense"), &x).into_iter().map(gelu).collect();
                let fed = self.linear(&at("output.dense"), &middle);
                next.push(self.norm(&at("output.LayerNorm"), &add(&x, &fed)));
            }
            x = next;
        }
        x.concat()
    }

    /// Their mean, at length 1.
    pub fn embedding(&self, tokens: &[u32], types: &[u32]) -> Vec<f64> {
        let hidden = self.hidden(CONFIG.num_hidden_layers, tokens, types);
        let width = CONFIG.hidden_size;
        let sum: Vec<f64> = (0..width).map(|c| hidden.iter().skip(c).step_by(width).sum()).collect();
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        sum.iter().map(|x| x / length).collect()
    }
}
