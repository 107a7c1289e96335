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
#[cfg(feature = "tract")]
mod tract;

use crate::case::Case;
use crate::elements::{Elements, Rounding};
use crate::peer::{ACCURATE, Entry, Environment, IN_F32, NATIVE, OURS, Peer, python, rust};
use ours::Way;

const FLOATS: &[Elements] = &[Elements::F32, Elements::Bf16, Elements::F16];

/// Ours first, then everyone that was built in or may be installed.
pub(crate) const PEERS: &[Entry] = &[
    rust(OURS, "sdpa").takes(&Elements::ALL),
    rust(NATIVE, "sdpa").takes(&[Elements::Bf16]),
    rust(ACCURATE, "sdpa").takes(FLOATS),
    rust(IN_F32, "sdpa").takes(&[Elements::Int8]),
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
    #[cfg(feature = "tract")]
    rust("tract", "tract-transformers"),
    python("torch").takes(FLOATS),
    // set_float32_matmul_precision of these: products of f32 as of tf32, and of bf16.
    python("torch-high").rounds(Rounding::FactorsToBf16),
    python("torch-medium").rounds(Rounding::FactorsToBf16),
    python("onnxruntime").takes(&[Elements::F32, Elements::Bf16]),
    python("openvino").takes(&[Elements::F32, Elements::Bf16]),
    python("zentorch").takes(&[Elements::F32, Elements::Bf16]).of(Environment::Zentorch),
    // Of one row a head, and of few.
    python("ggml").takes(&Elements::ALL).rounds(Rounding::SumsInF16),
];

/// The code behind a name.
pub(crate) fn rust_peer(name: &str) -> Option<Box<dyn Peer<Case>>> {
    let all: Vec<Box<dyn Peer<Case>>> = vec![
        Box::new(ours::Fused::new(Way::Exact)),
        Box::new(ours::Fused::new(Way::Native)),
        Box::new(ours::Fused::new(Way::Accurate)),
        Box::new(ours::Fused::new(Way::InF32)),
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
        #[cfg(feature = "tract")]
        Box::new(tract::Tract::default()),
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
    use crate::folder::Folder;
    use crate::peer::Home;
    use crate::reference::Reference;
    use crate::rounded::Rounded;
    use crate::workloads;

    /// On something small, on something with odd sizes, and on a latent step; one after the other, as a worker has it.
    #[test]
    fn rust_peers_are_right() {
        let folder = Folder::new().unwrap();
        let small = ["tiny-16", "odd"].into_iter().flat_map(|name| Elements::ALL.map(|e| (name, e)));
        let latent = [Elements::Bf16, Elements::Int8].map(|elements| ("mla-4k", elements));
        for (name, elements) in small.chain(latent) {
            let workload = workloads::by_name(name).unwrap();
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
