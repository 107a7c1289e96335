//! The trained translator as a file: weights in f16, words and sizes in its header.

use crate::corpus::Vocabulary;
use crate::model::Sizes;
use crate::training::{Result, export};
use candle_core::safetensors::load_buffer;
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use safetensors::SafeTensors;
use std::path::Path;

/// Writes the model's variables and what else it needs.
pub(crate) fn write(path: &Path, vars: &VarMap, sizes: Sizes, words: [&Vocabulary; 2]) -> Result<()> {
    let [english, french] = words.map(|vocabulary| vocabulary.words().join(" "));
    export(path, vars, &[("heads", sizes.heads.to_string()), ("english", english), ("french", french)])
}

/// Model of a file: its weights in f32, its sizes, its words.
pub(crate) struct Read {
    pub(crate) vars: VarBuilder<'static>,
    pub(crate) sizes: Sizes,
    #[allow(dead_code, reason = "tests compare them")]
    pub(crate) words: [Vocabulary; 2],
}

/// Reads what [`write`] has written.
pub(crate) fn read(bytes: &[u8]) -> Result<Read> {
    let header = SafeTensors::read_metadata(bytes)?.1.metadata().clone().unwrap_or_default();
    let field = |name: &str| header.get(name).ok_or_else(|| format!("{name}: not in the header"));
    let words = |name| Ok(Vocabulary::new(field(name)?.split(' ').map(str::to_owned)));
    let words: [Result<Vocabulary>; 2] = ["english", "french"].map(words);
    let [english, french] = words;
    let words = [english?, french?];
    let tensors = load_buffer(bytes, &Device::Cpu)?;
    let layers = (0..).take_while(|n| tensors.contains_key(&format!("encoder.{n}.self.q.weight"))).count();
    let up = tensors.get("encoder.0.feed_forward.up.weight").ok_or("a translator without layers")?.dims2()?;
    let sizes = Sizes {
        words: words.each_ref().map(|vocabulary| vocabulary.words().len()),
        width: up.1,
        heads: field("heads")?.parse()?,
        hidden: up.0,
        layers,
    };
    Ok(Read { vars: VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu), sizes, words })
}
