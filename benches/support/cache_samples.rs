//! Queries, keys and values for the errors of caches: those of two trained models, these with a large channel of keys, and normal ones.

use crate::support::{normal, test_mode};
use crate::translations::{self, LAYERS};
use safetensors::SafeTensors;
use sdpa::{Alignment, Attention, Inputs, View};

/// Factor of a large channel.
const LARGE: f32 = 20.0;

/// A call.
pub(crate) struct Sample {
    pub(crate) name: &'static str,
    pub(crate) attention: Attention,
    /// `[1, heads, rows, dim]`, and twice `[1, heads, keys, dim]`.
    pub(crate) shapes: [[usize; 4]; 3],
    pub(crate) qkv: [Vec<f32>; 3],
}

impl Sample {
    pub(crate) fn views(&self) -> [View<'_>; 3] {
        [0, 1, 2].map(|i| View::bhld(&self.qkv[i], self.shapes[i]).expect("data of this shape"))
    }

    pub(crate) fn inputs(&self) -> Inputs<'_> {
        let [q, k, v] = self.views();
        Inputs::new(q, k, v)
    }

    /// Multiplies a channel of each head's keys, and divides that of the queries by as much: scores stay what they are. The channel
    /// is the head's largest.
    fn with_large_channels(mut self, name: &'static str) -> Self {
        let [_, heads, keys, dim] = self.shapes[1];
        let rows = self.shapes[0][2];
        for head in 0..heads {
            let sizes = channels(&self.qkv[1][head * keys * dim..][..keys * dim], dim);
            let channel = (0..dim).max_by(|&a, &b| sizes[a].total_cmp(&sizes[b])).expect("channels");
            for key in 0..keys {
                self.qkv[1][(head * keys + key) * dim + channel] *= LARGE;
            }
            for row in 0..rows {
                self.qkv[0][(head * rows + row) * dim + channel] /= LARGE;
            }
        }
        Self { name, ..self }
    }

    /// Says how many there are, and how large the heads' largest channels of keys and of values are beside the middle ones.
    pub(crate) fn print(&self) {
        let [[_, heads, rows, _], [_, _, keys, dim], _] = self.shapes;
        print!("{}: {heads} heads of {dim}, {rows} rows, {keys} keys", self.name);
        for (i, what) in [(1, "keys"), (2, "values")] {
            let ratio = |head: &[f32]| {
                let mut sizes = channels(head, dim);
                sizes.sort_by(f32::total_cmp);
                sizes[dim - 1] / sizes[dim / 2]
            };
            let ratios: Vec<_> = self.qkv[i].chunks(keys * dim).map(ratio).collect();
            let ends = [f32::min, f32::max].map(|end| ratios.iter().copied().reduce(end).expect("heads"));
            print!("; largest channel of {what} over the middle one {:.1} to {:.1}", ends[0], ends[1]);
        }
        println!();
    }
}

/// Root mean square of each channel.
fn channels(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut sums = vec![0.0; dim];
    for row in rows.chunks(dim) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
    }
    sums.iter().map(|sum| (sum / (rows.len() / dim) as f32).sqrt()).collect()
}

/// All samples.
pub(crate) fn samples() -> Vec<Sample> {
    vec![
        paragraph(),
        paragraph().with_large_channels("MiniLM, a large channel"),
        decoder(),
        decoder().with_large_channels("decoder, a large channel"),
        random("normal", None),
        random("normal, a large channel", Some(37)),
    ]
}

/// Layer 3 of all-MiniLM-L6-v2 on a paragraph.
fn paragraph() -> Sample {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/minilm_paragraph.safetensors");
    let bytes = std::fs::read(path).expect("the repository's fixtures");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let qkv = ["q", "k", "v"].map(|name| {
        let tensor = file.tensor(&format!("layer.3.{name}")).expect("a fixture has its tensors");
        tensor.data().as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect()
    });
    Sample { name: "MiniLM", attention: Attention::new(), shapes: [[1, 12, 268, 32]; 3], qkv }
}

/// Layers of the translator's decoder, as heads of one call: words of all sentences end to end, which see those before them.
fn decoder() -> Sample {
    let translations::Tensors { tokens, qkv } = translations::tensors(if test_mode() { 1 } else { 8 });
    let shape = [1, LAYERS * translations::HEADS, tokens, translations::HEAD_DIM];
    Sample { name: "decoder", attention: causal(), shapes: [shape; 3], qkv }
}

/// Normal numbers; this channel of the keys is larger. Queries stay as they are.
fn random(name: &'static str, large: Option<usize>) -> Sample {
    let (rows, keys, dim) = if test_mode() { (2, 300, 128) } else { (512, 2048, 128) };
    let mut normal = normal(7);
    let mut fill = |rows: usize| (0..8 * rows * dim).map(|_| normal()).collect::<Vec<_>>();
    let mut qkv = [fill(rows), fill(keys), fill(keys)];
    if let Some(channel) = large {
        qkv[1].iter_mut().skip(channel).step_by(dim).for_each(|x| *x *= LARGE);
    }
    Sample { name, attention: causal(), shapes: [rows, keys, keys].map(|len| [1, 8, len, dim]), qkv }
}

fn causal() -> Attention {
    Attention::new().causal().align(Alignment::BottomRight)
}
