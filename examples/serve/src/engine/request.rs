//! Requests, and what their askers hold.

use super::inbox::Promise;
use crate::embedder::Texts;
use crate::sampling::Choice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// A prompt to be continued.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Completion {
    pub(crate) prompt: String,
    pub(crate) max_tokens: usize,
    /// 0 for the most probable letter.
    pub(crate) temperature: f32,
    pub(crate) seed: u64,
    /// Token at which the text ends; it is not written.
    pub(crate) stop: Option<u32>,
}

/// Reason why a request is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It can never be served.
    Invalid(String),
    /// Not now: this is exhausted.
    Busy(&'static str),
    /// The server is going down.
    Closing,
}

/// Part of an answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Event {
    Token(Choice),
    End(Finish),
}

/// Reason why a text has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// It has as many tokens as were asked for.
    Length,
    /// Its stop token came.
    Stop,
}

impl Finish {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop => "stop",
        }
    }
}

/// What the engine knows of an asker.
#[derive(Debug)]
pub(crate) struct Ticket {
    gone: AtomicBool,
    deadline: Instant,
}

impl Ticket {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { gone: AtomicBool::new(false), deadline }
    }

    /// Returns true if nobody waits for the answer any more.
    pub(crate) fn is_over(&self) -> bool {
        self.gone.load(Ordering::Relaxed) || Instant::now() >= self.deadline
    }
}

/// An asker's side of a ticket. When it is dropped, as a connection's task is when its client goes away, the request is given up.
#[derive(Debug)]
struct Presence(Arc<Ticket>);

impl Drop for Presence {
    fn drop(&mut self) {
        self.0.gone.store(true, Ordering::Relaxed);
    }
}

/// A text that is being written. Dropping it gives the request up.
#[derive(Debug)]
pub(crate) struct Writing {
    events: mpsc::UnboundedReceiver<Event>,
    presence: Presence,
    pub(crate) prompt_tokens: usize,
}

impl Writing {
    pub(crate) fn new(events: mpsc::UnboundedReceiver<Event>, ticket: Arc<Ticket>, prompt_tokens: usize) -> Self {
        Self { events, presence: Presence(ticket), prompt_tokens }
    }

    /// Next part of the answer; `None` if the engine has failed or ended.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.presence.0.deadline
    }
}

/// Embeddings that are being computed. Dropping it gives the request up.
#[derive(Debug)]
pub(crate) struct Embedding {
    rows: oneshot::Receiver<Vec<f32>>,
    presence: Presence,
    pub(crate) tokens: usize,
}

impl Embedding {
    pub(crate) fn new(rows: oneshot::Receiver<Vec<f32>>, ticket: Arc<Ticket>, tokens: usize) -> Self {
        Self { rows, presence: Presence(ticket), tokens }
    }

    /// Rows of all texts; `None` if the engine has failed or ended.
    pub(crate) async fn rows(&mut self) -> Option<Vec<f32>> {
        (&mut self.rows).await.ok()
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.presence.0.deadline
    }
}

/// Texts to be embedded, in one batch or several.
#[derive(Debug)]
pub(crate) struct TextsRequest {
    pub(crate) texts: Texts,
    /// Number of texts that are done.
    pub(crate) next: usize,
    pub(crate) rows: Vec<f32>,
    pub(crate) reply: oneshot::Sender<Vec<f32>>,
    pub(crate) ticket: Arc<Ticket>,
    pub(crate) promise: Promise,
}
