//! Names of tensors.

/// Names of the embedding tables in model files.
pub(super) const WORDS: &str = "embeddings.word_embeddings.weight";
pub(super) const POSITIONS: &str = "embeddings.position_embeddings.weight";
pub(super) const TYPES: &str = "embeddings.token_type_embeddings.weight";
