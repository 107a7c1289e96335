//! Caches that let keys go: nobody who may not see them notices, and who would see them is refused.

use crate::kv_support::same_full;
use crate::options::{Case, Wanted};
use crate::support::{Rng, Tensor, execs};
use core::num::NonZeroUsize;
use sdpa::{Alignment, Attention, Error, Exec, Inputs, KvCache, KvShape, Outputs, Point, View, ViewMut, Window};

const BLOCK: usize = 256;

fn window(last: usize, first: usize) -> Window {
    Window::last_tokens(NonZeroUsize::new(last).expect("at least 1")).keep_first(first)
}

fn sliding(sequences: usize, kv_heads: usize, dims: [usize; 2], last: usize, first: usize) -> KvCache {
    KvCache::sliding(
        sequences,
        KvShape { kv_heads, head_dim: dims[0], value_dim: dims[1] },
        NonZeroUsize::new(last).expect("at least 1"),
        first,
    )
    .unwrap()
}

/// The rows of the cache that were appended last, under any options that go with a window.
fn rows_at_the_end(rng: &mut Rng, cache: &KvCache, rows: usize, [d, dv]: [usize; 2], window: Window) -> Case {
    let longest = cache.lens().iter().copied().max().expect("a sequence");
    let mut case = Case::plain(rng, [cache.lens().len(), 4, 2, rows, 0, d, dv]);
    // Bias over all keys there ever were, gone ones included; the keys themselves come from the caches.
    (case.k, case.v) = (Tensor::filled([0, 2, longest, d], 0.0), Tensor::filled([0, 2, longest, dv], 0.0));
    (case.alignment, case.causal, case.window) = (Some(Alignment::BottomRight), rng.below(2) == 0, Some(window));
    case.bias = (rng.below(3) == 0).then(|| Tensor::normal([1, 4, 1, longest], rng).into());
    case.alibi = (rng.below(3) == 0).then(|| vec![0.1, -0.05, 0.3, 0.0]);
    case.sinks = (rng.below(3) == 0).then(|| vec![1.0, -2.0, 0.0, 3.0]);
    case
}

#[test]
fn a_window_from_a_sliding_cache_is_that_from_a_full_one() {
    let dims = [17, 20];
    for (seed, (last, first)) in
        [(1, 0), (2, 1), (16, 4), (100, 0), (255, 256), (256, 1), (257, 300), (300, 20), (600, 0)]
            .into_iter()
            .enumerate()
    {
        let rng = &mut Rng::new(seed as u64);
        let (mut slid, mut full) = (
            sliding(2, 2, dims, last, first),
            KvCache::new(2, KvShape { kv_heads: 2, head_dim: dims[0], value_dim: dims[1] }).unwrap(),
        );
        let (block, mut longest_chunk) = (4 * BLOCK * 2 * (17 + 32), 0);
        let mut compared = 0;
        while slid.lens()[0] < 1700 {
            let n = rng.pick(&[1, 1, 3, 16, 40, 200, 300]);
            longest_chunk = longest_chunk.max(n);
            // The second sequence lags behind.
            let lag = rng.below(3);
            for b in 0..if lag == 0 { 1 } else { 2 } {
                let [k, v] = dims.map(|dim| Tensor::normal([1, 2, n, dim], rng));
                for cache in [&mut slid, &mut full] {
                    cache.append_to(b, k.view(), v.view()).unwrap();
                }
            }
            let bound = first.div_ceil(BLOCK) + (last + longest_chunk).div_ceil(BLOCK) + 2;
            assert!(slid.bytes() <= 2 * bound * block, "last {last}, first {first}: {} bytes", slid.bytes());
            if lag == 0 || rng.below(4) > 0 {
                continue;
            }
            // What the cache was made for, and less.
            for window in [window(last, first), window(1 + rng.below(last), rng.below(first + 1))] {
                let rows = 1 + rng.below(n.min(7));
                let case = rows_at_the_end(rng, &slid, rows, dims, window);
                compared += 1;
                for (isa, exec) in execs() {
                    let [got, expected] = [&slid, &full]
                        .map(|cache| case.run_over(Inputs::cached(case.q.view(), cache), exec, Wanted::LEAST));
                    let what = format!("last {last}, first {first}, {:?} keys, {window:?}, {isa}", slid.lens());
                    same_full(&what, &got, &expected);
                }
            }
            // A draft that is not taken up.
            if last > 1 && rng.below(2) == 0 {
                let poison = dims.map(|dim| Tensor::filled([1, 2, 30, dim], f32::NAN));
                for cache in [&mut slid, &mut full] {
                    let len = cache.lens()[1];
                    cache.append_to(1, poison[0].view(), poison[1].view()).unwrap();
                    cache.truncate(1, len).unwrap();
                }
            }
        }
        assert!(compared > 3 && slid.lens() == full.lens());
        assert!(full.bytes() > slid.bytes() || last + first > 500, "last {last}, first {first}: nothing was evicted");
    }
}

