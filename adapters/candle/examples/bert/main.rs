//! Embeds texts with all-MiniLM-L6-v2 twice: by candle-transformers' BERT and by the same with this attention.

mod minilm;
mod model;

use candle_core::{D, Tensor};
use candle_transformers::models::bert::BertModel;
use minilm::{Batch, MiniLm, Result};
use model::Bert;

const TEXTS: [&str; 4] = [
    "A man is eating a piece of bread.",
    "Someone has lunch.",
    "The committee postponed its vote until the translation had been checked.",
    "Nobody voted, for want of a translation.",
];

fn main() -> Result<()> {
    let Some(minilm) = MiniLm::load()? else { return Ok(()) };
    let batch = Batch::new(&TEXTS.iter().map(|text| minilm.tokens(text)).collect::<Result<Vec<_>>>()?)?;
    let candle = BertModel::load(minilm.weights.clone(), &minilm.config)?;
    let ours = Bert::load(&minilm.weights, &minilm.config)?;
    let candle = embeddings(&candle.forward(&batch.ids, &batch.types, Some(&batch.mask))?, &batch.mask)?;
    let ours = embeddings(&ours.forward(&batch.ids, &batch.types, &batch.mask)?, &batch.mask)?;

    let similarities = ours.matmul(&ours.t()?)?.to_vec2::<f32>()?;
    for (text, row) in TEXTS.iter().zip(similarities) {
        println!("{}  {text}", row.iter().map(|s| format!("{s:5.2}")).collect::<Vec<_>>().join(" "));
    }
    let difference = (candle - ours)?.abs()?.max_all()?.to_scalar::<f32>()?;
    println!("largest difference from candle's own: {difference:.1e}");
    if difference.is_nan() || difference > 1e-5 {
        return Err(format!("embeddings differ by {difference:e}").into());
    }
    Ok(())
}

/// Means over the tokens that count, of length 1.
fn embeddings(hidden: &Tensor, mask: &Tensor) -> candle_core::Result<Tensor> {
    let sums = mask.to_dtype(hidden.dtype())?.unsqueeze(1)?.matmul(hidden)?.squeeze(1)?;
    sums.broadcast_div(&sums.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)
}
