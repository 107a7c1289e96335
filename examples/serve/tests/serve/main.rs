//! The server over a real socket, with a real client: answers, overload, deadlines, clients that vanish.

#[path = "../../../../tests/support/model_folder.rs"]
mod model_folder;
#[path = "../../../../tests/support/mod.rs"]
mod support;
#[path = "../../../../tests/support/temporary_folder.rs"]
mod temporary_folder;
#[path = "../../../../layers/tests/support/tiny_bert.rs"]
mod tiny_bert;

mod clients;
mod completions;
mod embeddings;
mod overload;
mod programs;
mod refusals;
mod server;
