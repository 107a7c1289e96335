//! This crate's encoder: texts end to end, without padding.

use super::Texts;
use crate::failure::Result;
use crate::peer::{OURS, Peer};
use sdpa::Exec;
use sdpa_layers::{Bert as Model, BertInput, Compute, Pooling, Sequences};
use std::fs;

/// The model, its memory kept from call to call.
#[derive(Debug, Default)]
pub(super) struct Bert {
    ready: Option<Ready>,
}

#[derive(Debug)]
struct Ready {
    model: Model,
    compute: Compute<'static>,
    tokens: Vec<u32>,
    /// Where each text begins, and where the last one ends.
    ends: Vec<usize>,
    answer: Vec<f32>,
}

impl Peer<Texts> for Bert {
    fn name(&self) -> &'static str {
        OURS
    }

    fn supports(&self, texts: &Texts) -> std::result::Result<(), String> {
        if texts.exact { Err("f32 only".to_owned()) } else { Ok(()) }
    }

    fn prepare(&mut self, texts: &Texts) -> Result<String> {
        let config = fs::read(texts.model.join("config.json"))?;
        let model = Model::from_safetensors(&config, &fs::read(texts.model.join("model.safetensors"))?)?;
        let mut ends = vec![0];
        ends.extend(texts.tokens.iter().scan(0, |end, text| {
            *end += text.len();
            Some(*end)
        }));
        self.ready = Some(Ready {
            compute: Compute::new(Exec::default().threads(texts.threads)),
            tokens: texts.tokens.concat(),
            answer: vec![0.0; texts.tokens.len() * model.width()],
            ends,
            model,
        });
        Ok("sdpa_layers::Bert, all texts end to end".to_owned())
    }

    fn run(&mut self) -> Result<()> {
        let Ready { model, compute, tokens, ends, answer } = self.ready.as_mut().ok_or("not prepared")?;
        let input = BertInput::new(tokens, Sequences::Ragged(ends));
        Ok(model.embed(input, Pooling::Mean, answer, compute)?)
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.ready.as_ref().ok_or("not prepared")?.answer.clone())
    }
}
