//! The backward pass: its gradients against the oracle, the oracle against differences, rows of a few keys, its bits, what
//! hidden memory does to it (nothing), its memory, its errors.

mod bits;
mod far_rows;
mod few_keys;
mod functions;
mod hidden;
mod oracle;
mod parameters;
mod partial;
mod parts;
mod positions;
mod precision;
mod refusals;
mod support;
mod written;
