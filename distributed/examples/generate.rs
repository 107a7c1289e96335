//! Decoding over a cache that is cut over ranks, compared with one cache on one machine bit for bit. There is no model: each
//! query is made of the last output, so that one wrong bit would show in all that follow.
//!
//! ```sh
//! cargo build --release --example generate
//! mpirun -n 4 target/release/examples/generate --prompt 100000 --tokens 64 --type int8
//! ```

mod start;

use indicatif::{ProgressBar, ProgressStyle};
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{Attention, Dtype, Exec, Inputs, KeyScales, KvCache, KvShape, Outputs, View, ViewMut};
use sdpa_mpi::{Merges, Ranks, Report, Step};
use start::{Done, Options, Words};
use std::error::Error;
use std::ops::Range;
use std::time::{Duration, Instant};

const HELP: &str = "Decoding over a cache that is cut over the ranks of mpirun, compared with one cache bit for bit.

--prompt N        keys before the first step, by default 20000
--tokens N        steps, by default 32
--heads QxKxD     query heads, key/value heads and their length, by default 32x8x128
--type TYPE       f32, bf16, f16 or int8: elements of the cache
--merges ORDER    in-order, with the bits of one machine, or tree, which rounds otherwise
--timeout S       seconds that nothing may come from another rank, by default 60";

/// Keys of a block, of which shares are made.
const KEY_BLOCK: usize = 256;
/// Keys that are made at once.
const PART: usize = 4096;

/// Arguments of the command line.
struct Asked {
    prompt: usize,
    tokens: usize,
    /// Query heads, key/value heads, length.
    heads: [usize; 3],
    kind: String,
    merges: Merges,
    timeout: Duration,
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            prompt: 20_000,
            tokens: 32,
            heads: [32, 8, 128],
            kind: "f32".to_owned(),
            merges: Merges::InOrder,
            timeout: Duration::from_secs(60),
        }
    }
}

impl Options for Asked {
    const HELP: &str = HELP;

