//! Peer: the code that computes, and what is known of it by name.

use crate::elements::{Elements, Rounding};
use crate::failure::Result;
use crate::support;

/// Something that computes a task, in the program's own language.
pub(crate) trait Peer<T> {
    /// By what name it is called for.
    fn name(&self) -> &'static str;

    /// # Errors
    /// Why it does not.
    fn supports(&self, task: &T) -> std::result::Result<(), String>;

    /// Gets everything ready that a user would keep from call to call. Says how it will go about it.
    fn prepare(&mut self, task: &T) -> Result<String>;

    /// Computes once. This is what is timed.
    fn run(&mut self) -> Result<()>;

    /// The last result, dense: for attention `[batch, heads, rows, value_dim]`.
    fn output(&mut self) -> Result<Vec<f32>>;
}

/// Place of a peer's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// In this program; the package in Cargo.lock that has its version.
    Rust { package: &'static str },
    /// In `python/`, which installs it.
    Python(Environment),
}

/// A virtual environment that `python/setup.py` makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Environment {
    Common,
    /// zentorch and the release of torch that it is built for.
    Zentorch,
}

/// A peer by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) home: Home,
    /// Types of elements that it computes on.
    pub(crate) elements: &'static [Elements],
    pub(crate) rounding: Rounding,
}

impl Entry {
    /// The same peer, which computes on these.
    pub(crate) const fn takes(self, elements: &'static [Elements]) -> Self {
        Self { elements, ..self }
    }

    pub(crate) const fn rounds(self, rounding: Rounding) -> Self {
        Self { rounding, ..self }
    }

    pub(crate) const fn of(self, environment: Environment) -> Self {
        Self { home: Home::Python(environment), ..self }
    }

    /// True for this crate, however it is used.
    pub(crate) fn is_ours(&self) -> bool {
        self.name.starts_with(OURS)
    }
}

/// A peer in this program, for f32.
pub(crate) const fn rust(name: &'static str, package: &'static str) -> Entry {
    Entry { name, home: Home::Rust { package }, elements: &[Elements::F32], rounding: Rounding::Exact }
}

/// A peer in Python, for f32.
pub(crate) const fn python(name: &'static str) -> Entry {
    let home = Home::Python(Environment::Common);
    Entry { name, home, elements: &[Elements::F32], rounding: Rounding::Exact }
}

/// Ours.
pub(crate) const OURS: &str = "sdpa";
/// Ours with the machine's own products of bf16.
pub(crate) const NATIVE: &str = "sdpa-native";
/// Ours with products of bf16 parts on a matrix unit.
pub(crate) const ACCURATE: &str = "sdpa-accurate";
/// Ours over the f32 that int8 caches are made from.
pub(crate) const IN_F32: &str = "sdpa-f32";

/// # Errors
/// That the instruction set that is measured has no fast products of bf16.
pub(crate) fn on_fast_bf16() -> std::result::Result<(), String> {
    let lacking = "Native has no effect: no fast bf16 products (AMX, AVX512_BF16 of AMD, FEAT_BF16)";
    if support::isa().has_native_bf16() { Ok(()) } else { Err(lacking.to_owned()) }
}

/// # Errors
/// Why the instruction set that is measured has no matrix unit.
pub(crate) fn on_matrix_unit() -> std::result::Result<(), String> {
    support::isa().matrix_unit().map_err(|why| format!("no effect without a matrix unit: {why}"))
}
