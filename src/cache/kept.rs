//! Keys that a sliding cache still has.

use crate::error::Error;
use sdpa_kernels::{Cache, Call};

/// Refuses calls whose rows would see keys that a sliding cache has evicted; `of_all_keys` is the name of an output that
/// has an element for every key, if there is one.
pub(crate) fn check_kept(cache: &Cache, call: &Call<'_>, of_all_keys: Option<&'static str>) -> Result<(), Error> {
    for index in 0..call.sequences() {
        let sequence = call.sequence(index);
        let evicted = cache.evicted(sequence.source);
        if evicted.is_empty() || sequence.q_len == 0 || call.q.shape()[1] == 0 {
            continue;
        }
        if let Some(argument) = of_all_keys {
            return Err(Error::Needs { argument, needs: "a cache that keeps all keys" });
        }
        // Check every row: rows in the middle may be the only ones whose windows reach evicted keys.
        for row in 0..sequence.q_len {
            let keys = call.visible.keys(sequence.offset.saturating_add_unsigned(row), sequence.kv_len);
            let seen = [(0, keys.prefix), (keys.start, keys.end)]
                .into_iter()
                .map(|(from, to)| (from.max(evicted.start), to.min(evicted.end)))
                .find(|(from, to)| from < to);
            if let Some((key, _)) = seen {
                let sequence = sequence.source;
                return Err(match wider(cache, call, key) {
                    Some((side, [got, keeps])) => Error::Wider { side, got, keeps, sequence, row, key },
                    None => Error::Evicted { sequence, row, key, end: evicted.end },
                });
            }
        }
    }
    Ok(())
}

/// Returns the side on which the call's window shows more keys, this evicted one among them, than the cache keeps, with
/// both numbers; `None` if it is no wider, or has no end.
fn wider(cache: &Cache, call: &Call<'_>, key: usize) -> Option<(&'static str, [usize; 2])> {
    let (window, keep) = (call.visible.window?, cache.keeps()?);
    let (first, last) = (window.kept_first(), window.sides()[0]?.saturating_add(1));
    if key < first && first > keep.first {
        Some(("first", [first, keep.first]))
    } else {
        (last > keep.last).then_some(("last", [last, keep.last]))
    }
}
