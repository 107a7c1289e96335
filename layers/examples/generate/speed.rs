//! What a token costs, by how many are before it.

use crate::decoders::{Size, random};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use sdpa::{Error, LayerCaches, probe};
use sdpa_layers::{Compute, Transformer};
use std::time::Instant;

/// Tokens of a prompt taken in at once.
const CHUNK: usize = 256;
/// Tokens timed at each length, after one that is not.
const TIMED: usize = 7;

/// A decoder and its steps.
pub(crate) struct Measured {
    pub(crate) size: Size,
    pub(crate) steps: Vec<Step>,
}

/// One token after so many others.
pub(crate) struct Step {
    pub(crate) past: usize,
    /// The median.
    pub(crate) seconds: f64,
    weights: f64,
    keys_and_values: f64,
    /// Bytes a second of the fastest of some plain reads right after.
    pub(crate) plain: f64,
}

impl Step {
    /// What it reads.
    pub(crate) fn bytes(&self) -> f64 {
        self.weights + self.keys_and_values
    }
}

/// A decoder in the midst of a sequence.
struct Sequence {
    decoder: Transformer,
    caches: LayerCaches,
    /// The next input: there are no tables of tokens here, so the last state takes its place.
    x: Vec<f32>,
    out: Vec<f32>,
    compute: Compute<'static>,
}

impl Sequence {
    fn new(size: &Size, positions: usize) -> Result<Self, Error> {
        let (decoder, width) = (size.decoder(positions)?, size.width());
        let (caches, compute) = (decoder.caches(1)?, Compute::default());
        Ok(Self { decoder, caches, x: vec![0.0; width], out: vec![0.0; CHUNK * width], compute })
    }

    /// Takes rows in, at most a chunk of them. The seconds that takes.
    fn take_in(&mut self, rows: &[f32]) -> Result<f64, Error> {
        let (start, out) = (Instant::now(), &mut self.out[..rows.len()]);
        self.decoder.decode(rows, &mut self.caches, out, &mut self.compute)?;
        let seconds = start.elapsed().as_secs_f64();
        self.x.copy_from_slice(&out[out.len() - self.decoder.width()..]);
        Ok(seconds)
    }

    /// Takes one more token in, its own last state.
    fn generate(&mut self) -> Result<f64, Error> {
        let x = std::mem::take(&mut self.x);
        let mut next = vec![0.0; x.len()];
        let start = Instant::now();
        self.decoder.decode(&x, &mut self.caches, &mut next, &mut self.compute)?;
        let seconds = start.elapsed().as_secs_f64();
        self.x = next;
        Ok(seconds)
    }
}

/// Takes a prompt in by chunks. At each of these lengths some tokens are generated, timed, and forgotten again.
pub(crate) fn measure(size: &Size, pasts: &[usize], memory: &Memory) -> Result<Measured, Error> {
    let (width, longest) = (size.width(), pasts.last().copied().unwrap_or(0));
    let (millions, gigabytes) = (size.weights() as f64 / 1e6, bytes(size.weights()) / 1e9);
    println!("{}, {}: {millions:.1} M weights, {gigabytes:.3} GB.", size.name(), size.shared());
    let mut sequence = Sequence::new(size, longest + 1 + TIMED)?;
    let head = ["past", "ms/token", "tokens/s", "keys+values", "GB/s", "of plain read"];
    println!("{:>6} {:>10} {:>9} {:>13} {:>8} {:>14}", head[0], head[1], head[2], head[3], head[4], head[5]);

    let progress = progress(size.weights() * longest, longest);
    let prompt: Vec<f32> = random(longest * width).collect();
    let (mut at, mut prefill, mut steps) = (0, 0.0, Vec::new());
    for &past in pasts {
        while at < past {
            let n = CHUNK.min(past - at);
            prefill += sequence.take_in(&prompt[at * width..][..n * width])?;
            at += n;
            progress.inc(n as u64);
        }
        let mut times = (0..=TIMED).map(|_| sequence.generate()).collect::<Result<Vec<_>, _>>()?;
        let read = (0..TIMED).map(|_| memory.read()).fold(f64::INFINITY, f64::min);
        sequence.caches.truncate(0, past)?;
        let step = Step {
            past,
            seconds: median(&mut times[1..]),
            weights: bytes(size.weights()),
            keys_and_values: bytes(size.keys_and_values(past + TIMED / 2 + 1)),
            plain: memory.bytes() / read,
        };
        progress.suspend(|| print(&step));
        steps.push(step);
    }
    progress.finish_and_clear();
    println!("The prompt, {CHUNK} tokens at a time: {:.0} tokens/s.\n", longest as f64 / prefill);
    Ok(Measured { size: *size, steps })
}

/// A bar if it takes long, and quiet unless someone looks on.
fn progress(products: usize, tokens: usize) -> ProgressBar {
    let bar = if products > 1 << 36 { ProgressBar::new(tokens as u64) } else { ProgressBar::hidden() };
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} tokens of the prompt, {eta} left");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn print(step: &Step) {
    let rate = step.bytes() / step.seconds;
    println!(
        "{:>6} {:>10.3} {:>9.1} {:>10.1} MB {:>8.1} {:>12.0} %",
        step.past,
        step.seconds * 1e3,
        1.0 / step.seconds,
        step.keys_and_values / 1e6,
        rate / 1e9,
        100.0 * rate / step.plain
    );
}

fn bytes(floats: usize) -> f64 {
    (floats * size_of::<f32>()) as f64
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Numbers to be read, and nothing done with them: what a step is held against.
pub(crate) struct Memory(Vec<f32>);

impl Memory {
    pub(crate) fn new(floats: usize) -> Self {
        Self(vec![1.0; floats])
    }

    fn bytes(&self) -> f64 {
        bytes(self.0.len())
    }

    /// Seconds that it takes on as many threads as a decoder has.
    fn read(&self) -> f64 {
        let start = Instant::now();
        let parts = self.0.par_chunks(1 << 20);
        let finite = if cfg!(feature = "rayon") { parts.all(probe::read) } else { probe::read(&self.0) };
        assert!(std::hint::black_box(finite), "ones are finite");
        start.elapsed().as_secs_f64()
    }
}
