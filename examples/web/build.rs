//! Takes from the translator's file what the page shows: the first attention of its encoder.

use safetensors::tensor::{SafeTensors, serialize};
use std::error::Error;
use std::path::PathBuf;

const FILE: &str = "../../layers/examples/models/translator.safetensors";

const TENSORS: [&str; 5] = [
    "embedding.english.weight",
    "encoder.0.self.norm.weight",
    "encoder.0.self.q.weight",
    "encoder.0.self.k.weight",
    "encoder.0.self.v.weight",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={FILE}");
    let bytes = std::fs::read(FILE)?;
    let header = SafeTensors::read_metadata(&bytes)?.1.metadata().clone().unwrap_or_default();
    let field = |name: &str| header.get(name).ok_or_else(|| format!("{name}: not in the header of {FILE}"));
    println!("cargo::rustc-env=HEADS={}", field("heads")?);
    let file = SafeTensors::deserialize(&bytes)?;
    let tensors = TENSORS.map(|name| Ok((name, file.tensor(name)?)));
    let tensors = tensors.into_iter().collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    std::fs::write(folder.join("words.safetensors"), serialize(tensors, None)?)?;
    std::fs::write(folder.join("words.txt"), field("english")?)?;
    Ok(())
}