/// Token by token, with the window the cache was made for: nothing is evicted a token too early, at any length.
#[test]
fn every_step_of_a_window_finds_its_keys() {
    let rng = &mut Rng::new(11);
    for (last, first) in [(1, 0), (2, 3), (16, 0), (255, 256), (256, 257), (257, 0), (300, 4)] {
        let dims = [5, 16];
        let (mut slid, mut full) = (
            sliding(1, 2, dims, last, first),
            KvCache::new(1, KvShape { kv_heads: 2, head_dim: dims[0], value_dim: dims[1] }).unwrap(),
        );
        for _ in 0..900 {
            let [k, v] = dims.map(|dim| Tensor::normal([1, 2, 1, dim], rng));
            for cache in [&mut slid, &mut full] {
                cache.append(k.view(), v.view()).unwrap();
            }
            let case = rows_at_the_end(rng, &slid, 1, dims, window(last, first));
            let [got, expected] = [&slid, &full]
                .map(|cache| case.run_over(Inputs::cached(case.q.view(), cache), Exec::serial(), Wanted::LEAST));
            same_full(&format!("last {last}, first {first}, {:?} keys", slid.lens()), &got, &expected);
        }
    }
}

/// What is appended decides what may go: without a new row, the last row keeps its keys.
#[test]
fn nothing_appended_evicts_nothing() {
    let rng = &mut Rng::new(12);
    let dims = [5, 16];
    let mut cache = sliding(1, 2, dims, 2, 0);
    let [k, v] = dims.map(|dim| Tensor::normal([1, 2, 257, dim], rng));
    cache.append(k.view(), v.view()).unwrap();
    let case = rows_at_the_end(rng, &cache, 1, dims, window(2, 0));
    let before = case.run_over(Inputs::cached(case.q.view(), &cache), Exec::serial(), Wanted::LEAST);
    let [k, v] = dims.map(|dim| Tensor::filled([1, 2, 0, dim], 0.0));
    cache.append(k.view(), v.view()).unwrap();
    cache.append_to(0, k.view(), v.view()).unwrap();
    let after = case.run_over(Inputs::cached(case.q.view(), &cache), Exec::serial(), Wanted::LEAST);
    same_full("after 0 tokens", &after, &before);
    let [k, v] = dims.map(|dim| Tensor::normal([1, 2, 1, dim], rng));
    cache.append(k.view(), v.view()).unwrap();
    assert_eq!(cache.lens(), [258]);
}

#[test]
fn memory_stays_bounded_for_ever() {
    let (k, v) = ([0.5; 8], [0.25; 8]);
    let (k, v) = (View::bhld(&k, [1, 1, 1, 8]).unwrap(), View::bhld(&v, [1, 1, 1, 8]).unwrap());
    for (last, first, blocks) in [(1, 0, 1), (256, 0, 2), (300, 5, 4), (512, 257, 5)] {
        let mut cache = sliding(1, 1, [8, 8], last, first);
        for _ in 0..20_000 {
            cache.append(k, v).unwrap();
        }
        let held = cache.bytes() / (4 * BLOCK * (8 + 16));
        println!("last {last}, first {first}: {held} blocks");
        assert!(held <= blocks, "last {last}, first {first}: {held} blocks");
        assert_eq!(cache.lens(), [20_000]);
        cache.clear(0).unwrap();
        assert_eq!((cache.lens(), cache.bytes() / (4 * BLOCK * (8 + 16))), (&[0][..], held));
    }
}

