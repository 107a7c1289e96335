//! Queries, keys and values: from the repository, from the user's file, or random.

use crate::args::Source;
use crate::failure::{Refused, Result};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use sdpa::{Inputs, Shape, View};
use std::path::{Path, PathBuf};

/// The seed of `--shape`.
const SEED: u64 = 0x5d9a;
/// Tensors that mean something to attention, but not yet to this crate. To compute without them would be to answer
/// another question than the one the file asks.
const NOT_YET: [&str; 5] = ["bias", "mask", "sinks", "alibi_slopes", "kv_lens"];
/// Names shown of the tensors that a file does have.
const NAMES_SHOWN: usize = 8;

/// A dense f32 tensor.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) shape: [usize; 4],
    pub(crate) data: Vec<f32>,
}

/// What attention reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensors {
    /// What this is, in words.
    pub(crate) title: String,
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
}

impl Tensor {
    fn view(&self) -> Result<View<'_>> {
        Ok(View::bhld(&self.data, self.shape)?)
    }

    /// `rows` rows of one head, as a tensor of their own.
    pub(crate) fn rows(&self, [batch, head]: [usize; 2], rows: std::ops::Range<usize>) -> Result<View<'_>> {
        let [_, heads, all, dim] = self.shape;
        let first = (batch * heads + head) * all;
        let data = &self.data[(first + rows.start) * dim..(first + rows.end) * dim];
        Ok(View::bhld(data, [1, 1, rows.len(), dim])?)
    }

    /// The largest absolute value of what is finite.
    pub(crate) fn largest(&self) -> f64 {
        self.data.iter().filter(|x| x.is_finite()).fold(0.0, |max, x| f64::from(x.abs()).max(max))
    }

    /// The largest Euclidean length of a row, of those that are finite.
    pub(crate) fn longest_row(&self) -> f64 {
        let length = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let rows = self.data.chunks_exact(self.shape[3].max(1)).map(length);
        rows.filter(|length| length.is_finite()).fold(0.0, f64::max)
    }
}

impl Tensors {
    pub(crate) fn inputs(&self) -> Result<Inputs<'_>> {
        Ok(Inputs::new(self.q.view()?, self.k.view()?, self.v.view()?))
    }
}

/// Gets the tensors from where they come from.
pub(crate) fn load(source: &Source) -> Result<Tensors> {
    match source {
        Source::Paragraph => {
            let path =
                PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/minilm_paragraph.safetensors"));
            file(&path, "layer.3.", paragraph_title)
        }
        Source::File(path) => file(path, "", |_| path.display().to_string()),
        Source::Random(shape) => random(shape),
    }
}

/// Reads `{prefix}q`, `{prefix}k` and `{prefix}v`.
fn file(path: &Path, prefix: &str, title: impl Fn(&[u8]) -> String) -> Result<Tensors> {
    let refuse = |why: &dyn std::fmt::Display| Refused::new(format_args!("{}: {why}", path.display()));
    // A directory or a device would give a puzzling message, or none ever.
    if !std::fs::metadata(path).map_err(|e| refuse(&e))?.is_file() {
        return Err(refuse(&"not a file"));
    }
    let bytes = std::fs::read(path).map_err(|e| refuse(&e))?;
    let [q, k, v] = tensors(&bytes, prefix).map_err(|e| refuse(&e))?;
    Ok(Tensors { title: title(&bytes), q, k, v })
}

/// The three tensors of a file in memory.
fn tensors(bytes: &[u8], prefix: &str) -> Result<[Tensor; 3]> {
    let file =
        SafeTensors::deserialize(bytes).map_err(|e| Refused::new(format_args!("not a safetensors file: {e}")))?;
    let mut names = file.names();
    names.sort_unstable();
    if let Some(name) = NOT_YET.iter().find(|name| names.contains(name)) {
        return Err(Refused::new(format_args!(
            "tensor {name}: not supported yet, and the answer would be another without it"
        )));
    }
    let tensor = |name: &str| {
        let full = format!("{prefix}{name}");
        let view = file.tensor(&full).map_err(|_| {
            let more = if names.len() > NAMES_SHOWN { ", …" } else { "" };
            let has = names.iter().take(NAMES_SHOWN).copied().collect::<Vec<_>>().join(", ");
            Refused::new(format_args!("no tensor {full}; there are {}: {has}{more}", names.len()))
        })?;
        tensor(&full, &view)
    };
    Ok([tensor("q")?, tensor("k")?, tensor("v")?])
}

