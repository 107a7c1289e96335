//! A step of the decoder: one call for rows of many texts.

use super::schedule::Part;
use super::worker::{Watch, Worker};
use sdpa::Error;
use sdpa_layers::{Compute, NextRows};
use std::time::Instant;

/// Memory of a step, kept from one to the next.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    tokens: Vec<u32>,
    /// Sequence of each part, the position of its first row, and where its rows end.
    sequences: Vec<usize>,
    starts: Vec<usize>,
    ends: Vec<usize>,
    x: Vec<f32>,
    out: Vec<f32>,
    /// Last rows of the texts that are written on.
    last: Vec<f32>,
    logits: Vec<f32>,
}

impl Worker {
    /// Computes the next rows of the running texts, and writes a token of each that has all its rows.
    pub(super) fn step(&mut self, watch: &Watch, compute: &mut Compute) {
        let parts = self.parts();
        if parts.is_empty() {
            return;
        }
        watch.set(parts.iter().map(|&(text, rows)| (&self.running[text].ticket, rows)));
        let start = Instant::now();
        match self.advance(&parts, compute) {
            Ok(()) => {
                self.inbox.metrics.step.add(start.elapsed());
                self.write(&parts);
            }
            // The next sweep finds those who have gone.
            Err(Error::Stopped) => self.inbox.metrics.stopped.add(1),
            Err(error) => self.fail(&parts, &error),
        }
    }

    /// Runs the decoder on these parts. Afterwards the logits are those of the texts that are written on, in order.
    fn advance(&mut self, parts: &[Part], compute: &mut Compute) -> Result<(), Error> {
        let (decoder, buffers) = (&self.models.decoder, &mut self.buffers);
        buffers.tokens.clear();
        for list in [&mut buffers.sequences, &mut buffers.starts, &mut buffers.ends] {
            list.clear();
        }
        buffers.ends.push(0);
        for &(text, rows) in parts {
            let text = &self.running[text];
            buffers.tokens.extend(&text.tokens[text.cached..text.cached + rows]);
            buffers.sequences.push(text.place);
            buffers.starts.push(text.cached);
            buffers.ends.push(buffers.tokens.len());
        }
        let width = decoder.width();
        for rows in [&mut buffers.x, &mut buffers.out] {
            rows.resize(buffers.tokens.len() * width, 0.0);
        }
        decoder.embed(&buffers.tokens, (&buffers.ends, &buffers.starts), &mut buffers.x, compute)?;
        let next = NextRows::new(&buffers.x, &buffers.sequences, &buffers.ends);
        decoder.advance(next, &mut self.caches, &mut buffers.out, compute)?;

        buffers.last.clear();
        for (&(text, rows), end) in parts.iter().zip(&buffers.ends[1..]) {
            if self.running[text].left() == rows {
                buffers.last.extend_from_slice(&buffers.out[(end - 1) * width..end * width]);
            }
        }
        buffers.logits.resize(buffers.last.len() / width * decoder.letters(), 0.0);
        if buffers.last.is_empty() { Ok(()) } else { decoder.logits(&buffers.last, &mut buffers.logits, compute) }
    }

    /// Takes note of the rows, chooses tokens, and lets go of the texts that have ended.
    fn write(&mut self, parts: &[Part]) {
        let metrics = &self.inbox.metrics;
        let mut logits = self.buffers.logits.chunks(self.models.decoder.letters());
        let mut ended = Vec::new();
        for &(number, rows) in parts {
            let text = &mut self.running[number];
            let prompt = text.prompt.saturating_sub(text.cached).min(rows);
            metrics.prompt_tokens.add(prompt);
            let whole = text.left() == rows;
            text.cached += rows;
            if let Some(logits) = whole.then(|| logits.next()).flatten() {
                metrics.written_tokens.add(1);
                ended.extend(text.write(logits).map(|finish| (number, finish)));
            }
        }
        metrics.finished.add(ended.len());
        for (number, finish) in ended.into_iter().rev() {
            let text = self.running.remove(number);
            self.release(text.place);
            text.finish(finish);
        }
    }

    /// Gives up the texts of a call that failed, for want of memory, say. Their askers see that no more comes.
    fn fail(&mut self, parts: &[Part], error: &Error) {
        eprintln!("serve: a step of {} texts: {error}", parts.len());
        self.inbox.metrics.failed.add(parts.len());
        for &(number, _) in parts.iter().rev() {
            let text = self.running.remove(number);
            self.release(text.place);
        }
        self.caches.shrink();
    }
}
