//! Who is compared.

#[cfg(feature = "burn")]
mod burn;
#[cfg(feature = "by-hand")]
mod by_hand;
#[cfg(feature = "candle")]
mod candle;
#[cfg(feature = "rten")]
mod onnx;
mod ours;
#[cfg(feature = "rten")]
mod rten;

use crate::case::Case;
use crate::elements::{Elements, Sums};
use crate::failure::Result;

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

/// Where a peer's code is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// In this program; the package in Cargo.lock whose version it has.
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
    pub(crate) sums: Sums,
}

impl Entry {
    /// The same peer, which computes on these.
    pub(crate) const fn takes(self, elements: &'static [Elements]) -> Self {
        Self { elements, ..self }
    }

    const fn sums(self, sums: Sums) -> Self {
        Self { sums, ..self }
    }

    const fn of(self, environment: Environment) -> Self {
        Self { home: Home::Python(environment), ..self }
    }

    /// True for this crate, however it is used.
    pub(crate) fn is_ours(&self) -> bool {
        self.name.starts_with(OURS)
    }
}

/// A peer in this program, for f32.
pub(crate) const fn rust(name: &'static str, package: &'static str) -> Entry {
    Entry { name, home: Home::Rust { package }, elements: &[Elements::F32], sums: Sums::F32 }
}

/// A peer in Python, for f32.
pub(crate) const fn python(name: &'static str) -> Entry {
    Entry { name, home: Home::Python(Environment::Common), elements: &[Elements::F32], sums: Sums::F32 }
}

/// Ours.
pub(crate) const OURS: &str = "sdpa";
/// Ours with the machine's own products of bf16.
pub(crate) const NATIVE: &str = "sdpa-native";

/// Ours first, then everyone that was built in or may be installed.
pub(crate) const PEERS: &[Entry] = &[
    rust(OURS, "sdpa").takes(&Elements::ALL),
    rust(NATIVE, "sdpa").takes(&[Elements::Bf16]),
    rust("unfused", "matrixmultiply"),
    #[cfg(feature = "gemm")]
    rust("gemm", "gemm"),
    #[cfg(feature = "faer")]
    rust("faer", "faer"),
    #[cfg(feature = "rten")]
    rust("rten", "rten"),
    #[cfg(feature = "candle")]
    rust("candle", "candle-nn"),
    #[cfg(feature = "candle")]
    rust("candle-flash", "candle-nn"),
    #[cfg(feature = "burn")]
    rust("burn", "burn-flex"),
    python("torch").takes(&[Elements::F32, Elements::Bf16, Elements::F16]),
    python("onnxruntime").takes(&[Elements::F32, Elements::Bf16]),
    python("openvino").takes(&[Elements::F32, Elements::Bf16]),
    python("zentorch").takes(&[Elements::F32, Elements::Bf16]).of(Environment::Zentorch),
    // Of one row a head, and of few.
    python("ggml").takes(&Elements::ALL).sums(Sums::F16),
];

/// The code behind a name.
pub(crate) fn rust_peer(name: &str) -> Option<Box<dyn Peer<Case>>> {
    let all: Vec<Box<dyn Peer<Case>>> = vec![
        Box::new(ours::Fused::exact()),
        Box::new(ours::Fused::native()),
        Box::new(ours::Unfused::default()),
        #[cfg(feature = "gemm")]
        Box::new(by_hand::ByHand::new(by_hand::Gemm)),
        #[cfg(feature = "faer")]
        Box::new(by_hand::ByHand::new(by_hand::Faer)),
        #[cfg(feature = "rten")]
        Box::new(rten::Rten::default()),
        #[cfg(feature = "candle")]
        Box::new(candle::Plain::default()),
        #[cfg(feature = "candle")]
        Box::new(candle::Flash::default()),
        #[cfg(feature = "burn")]
        Box::new(burn::Burn::default()),
    ];
    all.into_iter().find(|peer| peer.name() == name)
}

/// The version that this program was built with.
pub(crate) fn version(package: &str) -> String {
    let lock = include_str!("../Cargo.lock");
    let entry = lock.split("[[package]]").find(|entry| entry.contains(&format!("name = \"{package}\"\n")));
    let version = entry.and_then(|entry| entry.split("version = \"").nth(1)?.split('"').next());
    version.unwrap_or("?").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::Reference;
    use crate::rounded::Rounded;
    use crate::session::Folder;
    use crate::support::WORKLOADS;

    /// On something small, and on something whose sizes are all odd; one after the other, as a worker has it.
    #[test]
    fn rust_peers_are_right() {
        let folder = Folder::new().unwrap();
        for (name, elements) in ["tiny-16", "odd"].into_iter().flat_map(|name| Elements::ALL.map(|e| (name, e))) {
            let workload = *WORKLOADS.iter().find(|workload| workload.name == name).unwrap();
            let tensors = Rounded::new(workload, elements);
            let reference = Reference::compute(&tensors).unwrap();
            let case = Case::write(&tensors, 2, folder.as_ref()).unwrap();
            for entry in PEERS.iter().filter(|entry| entry.elements.contains(&elements)) {
                let Some(mut peer) = rust_peer(entry.name) else { continue };
                if peer.supports(&case).is_err() {
                    continue;
                }
                peer.prepare(&case).unwrap();
                peer.run().unwrap();
                let error = reference.error(&peer.output().unwrap()).unwrap();
                assert!(
                    error < elements.wrong(reference.largest()),
                    "{}, {name}, {}: {error}",
                    entry.name,
                    elements.name()
                );
            }
        }
    }

    #[test]
    fn versions_are_known() {
        for entry in PEERS {
            let Home::Rust { package } = entry.home else { continue };
            assert!(version(package).starts_with(|c: char| c.is_ascii_digit()), "{package}");
        }
    }
}
