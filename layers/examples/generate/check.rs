//! The decoders of a file: each step beside the whole sequence at once, and beside what PyTorch recorded.

use crate::fixture::Fixture;
use crate::models::Model;
use sdpa::Error;
use sdpa_layers::{Compute, LayerInput, Sequences};

/// Prints a line for the prompt and for each token after it.
///
/// # Panics
/// If a step has not the bits of the whole.
pub(crate) fn run(file: &Fixture, name: &str, model: &Model, prompt: usize) -> Result<(), Error> {
    let (tokens, recorded) = (file.tokens(&format!("{name}.in.ids")), file.floats(&format!("{name}.out.last")));
    let [batch, len, width] = file.shape(&format!("{name}.out.last"));
    let mut compute = Compute::default();

    let sequences = Sequences::Even { batch, len };
    let (mut x, mut whole) = (vec![0.0; batch * len * width], vec![0.0; batch * len * width]);
    model.embed(&tokens, sequences, &mut x, &mut compute);
    model.transformer.forward(LayerInput::new(&x, sequences), &mut whole, &mut compute)?;

    println!("{name} of {} layers, {batch} sequences of {len} tokens, {width} wide.", model.transformer.layers().len());
    println!("{:>6}  {:18} {:>12} {:>10}", "rows", "tokens", "− whole", "− PyTorch");
    let mut caches = model.transformer.caches(batch)?;
    for rows in std::iter::once(0..prompt).chain((prompt..len).map(|t| t..t + 1)) {
        // These rows of every sequence.
        let of = |all: &[f32]| -> Vec<f32> {
            all.chunks(len * width).flat_map(|x| &x[rows.start * width..rows.end * width]).copied().collect()
        };
        let part: Vec<u32> = tokens.chunks(len).flat_map(|tokens| &tokens[rows.clone()]).copied().collect();
        let sequences = Sequences::Even { batch, len: rows.len() };
        let (mut x, mut out) = (vec![0.0; part.len() * width], vec![0.0; part.len() * width]);
        model.embed_from(caches.layers()[0].lens(), (&part, sequences), &mut x, &mut compute);
        model.transformer.decode(&x, &mut caches, &mut out, &mut compute)?;

        let shown = if rows.len() > 1 { "a prompt each".to_owned() } else { format!("{part:?}") };
        let (from_whole, from_recorded) = (largest(&out, &of(&whole)), largest(&out, &of(&recorded)));
        println!("{:>6}  {shown:18} {from_whole:>12} {from_recorded:>10.1e}", format!("{}..{}", rows.start, rows.end));
        assert!(out.iter().map(|x| x.to_bits()).eq(of(&whole).iter().map(|x| x.to_bits())), "rows {rows:?} differ");
    }
    println!("Every step has the bits of its rows in the whole sequence.\n");
    Ok(())
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
