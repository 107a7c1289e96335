//! Models: a configuration, a byte of zero, and a file of tensors. Refused, or a model that embeds two texts.

#![no_main]

mod whole;

use sdpa_layers::{Bert, BertInput, Compute, Pooling, Sequences};

/// Widest model that is asked for embeddings.
const WIDE: usize = 256;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let config = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    let tensors = whole::file(bytes.get(config + 1..).unwrap_or_default());
    let model = match Bert::from_safetensors(&bytes[..config], &tensors) {
        Ok(model) => model,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let config = *model.config();
    if config.hidden_size > WIDE || config.intermediate_size > WIDE || config.num_hidden_layers > 3 {
        return;
    }
    let tokens = [0, 1, 2].map(|token: u32| token % config.vocab_size as u32);
    let blank = f32::from_bits(u32::MAX);
    let mut out = vec![blank; 2 * config.hidden_size];
    let input = BertInput::new(&tokens, Sequences::Ragged(&[0, 1, 3]));
    match model.embed(input, Pooling::Mean, &mut out, &mut Compute::default()) {
        Ok(_) => assert!(out.iter().all(|x| x.to_bits() != blank.to_bits()), "not all was written"),
        Err(error) => assert!(config.max_position_embeddings < 2, "{error}"),
    }
});
