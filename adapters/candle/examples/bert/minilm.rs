//! all-MiniLM-L6-v2 from its folder, and texts as it takes them.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::Config;
use std::error::Error;
use std::path::Path;
use tokenizers::Tokenizer;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Folder in which `.ci/fetch-minilm` puts the model.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/models/all-MiniLM-L6-v2");

pub(crate) struct MiniLm {
    pub(crate) config: Config,
    pub(crate) weights: VarBuilder<'static>,
    tokenizer: Tokenizer,
}

/// Padded texts, `[texts, longest]` each.
pub(crate) struct Batch {
    pub(crate) ids: Tensor,
    pub(crate) types: Tensor,
    /// 1 for tokens, 0 for padding.
    pub(crate) mask: Tensor,
}

impl MiniLm {
    /// Returns `None`, and says so, if the model is not there.
    pub(crate) fn load() -> Result<Option<Self>> {
        let folder = Path::new(FOLDER);
        if !folder.exists() {
            eprintln!("skipped: no model in {FOLDER}; .ci/fetch-minilm fetches it");
            return Ok(None);
        }
        let mut tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).map_err(|e| e.to_string())?;
        tokenizer.with_padding(None).with_truncation(None).map_err(|e| e.to_string())?;
        let weights = std::fs::read(folder.join("model.safetensors"))?;
        Ok(Some(Self {
            config: serde_json::from_slice(&std::fs::read(folder.join("config.json"))?)?,
            weights: VarBuilder::from_buffered_safetensors(weights, DType::F32, &Device::Cpu)?,
            tokenizer,
        }))
    }

    /// Tokens of a text, `[CLS]` and `[SEP]` included.
    pub(crate) fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, true).map_err(|e| e.to_string())?.get_ids().to_vec())
    }
}

impl Batch {
    pub(crate) fn new(texts: &[Vec<u32>]) -> Result<Self> {
        let longest = texts.iter().map(Vec::len).max().unwrap_or_default();
        let padded = |number: fn(u32) -> u32| {
            let rows =
                texts.iter().flat_map(|text| text.iter().map(move |&id| number(id)).chain(padding(text, longest)));
            Tensor::from_iter(rows, &Device::Cpu)?.reshape((texts.len(), longest))
        };
        let ids = padded(|id| id)?;
        Ok(Self { types: ids.zeros_like()?, mask: padded(|_| 1)?, ids })
    }
}

fn padding(text: &[u32], longest: usize) -> impl Iterator<Item = u32> + use<> {
    std::iter::repeat_n(0, longest - text.len())
}
