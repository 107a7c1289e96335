//! Dispatch on the form: token by token or in chunks.

use super::call::Call;
use super::head::Head;
use super::settings::{Form, Reach};
use super::{chunk, recurrent};
use sdpa_kernels::HeadsMut;

/// Floats of scratch per worker; `usize::MAX` if they do not fit the address space.
pub(super) fn scratch_len(call: &Call<'_>) -> usize {
    match (call.form, call.reach) {
        (Form::Recurrent, Reach::Causal) => recurrent::scratch_len(call),
        _ => chunk::scratch_len(call),
    }
}

/// Updates a head's state with its tokens and writes the results of its query heads.
#[inline(always)]
pub(super) fn run(head: &Head<'_>, state: &mut [f32], out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
    match (head.call.reach, head.call.form) {
        (Reach::Causal, Form::Recurrent) => recurrent::run(head, state, out, scratch),
        (Reach::Causal, Form::Chunked(_)) => chunk::causal(head, state, out, scratch),
        (Reach::Whole, _) => return chunk::whole(head, state, out, scratch),
    }
    head.write_padding(out, scratch);
}
