//! The engine: a thread that owns caches and computes, and the handle by which others ask it.

mod batch;
mod inbox;
mod memory;
mod request;
mod schedule;
mod step;
mod text;
mod worker;

use crate::decoder::Decoder;
use crate::embedder::{Embedder, Texts};
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::{Result, sampling::Sampler};
use inbox::Inbox;
use memory::Forecast;
pub(crate) use request::{Completion, Embedding, Event, Finish, Refusal, Writing};
use request::{TextsRequest, Ticket};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use text::Text;
use tokio::sync::{mpsc, oneshot};
use worker::Worker;

/// Models that the server runs.
#[derive(Debug)]
pub struct Models {
    /// Writes texts.
    pub decoder: Decoder,
    /// Embeds texts, if there is a model for it.
    pub embedder: Option<Embedder>,
}

/// Handle of the engine; clones are handles of the same.
#[derive(Debug, Clone)]
pub struct Engine {
    models: Arc<Models>,
    inbox: Arc<Inbox>,
    forecast: Forecast,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Engine {
    /// Starts the engine's threads, and computes the keys and values of the prefixes.
    ///
    /// # Errors
    /// If the limits do not fit together, a prefix does not fit in them, or there is no memory.
    pub fn start(models: Models, limits: Limits) -> Result<Self> {
        limits.check()?;
        let models = Arc::new(models);
        let inbox = Arc::new(Inbox::new(limits));
        let worker = Worker::new(models.clone(), inbox.clone())?;
        let forecast = worker.forecast();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(inbox.limits.threads).build()?;
        let thread = std::thread::Builder::new().name("engine".to_owned());
        // From within the pool, nobody has to be woken to begin a step.
        let thread = thread.spawn(move || pool.install(|| worker.run()))?;
        Ok(Self { models, inbox, forecast, thread: Arc::new(Mutex::new(Some(thread))) })
    }

    /// Models that it runs.
    pub fn models(&self) -> &Models {
        &self.models
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.inbox.metrics
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.inbox.limits
    }

    /// Returns true unless the engine has ended.
    pub(crate) fn is_alive(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Asks for the continuation of a prompt.
    pub(crate) fn complete(&self, completion: Completion) -> std::result::Result<Writing, Refusal> {
        let prompt =
            self.models.decoder.encode(&completion.prompt).map_err(|e| Refusal::Invalid(format!("prompt: {e}")))?;
        let (len, context) = (prompt.len(), self.models.decoder.context());
        let total = len.saturating_add(completion.max_tokens);
        if completion.max_tokens == 0 || total > context {
            let max_tokens = completion.max_tokens;
            return Err(Refusal::Invalid(format!(
                "max_tokens: {max_tokens}, but must be from 1 to {}: the prompt has {len} tokens, and a text at most {context}",
                context.saturating_sub(len)
            )));
        }
        let bytes = self.forecast.bytes(total);
        let most = self.forecast.for_texts(self.limits());
        if bytes > most {
            return Err(Refusal::Invalid(format!(
                "max_tokens: {total} tokens take {bytes} bytes of keys and values, but a text may have {most}"
            )));
        }
        let promise = self.inbox.bytes.promise(bytes).ok_or(Refusal::Busy("memory for more texts"))?;
        let ticket = Arc::new(Ticket::new(Instant::now() + self.limits().deadline));
        let (events, receiver) = mpsc::unbounded_channel();
        let Completion { max_tokens, temperature, seed, stop, .. } = completion;
        let text = Text {
            prompt: len,
            end: len + max_tokens,
            tokens: prompt,
            cached: 0,
            shared: 0,
            place: usize::MAX,
            number: 0,
            stop,
            sampler: Sampler::new(temperature, seed),
            events,
            ticket: ticket.clone(),
            promise,
        };
        self.inbox.push_text(text)?;
        Ok(Writing::new(receiver, ticket, len))
    }

    /// Asks for the embeddings of some texts.
    pub(crate) fn embed(&self, texts: Texts) -> std::result::Result<Embedding, Refusal> {
        let (tokens, most) = (texts.tokens.len(), self.limits().waiting_tokens);
        if tokens > most {
            return Err(Refusal::Invalid(format!("input: {tokens} tokens, but a request may have {most}")));
        }
        let promise = self.inbox.tokens.promise(tokens).ok_or(Refusal::Busy("tokens of waiting texts"))?;
        let ticket = Arc::new(Ticket::new(Instant::now() + self.limits().deadline));
        let (reply, receiver) = oneshot::channel();
        let (next, rows) = (0, Vec::new());
        let request = TextsRequest { texts, next, rows, reply, ticket: ticket.clone(), promise };
        self.inbox.push_texts(request)?;
        Ok(Embedding::new(receiver, ticket, tokens))
    }

    /// Ends the engine's thread: texts that are not done are given up.
    pub fn stop(&self) {
        self.inbox.close();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // If it panicked, it has said so on standard error.
            let _ = thread.join();
        }
        self.inbox.measure();
    }
}
