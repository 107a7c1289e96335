//! Queries, keys, values and options: from the repository, from the user's file, or random.

use crate::args::Source;
use crate::failure::{Refused, Result};
use crate::file;
use crate::lists::Lists;
use crate::settings::Groups;
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use safetensors::tensor::SafeTensors;
use sdpa::{Dtype, Inputs, Mask, SelectedKeys, Shape, View};
use std::ops::Range;
use std::path::PathBuf;

/// The seed of `--shape`.
const SEED: u64 = 0x5d9a;

/// A dense tensor.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor<T = f32> {
    pub(crate) shape: [usize; 4],
    pub(crate) data: Vec<T>,
}

/// What attention reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensors {
    /// What this is, in words.
    pub(crate) title: String,
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    /// Element type in which fused paths read q, k and v. It holds all of their numbers.
    pub(crate) dtype: Dtype,
    pub(crate) bias: Option<Tensor>,
    /// Nonzero keeps.
    pub(crate) mask: Option<Tensor<u8>>,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) alibi_slopes: Option<Vec<f32>>,
    pub(crate) kv_lens: Option<Vec<usize>>,
    pub(crate) selected: Option<Lists>,
    /// Gradients in the output, and in the log-sum-exp, `[batch, heads, rows, 1]`, for the backward pass.
    pub(crate) d_out: Option<Tensor>,
    pub(crate) d_lse: Option<Tensor>,
}

impl<T> Tensor<T> {
    pub(crate) fn view(&self) -> Result<View<'_, T>> {
        Ok(View::bhld(&self.data, self.shape)?)
    }

    /// All elements of one head.
    pub(crate) fn head(&self, [batch, head]: [usize; 2]) -> &[T] {
        let [_, heads, rows, dim] = self.shape;
        &self.data[(batch * heads + head) * rows * dim..][..rows * dim]
    }

    /// Some rows of one head, as a tensor of their own.
    pub(crate) fn rows(&self, at: [usize; 2], rows: Range<usize>) -> Result<View<'_, T>> {
        let [.., dim] = self.shape;
        Ok(View::bhld(&self.head(at)[rows.start * dim..rows.end * dim], [1, 1, rows.len(), dim])?)
    }

    /// Some rows of one head, as [`Self::rows`] returns them; one batch, head or row may stand for all.
    pub(crate) fn broadcast_rows(&self, [batch, head]: [usize; 2], rows: Range<usize>) -> Result<View<'_, T>> {
        let [batches, heads, all, _] = self.shape;
        let one = |n: usize, index| if n == 1 { 0 } else { index };
        self.rows([one(batches, batch), one(heads, head)], if all == 1 { 0..1 } else { rows })
    }
}

impl Tensors {
    fn new(title: String, [q, k, v]: [Tensor; 3]) -> Self {
        Self {
            title,
            q,
            k,
            v,
            dtype: Dtype::F32,
            bias: None,
            mask: None,
            sinks: None,
            alibi_slopes: None,
            kv_lens: None,
            selected: None,
            d_out: None,
            d_lse: None,
        }
    }

