//! Takes from the translator's file what the page shows, the first attention of its encoder, with numbers rounded to 49 levels
//! in each row: a third of the page would otherwise be digits that no heat map shows.

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::error::Error;
use std::path::PathBuf;

const FILE: &str = "../../layers/examples/models/translator.safetensors";

/// Level of the largest number of a row. Bytes, of which gzip leaves five bits: packed tighter they would not shrink so far.
const LARGEST: f32 = 24.0;

/// Tensors, in the order in which `src/model.rs` reads them.
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
    let (file, mut rounded) = (SafeTensors::deserialize(&bytes)?, Vec::new());
    for name in TENSORS {
        round(&file.tensor(name)?, &mut rounded)?;
    }
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    std::fs::write(folder.join("words.bin"), rounded)?;
    std::fs::write(folder.join("words.txt"), field("english")?)?;
    Ok(())
}

/// Writes rows and width, u32, then each row: its scale, f32, and its numbers in units of that, i8.
fn round(tensor: &TensorView<'_>, to: &mut Vec<u8>) -> Result<(), Box<dyn Error>> {
    let (Dtype::F16, Some(&width)) = (tensor.dtype(), tensor.shape().last()) else {
        return Err(format!("{FILE}: expected f16, got {:?} {:?}", tensor.dtype(), tensor.shape()).into());
    };
    let numbers: Vec<f32> =
        tensor.data().as_chunks().0.iter().map(|&bytes| half::f16::from_le_bytes(bytes).to_f32()).collect();
    for size in [numbers.len() / width, width] {
        to.extend(u32::try_from(size)?.to_le_bytes());
    }
    for row in numbers.chunks_exact(width) {
        let scale = row.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs())) / LARGEST;
        to.extend(scale.to_le_bytes());
        to.extend(row.iter().map(|x| (x / scale).round() as i8 as u8));
    }
    Ok(())
}