fn tensor(name: &str, view: &TensorView<'_>) -> Result<Tensor> {
    if view.dtype() != Dtype::F32 {
        return Err(Refused::new(format_args!("{name}: dtype is {:?}, but must be F32", view.dtype())));
    }
    let shape = view.shape().try_into().map_err(|_| {
        let shape = view.shape();
        Refused::new(format_args!(
            "{name}: shape {shape:?} has {} dimensions, but must have 4: batch, heads, rows, dim",
            shape.len()
        ))
    })?;
    let data = view.data().chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]));
    Ok(Tensor { shape, data: data.collect() })
}

/// The paragraph's first words.
fn paragraph_title(bytes: &[u8]) -> String {
    let metadata = SafeTensors::read_metadata(bytes).ok().and_then(|(_, metadata)| metadata.metadata().clone());
    let text = metadata.and_then(|mut metadata| metadata.remove("text")).unwrap_or_default();
    let words: Vec<_> = text.split_whitespace().take(12).collect();
    format!("layer 3 of all-MiniLM-L6-v2 reading “{} …”", words.join(" "))
}

/// Unit-normal tensors.
fn random(shape: &Shape) -> Result<Tensors> {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
    let shapes =
        [[batch, heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim], [batch, kv_heads, kv_len, value_dim]];
    let out = [[batch, heads, q_len, value_dim], [batch, heads, q_len, 1]];
    let elements = shapes.iter().chain(&out).map(elements).fold(0u128, u128::saturating_add);
    let (needed, available) = (elements.saturating_mul(4), available_memory());
    if needed > available {
        return Err(Refused::new(format_args!(
            "--shape: its tensors take {}, but there are {} of memory",
            gib(needed),
            gib(available)
        )));
    }
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let [q, k, v] = shapes.map(|shape| unit_normal(shape, &mut rng));
    let title = "unit-normal data from a fixed seed".to_owned();
    Ok(Tensors { title, q: q?, k: k?, v: v? })
}

fn elements(shape: &[usize; 4]) -> u128 {
    if shape.contains(&0) { 0 } else { shape.iter().fold(1, |n, &size| n.saturating_mul(size as u128)) }
}

/// Bytes that can be had: what Linux says, elsewhere the address space.
pub(crate) fn available_memory() -> u128 {
    let linux = || {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u128>().ok()? * 1024)
    };
    linux().unwrap_or(isize::MAX as u128)
}

pub(crate) fn gib(bytes: u128) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u128 << 30) as f64)
}

/// By Box and Muller: two uniform numbers make two normal ones.
fn unit_normal(shape: [usize; 4], rng: &mut ChaCha8Rng) -> Result<Tensor> {
    let len = elements(&shape) as usize;
    let mut data = reserved(len)?;
    while data.len() < len {
        let (u, angle) = (1.0 - rng.random::<f64>(), std::f64::consts::TAU * rng.random::<f64>());
        let radius = (-2.0 * u.ln()).sqrt();
        data.push((radius * angle.cos()) as f32);
        if data.len() < len {
            data.push((radius * angle.sin()) as f32);
        }
    }
    Ok(Tensor { shape, data })
}

