//! One row of the oracle: scores of every key in the order of operations, softmax, weighted sum.

use super::{Answer, Dense, Real};
use crate::{Attention, Error, Inputs, Mask, MaskMod, Mods, Position, ScoreMod, WeightMod};
use sdpa_kernels::{Alignment, Causality, Cover, Covered};

/// Appends the results of the row at `at` to `all`.
pub(super) fn row<T: Real, S: ScoreMod, M: MaskMod, P: WeightMod>(
    attention: &Attention,
    inputs: &Inputs<'_>,
    [q, k, v]: &[Dense<T>; 3],
    mods: &Mods<S, M, P>,
    at: Position,
    all: &mut Answer<T>,
) -> Result<(), Error> {
    let shape = inputs.shape()?;
    let (q_len, kv_len) = inputs.lengths(&shape, at.batch);
    let (source, k0) = first_key(inputs, at);
    let kv_head = at.head / (shape.heads / shape.kv_heads);
    let (zero, hidden) = (T::from(0.0), T::from(f32::NEG_INFINITY));
    let position = position(attention, [q_len, kv_len], at.row);
    let at = at_position(at, position);
    let scores = scores(attention, inputs, [q, k], mods, at)?;
    let sink = inputs.sinks.map_or(hidden, |sinks| T::from(sinks[at.head]));
    let max = scores[2].iter().copied().filter(|_| at.row < q_len).fold(sink, |max, s| if s > max { s } else { max });
    let reference = if max == hidden { zero } else { max };
    let exponentials: Vec<T> = scores[2].iter().map(|&s| (s - reference).exp()).collect();
    let sum = exponentials.iter().fold((sink - reference).exp(), |sum, &e| sum + e);
    let sees = |j: usize| scores[2][j] != hidden;
    let weights: Vec<T> = (0..shape.kv_len).map(|j| if sees(j) { exponentials[j] / sum } else { zero }).collect();
    all.lse.push(if sum == zero { hidden } else { reference + sum.ln() });
    let mut out = vec![zero; shape.value_dim];
    for j in (0..shape.kv_len).filter(|&j| sees(j)) {
        let here = with_key(attention, inputs, [q_len, kv_len], Position { key: j, ..at });
        let weight =
            if mods.weight.is_given() { T::from(mods.weight.weight(weights[j].to_f32(), here)) } else { weights[j] };
        let weight = weight * dropout_factor(attention, here, shape.heads);
        for (out, &v) in out.iter_mut().zip(v.row(source, kv_head, k0 + j)) {
            *out = *out + weight * v;
        }
    }
    all.out.extend(out);
    for (j, &weight) in weights.iter().enumerate() {
        let sum = &mut all.key_weight_sums[(at.batch * shape.kv_heads + kv_head) * shape.kv_len + j];
        *sum = *sum + weight;
    }
    for (all, row) in all.points.iter_mut().zip(scores.iter().chain([&weights])) {
        all.extend(row);
    }
    Ok(())
}

/// Returns the position of a row among the keys of its sequence.
pub(super) fn position(attention: &Attention, [q_len, kv_len]: [usize; 2], row: usize) -> i128 {
    let offset = match attention.alignment {
        Some(Alignment::BottomRight) => kv_len as i128 - q_len as i128,
        Some(Alignment::Offset(n)) => n as i128,
        _ => 0,
    };
    row as i128 + offset
}

/// Sets a row's position as the caller's functions receive it.
pub(super) fn at_position(at: Position, position: i128) -> Position {
    Position { position: position.clamp(isize::MIN as i128, isize::MAX as i128) as isize, ..at }
}

/// Returns how far a row is behind a key: by positions of their own, or by order.
pub(super) fn ahead(attention: &Attention, inputs: &Inputs<'_>, lengths: [usize; 2], at: Position) -> i128 {
    let row = match inputs.row_positions {
        Some(positions) => positions[at.batch].get(at.row).map_or(0, |&position| position as i128),
        None => position(attention, lengths, at.row),
    };
    let key = match inputs.key_positions {
        Some(positions) => positions[at.batch].get(at.key).map_or(0, |&position| position as i128),
        None => at.key as i128,
    };
    row - key
}

/// Sets the distance of a row and a key as the caller's functions receive it.
pub(super) fn with_key(attention: &Attention, inputs: &Inputs<'_>, lengths: [usize; 2], at: Position) -> Position {
    let ahead = ahead(attention, inputs, lengths, at);
    Position { distance: ahead.clamp(isize::MIN as i128, isize::MAX as i128) as isize, ..at }
}

/// Returns the batch index of a sequence's rows of q, and the first of them.
pub(super) fn first_row(inputs: &Inputs<'_>, at: Position) -> (usize, usize) {
    inputs.ragged.map_or((at.batch, 0), |ragged| (0, ragged.q[at.batch]))
}

