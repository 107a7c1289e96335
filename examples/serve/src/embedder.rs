//! The sentence encoder: that of `examples/embed`.

use crate::Result;
use crate::encoder::{self, Encoder, Tokens};
use sdpa::Error;
use sdpa_layers::{Compute, ModelError};
use std::path::Path;

/// Folder of the usual model, from the repository's root.
pub const MODEL: &str = encoder::MODEL;

/// Texts to embeddings, by a model of the BERT family.
#[derive(Debug)]
pub struct Embedder(Encoder);

/// Texts of one request, as tokens laid end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Texts {
    /// Tokens of all texts.
    pub(crate) tokens: Vec<u32>,
    /// Text `i` has tokens `ends[i]..ends[i + 1]`.
    pub(crate) ends: Vec<usize>,
}

impl Texts {
    /// Number of texts.
    pub(crate) fn count(&self) -> usize {
        self.ends.len() - 1
    }
}

impl Embedder {
    /// Reads a folder with `config.json`, `tokenizer.json` and `model.safetensors`.
    ///
    /// # Errors
    /// If there is no model, or not one of this kind.
    pub fn load(folder: &Path) -> Result<Self> {
        Ok(Self(Encoder::load(folder, None)?))
    }

    /// Tokens of some texts.
    ///
    /// # Errors
    /// If a text has more tokens than the model has positions.
    pub fn texts(&self, texts: &[String]) -> Result<Texts> {
        let Tokens { tokens, ends, cut } = self.0.tokens(texts)?;
        match cut.first() {
            None => Ok(Texts { tokens, ends }),
            Some(text) => Err(format!("input[{text}]: more than {} tokens", self.0.max_tokens()).into()),
        }
    }

    /// Length of an embedding.
    pub fn width(&self) -> usize {
        self.0.width()
    }

    /// Embeds texts laid end to end: writes a row of length 1 for each, `[texts, width]`.
    ///
    /// # Errors
    /// [`Error::Stopped`] if `compute` says so.
    pub(crate) fn embed(
        &self,
        (tokens, ends): (&[u32], &[usize]),
        rows: &mut [f32],
        compute: &mut Compute,
    ) -> Result<()> {
        match self.0.embed_tokens((tokens, ends), rows, compute) {
            Err(ModelError::Layer(Error::Stopped)) => Err(Error::Stopped.into()),
            done => Ok(done?),
        }
    }

    /// Embeds one text alone.
    ///
    /// # Errors
    /// As [`Self::texts`].
    pub fn embed_alone(&self, text: &str) -> Result<Vec<f32>> {
        let (Texts { tokens, ends }, mut row) = (self.texts(&[text.to_owned()])?, vec![0.0; self.width()]);
        self.embed((&tokens, &ends), &mut row, &mut Compute::default())?;
        Ok(row)
    }
}
