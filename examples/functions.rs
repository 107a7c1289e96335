//! Functions of one's own in the fused pass: of scores, of positions (with a hint for whole blocks), and of weights; and
//! gradients through a score function.
//!
//! ```text
//! cargo run --release --example functions
//! ```

#[path = "arguments/mod.rs"]
mod arguments;
#[path = "fixtures/mod.rs"]
mod fixtures;

use arguments::{Output, Program};
use fixtures::{HEAD_DIM, HEADS, Sentence, sentence};
use sdpa::{
    Attention, BlockClass, BlockPosition, Error, Gradients, Inputs, MaskMod, Mods, Outputs, Position, Run, Saved,
    ScoreMod, View, ViewMut, WeightMod, WithDerivative, naive,
};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Head of the model's first layer that looks for what belongs together.
const HEAD: usize = 4;

fn main() -> ExitCode {
    let about = "Runs functions of one's own: of scores, positions and weights.";
    Program { name: "functions", about, flags: &[], output: Output::Text }.run(|_| Ok(run()?))
}

fn run() -> Result<(), Error> {
    let sentence = sentence("minilm_park");
    println!("{:?}, all-MiniLM-L6-v2, layer 0, head {HEAD}.", sentence.text);
    println!("Weights in percent; rows are queries, columns keys; a dot is a key that is not seen.");
    scores_and_masks(&sentence)?;
    weights(&sentence)?;
    chosen_at_run_time(&sentence)?;
    gradients(&sentence)?;
    blocks()
}

/// Closures over scores and positions.
fn scores_and_masks(sentence: &Sentence) -> Result<(), Error> {
    print_weights(sentence, "No function", &Mods::new())?;
    let distance = |at: Position| at.distance.unsigned_abs();
    let near = Mods::new().score(|score: f32, at: Position| score - 0.5 * distance(at) as f32);
    print_weights(sentence, "Score function: score − 0.5 · distance", &near)?;
    let last = sentence.tokens.len() - 1;
    let words = Mods::new().mask(|at: Position| at.key != 0 && at.key != last && distance(at) <= 2);
    print_weights(sentence, "Mask function: words up to two away, no [CLS] and no [SEP]", &words)
}

/// Runs the first layer's attention with the functions: the weights of one head, `[tokens, tokens]`.
fn weights_of<S: ScoreMod, M: MaskMod, P: WeightMod>(
    sentence: &Sentence,
    mods: &Mods<S, M, P>,
) -> Result<Vec<f32>, Error> {
    let n = sentence.tokens.len();
    let (mut out, mut weights) = (vec![0.0; HEADS * n * HEAD_DIM], vec![0.0; HEADS * n * n]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, HEADS, n, HEAD_DIM])?)
        .weights(ViewMut::bhld(&mut weights, [1, HEADS, n, n])?);
    sdpa::attention_with(&Attention::new(), sentence.layers[0].attends()?, outputs, Run::new().mods(mods))?;
    Ok(weights[HEAD * n * n..][..n * n].to_vec())
}

fn print_weights<S: ScoreMod, M: MaskMod, P: WeightMod>(
    sentence: &Sentence,
    title: &str,
    mods: &Mods<S, M, P>,
) -> Result<(), Error> {
    let (tokens, weights) = (&sentence.tokens, weights_of(sentence, mods)?);
    println!("\n{title}:\n");
    print!("{:8}", "");
    tokens.iter().for_each(|token| print!("{token:>7}"));
    println!();
    for (token, row) in tokens.iter().zip(weights.chunks(tokens.len())) {
        print!("{token:>8}");
        for &weight in row {
            if weight > 0.0 { print!("{:7.1}", 100.0 * weight) } else { print!("{:>7}", "·") }
        }
        println!();
    }
    Ok(())
}

/// A weight function acts after the softmax: what it takes away is not made up for. With values of 1, an output is the
/// sum of its row's weights.
fn weights(sentence: &Sentence) -> Result<(), Error> {
    let (n, layer) = (sentence.tokens.len(), &sentence.layers[0]);
    let ones = vec![1.0; HEADS * n];
    let inputs =
        Inputs::new(fixtures::heads(&layer.q)?, fixtures::heads(&layer.k)?, View::bhld(&ones, [1, HEADS, n, 1])?);
    let mut sums = [(); 2].map(|()| vec![0.0; HEADS * n]);
    let [masked, dropped] = sums.each_mut().map(|sums| ViewMut::bhld(sums, [1, HEADS, n, 1]));
    let first_hidden = Mods::new().mask(|at: Position| at.key > 0);
    sdpa::attention_with(&Attention::new(), inputs, Outputs::new(masked?), Run::new().mods(&first_hidden))?;
    let first_dropped = Mods::new().weight(|weight: f32, at: Position| if at.key > 0 { weight } else { 0.0 });
    sdpa::attention_with(&Attention::new(), inputs, Outputs::new(dropped?), Run::new().mods(&first_dropped))?;
    println!("\nSums of the weights without [CLS], hidden by a mask function and dropped by a weight function:\n");
    for (i, token) in sentence.tokens.iter().enumerate() {
        println!("{token:>8}  {:.3}  {:.3}", sums[0][HEAD * n + i], sums[1][HEAD * n + i]);
    }
    Ok(())
}