    fn take(&mut self, option: &str, words: &mut Words) -> Done<bool> {
        match option {
            "--prompt" => self.prompt = words.parsed()?,
            "--tokens" => self.tokens = words.parsed()?,
            "--heads" => self.heads = words.sizes("32x8x128")?,
            "--type" => self.kind = words.value()?,
            "--merges" => self.merges = words.one_of(&[("in-order", Merges::InOrder), ("tree", Merges::Tree)])?,
            "--timeout" => self.timeout = Duration::try_from_secs_f64(words.parsed()?)?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn main() -> Done {
    start::on_ranks(run)
}

/// Part of a cache: the keys at some positions.
struct Part {
    cache: KvCache,
    heads: usize,
    dim: usize,
    /// Positions that belong here.
    range: Range<usize>,
}

impl Part {
    fn new(asked: &Asked, range: Range<usize>) -> Result<Self, Box<dyn Error>> {
        let [_, heads, dim] = asked.heads;
        let cache = KvCache::new(1, KvShape { kv_heads: heads, head_dim: dim, value_dim: dim })?;
        let cache = match asked.kind.as_str() {
            "f32" => cache,
            "bf16" => cache.dtype(Dtype::Bf16)?,
            "f16" => cache.dtype(Dtype::F16)?,
            "int8" => cache.int8(KeyScales::PerToken)?,
            other => return Err(format!("--type {other}: but must be f32, bf16, f16 or int8").into()),
        };
        let mut part = Self { cache, heads, dim, range };
        for start in (0..asked.prompt).step_by(PART) {
            part.append(start..asked.prompt.min(start + PART))?;
        }
        Ok(part)
    }

    /// Appends keys and values, those that belong here.
    fn append(&mut self, keys: Range<usize>) -> Result<(), sdpa::Error> {
        let keys = keys.start.max(self.range.start)..keys.end.min(self.range.end);
        if keys.is_empty() {
            return Ok(());
        }
        let shape = [1, self.heads, keys.len(), self.dim];
        let numbers = |seed: u64| -> Vec<f32> {
            let places = (0..self.heads).flat_map(|head| keys.clone().map(move |key| (head, key)));
            let place = |(head, key): (usize, usize)| (head << 40 | key) * self.dim;
            places.flat_map(|at| (0..self.dim).map(move |d| number((place(at) + d) as u64, seed))).collect()
        };
        let (k, v) = (numbers(1), numbers(2));
        self.cache.append(View::bhld(&k, shape)?, View::bhld(&v, shape)?)
    }
}

/// A number from −1 to 1, made of its place.
fn number(place: u64, seed: u64) -> f32 {
    let mut x = place.wrapping_add(seed << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((x ^ x >> 27) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// The query of a step: numbers of its own, and the last output.
fn query(step: usize, last: &[f32]) -> Vec<f32> {
    let own = (0..last.len()).map(|at| number((step * last.len() + at) as u64, 3));
    own.zip(last).map(|(own, last)| own + 8.0 * last).collect()
}

fn run(world: &SimpleCommunicator, asked: &Asked) -> Done {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let [heads, _, dim] = asked.heads;
    let keys = asked.prompt + asked.tokens;
    let share = keys.div_ceil(size).next_multiple_of(KEY_BLOCK);
    let mut part = Part::new(asked, rank * share..(rank + 1) * share)?;
    let ranks = Ranks::new(world, asked.timeout);
    let bar = if rank == 0 { ProgressBar::new(asked.tokens as u64) } else { ProgressBar::hidden() };
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos} of {len} tokens, {eta} left")?);
    let (mut out, mut outs) = (vec![0.0f32; heads * dim], Vec::new());
    let (mut sum, begin) = (Report::default(), Instant::now());
    for token in 0..asked.tokens {
        part.append(asked.prompt + token..asked.prompt + token + 1)?;
        let q = query(token, &out);
        let inputs = Inputs::cached(View::bhld(&q, [1, heads, 1, dim])?, &part.cache);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, heads, 1, dim])?);
        let step = Step::new(inputs, rank * share, outputs).merges(asked.merges);
        let report = ranks.step(&Attention::new(), step)?;
        sum.sent += report.sent;
        sum.computing += report.computing;
        sum.waiting += report.waiting;
        outs.push(out.clone());
        bar.inc(1);
    }
    let total = begin.elapsed();
    bar.finish_and_clear();
    let per = |time: Duration| 1e3 * time.as_secs_f64() / asked.tokens.max(1) as f64;
    println!(
        "rank {rank}: {} keys; a token {:.2} ms, of which computing {:.2} ms, waiting {:.2} ms; sent {} bytes a token",
        part.cache.lens()[0],
        per(total),
        per(sum.computing),
        per(sum.waiting),
        sum.sent / asked.tokens.max(1)
    );
    if rank == 0 { compare(asked, &outs) } else { Ok(()) }
}

/// Decodes with one cache, and compares.
fn compare(asked: &Asked, outs: &[Vec<f32>]) -> Result<(), Box<dyn Error>> {
    let ([heads, _, dim], mut part) = (asked.heads, Part::new(asked, 0..usize::MAX)?);
    let (mut out, mut last, mut differ, mut far) = (vec![0.0f32; heads * dim], vec![0.0f32; heads * dim], 0, 0.0f32);
    let begin = Instant::now();
    for (token, got) in outs.iter().enumerate() {
        part.append(asked.prompt + token..asked.prompt + token + 1)?;
        let q = query(token, &last);
        let inputs = Inputs::cached(View::bhld(&q, [1, heads, 1, dim])?, &part.cache);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, heads, 1, dim])?);
        Attention::new().problem(inputs, outputs)?.run_once(Exec::default());
        differ += got.iter().zip(&out).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        far = got.iter().zip(&out).fold(far, |far, (a, b)| far.max((a - b).abs()));
        // Of the ranks, so that each step is compared by itself.
        last.clone_from(got);
    }
    println!("one cache alone: a token {:.2} ms", 1e3 * begin.elapsed().as_secs_f64() / outs.len().max(1) as f64);
    match asked.merges {
        Merges::InOrder if differ > 0 => return Err(format!("{differ} numbers differ from those of one cache").into()),
        Merges::InOrder => println!("every bit is that of one cache"),
        _ => {
            let all = outs.len() * out.len();
            println!("{differ} of {all} numbers differ from those of one cache, by {far:e} at most");
        }
    }
    Ok(())
}
