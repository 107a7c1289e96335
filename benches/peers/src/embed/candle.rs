//! candle-transformers' BERT.

use super::{Batch, Texts};
use crate::failure::Result;
use crate::peer::Peer;
use candle_core::{D, DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::{BertModel, Config};
use std::fs;

/// The model, used in one of three ways.
pub(super) struct Bert {
    name: &'static str,
    ready: Option<Ready>,
    /// A row for each text.
    answer: Vec<f32>,
}

struct Ready {
    model: BertModel,
    dtype: DType,
    tokens: Vec<Vec<u32>>,
    batches: Vec<Batch>,
}

impl Bert {
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, ready: None, answer: Vec::new() }
    }
}

impl Ready {
    /// Embeddings of some texts, `[texts, hidden]`.
    fn embed(&self, batch: &Batch) -> candle_core::Result<Tensor> {
        let texts = || batch.iter().map(|&text| &self.tokens[text]);
        let longest = texts().map(Vec::len).max().unwrap_or(0);
        let shape = (batch.len(), longest);
        // Token 0 is padding.
        let padded = texts().flat_map(|text| text.iter().copied().chain(std::iter::repeat(0)).take(longest));
        let ids = Tensor::from_vec(padded.collect::<Vec<u32>>(), shape, &Device::Cpu)?;
        let types = ids.zeros_like()?;
        if texts().all(|text| text.len() == longest) {
            let mean = self.model.forward(&ids, &types, None)?.mean(1)?;
            return normalised(&mean);
        }
        let mask = texts().flat_map(|text| (0..longest).map(|j| u32::from(j < text.len())));
        let mask = Tensor::from_vec(mask.collect::<Vec<u32>>(), shape, &Device::Cpu)?;
        let hidden = self.model.forward(&ids, &types, Some(&mask))?;
        // A product with a row of zeros and ones, instead of a pass over the hidden states and a sum.
        let mask = mask.to_dtype(self.dtype)?.unsqueeze(1)?;
        let sums = mask.matmul(&hidden)?.squeeze(1)?;
        normalised(&sums.broadcast_div(&mask.sum(D::Minus1)?)?)
    }
}

fn normalised(rows: &Tensor) -> candle_core::Result<Tensor> {
    rows.broadcast_div(&rows.sqr()?.sum_keepdim(1)?.sqrt()?)
}

impl Peer<Texts> for Bert {
    fn name(&self) -> &'static str {
        self.name
    }

    fn supports(&self, _: &Texts) -> std::result::Result<(), String> {
        Ok(())
    }

    fn prepare(&mut self, texts: &Texts) -> Result<String> {
        let dtype = if texts.exact { DType::F64 } else { DType::F32 };
        let config: Config = serde_json::from_slice(&fs::read(texts.model.join("config.json"))?)?;
        let weights = fs::read(texts.model.join("model.safetensors"))?;
        let weights = VarBuilder::from_buffered_safetensors(weights, dtype, &Device::Cpu)?;
        let (batches, how) = match self.name {
            "candle-padded" => (&texts.batches.padded, "all texts in one batch, padded"),
            "candle-sorted" => (&texts.batches.sorted, "eight texts at a time, sorted by length, padded"),
            _ => (&texts.batches.single, "one text at a time"),
        };
        let model = BertModel::load(weights, &config)?;
        self.ready = Some(Ready { model, dtype, tokens: texts.tokens.clone(), batches: batches.clone() });
        Ok(format!("candle-transformers BertModel, {how}"))
    }

    fn run(&mut self) -> Result<()> {
        let ready = self.ready.as_ref().ok_or("not prepared")?;
        for batch in &ready.batches {
            let rows = ready.embed(batch)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
            for (row, &text) in rows.iter().zip(batch) {
                self.answer.resize(ready.tokens.len() * row.len(), 0.0);
                self.answer[text * row.len()..][..row.len()].copy_from_slice(row);
            }
        }
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.answer.clone())
    }
}
