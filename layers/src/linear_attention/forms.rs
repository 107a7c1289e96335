//! Dispatch on the form: token by token or in chunks; of states in place, or of those that a cache keeps.

use super::call::Call;
use super::head::Head;
use super::settings::{Form, Reach};
use super::state_cache::Slot;
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
    match head.call.reach {
        Reach::Causal => update(head, state, out, scratch),
        Reach::Whole => return chunk::whole(head, state, out, scratch),
    }
    head.write_padding(out, scratch);
}

/// As [`run`], from the state of the first slot. The states after the last tokens are written to the slots behind it: one token a
/// slot or, if there are more tokens than slots, the first ones together.
#[inline(always)]
pub(super) fn keep(head: &Head<'_>, slots: &mut [Slot], out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
    let ends = head.len.saturating_sub(slots.len() - 2).max(1)..=head.len; // none, of no tokens
    let mut first = 0;
    for (i, end) in ends.enumerate() {
        let [from, to] = slots.get_disjoint_mut([i, i + 1]).expect("two slots");
        let to = Slot::get_mut(to).expect("reserved by the cache");
        // To read one state and write the other would be no faster.
        to.copy_from_slice(from);
        update(&head.part(first, end), to, out, scratch);
        first = end;
    }
    head.write_padding(out, scratch);
}

#[inline(always)]
fn update(head: &Head<'_>, state: &mut [f32], out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
    match head.call.form {
        Form::Recurrent => recurrent::run(head, state, out, scratch),
        Form::Chunked(_) => chunk::causal(head, state, out, scratch),
    }
}