/// One sequence of 601 keys; 256 to 511 were evicted: the last 16 and the first 4 stay, and what shares their blocks.
fn gappy() -> KvCache {
    let mut cache = sliding(1, 1, [8, 8], 16, 4);
    for n in [600, 1] {
        let rows = Tensor::normal([1, 1, n, 8], &mut Rng::new(n as u64));
        cache.append(rows.view(), rows.view()).unwrap();
    }
    cache
}

/// The error of a call, checked to have left the outputs alone.
fn refusal(attention: &Attention, cache: &KvCache, rows: usize, extra: Option<&str>) -> Option<Error> {
    let q = Tensor::normal([1, 2, rows, 8], &mut Rng::new(7));
    let mut memory = [vec![42.0; 2 * rows * 8], vec![42.0; 2 * rows], vec![42.0; 2 * rows * 601], vec![42.0; 601]];
    let [out, lse, scores, mass] = &mut memory;
    let outputs = Outputs::new(ViewMut::bhld(out, [1, 2, rows, 8]).unwrap());
    let outputs = outputs.lse(ViewMut::bhl(lse, [1, 2, rows]).unwrap());
    let scores = ViewMut::bhld(scores, [1, 2, rows, 601]).unwrap();
    let outputs = match extra {
        Some("raw") => outputs.scores(Point::Raw, scores),
        Some("weights") => outputs.weights(scores),
        Some(_) => outputs.key_weight_sums(ViewMut::bhld(mass, [1, 1, 601, 1]).unwrap()),
        None => outputs,
    };
    let error = sdpa::attention(attention, Inputs::cached(q.view(), cache), outputs).err();
    if error.is_some() {
        assert!(memory.iter().flatten().all(|&x| x == 42.0), "a refused call wrote: {error:?}");
    }
    error
}

#[test]
fn who_would_see_a_key_let_go_is_refused() {
    let cache = gappy();
    let end = Attention::new().align(Alignment::BottomRight);
    let at = |offset| Attention::new().align(Alignment::Offset(offset));
    let gone = |row, key| Some(Error::Evicted { sequence: 0, row, key, end: 512 });
    let wider = |side, got, keeps| Some(Error::Wider { side, got, keeps });
    for (name, attention, rows, expected) in [
        ("everything", Attention::new(), 1, gone(0, 256)),
        ("causal", end.causal(), 1, gone(0, 256)),
        ("the window it was made for", end.window(window(16, 4)), 1, None),
        ("the widest that is there", end.window(window(89, 256)), 1, wider("first", 256, 4)),
        ("one key too far back", end.window(window(17, 4)), 1, wider("last", 17, 16)),
        ("one first key too many", end.window(window(16, 5)), 1, wider("first", 5, 4)),
        ("a window without an end", end.window(Window::inclusive(None, Some(0))), 1, gone(0, 256)),
        ("rows as far back as there are keys", end.window(window(16, 4)), 75, gone(0, 511)),
        ("one fewer", end.window(window(16, 4)), 74, None),
        ("among the first", at(0).causal(), 256, None),
        ("past the first", at(0).causal(), 257, gone(256, 256)),
        ("past the end", at(700).window(window(16, 4)), 5, None),
        ("far past the end", at(isize::MAX).window(window(16, 4)), 5, None),
        ("before the start", at(-5).causal(), 3, None),
        ("no rows", Attention::new(), 0, None),
        // Neither the first row nor the last sees what is gone: those between them do.
        ("across the gap", at(0).window(window(16, 4)), 601, gone(256, 256)),
        ("across the gap, from before the start", at(-30).window(window(16, 4)), 640, gone(286, 256)),
        ("into the gap from the left", at(10).window(Window::inclusive(Some(2), Some(2))), 300, gone(244, 256)),
    ] {
        assert_eq!(refusal(&attention, &cache, rows, None), expected, "{name}");
    }
}

