//! The examples as programs: what they print, write and refuse; and what two of them show, as calls.

#[path = "../../../tests/support/counting.rs"]
mod counting;
#[path = "../../../examples/fixtures/mod.rs"]
mod fixtures;
#[path = "../../../tests/programs/compare/program.rs"]
mod program;
#[path = "../../../tests/support/small_examples.rs"]
mod small;
#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "../../../tests/support/temporary_folder.rs"]
mod temporary_folder;

mod dictionary;
mod small_examples;
mod steps;
mod translate;
