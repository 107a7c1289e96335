//! Keys that a sliding cache still has.

use crate::error::Error;
use sdpa_kernels::{Cache, Call};

/// Refuses calls of a sliding cache under a window wider than the cache's, at any length, and calls with a row that would see
/// keys that the cache has evicted. `of_all_keys` is the name of an output that has an element for every key, if there is one.
pub(crate) fn check_held(call: &Call<'_>, of_all_keys: Option<&'static str>) -> Result<(), Error> {
    let Some(cache) = call.kv.cache() else { return Ok(()) };
    refuse_wider(cache, call)?;
    for index in 0..call.sequence_count() {
        let sequence = call.sequence(index);
        let evicted = cache.evicted(sequence.source);
        if evicted.is_empty() || sequence.q_len == 0 || call.q.shape()[1] == 0 {
            continue;
        }
        if let Some(argument) = of_all_keys {
            return Err(Error::Needs { argument, needs: "a cache that keeps all keys" });
        }
        if let Some(argument) = call.options.own_positions().filter(|_| call.visible.hides_keys()) {
            return Err(Error::Needs { argument, needs: "a cache that keeps all keys" });
        }
        if let Some(selected) = call.options.selected {
            if let Some((row, key)) = selected.first_in(index, evicted.clone()) {
                return Err(Error::Evicted { sequence: sequence.source, row, key, end: evicted.end });
            }
            continue;
        }
        // Check every row: perhaps only the windows of rows in the middle reach evicted keys.
        for row in 0..sequence.q_len {
            let keys = call.visible.keys(sequence.offset.saturating_add_unsigned(row), sequence.kv_len);
            let seen = [(0, keys.prefix), (keys.start, keys.end)]
                .into_iter()
                .map(|(from, to)| (from.max(evicted.start), to.min(evicted.end)))
                .find(|(from, to)| from < to);
            if let Some((key, _)) = seen {
                return Err(Error::Evicted { sequence: sequence.source, row, key, end: evicted.end });
            }
        }
    }
    Ok(())
}

/// Refuses a window that shows more keys on a side than the cache was made to keep. A window that is unbounded on the
/// left does not count as wider: as without a window, rows may see what the cache still has.
fn refuse_wider(cache: &Cache, call: &Call<'_>) -> Result<(), Error> {
    let (Some(window), Some(sliding)) = (call.visible.window, cache.sliding()) else { return Ok(()) };
    let last = window.sides()[0].map_or(0, |left| left.saturating_add(1));
    for (side, got, keeps) in [("first", window.kept_first(), sliding.first), ("last", last, sliding.last)] {
        if got > keeps {
            return Err(Error::Wider { side, got, keeps });
        }
    }
    Ok(())
}
