//! candle-transformers' BERT and Llama with this attention, against their own answers on the same weights.

#[path = "../examples/bert/model.rs"]
mod bert_model;
#[path = "../examples/llama/model.rs"]
mod llama_model;
#[path = "../examples/bert/minilm.rs"]
mod minilm;

use bert_model::Bert;
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::bert::{self, BertModel};
use candle_transformers::models::llama;
use llama_model::{Llama, difference, small};
use minilm::{Batch, MiniLm};

/// Difference of hidden states, as a part of the largest, that orders of addition make.
const CLOSE: f32 = 2e-5;

fn texts() -> Vec<Vec<u32>> {
    [7, 1, 40, 17].map(|len| (0..len).map(|n| 100 + n * 37 % 800).collect()).into()
}

fn compare_bert(weights: &VarBuilder<'_>, config: &bert::Config, texts: &[Vec<u32>]) {
    let Batch { ids, types, mask } = Batch::new(texts).unwrap();
    let candle = BertModel::load(weights.clone(), config).unwrap().forward(&ids, &types, Some(&mask)).unwrap();
    let ours = Bert::load(weights, config).unwrap().forward(&ids, &types, &mask).unwrap();
    let worst = difference(&ours, &candle).unwrap();
    assert!(worst <= CLOSE, "{worst:e}");
}

#[test]
fn bert_of_random_weights() {
    let config = bert::Config {
        vocab_size: 1000,
        hidden_size: 96,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        intermediate_size: 200,
        max_position_embeddings: 64,
        ..bert::Config::default()
    };
    let weights = VarMap::new();
    compare_bert(&VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu), &config, &texts());
}

#[test]
fn bert_of_minilm() {
    let Some(minilm) = MiniLm::load().unwrap() else { return };
    let sentences = ["Bees find their way back by the sun, even behind cloud.", "A clever title.", ""];
    let tokens: Vec<_> = sentences.iter().map(|text| minilm.tokens(text).unwrap()).collect();
    compare_bert(&minilm.weights, &minilm.config, &tokens);
}

#[test]
fn llama_of_random_weights() {
    let config = small();
    let weights = VarMap::new();
    let weights = VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
    let candle = llama::Llama::load(weights.clone(), &config).unwrap();
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    let (mut ours, mut caches) = (Llama::load(&weights, &config).unwrap(), Llama::caches(&config, 2).unwrap());
    let mut from = 0;
    for rows in [255, 1, 1, 1] {
        let tokens: Vec<_> = (0..2 * rows as u32).map(|n| (n * n * 7 + 13 * n + from as u32) % 300).collect();
        let tokens = Tensor::from_vec(tokens, (2, rows), &Device::Cpu).unwrap();
        let expected = candle.forward(&tokens, from, &mut cache).unwrap();
        let worst = difference(&ours.forward(&tokens, &mut caches).unwrap(), &expected).unwrap();
        assert!(worst <= CLOSE, "after {} tokens: {worst:e}", from + rows);
        from += rows;
    }
}
