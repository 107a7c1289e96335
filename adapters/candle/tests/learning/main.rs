//! The examples that learn: their grammar, their training and its checkpoints, and the translator in the repository.

#[allow(dead_code, reason = "of an example; no test uses all of it")]
#[path = "../../examples/write/bigram.rs"]
mod bigram;
#[allow(dead_code, reason = "of an example; no test uses all of it")]
#[path = "../../examples/translate/corpus.rs"]
mod corpus;
#[allow(dead_code, reason = "of an example; no test uses all of it")]
#[path = "../../examples/translate/evaluate.rs"]
mod evaluate;
#[allow(dead_code, reason = "of an example; no test uses all of it")]
#[path = "../../examples/translate/file.rs"]
mod file;
#[path = "../../examples/translate/grammar/mod.rs"]
mod grammar;
#[allow(dead_code, reason = "of an example; no test uses all of it")]
#[path = "../../examples/translate/model.rs"]
mod model;
#[allow(dead_code, reason = "of an example; no test uses all of it")]
#[path = "../../examples/write/text.rs"]
mod text;
#[path = "../../examples/training/mod.rs"]
mod training;
#[allow(dead_code, reason = "of an example; no test uses all of it")]
#[path = "../../../../layers/examples/translate/translator.rs"]
mod translator;
#[path = "../../../../layers/examples/translate/words.rs"]
mod words;

mod checkpoints;
mod languages;
mod shipped;
