//! The examples as programs: what they print, write and refuse; and the pictures that they draw.

#[path = "../conformance/cases.rs"]
mod cases;
#[path = "compare/program.rs"]
mod program;
#[path = "../support/small_examples.rs"]
mod small;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/temporary_folder.rs"]
mod temporary_folder;

mod compare_backward;
mod compare_options;
mod compare_refusals;
mod compare_sweep;
mod compare_types;
mod drawing;
mod select;
mod small_examples;
