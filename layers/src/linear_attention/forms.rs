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

/// States of one head.
pub(super) trait States: Send {
    /// Updates the state with the head's tokens and writes the results of its query heads. It is always inlined, into code for an
    /// instruction set: a function passed by name would be called.
    fn update(self, head: &Head<'_>, out: &mut HeadsMut<'_>, scratch: &mut [f32]);
}

/// A state, in place.
impl States for &mut [f32] {
    #[inline(always)]
    fn update(self, head: &Head<'_>, out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
        if head.call.reach == Reach::Whole {
            return chunk::whole(head, self, out, scratch);
        }
        update(head, self, out, scratch);
        head.write_padding(out, scratch);
    }
}

/// Slots of a cache. The first one is the current state. The states after the last tokens are written to those behind it: one token
/// a slot or, if there are more tokens than slots, the first ones together.
impl States for &mut [Slot] {
    #[inline(always)]
    fn update(self, head: &Head<'_>, out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
        let ends = head.len.saturating_sub(self.len() - 2).max(1)..=head.len; // none, of no tokens
        let mut first = 0;
        for (i, end) in ends.enumerate() {
            let [from, to] = self.get_disjoint_mut([i, i + 1]).expect("two slots");
            let to = Slot::get_mut(to).expect("reserved by the cache");
            // To read one state and write the other would be no faster.
            to.copy_from_slice(from);
            update(&head.part(first, end), to, out, scratch);
            first = end;
        }
        head.write_padding(out, scratch);
    }
}

#[inline(always)]
fn update(head: &Head<'_>, state: &mut [f32], out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
    match head.call.form {
        Form::Recurrent => recurrent::run(head, state, out, scratch),
        Form::Chunked(_) => chunk::causal(head, state, out, scratch),
    }
}
