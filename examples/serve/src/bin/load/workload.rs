//! Requests at random: prompts of lines, texts of words, and the time between them.

use serde_json::{Value, json};
use std::time::Duration;

/// Words that the trained decoder knows.
const WORDS: [&str; 24] = [
    "the",
    "happy",
    "girls",
    "love",
    "to",
    "sing",
    "in",
    "my",
    "old",
    "garden",
    "we",
    "want",
    "red",
    "umbrellas",
    "she",
    "waits",
    "for",
    "her",
    "friends",
    "at",
    "small",
    "hotel",
    "today",
    "doctor",
];
/// Longest of what is asked for.
const MOST_PROMPT_WORDS: u64 = 40;
const MOST_LETTERS: u64 = 96;
const LEAST_LETTERS: u64 = 16;
const MOST_TEXTS: u64 = 4;
const MOST_TEXT_WORDS: u64 = 24;

/// A request.
pub(crate) enum Request {
    Completion(Value),
    Embeddings(Value),
}

/// Requests of a seed.
pub(crate) struct Workload {
    pub(crate) embeddings: f64,
    pub(crate) words: Option<Vec<String>>,
    pub(crate) prefix: String,
    state: u64,
}

impl Workload {
    pub(crate) fn new(embeddings: f64, words: Option<Vec<String>>, prefix: String, seed: u64) -> Self {
        Self { embeddings, words, prefix, state: seed }
    }

    /// Number below `n`.
    fn below(&mut self, n: u64) -> u64 {
        (self.unit() * n as f64) as u64
    }

    /// Number from 0 to 1, 1 excluded (SplitMix64; Steele, Lea, Flood 2014).
    fn unit(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 * 2f64.powi(-53)
    }

    /// Time to the next of arrivals that do not know of each other (a Poisson process).
    pub(crate) fn pause(&mut self, per_second: f64) -> Duration {
        Duration::from_secs_f64(-(1.0 - self.unit()).ln() / per_second)
    }

    pub(crate) fn next(&mut self) -> Request {
        if self.unit() < self.embeddings {
            let texts = 1 + self.below(MOST_TEXTS);
            let words = self.words.take().unwrap_or_else(|| WORDS.map(str::to_owned).to_vec());
            let texts: Vec<String> = (0..texts).map(|_| self.text(&words, MOST_TEXT_WORDS)).collect();
            self.words = Some(words);
            return Request::Embeddings(json!({ "input": texts, "encoding_format": "base64" }));
        }
        let text = self.text(&WORDS, MOST_PROMPT_WORDS);
        let prompt = format!("{}{text} ", self.prefix);
        let letters = LEAST_LETTERS + self.below(1 + MOST_LETTERS - LEAST_LETTERS);
        let seed = self.below(1 << 32);
        Request::Completion(
            json!({ "prompt": prompt, "max_tokens": letters, "temperature": 0.8, "seed": seed, "stream": true }),
        )
    }

    fn text(&mut self, words: &[impl AsRef<str>], most: u64) -> String {
        let count = 1 + self.below(most.min(if words.len() < 8 { 8 } else { most }));
        let words = (0..count).map(|_| words[self.below(words.len() as u64) as usize].as_ref());
        words.collect::<Vec<_>>().join(" ")
    }
}
