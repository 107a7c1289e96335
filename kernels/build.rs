//! Tells the crate how it is compiled, so that `explain` can say when that makes it slow.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let level = std::env::var("OPT_LEVEL").unwrap_or_default();
    println!("cargo::rustc-env=SDPA_OPT_LEVEL={level}");
}
