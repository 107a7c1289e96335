//! Attention with a relative bias, as T5 has one: what the adapters' examples of that name share. No framework is in it.

use sdpa::{Attention, Error, Gradients, Inputs, Mods, Outputs, Position, Run, Saved, ScoreMod, View, ViewMut};

pub(crate) const HEADS: usize = 2;
const ROWS: usize = 64;
const DIM: usize = 16;
/// Entries of a head's table, half of them for keys behind the row.
pub(crate) const BUCKETS: usize = 16;
/// Distance from which on all keys share a bucket.
const FARTHEST: f32 = 32.0;
pub(crate) const SHAPE: [usize; 4] = [1, HEADS, ROWS, DIM];
const LSE: [usize; 3] = [1, HEADS, ROWS];

/// Numbers that are the same on every run.
pub(crate) fn numbers(seed: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| (1.7 * (i * (seed + 2) + seed) as f32).sin()).collect()
}

/// Queries, keys and values, `[1, heads, rows, dim]`.
#[derive(Debug)]
pub(crate) struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Output of a call, and its log-sum-exp, which the step back needs.
#[derive(Debug, Clone)]
pub(crate) struct Attended {
    pub(crate) out: Vec<f32>,
    pub(crate) lse: Vec<f32>,
}

impl Data {
    /// Creates data with values that tell keys apart: each stands out in a few of its numbers.
    pub(crate) fn new() -> Self {
        let v = (0..HEADS * ROWS * DIM).map(|i| ((i / DIM * (i % DIM + 1)) as f32 * 0.37).sin()).collect();
        Self { q: numbers(1, HEADS * ROWS * DIM), k: numbers(2, HEADS * ROWS * DIM), v }
    }

    fn inputs(&self) -> Result<Inputs<'_>, Error> {
        Ok(Inputs::new(View::bhld(&self.q, SHAPE)?, View::bhld(&self.k, SHAPE)?, View::bhld(&self.v, SHAPE)?))
    }

    /// Computes attention with a table `[heads, buckets]`.
    pub(crate) fn attention(&self, table: &[f32]) -> Result<Attended, Error> {
        let mods = Mods::new().score(RelativeBias(table));
        let (mut out, mut lse) = (vec![0.0; HEADS * ROWS * DIM], vec![0.0; HEADS * ROWS]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, SHAPE)?).lse(ViewMut::bhl(&mut lse, LSE)?);
        sdpa::attention_with(&Attention::new(), self.inputs()?, outputs, Run::new().mods(&mods))?;
        Ok(Attended { out, lse })
    }

    /// Computes the gradient in the table from that of the output.
    pub(crate) fn gradient(&self, table: &[f32], attended: &Attended, d_out: &[f32]) -> Result<Vec<f32>, Error> {
        let Attended { out, lse } = attended;
        let saved = Saved::new(View::bhld(out, SHAPE)?, View::bhl(lse, LSE)?, View::bhld(d_out, SHAPE)?);
        let mods = Mods::new().score(RelativeBias(table));
        let mut d_table = vec![0.0; table.len()];
        let gradients = Gradients::new().parameters(&mut d_table);
        let (attention, run) = (Attention::new(), Run::new().mods(&mods));
        sdpa::attention_backward_with(&attention, self.inputs()?, saved, gradients, run)?;
        Ok(d_table)
    }
}

/// Score function that adds an entry of a table `[heads, buckets]`.
struct RelativeBias<'a>(&'a [f32]);

impl RelativeBias<'_> {
    fn entry(at: Position) -> usize {
        at.head * BUCKETS + bucket(at.distance)
    }
}

impl ScoreMod for RelativeBias<'_> {
    fn score(&self, score: f32, at: Position) -> f32 {
        score + self.0[Self::entry(at)]
    }

    fn derivative(&self, _: f32, _: Position) -> Option<f32> {
        Some(1.0)
    }

    fn parameters(&self) -> usize {
        self.0.len()
    }

    fn parameter_derivatives(&self, _: f32, at: Position, add: &mut dyn FnMut(usize, f32)) {
        add(Self::entry(at), 1.0);
    }
}

/// Bucket of a distance: of its own while it is small, then shared by distances of about the same logarithm (Raffel and others 2020,
/// arXiv:1910.10683). Keys after the row have the second half, from distance 1 on.
fn bucket(distance: isize) -> usize {
    let of_side = BUCKETS / 2;
    let (first, far) = if distance < 0 { (of_side, distance.unsigned_abs() - 1) } else { (0, distance.unsigned_abs()) };
    let exact = of_side / 2;
    let shared = || {
        let share = (far as f32 / exact as f32).ln() / (FARTHEST / exact as f32).ln();
        (exact + (share * (of_side - exact) as f32) as usize).min(of_side - 1)
    };
    first + if far < exact { far } else { shared() }
}
