//! The backward pass: its gradients against the oracle, the oracle against differences, its bits, what hidden memory does
//! to it (nothing), its memory, its errors.

mod bits;
mod functions;
mod hidden;
mod oracle;
mod refusals;
mod support;
