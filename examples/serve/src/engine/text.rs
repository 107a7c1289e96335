//! A text that is being written.

use super::inbox::Promise;
use super::request::{Event, Finish, Ticket};
use crate::sampling::Sampler;
use std::sync::Arc;
use tokio::sync::mpsc;

/// A text that is being written: it waits, has a place in the caches, or has lost it and waits again. Its tokens say all that it
/// needs to go on.
#[derive(Debug)]
pub(crate) struct Text {
    /// The prompt, and what was written.
    pub(crate) tokens: Vec<u32>,
    /// Number of tokens of the prompt.
    pub(crate) prompt: usize,
    /// Number of tokens at which it ends.
    pub(crate) end: usize,
    /// Number of tokens whose keys and values are in the caches.
    pub(crate) cached: usize,
    /// Number of its first tokens that are those of the prefix that it is forked from.
    pub(crate) shared: usize,
    /// Sequence of the caches, while it has one.
    pub(crate) place: usize,
    /// Number in the order in which texts first got a place.
    pub(crate) number: u64,
    pub(crate) stop: Option<u32>,
    pub(crate) sampler: Sampler,
    pub(crate) events: mpsc::UnboundedSender<Event>,
    pub(crate) ticket: Arc<Ticket>,
    pub(crate) promise: Promise,
}

impl Text {
    /// Number of tokens whose keys and values are still to be computed; at least one.
    pub(crate) fn left(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// Chooses the next token by the logits that follow the last one, and sends it. Returns the reason if the text has ended.
    pub(crate) fn write(&mut self, logits: &[f32]) -> Option<Finish> {
        let choice = self.sampler.choose(logits);
        if self.stop == Some(choice.token) {
            return Some(Finish::Stop);
        }
        self.tokens.push(choice.token);
        // Nobody may be there to hear it: then the ticket says so.
        let _ = self.events.send(Event::Token(choice));
        (self.tokens.len() == self.end).then_some(Finish::Length)
    }

    /// Says that the text has ended. What was promised to it is free before its asker knows, who may ask again at once.
    pub(crate) fn finish(self, finish: Finish) {
        let Self { events, promise, .. } = self;
        drop(promise);
        let _ = events.send(Event::End(finish));
    }
}
