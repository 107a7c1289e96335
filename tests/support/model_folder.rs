//! Where all-MiniLM-L6-v2 is, if it is.
#![allow(dead_code, reason = "compiled into each test of the model; none uses all of it")]

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The model's folder: `SDPA_MINILM`, or where `.ci/fetch-minilm` puts it. Without either, says on standard error that
/// this test is skipped: past the test harness, which would keep it to itself.
pub(crate) fn folder(test: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("SDPA_MINILM") {
        let folder = PathBuf::from(folder);
        assert!(folder.is_dir(), "SDPA_MINILM is {}, but there is no such folder", folder.display());
        return Some(folder);
    }
    let folder = repository().join("target/models/all-MiniLM-L6-v2");
    if folder.is_dir() {
        return Some(folder);
    }
    let line = format!("skipped: {test}: no model in {}; .ci/fetch-minilm gets it\n", folder.display());
    let _ = std::io::stderr().write_all(line.as_bytes());
    None
}

/// A file of `tests/fixtures`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    repository().join("tests/fixtures").join(name)
}

/// The repository's folder: that of the package under test, or one above it.
fn repository() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().find(|folder| folder.join("tests/fixtures").is_dir()).expect("the repository's fixtures")
}
