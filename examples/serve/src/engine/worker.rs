//! The engine's thread: its state, and its turns.

use super::Models;
use super::inbox::Inbox;
use super::memory::Forecast;
use super::request::{TextsRequest, Ticket};
use super::step::Buffers;
use super::text::Text;
use crate::{Decoder, Result};
use sdpa::{Exec, LayerCaches};
use sdpa_layers::{Compute, NextRows};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// State of the engine's thread. Prefix `i` is sequence `i` of the caches; the sequences behind the prefixes are places of texts.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(super) models: Arc<Models>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) caches: LayerCaches,
    pub(super) forecast: Forecast,
    pub(super) prefixes: Vec<Vec<u32>>,
    /// Texts that have a place, oldest first.
    pub(super) running: Vec<Text>,
    /// Texts that have lost theirs, oldest first.
    pub(super) preempted: VecDeque<Text>,
    /// Sequences that no text has.
    pub(super) free: Vec<usize>,
    /// Number of texts that have had a place.
    pub(super) numbers: u64,
    /// Texts to be embedded; some may be done.
    pub(super) texts: VecDeque<TextsRequest>,
    pub(super) buffers: Buffers,
}

impl Worker {
    pub(crate) fn new(models: Arc<Models>, inbox: Arc<Inbox>) -> Result<Self> {
        let (decoder, limits) = (&models.decoder, &inbox.limits);
        let prefixes = limits.prefixes.iter().map(|text| decoder.encode(text)).collect::<Result<Vec<_>>>()?;
        let mut caches = decoder.transformer().caches(prefixes.len() + limits.places)?;
        for (sequence, prefix) in prefixes.iter().enumerate() {
            compute_prefix(decoder, prefix, sequence, &mut caches).map_err(|e| format!("prefix {sequence}: {e}"))?;
        }
        caches.shrink();
        let forecast = Forecast::new(decoder.transformer().caches(1)?, caches.bytes());
        let free = (prefixes.len()..prefixes.len() + limits.places).rev().collect();
        if forecast.for_texts(limits) < forecast.bytes(1) {
            let (got, prefixes) = (limits.cache_bytes, caches.bytes());
            return Err(format!("cache_bytes: {got}, but the prefixes alone take {prefixes}").into());
        }
        inbox.metrics.cache_bytes.set(caches.bytes());
        let (running, preempted, texts) = (Vec::new(), VecDeque::new(), VecDeque::new());
        let buffers = Buffers::default();
        Ok(Self { models, inbox, caches, forecast, prefixes, running, preempted, free, numbers: 0, texts, buffers })
    }

    pub(crate) fn forecast(&self) -> Forecast {
        self.forecast.clone()
    }

    /// Works until the inbox is closed.
    pub(crate) fn run(mut self) {
        let watch = Watch::default();
        let stop = || watch.is_forsaken();
        let mut compute = Compute::new(Exec::default()).until(&stop);
        loop {
            if self.is_idle() {
                self.caches.shrink();
                self.measure();
                self.inbox.wait();
            }
            if self.inbox.waiting().closing {
                break;
            }
            self.sweep();
            self.admit();
            self.step(&watch, &mut compute);
            self.embed(&watch, &mut compute);
            self.measure();
        }
        // Texts that are left: their askers see that the channel is closed.
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty() && self.preempted.is_empty() && self.texts.is_empty()
    }

    fn measure(&self) {
        self.inbox.measure();
        self.inbox.metrics.running.set(self.running.len());
        self.inbox.metrics.cache_bytes.set(self.caches.bytes());
    }
}

/// Those who wait for the call under way, each with its share of the rows.
#[derive(Debug, Default)]
pub(super) struct Watch(Mutex<Vec<(Arc<Ticket>, usize)>>);

impl Watch {
    /// Sets the tickets of the next call, and the rows of each.
    pub(super) fn set<'t>(&self, tickets: impl Iterator<Item = (&'t Arc<Ticket>, usize)>) {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.clear();
        watched.extend(tickets.map(|(ticket, rows)| (ticket.clone(), rows)));
    }

    /// Returns true if more than half of the rows have nobody who waits for them. To compute the others once more then takes
    /// less time than to go on.
    fn is_forsaken(&self) -> bool {
        let watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let rows = |(_, rows): &(Arc<Ticket>, usize)| *rows;
        let over = watched.iter().filter(|(ticket, _)| ticket.is_over()).map(rows).sum::<usize>();
        2 * over > watched.iter().map(rows).sum()
    }
}

/// Computes keys and values of a prefix.
fn compute_prefix(decoder: &Decoder, prefix: &[u32], sequence: usize, caches: &mut LayerCaches) -> Result<()> {
    let mut compute = Compute::new(Exec::serial());
    let ends = [0, prefix.len()];
    let (mut x, mut out) = (vec![0.0; prefix.len() * decoder.width()], vec![0.0; prefix.len() * decoder.width()]);
    decoder.embed(prefix, (&ends, &[0]), &mut x, &mut compute)?;
    Ok(decoder.advance(NextRows::new(&x, &[sequence], &ends), caches, &mut out, &mut compute)?)
}
