//! The repository itself: its imports and its documents.

mod docs;
mod imports;
mod platform;
