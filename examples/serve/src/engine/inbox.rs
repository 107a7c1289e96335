//! Requests that wait for the engine, and limits of what may wait.

use super::request::{Refusal, TextsRequest};
use super::text::Text;
use crate::limits::Limits;
use crate::metrics::Metrics;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Requests that wait, shared by the engine and those who ask it.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    /// Bytes of keys and values that accepted texts may come to hold.
    pub(crate) bytes: Arc<Budget>,
    /// Tokens of accepted texts that are not embedded yet.
    pub(crate) tokens: Arc<Budget>,
    waiting: Mutex<Waiting>,
    arrival: Condvar,
}

/// Requests in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    pub(crate) writing: VecDeque<Text>,
    pub(crate) texts: VecDeque<TextsRequest>,
    pub(crate) closing: bool,
}

impl Inbox {
    pub(crate) fn new(limits: Limits) -> Self {
        let [bytes, tokens] = [limits.promised_bytes, limits.waiting_tokens].map(|most| Arc::new(Budget::new(most)));
        let (waiting, metrics) = (Mutex::default(), Metrics::default());
        Self { limits, metrics, bytes, tokens, waiting, arrival: Condvar::new() }
    }

    /// What waits. The lock is held for as long as a list takes to change, never while something is computed.
    pub(crate) fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a text to be written.
    pub(crate) fn push_text(&self, text: Text) -> Result<(), Refusal> {
        self.push(|waiting, limits| {
            if waiting.writing.len() >= limits.waiting {
                return Err(Refusal::Busy("places for waiting texts"));
            }
            waiting.writing.push_back(text);
            Ok(())
        })
    }

    /// Adds texts to be embedded.
    pub(crate) fn push_texts(&self, request: TextsRequest) -> Result<(), Refusal> {
        self.push(|waiting, _| {
            waiting.texts.push_back(request);
            Ok(())
        })
    }

    fn push(&self, add: impl FnOnce(&mut Waiting, &Limits) -> Result<(), Refusal>) -> Result<(), Refusal> {
        let mut waiting = self.waiting();
        if waiting.closing {
            return Err(Refusal::Closing);
        }
        let added = add(&mut waiting, &self.limits);
        if added.is_ok() {
            self.metrics.accepted.add(1);
            self.arrival.notify_one();
        }
        added
    }

    /// Waits until there is something to do, or the end has come.
    pub(crate) fn wait(&self) {
        let idle = |waiting: &mut Waiting| waiting.writing.is_empty() && waiting.texts.is_empty() && !waiting.closing;
        drop(self.arrival.wait_while(self.waiting(), idle).unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes no more requests; the engine ends.
    pub(crate) fn close(&self) {
        self.waiting().closing = true;
        self.arrival.notify_one();
    }

    /// Sets the gauges of what waits.
    pub(crate) fn measure(&self) {
        self.metrics.waiting.set(self.waiting().writing.len());
        self.metrics.waiting_tokens.set(self.tokens.used());
        self.metrics.promised_bytes.set(self.bytes.used());
    }
}

/// An amount that requests share, none of them more than is left.
#[derive(Debug)]
pub(crate) struct Budget {
    used: AtomicUsize,
    most: usize,
}

impl Budget {
    fn new(most: usize) -> Self {
        Self { used: AtomicUsize::new(0), most }
    }

    fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Promises an amount, if there is as much left.
    pub(crate) fn promise(self: &Arc<Self>, amount: usize) -> Option<Promise> {
        let more = |used: usize| used.checked_add(amount).filter(|&used| used <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Promise { budget: self.clone(), amount })
    }
}

/// Part of a budget. It is free again when this is dropped, however the request has ended.
#[derive(Debug)]
pub(crate) struct Promise {
    budget: Arc<Budget>,
    amount: usize,
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.amount, Ordering::Relaxed);
    }
}
