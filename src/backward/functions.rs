//! Functions of the caller in a backward call.

use crate::error::{Error, same};
use sdpa_kernels::{Call, Gradients, MaskMod, Mods, Position, ScoreMod, WeightMod};

/// Refusal of a score function without a derivative.
pub(crate) const NO_DERIVATIVE: Error = Error::Needs {
    argument: "score function",
    needs: "a derivative in a backward call: ScoreMod::derivative, or WithDerivative",
};

/// Refusal of a weight function.
pub(crate) const WEIGHT_FUNCTION: Error =
    Error::Needs { argument: "weight function", needs: "a forward call: it has no derivative" };

/// Checks that the functions fit the call and its gradients, and have what the backward pass needs.
pub(crate) fn check<S: ScoreMod, M: MaskMod, P: WeightMod>(
    call: &Call<'_>,
    gradients: &Gradients<'_>,
    mods: &Mods<S, M, P>,
) -> Result<(), Error> {
    if mods.weight.is_given() {
        return Err(WEIGHT_FUNCTION);
    }
    call.check_mask(&mods.mask)?;
    if let Some(gradient) = &gradients.parameters {
        let of = "the score function (ScoreMod::parameters)";
        same("dparameters", "length", gradient.len(), mods.score.parameters(), of)?;
    }
    match first_pair(call).filter(|_| mods.score.is_given()) {
        Some(at) => mods.score.derivative(0.0, at).map(|_| ()).ok_or(NO_DERIVATIVE),
        None => Ok(()),
    }
}

/// Returns the first pair of a row and a key of a call, if there is one.
fn first_pair(call: &Call<'_>) -> Option<Position> {
    let heads = call.q.shape()[1];
    let sequences = if heads == 0 { 0 } else { call.sequence_count() };
    (0..sequences).find_map(|batch| {
        let sequence = call.sequence(batch);
        let (position, distance) = (sequence.offset, sequence.offset);
        let there = sequence.q_len > 0 && sequence.kv_len > 0;
        there.then_some(Position { batch, head: 0, row: 0, key: 0, position, distance })
    })
}
