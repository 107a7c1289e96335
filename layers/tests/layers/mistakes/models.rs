//! 1 and 2: models with files that do not fit, or are none.

use crate::mistake::{Mistake, mistake, outcome};
use safetensors::tensor::{Dtype, TensorView};
use sdpa_layers::{Bert, BertConfig, SafeTensorsFile, Tensor};
use std::collections::HashMap;

const WORDS: &str = "embeddings.word_embeddings.weight";

fn config() -> BertConfig {
    BertConfig { vocab_size: 5, hidden_size: 4, num_attention_heads: 2, ..BertConfig::default() }
}

pub(super) fn mistakes() -> Vec<Mistake> {
    let bert = |config: BertConfig, shape: Option<&[usize]>| {
        let mut weights: HashMap<String, Tensor<'_>> = HashMap::new();
        if let Some(shape) = shape {
            let data = vec![0.0; shape.iter().product()];
            weights.insert(WORDS.to_owned(), Tensor::new(shape, data).unwrap());
        }
        outcome(Bert::new(config, &weights))
    };
    let file = |bytes: &[u8]| outcome(SafeTensorsFile::new(bytes));
    // What follows are the reader's own words.
    let no_file = |bytes: &[u8]| file(bytes).split_once(": ").map_or("?".to_owned(), |(words, _)| words.to_owned());
    let whole = doubles();
    vec![
        mistake(1, "missing tensor", bert(config(), None), format!("{WORDS}: no such tensor")),
        mistake(
            1,
            "wrong shape",
            bert(config(), Some(&[5, 3])),
            format!("{WORDS}: shape is [5, 3], but by the configuration must be [5, 4]"),
        ),
        mistake(
            1,
            "wrong dtype",
            outcome(Bert::new(config(), &SafeTensorsFile::new(&whole).unwrap())),
            format!("{WORDS}: dtype is F64, but must be F32, F16 or BF16"),
        ),
        mistake(
            1,
            "contradictory config",
            bert(BertConfig { num_attention_heads: 3, ..config() }, Some(&[5, 4])),
            "configuration: num_attention_heads is 3, but must be a divisor of hidden_size, which is 4",
        ),
        mistake(2, "a file that is no safetensors", no_file(b"GGUF, and something else"), "not a safetensors file"),
        mistake(
            2,
            "a header that is no JSON",
            no_file(&[&8u64.to_le_bytes()[..], b"not JSON"].concat()),
            "not a safetensors file",
        ),
        mistake(2, "tensors that end beyond all numbers", no_file(&endless()), "not a safetensors file"),
        mistake(
            2,
            "a file cut off",
            file(&whole[..whole.len() - 1]),
            format!("the file has {} bytes, but its header speaks of {}", whole.len() - 1, whole.len()),
        ),
    ]
}

/// A file of tensors that follow one another up to the largest number: with the header before them it overflows.
fn endless() -> Vec<u8> {
    let tensor = |name: &str, from: usize, to: usize| {
        format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, to - from)
    };
    // A tensor's size in bits is a number, too.
    let step = usize::MAX / 8;
    let ends = (0..9).map(|n| (n * step, (n + 1).saturating_mul(step)));
    let tensors: Vec<_> = ends.enumerate().map(|(n, (from, to))| tensor(&n.to_string(), from, to)).collect();
    let header = format!("{{{}}}", tensors.join(","));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

/// A file with word embeddings of `f64`.
fn doubles() -> Vec<u8> {
    let data = [0u8; 5 * 4 * 8];
    let view = TensorView::new(Dtype::F64, vec![5, 4], &data).unwrap();
    safetensors::serialize([(WORDS, view)], None).unwrap()
}
