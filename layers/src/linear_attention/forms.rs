//! Dispatch on the form: token by token or in chunks; in place, or keeping the states of the last tokens.

use super::call::Call;
use super::head::Head;
use super::settings::{Form, Reach};
use super::state_cache::{Ring, Slot};
use super::{chunk, recurrent};
use sdpa_kernels::HeadsMut;

/// Floats of scratch per worker; `usize::MAX` if they do not fit the address space.
pub(super) fn scratch_len(call: &Call<'_>) -> usize {
    match (call.form, call.reach) {
        (Form::Recurrent, Reach::Causal) => recurrent::scratch_len(call),
        _ => chunk::scratch_len(call),
    }
}

/// Floats of scratch per worker of a call that keeps states.
pub(super) fn scratch_to_keep(call: &Call<'_>) -> usize {
    scratch_len(call).max(recurrent::scratch_len(call))
}

/// Updates a head's state with its tokens and writes the results of its query heads.
#[inline(always)]
pub(super) fn run(head: &Head<'_>, state: &mut [f32], out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
    if head.call.reach == Reach::Whole {
        return chunk::whole(head, state, out, scratch);
    }
    match head.call.form {
        Form::Recurrent => recurrent::run(head, 0..head.len, state, out, scratch),
        Form::Chunked(_) => chunk::causal(head, head.len, state, out, scratch),
    }
    head.write_padding(out, scratch);
}

/// Updates a head's state with its tokens, as [`run`], and writes the states after the last ones to the slots behind the current
/// one: a slot for each token, or if there are more tokens than slots, the first slot for all the first ones.
#[inline(always)]
pub(super) fn keep(head: &Head<'_>, ring: Ring<'_>, out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
    let Ring { slots, mut at } = ring;
    let (mut done, mut end) = (0, head.len.saturating_sub(slots.len() - 2).max(1));
    while done < head.len {
        let next = (at + 1) % slots.len();
        let [from, to] = slots.get_disjoint_mut([at, next]).expect("two slots");
        let to = Slot::get_mut(to).expect("reserved by the cache");
        // To write the next state while the current one is read is as fast, and needs a second loop.
        to.copy_from_slice(from);
        match head.call.form {
            Form::Chunked(_) if end - done > 1 => chunk::causal(head, end, to, out, scratch),
            _ => recurrent::run(head, done..end, to, out, scratch),
        }
        (at, done, end) = (next, end, end + 1);
    }
    head.write_padding(out, scratch);
}
