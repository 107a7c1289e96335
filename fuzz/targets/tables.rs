//! Block tables, lengths, views, states and masks, good and bad: the fuzzer's cases, of which the bytes say each choice. The
//! first says which kind.

#![no_main]

#[path = "../../tests/fuzz/mod.rs"]
#[allow(dead_code, reason = "a part is enough")]
mod fuzzer;

/// Kinds that panic only if something is wrong: libFuzzer takes any panic for a failure.
const KINDS: [&str; 8] = ["pages", "pools", "misfit", "views", "states", "misfit-gradients", "masks", "balance"];

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let name = KINDS[usize::from(first) % KINDS.len()];
    let kind = fuzzer::KINDS.iter().find(|kind| kind.name == name).expect("a kind of the fuzzer");
    kind.said(bytes);
});
