//! Every way a call can be wrong: the error, its words, and outputs as they were.

mod options;
mod sizes;
mod views;
