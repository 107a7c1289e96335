//! Faults of backward passes.

use crate::faults::{DIM, Fault, GUILTY, Kind, fault};
use sdpa::{Alignment, Attention, Gradients, Inputs, Outputs, Saved, View, ViewMut};
use sdpa_mpi::{BackwardShare, Error, Ranks, Share};

/// Rows and keys of each rank.
const N: usize = 40;

pub(crate) const FAULTS: [Fault; 13] = [
    fault("backward scale", "scale: rank 1 has 2, but rank 0 has 1/√head_dim", Kind::Said),
    fault("backward window", "window left: rank 1 has 3, but rank 0 has none", Kind::Said),
    fault("backward call", "call: rank 1 has forward pass, but rank 0 has backward pass", Kind::Said),
    fault("backward gap", "keys 40..41: no rank has them", Kind::Said),
    fault("backward queries", "rank 1 refused its part of the call: dq: rows is 39, but q has 40", Kind::Own),
    fault("backward sum", "rank 1 refused its part of the call: dscale: needs one stretch with all rows", Kind::Own),
    fault(
        "backward parameters",
        "rank 1 refused its part of the call: dparameters: needs one call with all keys",
        Kind::Own,
    ),
    fault(
        "backward bias",
        "rank 1 refused its part of the call: dbias: needs a bias with a row for each row, or one stretch with all rows",
        Kind::Own,
    ),
    fault(
        "backward positions",
        "rank 1 refused its part of the call: key positions: needs all keys at once",
        Kind::Own,
    ),
    fault("backward keys", "rank 1 refused its part of the call: dk: rows is 39, but k has 40", Kind::Own),
    fault("backward late", "waited 3s in vain for rank 1: what it has of the call", Kind::Late),
    fault("backward dead", "waited 3s in vain for rank 1: what it has of the call", Kind::Dies),
    fault("backward dying", "waited 3s in vain for rank 1:", Kind::Dies),
];

/// A backward pass of 40 rows and keys a rank, in which the guilty rank does something else.
pub(crate) fn call(ranks: &Ranks<'_>, name: &str, rank: usize, guilty: bool) -> Result<(), Error> {
    let is = |fault: &str| guilty && name == fault;
    let attention = Attention::new().align(Alignment::TopLeft);
    let attention = if is("backward scale") { attention.scale(2.0) } else { attention };
    let window = sdpa::Window::inclusive(Some(3), None);
    let attention = if is("backward window") { attention.window(window) } else { attention };
    // Enough keys for several parcels, where one is to die between them.
    let n = if name == "backward dying" { 20_000 } else { N };
    let (x, lse) = (vec![0.25f32; n.max(N) * DIM], [1.0f32; N]);
    let (mut dscale, mut dparameters) = (7.0, [7.0; 3]);
    let (mut dq, mut dk, mut dv) = (vec![7.0f32; N * DIM], vec![7.0f32; n * DIM], vec![7.0f32; n * DIM]);
    let (q, kv) = (View::bhld(&x[..N * DIM], [1, 1, N, DIM])?, View::bhld(&x[..n * DIM], [1, 1, n, DIM])?);
    let first = rank * n + usize::from(name == "backward gap" && rank >= GUILTY);
    let (bias, mut dbias) = ([0.0f32; 7 * N], [7.0f32; 7 * N]);
    let inputs = Inputs::new(q, kv, kv);
    let own: [i32; N] = core::array::from_fn(|key| key as i32);
    let own = [&own[..]];
    let inputs = if is("backward positions") { inputs.key_positions(&own) } else { inputs };
    let columns = [1, 1, 1, 7 * N];
    let inputs = if name == "backward bias" { inputs.bias(View::bhld(&bias, columns)?) } else { inputs };
    let result = if is("backward call") {
        let outputs = Outputs::new(ViewMut::bhld(&mut dq, [1, 1, N, DIM])?);
        ranks.attention(&attention, Share::new().rows(rank * N, inputs, outputs).keys(first, kv, kv))
    } else {
        let saved = Saved::new(q, View::bhl(&lse, [1, 1, N])?, q);
        let rows = N - usize::from(is("backward queries"));
        let keys = n - usize::from(is("backward keys"));
        let gradients = Gradients::new().q(ViewMut::bhld(&mut dq[..rows * DIM], [1, 1, rows, DIM])?);
        let gradients = if is("backward sum") { gradients.scale(&mut dscale) } else { gradients };
        let gradients = if is("backward parameters") { gradients.parameters(&mut dparameters) } else { gradients };
        let gradients =
            if is("backward bias") { gradients.bias(ViewMut::bhld(&mut dbias, columns)?) } else { gradients };
        let share = BackwardShare::new().rows_with(rank * N, inputs, saved, gradients).keys(
            first,
            kv,
            kv,
            ViewMut::bhld(&mut dk[..keys * DIM], [1, 1, keys, DIM])?,
            ViewMut::bhld(&mut dv, [1, 1, n, DIM])?,
        );
        ranks.attention_backward(&attention, share)
    };
    assert!(
        result.is_ok()
            || dq.iter().chain(&dk).chain(&dv).chain(&dbias).chain(&dparameters).chain([&dscale]).all(|&x| x == 7.0),
        "gradients were written"
    );
    result.map(|_| ())
}
