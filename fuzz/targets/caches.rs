//! Files of caches: refused, or a cache that can be used like any other.

#![no_main]

#[path = "../../tests/fuzz/mod.rs"]
#[allow(dead_code, reason = "a part is enough")]
mod fuzzer;
mod whole;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let file = whole::file(bytes);
    fuzzer::import(&mut fuzzer::Rng::said(bytes), &file);
});