/// Returns the index of a sequence's keys in their source, and the first of them.
pub(super) fn first_key(inputs: &Inputs<'_>, at: Position) -> (usize, usize) {
    let first = inputs.ragged.and_then(|ragged| ragged.k).map_or(0, |k| k[at.batch]);
    (inputs.source_of(at.batch), first)
}

/// Returns what dropout multiplies a weight by.
pub(super) fn dropout_factor<T: Real>(attention: &Attention, at: Position, heads: usize) -> T {
    attention
        .dropout
        .map_or(T::from(1.0), |dropout| T::from(if dropout.keeps(at, heads) { dropout.factor() } else { 0.0 }))
}

/// Returns the index of the entry for a row and key in a bias or mask of this shape; `None` if it leaves the key as it is. With
/// [`Cover::FirstKeys`], a missing column hides its key. Fewer sequences than the call has repeat, and fewer heads each serve
/// as many of its `heads` query heads.
pub(super) fn entry(
    [b, h, l, columns]: [usize; 4],
    cover: Cover,
    at: Position,
    heads: usize,
    kv_len: usize,
) -> Option<[usize; 4]> {
    let column = match cover {
        Cover::AllKeys if columns == 1 => 0,
        Cover::AllKeys | Cover::FirstKeys => at.key,
        Cover::LastKeys => (at.key + columns).checked_sub(kv_len)?,
    };
    Some([at.batch % b, at.head / (heads / h), at.row.min(l - 1), column])
}

/// Returns the scores of every key at the first three points of [`Answer`]: raw, softcapped, masked.
fn scores<T: Real, S: ScoreMod, M: MaskMod, P: WeightMod>(
    attention: &Attention,
    inputs: &Inputs<'_>,
    [q, k]: [&Dense<T>; 2],
    mods: &Mods<S, M, P>,
    at: Position,
) -> Result<[Vec<T>; 3], Error> {
    let shape = inputs.shape()?;
    let (q_len, kv_len) = inputs.lengths(&shape, at.batch);
    let ((b, q0), (source, k0)) = (first_row(inputs, at), first_key(inputs, at));
    let kv_head = at.head / (shape.heads / shape.kv_heads);
    let (zero, hidden) = (T::from(0.0), T::from(f32::NEG_INFINITY));
    let mut scores = [const { Vec::new() }; 3];
    for j in 0..shape.kv_len {
        let exists = at.row < q_len && j < kv_len;
        let mut s = hidden;
        if exists {
            let (query, key) = (q.row(b, at.head, q0 + at.row), k.row(source, kv_head, k0 + j));
            let dot = query.iter().zip(key).fold(zero, |sum, (&q, &k)| sum + q * k);
            s = dot * T::from(attention.scale_for(shape.head_dim));
        }
        scores[0].push(s);
        if let (Some(c), true) = (attention.softcap.map(T::from), exists) {
            s = (s / c).tanh() * c;
        }
        scores[1].push(s);
        let ahead = ahead(attention, inputs, [q_len, kv_len], Position { key: j, ..at });
        let first = |kept: usize| match inputs.key_positions {
            Some(positions) => positions[at.batch].get(j).is_some_and(|&key| key >= 0 && (key as usize) < kept),
            None => j < kept,
        };
        let window = attention.visible.window.is_none_or(|w| w.sees(ahead) || first(w.kept_first()));
        let causal = attention.visible.causality == Causality::Full || ahead >= 0;
        let here = with_key(attention, inputs, [q_len, kv_len], Position { key: j, ..at });
        let entry = |of: [usize; 4], cover: Cover| entry(of, cover, here, shape.heads, kv_len);
        let bias = inputs.bias.and_then(|Covered { of, cover }| {
            entry(of.shape(), cover).map(|at| of.get(at).unwrap_or(f32::NEG_INFINITY))
        });
        // Of all numbers, −0 alone leaves each as it is when added.
        let bias = bias.unwrap_or(-0.0);
        let masked = inputs.mask.is_some_and(|Covered { of, cover }| {
            let hides = |&byte: &u8| (byte != 0) != matches!(of, Mask::Keep(_));
            entry(of.view().shape(), cover).is_some_and(|at| of.view().get(at).is_none_or(hides))
        });
        let visible = exists && window && causal && bias != f32::NEG_INFINITY;
        if !visible || masked || !mods.mask.keep(here) {
            s = hidden;
        } else {
            s = s + T::from(bias)
                - inputs.alibi.map_or(zero, |slopes| T::from(slopes[at.head]) * T::from(ahead.abs() as f32));
            s = if mods.score.is_given() && s != hidden { T::from(mods.score.score(s.to_f32(), here)) } else { s };
        }
        scores[2].push(s);
    }
    Ok(scores)
}
