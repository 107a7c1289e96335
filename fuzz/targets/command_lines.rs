//! Command lines of the examples, a word a line: refused with a reason, or understood.

#![no_main]

#[path = "../../examples/compare/args.rs"]
#[allow(dead_code, unexpected_cfgs, reason = "it is read, not carried out")]
mod args;
#[path = "../../examples/embed/src/args.rs"]
#[allow(dead_code, reason = "it is read, not carried out")]
mod embed;
#[path = "../../examples/compare/failure.rs"]
mod failure;
#[path = "../../examples/compare/settings.rs"]
#[allow(dead_code, reason = "it is read, not carried out")]
mod settings;
#[path = "../../examples/compare/sweep/options.rs"]
#[allow(dead_code, reason = "it is read, not carried out")]
mod sweep;

/// What the command line of `embed` needs of its encoder.
mod encoder {
    pub(crate) const MODEL: &str = "a folder";
}

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

fn check<T>(result: failure::Result<T>) {
    if let Err(refused) = result {
        assert!(!refused.to_string().is_empty());
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let words = || bytes.split(|&byte| byte == b'\n').map(|word| OsString::from_vec(word.to_vec()));
    check(args::parse(words()));
    check(embed::parse(words()));
});
