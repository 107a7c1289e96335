//! Messages of errors.

use crate::error::Error;
use core::fmt;
use sdpa_kernels::{Bound, KEY_BLOCK};

/// Argument that says how many keys a backward state had before more came.
pub(crate) const KEYS_BEFORE: &str = "keys before";
/// Advice for biases and masks of some of the keys.
const FEWER_COLUMNS: &str = "; mask_prefix and bias_prefix take fewer columns and hide the other keys; mask_suffix and bias_suffix take \
                             the columns of the last keys";
/// Advice for pieces that are no multiples.
const SMALL_PIECES: &str =
    ": push small pieces together, in their order, with sums for all their keys; KeyGradientSums::keys cuts these";

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mismatch { argument, what, got, expected, of } => {
                write!(f, "{argument}: {what} is {got}, but {of} has {expected}")?;
                let fewer = matches!(*argument, "bias" | "mask") && *what == "columns" && got < expected;
                if fewer { f.write_str(FEWER_COLUMNS) } else { Ok(()) }
            }
            Self::Range { argument, what, got, bound, limit, of } => {
                write!(f, "{argument}: {what} is {got}, but must be {bound} {limit}, {of}")
            }
            Self::Size { argument, what, got, expected } => {
                write!(f, "{argument}: {what} is {got}, but must be {expected}")
            }
            Self::Heads { q_heads, kv_heads, of } => {
                write!(f, "q: {q_heads} heads are no multiple of the {kv_heads} heads of {of}")
            }
            Self::Empty { argument, what } => write!(f, "{argument}: {what} is 0, but must be at least 1"),
            Self::Number { argument, got, expected } => write!(f, "{argument}: {got}, but must be {expected}"),
            Self::Unaligned { rule, sequence, q_len, kv_len } => unaligned(f, rule, *sequence, [*q_len, *kv_len]),
            Self::TooLarge { what, sizes } => write!(f, "{what}: sizes {sizes:?} do not fit the address space"),
            Self::Memory { what, bytes } => write!(f, "{what}: could not allocate {bytes} bytes"),
            Self::Sequence { argument, got, sequences } => {
                write!(f, "{argument}: there is no sequence {got}, the cache has {sequences}")
            }
            Self::Removed { argument, sequence } => write!(f, "{argument}: sequence {sequence} was removed"),
            Self::Repeated { argument, sequence } => write!(f, "{argument}: sequence {sequence} is named twice"),
            Self::Entry { argument, index, got, bound, limit, of } => {
                write!(f, "{argument}: entry {index} is {got}, but must be {bound} {limit}, {of}")
            }
            Self::Length { argument, sequence, got, bound: Bound::AtLeast, limit } => {
                too_short(f, argument, *sequence, [*got, *limit])
            }
            Self::Length { argument, sequence, got, limit, .. } => {
                write!(f, "{argument}: {got}, but sequence {sequence} has {limit} keys")
            }
            Self::Row { argument, what, row, got, expected } => {
                write!(f, "{argument}: {what} of row {row} is {got}, but must be {expected}")
            }
            Self::Evicted { sequence, row, key, end } => evicted(f, *sequence, *row, *key, *end),
            Self::Wider { side, got, keeps } => write!(
                f,
                "window: shows the {side} {got} keys, but the sliding cache was made to keep the {side} {keeps}"
            ),
            Self::Pages(e) => e.fmt(f),
            Self::Selection(e) => e.fmt(f),
            Self::Mask(e) => e.fmt(f),
            Self::Stopped => f.write_str("stopped before all was computed"),
            Self::Needs { argument, needs } => write!(f, "{argument}: needs {needs}"),
            Self::File { what, why } => write!(f, "{what}: {why}"),
            Self::Twice { argument } => write!(f, "{argument}: given twice, but an output is written once"),
            Self::Differs { argument, what, got, expected, of } => {
                write!(f, "{argument}: {what} is {got}, but {of} has {expected}")
            }
            Self::Multiple { argument, got, of } => {
                write!(f, "{argument}: {got}, but must be a multiple of {of}")?;
                if *argument == KEYS_BEFORE { f.write_str(SMALL_PIECES) } else { Ok(()) }
            }
            Self::Apart { first, end } => apart(f, *first, *end),
            Self::Layout(e) => e.fmt(f),
        }
    }
}

fn unaligned(
    f: &mut fmt::Formatter<'_>,
    rule: &str,
    sequence: Option<usize>,
    [q_len, kv_len]: [usize; 2],
) -> fmt::Result {
    match sequence {
        Some(sequence) => write!(f, "{rule}: sequence {sequence} has {q_len} rows and {kv_len} keys")?,
        None => write!(f, "{rule}: {q_len} rows and {kv_len} keys differ")?,
    }
    f.write_str(", and no alignment says where the rows stand among the keys (top-left, bottom-right or an offset)")
}

fn too_short(f: &mut fmt::Formatter<'_>, argument: &str, sequence: usize, [got, least]: [usize; 2]) -> fmt::Result {
    let evicted = match argument {
        "length" => "keys that its next row would see (KvCache::rollback_room keeps more)",
        _ => "keys from places that accepted keys would move to",
    };
    write!(
        f,
        "{argument}: {got}, but must be at least {least} for sequence {sequence}: the sliding cache has evicted {evicted}"
    )
}

fn evicted(f: &mut fmt::Formatter<'_>, sequence: usize, row: usize, key: usize, end: usize) -> fmt::Result {
    write!(
        f,
        "cache: row {row} of sequence {sequence} sees key {key}, but the sliding cache has evicted keys before {end}: \
         the call has no window, or one that reaches further back than the cache keeps"
    )
}

fn apart(f: &mut fmt::Formatter<'_>, first: usize, end: usize) -> fmt::Result {
    if end.is_multiple_of(KEY_BLOCK) {
        write!(f, "later state: its first key is {first}, but this state ends at {end} (AttnState::starting_at)")
    } else {
        write!(
            f,
            "later state: this state ends at {end}, and merges only at a multiple of {KEY_BLOCK}: push the later keys to this state instead"
        )
    }
}
