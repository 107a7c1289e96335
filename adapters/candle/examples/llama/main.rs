//! Generates tokens with a small Llama of random weights twice: by candle-transformers' model and cache, and by the same
//! model with this attention over a cache of each type.

mod model;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama;
use model::{Llama, difference};
use sdpa_candle::{KeyScales, KvCache};

const STEPS: usize = 20;

/// A type of cache: its name, how an empty `f32` cache becomes one, and the difference from candle's logits allowed.
type Kind = (&'static str, fn(KvCache) -> Result<KvCache>, f32);

const KINDS: [Kind; 4] = [
    ("f32", Ok, 1e-5),
    ("bf16", |cache| cache.dtype(DType::BF16), 5e-2),
    ("f16", |cache| cache.dtype(DType::F16), 1e-2),
    ("int8", |cache| cache.int8(KeyScales::PerToken), 0.1),
];

fn main() -> Result<()> {
    let config = model::small();
    let weights = VarMap::new();
    let weights = VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
    let candle = llama::Llama::load(weights.clone(), &config)?;
    let mut ours = Llama::load(&weights, &config)?;
    let vocabulary = config.vocab_size as u32;
    let prompt: Vec<u32> = (0..300).map(|n| n * 7919 % vocabulary).collect();

    let mut expected = Vec::new();
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    let (mut tokens, mut position) = (prompt.clone(), 0);
    for _ in 0..STEPS {
        let logits = candle.forward(&Tensor::new(&tokens[..], &Device::Cpu)?.unsqueeze(0)?, position, &mut cache)?;
        position += tokens.len();
        tokens = logits.argmax(1)?.to_vec1()?;
        expected.push((logits, tokens[0]));
    }

    println!("{} tokens of a prompt, {STEPS} steps; difference of logits from candle's own, at most:", prompt.len());
    for (name, of_kind, allowed) in KINDS {
        let mut caches = Llama::caches(&config, 1)?.into_iter().map(of_kind).collect::<Result<Vec<_>>>()?;
        let mut tokens = prompt.clone();
        let mut worst = 0f32;
        for (logits, next) in &expected {
            let ours = ours.forward(&Tensor::new(&tokens[..], &Device::Cpu)?.unsqueeze(0)?, &mut caches)?;
            worst = worst.max(difference(&ours, logits)?);
            tokens = vec![*next];
        }
        println!(
            "{name:>5} {worst:.1e}, {} KiB of cache",
            caches.iter().map(|cache| cache.bytes()).sum::<usize>() >> 10
        );
        if worst.is_nan() || worst > allowed {
            candle_core::bail!("{name}: logits differ by {worst:e} of the largest");
        }
    }
    Ok(())
}
