//! Limits of the server.

use std::time::Duration;

/// Limits of the server: of work in a turn, of memory, of what may wait, of time.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Texts that are written side by side: sequences of the caches, besides the prefixes.
    pub places: usize,
    /// Rows of a step: one for each text, and chunks of prompts with the rest.
    pub rows: usize,
    /// Bytes of keys and values that running texts may hold, prefixes included. If a step would need more, the youngest text
    /// loses its place, and later computes its keys and values again.
    pub cache_bytes: usize,
    /// Bytes of keys and values that all accepted texts may come to hold, waiting ones included. Beyond it a request is refused.
    pub promised_bytes: usize,
    /// Completions that may wait for a place. Beyond it a request is refused.
    pub waiting: usize,
    /// Tokens of texts that may wait to be embedded. Beyond it a request is refused.
    pub waiting_tokens: usize,
    /// Tokens of texts that are embedded in one call, between two steps; a longer text is a call alone.
    pub batch_tokens: usize,
    /// Time from a request's arrival to its end.
    pub deadline: Duration,
    /// Beginnings that prompts share. Their keys and values are computed once, at the start.
    pub prefixes: Vec<String>,
    /// Threads that compute; 0 for all.
    pub threads: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            places: 8,
            rows: 10,
            cache_bytes: 64 << 20,
            promised_bytes: 256 << 20,
            waiting: 64,
            waiting_tokens: 8192,
            batch_tokens: 32,
            deadline: Duration::from_secs(30),
            prefixes: Vec::new(),
            threads: 0,
        }
    }
}

impl Limits {
    /// Refuses limits under which nothing, or not everything, could go on.
    pub(crate) fn check(&self) -> crate::Result<()> {
        if self.places == 0 {
            return Err("places: 0, but must be at least 1".into());
        }
        if self.rows <= self.places {
            let (rows, places) = (self.rows, self.places);
            return Err(format!("rows: {rows}, but must be more than the places, which are {places}").into());
        }
        Ok(())
    }
}
