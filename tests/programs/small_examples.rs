//! The small examples on attention alone.

use crate::small;

const DRAWING: [&str; 1] = ["select"];
const PRINTING: [&str; 2] = ["functions", "ndarray_heads"];

#[test]
fn unknown_words_are_refused() {
    small::refuse_unknown_words(&DRAWING, &PRINTING);
}

#[test]
fn help_is_printed() {
    small::print_help(&DRAWING, &PRINTING);
}
