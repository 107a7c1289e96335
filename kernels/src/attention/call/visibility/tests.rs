//! Tests of what rows see.

use super::*;

/// Defines visibility, key by key.
fn sees(rules: &Visible, p: isize, j: isize) -> bool {
    let causal = rules.causality == Causality::Full || j <= p;
    let Some(Window { left, right, keep_first }) = rules.window else { return causal };
    let inside = left.is_none_or(|n| j >= p - n as isize) && right.is_none_or(|n| j <= p + n as isize);
    causal && (inside || j < keep_first as isize)
}

#[test]
fn ranges_hold_the_keys_the_rules_allow() {
    let sides = [None, Some(0), Some(1), Some(3), Some(100)];
    for causality in [Causality::Full, Causality::Causal] {
        for left in sides {
            for right in sides {
                for keep in [0, 1, 4, 100] {
                    let window = Some(Window::inclusive(left, right).keep_first(keep));
                    for rules in [Visible { causality, window }, Visible { causality, window: None }] {
                        for p in -9..15 {
                            for kv_len in [0, 1, 5, 9] {
                                let keys = rules.keys(p, kv_len);
                                assert!(keys.end <= kv_len && keys.prefix <= keys.start, "{keys:?}");
                                for j in 0..kv_len {
                                    let seen = j < keys.prefix || (keys.start..keys.end).contains(&j);
                                    assert_eq!(seen, sees(&rules, p, j as isize), "{rules:?} p {p} j {j}");
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_key_range_holds_what_every_row_sees() {
    let sides = [None, Some(0), Some(2), Some(5)];
    for causality in [Causality::Full, Causality::Causal] {
        for (left, right, keep) in
            sides.iter().flat_map(|&l| sides.iter().flat_map(move |&r| [0, 3].map(|keep| (l, r, keep))))
        {
            let rules = Visible { causality, window: Some(Window::inclusive(left, right).keep_first(keep)) };
            for (first, last) in (-9..15).flat_map(|first| (first..15).map(move |last| (first, last))) {
                let key_range = rules.key_range(first, last, 7);
                let seen = |j| (first..=last).any(|p| sees(&rules, p, j as isize));
                assert!(key_range.start <= key_range.end && key_range.end <= 7, "{key_range:?}");
                for (lo, hi) in (0..7).flat_map(|lo| (lo + 1..=7).map(move |hi| (lo, hi))) {
                    let all = (first..=last).all(|p| (lo..hi).all(|j| sees(&rules, p, j as isize)));
                    let shown = rules.shows_all(first, last, 7, lo..hi);
                    assert_eq!(shown, all, "{rules:?} {first}..={last}: {lo}..{hi}");
                }
                assert!(
                    (0..7).all(|j| !seen(j) || key_range.contains(&j)),
                    "{rules:?} {first}..={last}: {key_range:?}"
                );
            }
        }
    }
}

#[test]
fn rows_see_of_a_block_what_their_ends_see() {
    let sides = [None, Some(0), Some(2), Some(5), Some(usize::MAX)];
    let rules = [Causality::Full, Causality::Causal].into_iter().flat_map(|causality| {
        let windows = sides.iter().flat_map(|&l| sides.iter().map(move |&r| Some(Window::inclusive(l, r))));
        windows.chain([None]).map(move |window| Visible { causality, window })
    });
    let firsts = (-9..15).chain([isize::MIN, isize::MIN + 3, isize::MAX - 3]);
    for (rules, first, rows, kv_len) in rules.flat_map(|rules| {
        let calls =
            firsts.clone().flat_map(|first| (1..7).flat_map(move |rows| [0, 1, 5, 9].map(|len| (first, rows, len))));
        calls.map(move |(first, rows, len)| (rules, first, rows, len))
    }) {
        let positions = (0..rows).map(|i| first.saturating_add(i));
        for block in (0..kv_len).flat_map(|start| (start + 1..=kv_len).map(move |end| start..end)) {
            let seen = positions.clone().map(|p| rules.keys(p, kv_len).within(block.start, block.len()));
            let seen: Vec<_> = seen.map(VisibleKeys::key_range).collect();
            let some = seen.iter().filter(|(start, end)| start < end);
            let start = some.clone().map(|range| range.0).min();
            let union = start.map_or(0..0, |start| start..some.map(|range| range.1).max().unwrap_or(start));
            let (got, all) = rules.seen_in([first, first.saturating_add(rows - 1)], kv_len, block.clone());
            let what = format!("{rules:?} {rows} rows from {first}, {block:?} of {kv_len}");
            assert!(got == union || got.is_empty() && union.is_empty(), "{what}: {got:?}, not {union:?}");
            let alike = seen.iter().all(|&(start, end)| (start..end) == union);
            assert!(got.is_empty() || all == alike, "{what}");
        }
    }
}

#[test]
fn ranges_of_positions_are_seen_as_their_positions_are() {
    let sides = [None, Some(0), Some(2), Some(5)];
    for causality in [Causality::Full, Causality::Causal] {
        for (left, right, keep) in
            sides.iter().flat_map(|&l| sides.iter().flat_map(move |&r| [0, 1, 3].map(|keep| (l, r, keep))))
        {
            let rules = Visible { causality, window: Some(Window::inclusive(left, right).keep_first(keep)) };
            for (first, last) in (-4..8).flat_map(|first| (first..8).map(move |last| (first, last))) {
                let [some, every] = rules.positions(first, last);
                let (window, kept) =
                    (VisiblePositions { first: 0, ..every }, VisiblePositions { from: 1, to: 0, ..every });
                for (low, high) in (-6..12).flat_map(|low| (low..12).map(move |high| (low, high))) {
                    let what = format!("{rules:?} {first}..={last}: {low}..={high}");
                    assert_eq!(some.may_have([low, high]), (low..=high).any(|key| some.has(key)), "{what}");
                    let all = [window, kept].map(|of| (low..=high).all(|key| of.has(key)));
                    assert_eq!(every.has_all([low, high]), all.contains(&true), "{what}");
                }
                for key in 0..12 {
                    let seen = |p: isize| sees(&rules, p, key as isize);
                    assert!(some.has(key) || !(first..=last).any(seen), "{rules:?} {first}..={last}: {key}");
                    assert!(!every.has(key) || (first..=last).all(seen), "{rules:?} {first}..={last}: {key}");
                }
            }
        }
    }
}

#[test]
fn rules_hide_keys_unless_there_are_none() {
    let window = |left, keep| Some(Window::inclusive(left, None).keep_first(keep));
    for (causality, window, hides, is_one_range) in [
        (Causality::Full, None, false, true),
        (Causality::Causal, None, true, true),
        (Causality::Full, window(Some(3), 0), true, true),
        (Causality::Causal, window(Some(3), 2), true, false),
    ] {
        let rules = Visible { causality, window };
        assert_eq!((rules.hides_keys(), rules.is_one_range()), (hides, is_one_range), "{rules:?}");
    }
    let window = Window::inclusive(Some(2), Some(1));
    assert_eq!([-2, -1, 0, 2, 3].map(|behind| window.sees(behind)), [false, true, true, true, false]);
}

#[test]
fn far_positions_saturate() {
    let window = Some(Window::inclusive(Some(usize::MAX), Some(usize::MAX)));
    for causality in [Causality::Full, Causality::Causal] {
        let rules = Visible { causality, window };
        assert_eq!(rules.keys(isize::MAX, 7).key_range(), (0, 7));
        let end = if causality == Causality::Causal { 0 } else { 7 };
        assert_eq!(rules.keys(isize::MIN, 7).key_range().1, end.min(rules.keys(isize::MIN, 7).end));
    }
}
