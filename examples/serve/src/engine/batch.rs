//! A batch of embeddings: one call for texts of many requests, laid end to end.

use super::request::TextsRequest;
use super::worker::{Watch, Worker};
use sdpa::Error;
use sdpa_layers::Compute;
use std::time::Instant;

impl Worker {
    /// Embeds the next texts, up to the tokens of a batch, at least one.
    pub(super) fn embed(&mut self, watch: &Watch, compute: &mut Compute) {
        let Some(embedder) = &self.models.embedder else { return };
        let (mut tokens, mut ends) = (Vec::new(), vec![0]);
        // Requests of the batch: the number of texts of each, and of tokens.
        let mut parts: Vec<[usize; 2]> = Vec::new();
        'requests: for request in &self.texts {
            parts.push([0, 0]);
            for text in request.texts.ends[request.next..].windows(2) {
                let len = text[1] - text[0];
                if !tokens.is_empty() && tokens.len() + len > self.inbox.limits.batch_tokens {
                    break 'requests;
                }
                tokens.extend_from_slice(&request.texts.tokens[text[0]..text[1]]);
                ends.push(tokens.len());
                let part = parts.last_mut().expect("one was pushed");
                *part = [part[0] + 1, part[1] + len];
            }
        }
        parts.retain(|&[texts, _]| texts > 0); // all but the last have some
        if parts.is_empty() {
            return;
        }
        watch.set(self.texts.iter().zip(&parts).map(|(request, &[_, tokens])| (&request.ticket, tokens)));
        let mut rows = vec![0.0; (ends.len() - 1) * embedder.width()];
        let start = Instant::now();
        let done = embedder.embed((&tokens, &ends), &mut rows, compute);
        let metrics = &self.inbox.metrics;
        match done {
            Ok(()) => {
                metrics.batch.add(start.elapsed());
                metrics.embedded_tokens.add(tokens.len());
                self.hand_out(&parts, &rows);
            }
            Err(error) if error.downcast_ref() == Some(&Error::Stopped) => metrics.stopped.add(1),
            Err(error) => {
                eprintln!("serve: a batch of {} texts: {error}", ends.len() - 1);
                metrics.failed.add(parts.len());
                self.texts.drain(..parts.len());
            }
        }
    }

    /// Hands rows to the requests of a batch, and answers those that are done.
    fn hand_out(&mut self, parts: &[[usize; 2]], rows: &[f32]) {
        let width = self.models.embedder.as_ref().map_or(0, |embedder| embedder.width());
        let mut rows = rows;
        for (request, &[texts, _]) in self.texts.iter_mut().zip(parts) {
            let (own, others) = rows.split_at(texts * width);
            rows = others;
            request.rows.extend_from_slice(own);
            request.next += texts;
        }
        while self.texts.front().is_some_and(|request| request.next == request.texts.count()) {
            let Some(TextsRequest { rows, reply, promise, .. }) = self.texts.pop_front() else { break };
            self.inbox.metrics.finished.add(1);
            // Free before the asker knows, who may ask again at once, or have gone meanwhile.
            drop(promise);
            let _ = reply.send(rows);
        }
    }
}
