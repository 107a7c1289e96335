//! One request, and what became of it.

use crate::Result;
use crate::arguments::Arguments;
use crate::metrics::Metrics;
use crate::workload::{Request, Workload};
use reqwest::{Client, Response};
use serde_json::Value;
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// Time after which a server counts as silent.
const PATIENCE: Duration = Duration::from_secs(120);

/// Asks a server.
pub(crate) struct Asker {
    client: Client,
    url: String,
    pub(crate) workload: RefCell<Workload>,
}

/// Outcome of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Outcome {
    /// Letters of a completion, the time to the first of them, and to the last.
    Written {
        letters: usize,
        first: Duration,
        whole: Duration,
    },
    /// Time to the embeddings.
    Embedded {
        whole: Duration,
    },
    /// 429, or 503.
    Refused,
    /// 504, or the same in a stream.
    Late,
    Failed(String),
}

impl Asker {
    pub(crate) fn new(arguments: &Arguments) -> Self {
        let (words, prefix) = (arguments.words.clone(), arguments.prefix.clone());
        let workload = Workload::new(arguments.embeddings, words, prefix, arguments.seed);
        Self { client: Client::new(), url: arguments.url.clone(), workload: RefCell::new(workload) }
    }

    /// Makes a request, and waits for its end.
    pub(crate) async fn ask(&self, request: Request) -> Outcome {
        let answer = tokio::time::timeout(PATIENCE, async {
            match request {
                Request::Completion(body) => self.complete(&body).await,
                Request::Embeddings(body) => self.embed(&body).await,
            }
        });
        match answer.await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => Outcome::Failed(error.to_string()),
            Err(_) => Outcome::Failed("no answer".to_owned()),
        }
    }

    async fn complete(&self, body: &Value) -> Result<Outcome> {
        let start = Instant::now();
        let mut response = self.client.post(format!("{}/v1/completions", self.url)).json(body).send().await?;
        if let Some(outcome) = refused(&response) {
            return Ok(outcome);
        }
        let (mut text, mut first) = (Vec::new(), None);
        while let Some(chunk) = response.chunk().await? {
            first.get_or_insert_with(|| start.elapsed());
            text.extend_from_slice(&chunk);
        }
        let text = String::from_utf8(text)?;
        if text.contains("\"type\":\"timeout\"") {
            return Ok(Outcome::Late);
        }
        if !text.ends_with("data: [DONE]\n\n") || text.contains("\"error\"") {
            return Ok(Outcome::Failed(format!("a stream that ends so: {}", &text[text.len().saturating_sub(80)..])));
        }
        let letters = text.matches("data: ").count() - 2; // the end, and [DONE]
        Ok(Outcome::Written { letters, first: first.unwrap_or_default(), whole: start.elapsed() })
    }

    async fn embed(&self, body: &Value) -> Result<Outcome> {
        let start = Instant::now();
        let response = self.client.post(format!("{}/v1/embeddings", self.url)).json(body).send().await?;
        if let Some(outcome) = refused(&response) {
            return Ok(outcome);
        }
        response.bytes().await?;
        Ok(Outcome::Embedded { whole: start.elapsed() })
    }

    /// The server's own numbers.
    pub(crate) async fn metrics(&self) -> Result<Metrics> {
        let text = self.client.get(format!("{}/metrics", self.url)).send().await;
        let text = text.map_err(|e| format!("{}: {e}; is the server running?", self.url))?.text().await?;
        Ok(Metrics::new(&text))
    }
}

fn refused(response: &Response) -> Option<Outcome> {
    match response.status().as_u16() {
        200 => None,
        429 | 503 => Some(Outcome::Refused),
        504 => Some(Outcome::Late),
        status => Some(Outcome::Failed(format!("status {status}"))),
    }
}
