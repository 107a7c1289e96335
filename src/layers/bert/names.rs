//! Names of tensors.

/// Tables, as files name them.
pub(super) const WORDS: &str = "embeddings.word_embeddings.weight";
pub(super) const POSITIONS: &str = "embeddings.position_embeddings.weight";
pub(super) const TYPES: &str = "embeddings.token_type_embeddings.weight";