/// Functions of one type whatever they do, for those that a configuration names.
fn chosen_at_run_time(sentence: &Sentence) -> Result<(), Error> {
    println!("\nScore functions chosen at run time, and what \"park\" then weighs most:\n");
    let functions: [(&str, Box<dyn ScoreMod>); 3] = [
        ("as it is", Box::new(())),
        ("sharper", Box::new(|score: f32, _: Position| 2.0 * score)),
        (
            "later words only",
            Box::new(|score: f32, at: Position| if at.key > at.row { score } else { f32::NEG_INFINITY }),
        ),
    ];
    let n = sentence.tokens.len();
    for (name, function) in &functions {
        let weights = weights_of(sentence, &Mods::new().score(&**function))?;
        let park = sentence.tokens.iter().position(|token| token == "park").expect("a word of the sentence");
        let row = &weights[park * n..][..n];
        let best = (0..n).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a word");
        println!("  {name:<18} {} {:.2}", sentence.tokens[best], row[best]);
    }
    Ok(())
}

/// A score function with its derivative takes part in learning. With the sum of all outputs as the loss, its derivatives in
/// a query are also had by moving the query.
fn gradients(sentence: &Sentence) -> Result<(), Error> {
    let (n, layer, attention) = (sentence.tokens.len(), &sentence.layers[0], Attention::new());
    let (shape, rows) = ([1, HEADS, n, HEAD_DIM], [1, HEADS, n, 1]);
    let mods = Mods::new().score(WithDerivative::new(
        |score: f32, _: Position| score / (1.0 + score.abs()),
        |score: f32, _: Position| (1.0 + score.abs()).powi(-2),
    ));
    let inputs = layer.attends()?;
    let (mut out, mut lse) = (vec![0.0; layer.q.len()], vec![0.0; HEADS * n]);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, shape)?).lse(ViewMut::bhld(&mut lse, rows)?);
    sdpa::attention_with(&attention, inputs, outputs, Run::new().mods(&mods))?;
    let (d_out, mut dq) = (vec![1.0; out.len()], vec![0.0; out.len()]);
    let saved = Saved::new(View::bhld(&out, shape)?, View::bhld(&lse, rows)?, View::bhld(&d_out, shape)?);
    let wanted = Gradients::new().q(ViewMut::bhld(&mut dq, shape)?);
    sdpa::attention_backward_with(&attention, inputs, saved, wanted, Run::new().mods(&mods))?;
    println!(
        "
Score function score / (1 + |score|): derivatives of the sum of outputs in a query, and by moving it:
"
    );
    let first = HEAD * n * HEAD_DIM;
    for at in first..first + 4 {
        const STEP: f32 = 1.0 / 64.0;
        let loss = |step: f32| -> Result<f64, Error> {
            let mut q = layer.q.clone();
            q[at] += step;
            let inputs = Inputs::new(fixtures::heads(&q)?, fixtures::heads(&layer.k)?, fixtures::heads(&layer.v)?);
            Ok(naive::answer::<f64, _, _, _>(&attention, &inputs, &mods)?.out.iter().sum())
        };
        let moved: f64 = (loss(STEP)? - loss(-STEP)?) / f64::from(2.0 * STEP);
        println!("  {:9.5} {moved:9.5}", dq[at]);
        assert!((f64::from(dq[at]) - moved).abs() < 1e-3, "the derivative is the function's");
    }
    Ok(())
}

/// Mask function that knows about whole blocks: each row sees the stretch of keys it stands in.
struct Stretches(usize);

impl MaskMod for Stretches {
    fn keep(&self, at: Position) -> bool {
        at.key / self.0 == at.row / self.0
    }

    /// Keys and rows of one stretch see each other, those of stretches apart do not.
    fn class(&self, block: BlockPosition) -> BlockClass {
        let first_and_last = |range: core::ops::Range<usize>| (range.start / self.0, (range.end - 1) / self.0);
        let (rows, keys) = (first_and_last(block.rows), first_and_last(block.keys));
        if rows.0 == rows.1 && rows == keys {
            BlockClass::All
        } else if keys.1 < rows.0 || rows.1 < keys.0 {
            BlockClass::None
        } else {
            BlockClass::Mixed
        }
    }
}

/// Runs one rule without the hint and with it: the same bits, in less time.
fn blocks() -> Result<(), Error> {
    const SHAPE: [usize; 4] = [1, 2, 2048, 64];
    let size = SHAPE.iter().product::<usize>();
    let [q, k, v] =
        [1, 2, 3].map(|seed| (0..size).map(|i| ((i * 7919 * seed) % 1013) as f32 / 1013.0).collect::<Vec<_>>());
    let inputs = Inputs::new(View::bhld(&q, SHAPE)?, View::bhld(&k, SHAPE)?, View::bhld(&v, SHAPE)?);
    fn timed<M: MaskMod>(inputs: Inputs<'_>, out: &mut [f32], mask: M) -> Result<Duration, Error> {
        let (start, mods) = (Instant::now(), Mods::new().mask(mask));
        sdpa::attention_with(
            &Attention::new(),
            inputs,
            Outputs::new(ViewMut::bhld(out, SHAPE)?),
            Run::new().mods(&mods),
        )?;
        Ok(start.elapsed())
    }
    let mut outs = [(); 3].map(|()| vec![0.0; size]);
    let [all, pairs, hinted] = &mut outs;
    let times = [
        timed(inputs, all, |_: Position| true)?,
        timed(inputs, pairs, |at: Position| Stretches(128).keep(at))?,
        timed(inputs, hinted, Stretches(128))?,
    ]
    .map(|time| time.as_secs_f64() * 1e3);
    println!("\n2 heads of 64, 2048 rows and keys; a row sees the stretch of 128 keys that it stands in:\n");
    println!("  all keys, by a closure        {:7.2} ms", times[0]);
    println!("  the stretch, pair by pair     {:7.2} ms", times[1]);
    println!("  the stretch, block by block   {:7.2} ms", times[2]);
    let differ = outs[1].iter().zip(&outs[2]).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    println!("  numbers with other bits       {differ} of {size}");
    assert_eq!(differ, 0, "the hint says what the function says");
    Ok(())
}
