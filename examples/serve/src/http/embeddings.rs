//! `POST /v1/embeddings`, in OpenAI's form.

use super::error::{Failure, read};
use crate::engine::Engine;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout_at;

/// Texts of one request.
const MOST_TEXTS: usize = 256;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    input: Input,
    model: Option<String>,
    #[serde(default)]
    encoding_format: Format,
    /// Taken, and of no effect.
    #[serde(rename = "user")]
    _user: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "input must be a string or an array of strings")]
enum Input {
    One(String),
    Many(Vec<String>),
}

/// Form of the numbers.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    #[default]
    Float,
    /// Little-endian f32.
    Base64,
}

pub(super) async fn answer(
    State(engine): State<Engine>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, Failure> {
    let Request { input, model, encoding_format, .. } = read(body)?;
    let embedder = engine.models().embedder.as_ref().ok_or_else(Failure::no_embedder)?;
    let input = match input {
        Input::One(text) => vec![text],
        Input::Many(texts) => texts,
    };
    if input.is_empty() || input.len() > MOST_TEXTS {
        return Err(Failure::invalid(format!("input: {} texts, but must be 1 to {MOST_TEXTS}", input.len())));
    }
    let texts = embedder.texts(&input).map_err(|e| Failure::invalid(e.to_string()))?;
    let mut embedding = engine.embed(texts).map_err(|refusal| Failure::refused(&engine, refusal))?;
    let deadline = embedding.deadline();
    let rows = timeout_at(deadline.into(), embedding.rows()).await.map_err(|_| Failure::late(&engine))?;
    let rows = rows.ok_or_else(|| Failure::given_up(&engine, deadline))?;
    let data = rows.chunks(embedder.width()).enumerate();
    let data: Vec<Value> = data
        .map(|(index, row)| json!({ "object": "embedding", "index": index, "embedding": encoding_format.write(row) }))
        .collect();
    let usage = json!({ "prompt_tokens": embedding.tokens, "total_tokens": embedding.tokens });
    let model = model.unwrap_or_else(|| "embedder".to_owned());
    Ok(Json(json!({ "object": "list", "data": data, "model": model, "usage": usage })))
}

impl Format {
    fn write(self, row: &[f32]) -> Value {
        match self {
            Self::Float => json!(row),
            Self::Base64 => {
                json!(BASE64_STANDARD.encode(row.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()))
            }
        }
    }
}
