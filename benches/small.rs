//! Calls of little work each, beside loops as one writes them by hand: many texts of a few tokens, as a batch and
//! ragged, and the merge of two results. Cases alternate on one thread; medians. `cargo bench --bench small`.
//!
//! The loops are compiled as the crate's users compile theirs, with the flags of the build; sums run in sixteen lanes, which
//! the compiler turns into vectors.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::{medians, random};
use sdpa::{Attention, Exec, Inputs, Outputs, Plan, View, ViewMut, Workspace, merge};

const HEADS: usize = 12;
const ROUNDS: usize = 9;

/// Texts of equal length, heads of `dim`: queries, keys, values and output, `[texts, heads, tokens, dim]` for a batch,
/// `[1, heads, texts · tokens, dim]` if ragged.
struct Texts {
    texts: usize,
    tokens: usize,
    dim: usize,
    qkv: [Vec<f32>; 3],
}

impl Texts {
    fn new(texts: usize, tokens: usize, dim: usize) -> Self {
        Self { texts, tokens, dim, qkv: [1, 2, 3].map(|seed| random(texts * HEADS * tokens * dim, seed)) }
    }

    fn shape(&self, ragged: bool) -> [usize; 4] {
        match ragged {
            false => [self.texts, HEADS, self.tokens, self.dim],
            true => [1, HEADS, self.texts * self.tokens, self.dim],
        }
    }

    fn run(&self, ragged: Option<&[usize]>, out: &mut [f32], workspace: &mut Workspace) {
        let shape = self.shape(ragged.is_some());
        let [q, k, v] = self.qkv.each_ref().map(|x| View::bhld(x, shape).expect("data of this shape"));
        let inputs = Inputs::new(q, k, v);
        let inputs = ragged.map_or(inputs, |ends| inputs.ragged(ends, ends));
        let outputs = Outputs::new(ViewMut::bhld(out, shape).expect("data of this shape"));
        let problem = Attention::new().problem(inputs, outputs).expect("a good call");
        let plan = Plan::new(&problem, Exec::serial());
        problem.run(&plan, workspace);
    }

    /// The same by hand.
    fn loops(&self, ragged: bool, out: &mut [f32]) {
        let (n, d) = (self.tokens, self.dim);
        let scale = 1.0 / (d as f32).sqrt();
        let mut weights = vec![0.0; n];
        for text in 0..self.texts {
            for head in 0..HEADS {
                let first = if ragged { (head * self.texts + text) * n * d } else { (text * HEADS + head) * n * d };
                let [q, k, v] = self.qkv.each_ref().map(|x| &x[first..first + n * d]);
                for (q, out) in q.chunks_exact(d).zip(out[first..first + n * d].chunks_exact_mut(d)) {
                    attend(q, [k, v], scale, &mut weights, out);
                }
            }
        }
    }
}

/// One row against all keys: scores, softmax, weighted sum.
fn attend(q: &[f32], [k, v]: [&[f32]; 2], scale: f32, weights: &mut [f32], out: &mut [f32]) {
    let d = q.len();
    let mut max = f32::NEG_INFINITY;
    for (weight, k) in weights.iter_mut().zip(k.chunks_exact(d)) {
        *weight = dot(q, k) * scale;
        max = max.max(*weight);
    }
    let mut sum = 0.0;
    for weight in &mut *weights {
        *weight = (*weight - max).exp();
        sum += *weight;
    }
    out.fill(0.0);
    for (weight, v) in weights.iter().zip(v.chunks_exact(d)) {
        let weight = weight / sum;
        out.iter_mut().zip(v).for_each(|(out, v)| *out += weight * v);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for (a, b) in a.as_chunks::<16>().0.iter().zip(b.as_chunks::<16>().0) {
        lanes.iter_mut().zip(a.iter().zip(b)).for_each(|(lane, (a, b))| *lane += a * b);
    }
    lanes.iter().sum()
}

fn texts(rounds: usize) {
    let sizes = if support::test_mode() {
        vec![(10, 4, 32)]
    } else {
        vec![(10_000, 4, 32), (10_000, 4, 64), (10_000, 1, 64), (5_000, 8, 64), (2_500, 16, 64)]
    };
    for (count, tokens, dim) in sizes {
        let texts = Texts::new(count, tokens, dim);
        let ends: Vec<usize> = (0..=count).map(|text| text * tokens).collect();
        for (name, ragged) in [("batch ", None), ("ragged", Some(&ends[..]))] {
            let mut outs = [vec![0.0; texts.qkv[0].len()], vec![0.0; texts.qkv[0].len()]];
            let ([ours, plain], mut workspace) = (&mut outs, Workspace::new());
            let [a, b] = medians(
                rounds,
                [&mut || texts.run(ragged, ours, &mut workspace), &mut || texts.loops(ragged.is_some(), plain)],
            )
            .map(|s| s * 1e3);
            assert!(outs[0].iter().zip(&outs[1]).all(|(a, b)| (a - b).abs() < 1e-4));
            println!(
                "{count:6} texts of {tokens:2} tokens, {HEADS} heads of {dim:3}, {name}  {a:8.3} ms  by hand {b:8.3} ms  ({:.3})",
                a / b
            );
        }
    }
}

fn merges(rounds: usize) {
    let [heads, rows, dim] = if support::test_mode() { [2, 5, 32] } else { [32, 2048, 128] };
    let (shape, of_rows) = ([1, heads, rows, dim], [1, heads, rows, 1]);
    let [other, lse, other_lse] = [(dim, 1), (1, 2), (1, 3)].map(|(dim, seed)| random(heads * rows * dim, seed));
    let mut outs = [other.clone(), other.clone()];
    let mut lses = [lse.clone(), lse.clone()];
    let ([ours, plain], [our_lse, plain_lse]) = (&mut outs, &mut lses);
    let [a, b] = medians(
        rounds,
        [
            &mut || {
                let mine =
                    (ViewMut::bhld(ours, shape).expect("dense"), ViewMut::bhld(our_lse, of_rows).expect("dense"));
                let others =
                    (View::bhld(&other, shape).expect("dense"), View::bhld(&other_lse, of_rows).expect("dense"));
                merge(mine, others).expect("shapes that fit");
            },
            &mut || {
                let rows = plain.chunks_exact_mut(dim).zip(other.chunks_exact(dim));
                for ((out, other), (lse, &other_lse)) in rows.zip(plain_lse.iter_mut().zip(&other_lse)) {
                    let max = lse.max(other_lse);
                    let (a, b) = ((*lse - max).exp(), (other_lse - max).exp());
                    let (mine, others) = (a / (a + b), b / (a + b));
                    *lse = max + (a + b).ln();
                    out.iter_mut().zip(other).for_each(|(x, y)| *x = *x * mine + y * others);
                }
            },
        ],
    )
    .map(|s| s * 1e3);
    println!("merge of {heads} × {rows} × {dim}  {a:8.3} ms  by hand {b:8.3} ms  ({:.3})", a / b);
}

fn main() {
    support::print_machine();
    let rounds = if support::test_mode() { 1 } else { ROUNDS };
    texts(rounds);
    merges(rounds);
}