/// A server that asks for too much finds out in its first step, not when a block goes.
#[test]
fn a_window_wider_than_its_sliding_cache_is_refused_at_every_length() {
    let end = Attention::new().align(Alignment::BottomRight);
    let mut cache = sliding(1, 1, [8, 8], 100, 4);
    for len in 0..700 {
        let refusals = [window(101, 0), window(usize::MAX, 4), window(100, 5), Window::inclusive(Some(100), None)];
        for wide in refusals {
            for (rows, of) in [(1, end), (3, end), (2, end.causal()), (0, end)] {
                let error = wider(&of.window(wide), &cache, rows);
                assert!(matches!(error, Some(Error::Wider { .. })), "{len} keys, {wide:?}, {rows} rows: {error:?}");
            }
        }
        for narrow in [window(100, 4), window(1, 0), Window::inclusive(Some(99), Some(3)).keep_first(2)] {
            assert_eq!(wider(&end.window(narrow), &cache, 1), None, "{len} keys, {narrow:?}");
        }
        let token = Tensor::normal([1, 1, 1, 8], &mut Rng::new(len));
        cache.append(token.view(), token.view()).unwrap();
    }
    let error = wider(&end.window(window(101, 0)), &cache, 1).map(|e| e.to_string());
    assert_eq!(error.unwrap(), "window: shows the last 101 keys, but the sliding cache was made to keep the last 100");
}

/// The error of a call over some rows, checked to have left the output alone.
fn wider(attention: &Attention, cache: &KvCache, rows: usize) -> Option<Error> {
    let q = Tensor::normal([1, 2, rows, 8], &mut Rng::new(7));
    let mut out = vec![42.0; 2 * rows * 8];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, rows, 8]).unwrap());
    let error = sdpa::attention(attention, Inputs::cached(q.view(), cache), outputs).err();
    assert!(error.is_none() || out.iter().all(|&x| x == 42.0), "a refused call wrote");
    error
}

#[test]
fn scores_and_key_mass_need_all_keys() {
    let attention = Attention::new().align(Alignment::BottomRight).window(window(16, 4));
    for (extra, argument) in [("raw", "raw scores"), ("weights", "weights"), ("mass", "key weight sums")] {
        let needs = Error::Needs { argument, needs: "a cache that keeps all keys" };
        assert_eq!(refusal(&attention, &gappy(), 1, Some(extra)), Some(needs), "{extra}");
    }
    // As long as nothing was evicted they are there.
    let mut young = sliding(1, 1, [8, 8], 16, 4);
    let rows = Tensor::normal([1, 1, 601, 8], &mut Rng::new(1));
    young.append(rows.view(), rows.view()).unwrap();
    assert_eq!(refusal(&attention, &young, 1, Some("weights")), None);
}

#[test]
fn a_rollback_into_what_was_let_go_is_refused() {
    // The next row sees 16 keys, its own included: so far behind what was evicted it has to stand.
    let shortest = Some(527);
    let refused = [257, 512, 513, 526].map(|len| (len, shortest));
    for (len, limit) in refused.into_iter().chain([602, 527, 256, 3].map(|len| (len, None))) {
        let mut cache = gappy();
        let error = cache.truncate(0, len).err();
        match (limit, len) {
            (Some(limit), _) => {
                let says = super::too_short(len, limit);
                assert_eq!(error.map(|e| e.to_string()), Some(says));
            }
            (None, 602) => {
                let says = "length: 602, but sequence 0 has 601 keys".to_owned();
                assert_eq!(error.map(|e| e.to_string()), Some(says));
            }
            _ => assert_eq!(error, None),
        }
        assert_eq!(cache.lens(), [if error_free(limit, len) { len } else { 601 }]);
        // From the first block on everything is there again, and goes on.
        if len <= 256 {
            let rows = Tensor::normal([1, 1, 601 - len, 8], &mut Rng::new(5));
            cache.append(rows.view(), rows.view()).unwrap();
            assert_eq!(refusal(&Attention::new(), &cache, 1, Some("weights")), None);
        }
    }
}

fn error_free(limit: Option<usize>, len: usize) -> bool {
    limit.is_none() && len <= 601
}