/// An empty vector with room for so many elements, or a refusal where there is none.
pub(crate) fn reserved(len: usize) -> Result<Vec<f32>> {
    let mut data = Vec::new();
    let (needed, there) = (4 * len as u128, available_memory());
    // Where memory is overcommitted, the reservation would succeed and the first use of it would not.
    if needed > there || data.try_reserve_exact(len).is_err() {
        let (needed, there) = (gib(needed), gib(there));
        return Err(Refused::new(format_args!("{len} numbers take {needed}, but there are {there} of memory")));
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn file_of(tensors: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
        let zeros = vec![0u8; 4096];
        let views = tensors.iter().map(|&(name, dtype, shape)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorView::new(dtype, shape.to_vec(), &zeros[..bytes]).unwrap())
        });
        safetensors::serialize(views.collect::<HashMap<_, _>>(), None).unwrap()
    }

    fn refusal(tensors: &[(&str, Dtype, &[usize])]) -> String {
        super::tensors(&file_of(tensors), "").unwrap_err().to_string()
    }

    #[test]
    fn the_paragraph_is_there() {
        let Tensors { title, q, k, v } = load(&Source::Paragraph).unwrap();
        assert_eq!(
            title,
            "layer 3 of all-MiniLM-L6-v2 reading “Attention lets every word of a sentence look at every other word …”"
        );
        for tensor in [&q, &k, &v] {
            assert_eq!(tensor.shape, [1, 12, 268, 32]);
            assert!(tensor.largest() > 0.5 && tensor.largest() < 50.0);
        }
    }

    #[test]
    fn tensors_of_other_kinds_are_refused() {
        let good: &[usize] = &[1, 1, 2, 4];
        let f32s = |name| (name, Dtype::F32, good);
        assert!(super::tensors(&file_of(&[f32s("q"), f32s("k"), f32s("v"), f32s("expected.out")]), "").is_ok());
        assert_eq!(refusal(&[("q", Dtype::F64, good), f32s("k"), f32s("v")]), "q: dtype is F64, but must be F32");
        assert_eq!(
            refusal(&[f32s("q"), ("k", Dtype::F32, &[1, 2, 4]), f32s("v")]),
            "k: shape [1, 2, 4] has 3 dimensions, but must have 4: batch, heads, rows, dim"
        );
        assert_eq!(refusal(&[f32s("q"), f32s("k")]), "no tensor v; there are 2: k, q");
        assert_eq!(refusal(&[]), "no tensor q; there are 0: ");
        for name in NOT_YET {
            let message = format!("tensor {name}: not supported yet, and the answer would be another without it");
            assert_eq!(refusal(&[f32s("q"), f32s("k"), f32s("v"), f32s(name)]), message);
        }
    }

    #[test]
    fn broken_files_are_refused() {
        let whole = file_of(&[("q", Dtype::F32, &[1, 1, 2, 4])]);
        for len in 0..whole.len() {
            let message = super::tensors(&whole[..len], "").unwrap_err().to_string();
            assert!(message.starts_with("not a safetensors file: "), "{message}");
        }
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 0x55;
            assert!(super::tensors(&flipped, "").is_err());
        }
        let message = load(&Source::File("no/such.safetensors".into())).unwrap_err().to_string();
        assert!(message.starts_with("no/such.safetensors: "), "{message}");
        let message = load(&Source::File(env!("CARGO_MANIFEST_DIR").into())).unwrap_err().to_string();
        assert!(message.ends_with(": not a file"), "{message}");
    }

    #[test]
    fn random_tensors_are_unit_normal_and_always_the_same() {
        let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 33, kv_len: 65, head_dim: 31, value_dim: 7 };
        let tensors = random(&shape).unwrap();
        assert_eq!(tensors, random(&shape).unwrap());
        assert_eq!(tensors.inputs().unwrap().shape().unwrap(), shape);
        let data = &tensors.q.data;
        let mean = data.iter().sum::<f32>() / data.len() as f32;
        let variance = data.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / data.len() as f32;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.1, "{mean} {variance}");
    }

    #[test]
    fn shapes_beyond_memory_are_refused() {
        for big in [1 << 40, usize::MAX] {
            let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: big, kv_len: 1, head_dim: 8, value_dim: 8 };
            let message = random(&shape).unwrap_err().to_string();
            assert!(message.starts_with("--shape: its tensors take "), "{message}");
        }
    }
}
