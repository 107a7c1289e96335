//! The repository itself: its imports and its documents.

mod docs;
mod faults;
mod imports;
mod platform;
