//! Who has a place, and whose rows are computed next.

use super::text::Text;
use super::worker::Worker;

/// Rows of a text in a step: its index among the running texts, and their number.
pub(super) type Part = (usize, usize);

impl Worker {
    /// Forgets requests that nobody waits for any more.
    pub(super) fn sweep(&mut self) {
        let before = self.running.len() + self.preempted.len() + self.texts.len();
        for number in (0..self.running.len()).rev() {
            if self.running[number].ticket.is_over() {
                let text = self.running.remove(number);
                self.release(text.place);
            }
        }
        self.preempted.retain(|text| !text.ticket.is_over());
        self.texts.retain(|request| !request.ticket.is_over());
        let mut given_up = before - self.running.len() - self.preempted.len() - self.texts.len();

        let mut waiting = self.inbox.waiting();
        let before = waiting.writing.len() + waiting.texts.len();
        waiting.writing.retain(|text| !text.ticket.is_over());
        waiting.texts.retain(|request| !request.ticket.is_over());
        given_up += before - waiting.writing.len() - waiting.texts.len();
        self.texts.append(&mut waiting.texts);
        drop(waiting);
        self.inbox.metrics.given_up.add(given_up);
    }

    /// Gives places to texts, the oldest first, as long as there are places and memory.
    pub(super) fn admit(&mut self) {
        while !self.free.is_empty() {
            let lost = self.preempted.pop_front();
            let Some(text) = lost.or_else(|| self.inbox.waiting().writing.pop_front()) else { break };
            if !self.running.is_empty() && !self.has_room_for(&text) {
                self.put_back(text);
                break;
            }
            self.place(text);
        }
    }

    /// Returns true if the keys and values of a text's tokens fit beside those of the running texts.
    fn has_room_for(&self, text: &Text) -> bool {
        let bytes = |text: &Text, shared| self.forecast.beside(shared, text.tokens.len());
        let held: usize = self.running.iter().map(|text| bytes(text, text.shared)).sum();
        let shared = self.beginning(text).map_or(0, |(_, common)| common);
        held + bytes(text, shared) <= self.forecast.for_texts(&self.inbox.limits)
    }

    /// Puts a text back before all that wait.
    fn put_back(&mut self, text: Text) {
        if text.number > 0 {
            self.preempted.push_front(text);
        } else {
            self.inbox.waiting().writing.push_front(text);
        }
    }

    /// Prefix that has the most tokens in common with a text, and their number. The text's last token is not among them: its row
    /// is computed, as it says what comes next.
    fn beginning(&self, text: &Text) -> Option<(usize, usize)> {
        let tokens = &text.tokens[..text.prompt - 1];
        let common = |prefix: &[u32]| prefix.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let prefixes = self.prefixes.iter().enumerate().map(|(sequence, prefix)| (sequence, common(prefix)));
        prefixes.max_by_key(|&(_, common)| common).filter(|&(_, common)| common > 0)
    }

    /// Gives a text a place, which begins as a fork of the prefix that begins it.
    fn place(&mut self, mut text: Text) {
        let Some(place) = self.free.pop() else { return self.put_back(text) };
        text.place = place;
        if let Some((prefix, common)) = self.beginning(&text) {
            let forked = self.caches.fork(prefix, place).and_then(|()| self.caches.truncate(place, common));
            // Both sequences are there, and the prefix is as long; otherwise nothing is shared.
            if forked.is_ok() {
                (text.cached, text.shared) = (common, common);
                self.inbox.metrics.forked_tokens.add(common);
            }
        }
        if text.number == 0 {
            self.numbers += 1;
            text.number = self.numbers;
        }
        let at = self.running.partition_point(|other| other.number < text.number);
        self.running.insert(at, text);
    }

    /// Empties a place. Its memory is kept for later tokens, unless more is held than may be.
    pub(super) fn release(&mut self, place: usize) {
        // The sequence is there.
        let _ = self.caches.clear(place);
        if self.caches.bytes() > self.inbox.limits.cache_bytes {
            self.caches.shrink();
        }
        self.free.push(place);
    }

    /// Rows of the next step: one of each text that is being written, then parts of prompts, oldest first. While they do not fit
    /// in memory, the youngest text loses its place.
    pub(super) fn parts(&mut self) -> Vec<Part> {
        loop {
            let parts = self.rows();
            let mut tokens: Vec<usize> = self.running.iter().map(|text| text.cached).collect();
            parts.iter().for_each(|&(text, rows)| tokens[text] += rows);
            let texts = self.running.iter().zip(tokens);
            let bytes: usize = texts.map(|(text, tokens)| self.forecast.beside(text.shared, tokens)).sum();
            // The oldest text fits alone: that was checked when it was accepted.
            if bytes <= self.forecast.for_texts(&self.inbox.limits) || self.running.len() <= 1 {
                return parts;
            }
            self.preempt();
        }
    }

    fn rows(&self) -> Vec<Part> {
        let mut left = self.inbox.limits.rows;
        let mut parts = Vec::with_capacity(self.running.len());
        for prompts in [false, true] {
            for (number, text) in self.running.iter().enumerate().filter(|(_, text)| (text.left() > 1) == prompts) {
                let rows = text.left().min(left);
                left -= rows;
                if rows > 0 {
                    parts.push((number, rows));
                }
            }
        }
        parts.sort_unstable();
        parts
    }

    /// Takes the youngest text's place. It waits before all others, and its tokens become its prompt: its keys and values will be
    /// computed again, with the same bits. To move them elsewhere would free nothing, as it is the same memory.
    fn preempt(&mut self) {
        let Some(mut text) = self.running.pop() else { return };
        self.release(text.place);
        (text.place, text.cached, text.shared) = (usize::MAX, 0, 0);
        self.inbox.metrics.preempted.add(1);
        self.preempted.push_front(text);
    }
}