    /// Views of all there is, in f32.
    pub(crate) fn inputs(&self) -> Result<Inputs<'_>> {
        Ok(self.with_lists(self.all_but_lists()?))
    }

    /// Views of all but lists of selected keys, in f32.
    pub(crate) fn all_but_lists(&self) -> Result<Inputs<'_>> {
        self.with_options(Inputs::new(self.q.view()?, self.k.view()?, self.v.view()?))
    }

    /// Adds lists of selected keys, if there are any.
    pub(crate) fn with_lists<'a>(&'a self, inputs: Inputs<'a>) -> Inputs<'a> {
        self.selected.as_ref().map_or(inputs, |lists| inputs.selected(&lists.keys))
    }

    /// Makes the lists of selected keys of the file's numbers.
    pub(crate) fn select(&mut self, groups: Option<Groups>) -> Result<()> {
        if self.selected.is_none() {
            return groups.map_or(Ok(()), |Groups { rows, unit }| {
                Err(Refused::new(format_args!("--selected: {rows},{unit}, but there is no tensor selected")))
            });
        }
        let Shape { batch, q_len, .. } = self.all_but_lists()?.shape()?;
        let kv_lens: Vec<_> = (0..batch).map(|b| self.kv_len(b)).collect();
        self.selected.as_mut().map_or(Ok(()), |lists| lists.make(groups.unwrap_or_default(), q_len, &kv_lens))
    }

    /// Adds all else there is, but lists, to views of queries, keys and values.
    pub(crate) fn with_options<'a>(&'a self, mut inputs: Inputs<'a>) -> Result<Inputs<'a>> {
        if let Some(bias) = &self.bias {
            inputs = inputs.bias(bias.view()?);
        }
        if let Some(mask) = &self.mask {
            inputs = inputs.mask(Mask::keep(mask.view()?));
        }
        if let Some(sinks) = &self.sinks {
            inputs = inputs.sinks(sinks);
        }
        if let Some(slopes) = &self.alibi_slopes {
            inputs = inputs.alibi(slopes);
        }
        if let Some(lens) = &self.kv_lens {
            inputs = inputs.kv_lens(lens);
        }
        Ok(inputs)
    }

    /// Some rows of one head, and all they look at, as a separate call; its lists, if there are any, are made in `lists`.
    pub(crate) fn inputs_of_rows<'a>(
        &'a self,
        [batch, head]: [usize; 2],
        rows: Range<usize>,
        lists: &'a mut SelectedKeys,
    ) -> Result<Inputs<'a>> {
        let ([_, heads, ..], [_, kv_heads, keys, _]) = (self.q.shape, self.k.shape);
        let kv = [batch, head / (heads / kv_heads)];
        let q = self.q.rows([batch, head], rows.clone())?;
        let mut inputs = Inputs::new(q, self.k.rows(kv, 0..keys)?, self.v.rows(kv, 0..keys)?);
        if let Some(bias) = &self.bias {
            inputs = inputs.bias(bias.broadcast_rows([batch, head], rows.clone())?);
        }
        if let Some(mask) = &self.mask {
            inputs = inputs.mask(Mask::keep(mask.broadcast_rows([batch, head], rows.clone())?));
        }
        if let Some(sinks) = &self.sinks {
            inputs = inputs.sinks(&sinks[head..=head]);
        }
        if let Some(slopes) = &self.alibi_slopes {
            inputs = inputs.alibi(&slopes[head..=head]);
        }
        if let Some(lens) = &self.kv_lens {
            inputs = inputs.kv_lens(&lens[batch..=batch]);
        }
        if let Some(selected) = &self.selected {
            selected.of_rows([batch, head], heads, rows, lists)?;
            inputs = inputs.selected(lists);
        }
        Ok(inputs)
    }

    /// Keys of one sequence that exist.
    pub(crate) fn kv_len(&self, batch: usize) -> usize {
        self.kv_lens.as_ref().map_or(self.k.shape[2], |lens| lens[batch])
    }

    /// What there is beyond queries, keys and values, in words.
    pub(crate) fn options(&self) -> Vec<String> {
        let mut options = Vec::new();
        options.extend(self.bias.as_ref().map(|bias| format!("bias {:?}", bias.shape)));
        options.extend(self.mask.as_ref().map(|mask| format!("mask {:?}", mask.shape)));
        options.extend(self.sinks.as_ref().map(|_| "sinks".to_owned()));
        options.extend(self.alibi_slopes.as_ref().map(|_| "ALiBi".to_owned()));
        let range = self.kv_lens.as_ref().and_then(|lens| Some((lens.iter().min()?, lens.iter().max()?)));
        options.extend(range.map(|(min, max)| match min == max {
            true => format!("{min} keys exist"),
            false => format!("{min} to {max} keys exist"),
        }));
        options.extend(self.selected.as_ref().map(Lists::in_words));
        options
    }
}

/// Gets the tensors from where they come from.
pub(crate) fn load(source: &Source) -> Result<Tensors> {
    match source {
        Source::Paragraph => {
            let path =
                PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/minilm_paragraph.safetensors"));
            file::load(&path, "layer.3.", paragraph_title)
        }
        Source::File(path) => file::load(path, "", |_| path.display().to_string()),
        Source::Random(shape) => random(shape),
    }
}

/// The paragraph's first words.
fn paragraph_title(bytes: &[u8]) -> String {
    let metadata = SafeTensors::read_metadata(bytes).ok().and_then(|(_, metadata)| metadata.metadata().clone());
    let text = metadata.and_then(|mut metadata| metadata.remove("text")).unwrap_or_default();
    let words: Vec<_> = text.split_whitespace().take(12).collect();
    format!("layer 3 of all-MiniLM-L6-v2 reading “{} …”", words.join(" "))
}

/// A unit-normal gradient in the output of a call.
pub(crate) fn made_up_gradient(shape: [usize; 4]) -> Result<Tensor> {
    unit_normal(shape, &mut ChaCha8Rng::seed_from_u64(SEED + 1))
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
    Ok(Tensors::new(title, [q?, k?, v?]))
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
pub(crate) fn reserved<T>(len: usize) -> Result<Vec<T>> {
    let mut data = Vec::new();
    let (needed, there) = (size_of::<T>() as u128 * len as u128, available_memory());
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

    #[test]
    fn the_paragraph_is_there() {
        let Tensors { title, q, k, v, .. } = load(&Source::Paragraph).unwrap();
        assert_eq!(
            title,
            "layer 3 of all-MiniLM-L6-v2 reading “Attention lets every word of a sentence look at every other word …”"
        );
        for tensor in [&q, &k, &v] {
            assert_eq!(tensor.shape, [1, 12, 268, 32]);
            let largest = tensor.data.iter().fold(0.0, |max: f32, x| x.abs().max(max));
            assert!(largest > 0.5 && largest < 50.0);
        }
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
