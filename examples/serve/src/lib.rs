//! Server of embeddings and generated text: one thread computes ([`Engine`]), one thread talks HTTP ([`http`]).
//!
//! ```text
//!  clients ─ HTTP ─► http (tokio, one thread) ─ inbox, bounded ─► engine (one thread, on a rayon pool)
//!                        ▲                                         │  each turn:
//!                        │                                         │   1. forget clients that went away, deadlines that passed
//!                        │                                         │   2. give waiting requests places in the caches
//!                        └──────── tokens, rows ◄──────────────────│   3. one call: a row of each text, chunks of prompts
//!                                                                  │   4. one call: some texts to embed
//! ```
//!
//! No lock is held while something is computed, and nothing is computed while one is held.

mod decoder;
mod embedder;
#[path = "../../embed/src/encoder.rs"]
#[allow(dead_code, reason = "the program embed uses all of it")]
mod encoder;
mod engine;
#[path = "../../compare/failure.rs"]
mod failure;
pub mod http;
mod limits;
mod metrics;
#[path = "../../embed/src/panics.rs"]
mod panics;
mod sampling;

pub use decoder::{Decoder, Size};
pub use embedder::{Embedder, MODEL};
pub use engine::{Engine, Models};
pub use limits::Limits;
pub use sampling::{Choice, Sampler};

/// Result of what may be refused: by its file, its argument or its size.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