/// A fork of a cache with a gap has the gap, and a copy that goes on does not open one in the other.
#[test]
fn forks_of_sliding_caches_let_go_apart() {
    let mut cache = sliding(1, 1, [8, 8], 16, 0);
    let rows = Tensor::normal([1, 1, 520, 8], &mut Rng::new(2));
    cache.append(rows.view(), rows.view()).unwrap();
    assert_eq!(cache.add_sequence(), 1);
    cache.fork(0, 1).unwrap();
    let one = rows.rows(0..1);
    cache.append_to(1, one.view(), one.view()).unwrap();
    let q = Tensor::normal([2, 1, 1, 8], &mut Rng::new(3));
    let mut out = vec![0.0; 16];
    let view = ViewMut::bhld(&mut out, [2, 1, 1, 8]).unwrap();
    let error = sdpa::attention(&Attention::new(), Inputs::cached(q.view(), &cache), Outputs::new(view)).err();
    assert_eq!(error, Some(Error::Evicted { sequence: 1, row: 0, key: 0, end: 256 }));
    // Sequence 0 has let nothing go: rolled back below the gap, both see all they have.
    cache.clear(1).unwrap();
    let mut full = KvCache::new(2, KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 }).unwrap();
    full.append_to(0, rows.view(), rows.view()).unwrap();
    let mut case = Case::plain(&mut Rng::new(3), [2, 1, 1, 1, 520, 8, 8]);
    case.q = q;
    let [got, expected] =
        [&cache, &full].map(|cache| case.run_over(Inputs::cached(case.q.view(), cache), Exec::serial(), Wanted::ALL));
    same_full("after the fork was cleared", &got, &expected);
}

/// Token by token to a length, a rollback, one more token, and attention over the last hundred.
fn rolled_back(cache: KvCache, len: usize, to: usize) -> Result<Option<Error>, Error> {
    let mut cache = cache;
    let token = Tensor::normal([1, 1, 1, 2], &mut Rng::new(1));
    for _ in 0..len {
        cache.append(token.view(), token.view()).unwrap();
    }
    cache.truncate(0, to)?;
    cache.append(token.view(), token.view()).unwrap();
    let mut out = [0.0; 2];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 2]).unwrap());
    let attention = Attention::new().align(Alignment::BottomRight).window(window(100, 0));
    Ok(sdpa::attention(&attention, Inputs::cached(token.view(), &cache), outputs).err())
}

/// A rollback after which the next row would miss keys of its window is refused itself, and says from which length on it
/// would not; with room for it, it is not.
#[test]
fn a_rollback_never_strands_a_sequence() {
    let bare = || sliding(1, 1, [2, 2], 100, 0);
    for to in [257, 353, 354] {
        let error = rolled_back(bare(), 357, to).unwrap_err().to_string();
        assert_eq!(error, super::too_short(to, 355));
    }
    assert_eq!(rolled_back(bare(), 357, 355), Ok(None));
    for room in [1, 4, 5, 30, 300] {
        for len in [300, 355, 356, 357, 400, 611, 612, 613, 640] {
            // Counted from before the last append.
            for back in [1, room.min(len - 1)] {
                let cache = bare().rollback_room(room).unwrap();
                assert_eq!(rolled_back(cache, len, len - 1 - back), Ok(None), "room {room}, {back} back from {len}");
            }
        }
    }
    let error = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 })
        .unwrap()
        .rollback_room(3)
        .unwrap_err()
        .to_string();
    assert_eq!(error, "rollback_room: needs a sliding cache");
}

/// A row that sees its own key alone misses nothing, wherever the sequence is cut behind what was evicted.
#[test]
fn a_window_of_one_key_is_never_stranded() {
    let mut cache = sliding(1, 1, [2, 2], 1, 0);
    let token = Tensor::normal([1, 1, 1, 2], &mut Rng::new(1));
    for _ in 0..300 {
        cache.append(token.view(), token.view()).unwrap();
    }
    cache.truncate(0, 256).unwrap();
    cache.append(token.view(), token.view()).unwrap();
    let mut out = [0.0; 2];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 2]).unwrap());
    let attention = Attention::new().align(Alignment::BottomRight).window(window(1, 0));
    sdpa::attention(&attention, Inputs::cached(token.view(), &cache), outputs).unwrap();
    assert_eq!(out[..], token.data[..]);
}
