//! One prompt over all ranks, compared with one process bit for bit; what was moved, and how long each rank computed and
//! waited.
//!
//! ```sh
//! cargo build --release --example ring
//! mpirun -n 4 target/release/examples/ring --shape 1x8x8192x64 --causal --type f32
//! ```

mod numbers;
#[path = "../../../examples/pictures/mod.rs"]
mod pictures;
mod sample;
#[path = "../start/mod.rs"]
mod start;
mod turns;

use indicatif::{ProgressBar, ProgressStyle};
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use numbers::Stripe;
use pictures::{Bars, Labels, Picture, page, save};
use sdpa::{Attention, Dtype, Inputs, Outputs, ViewMut};
use sdpa_mpi::{Ranks, Report, Share, Split, zigzag};
use start::{Done, Options, Words};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const HELP: &str = "One prompt over all ranks of mpirun, compared with one process bit for bit.

--shape BxHxNxD   batch, heads, tokens, head_dim; by default 1x8x8192x64
--kv-heads N      key/value heads; by default as many as heads
--causal          a row sees no later keys
--type TYPE       f32, bf16 or f16: elements of q, k and v
--split WAY       rows, heads, or chosen: by a cost model, from figures measured first, which is printed
--memory MIB      limit of a rank's memory, which all keys and values together may exceed: then some rows of each
                  rank are compared with those of a state, instead of all
--turns N         times of N turns, shuffled: all ranks together, one alone, and all at once that share nothing
--timeout S       seconds that nothing may come from another rank, by default 60
--folder F        where the picture goes, by default target/pictures";

/// Arguments of the command line.
struct Asked {
    shape: [usize; 4],
    kv_heads: Option<usize>,
    causal: bool,
    dtype: Dtype,
    way: Way,
    /// Bytes.
    memory: Option<usize>,
    turns: usize,
    timeout: Duration,
    folder: PathBuf,
}

/// Way in which the call is cut.
#[derive(Clone, Copy)]
enum Way {
    Rows,
    Heads,
    Chosen,
}

impl Asked {
    /// Shape of all keys.
    fn of_keys(&self) -> [usize; 4] {
        let [batch, heads, tokens, dim] = self.shape;
        [batch, self.kv_heads.unwrap_or(heads), tokens, dim]
    }

    fn attention(&self) -> Attention {
        if self.causal { Attention::new().causal() } else { Attention::new() }
    }
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            shape: [1, 8, 8192, 64],
            kv_heads: None,
            causal: false,
            dtype: Dtype::F32,
            way: Way::Rows,
            memory: None,
            turns: 0,
            timeout: Duration::from_secs(60),
            folder: PathBuf::from("target/pictures"),
        }
    }
}

impl Options for Asked {
    const HELP: &str = HELP;

    fn take(&mut self, option: &str, words: &mut Words) -> Done<bool> {
        match option {
            "--shape" => self.shape = words.sizes("1x8x8192x64")?,
            "--kv-heads" => self.kv_heads = Some(words.parsed()?),
            "--causal" => self.causal = true,
            "--type" => {
                self.dtype = words.one_of(&[("f32", Dtype::F32), ("bf16", Dtype::Bf16), ("f16", Dtype::F16)])?;
            }
            "--split" => {
                self.way = words.one_of(&[("rows", Way::Rows), ("heads", Way::Heads), ("chosen", Way::Chosen)])?;
            }
            "--memory" => self.memory = Some(words.parsed::<usize>()? << 20),
            "--turns" => self.turns = words.parsed()?,
            "--timeout" => self.timeout = Duration::try_from_secs_f64(words.parsed()?)?,
            "--folder" => self.folder = words.value()?.into(),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn main() -> Done {
    start::on_ranks(run)
}

fn run(world: &SimpleCommunicator, asked: &Asked) -> Done {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let tokens = asked.shape[2];
    let bar = progress_bar(tokens, rank);
    let progress = |done: usize, _: usize| bar.set_position(done as u64);
    let attention = asked.attention();
    let mut stripes = zigzag(tokens, rank, size).map(|rows| Stripe::new(asked, rows));
    let ranks = Ranks::new(world, asked.timeout).progress(&progress);
    let split = match asked.way {
        Way::Rows => Split::Rows,
        Way::Heads => Split::Heads,
        Way::Chosen => {
            let costs = ranks.measure()?;
            let forecast = ranks.forecast(&attention, &share(&mut stripes)?, costs)?;
            if rank == 0 {
                println!("{forecast}");
            }
            Split::Chosen(costs)
        }
    };
    let ranks = ranks.split(split);
    world.barrier();
    let report = ranks.attention(&attention, share(&mut stripes)?)?;
    bar.finish_and_clear();
    let differ = match asked.memory {
        Some(limit) => sample::within(world, asked, &stripes, limit)?,
        None => compare(world, asked, &attention, &stripes)?,
    };
    show(world, asked, &report)?;
    if differ > 0 {
        return Err(format!("{differ} numbers differ from those of one process").into());
    }
    if rank == 0 {
        let of = if asked.memory.is_some() { "every bit of the rows compared" } else { "every bit" };
        println!("{of} is that of one process");
    }
    if asked.turns > 0 {
        turns::run(world, asked, &ranks, &mut stripes)?;
    }
    Ok(())
}

/// A line about the keys that are done, on rank 0.
fn progress_bar(tokens: usize, rank: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos} of {len} keys, {eta} left").expect("a template");
    if rank == 0 { ProgressBar::new(tokens as u64).with_style(style) } else { ProgressBar::hidden() }
}

/// The share of this rank.
fn share(stripes: &mut [Stripe; 2]) -> Result<Share<'_>, sdpa::Error> {
    let mut share = Share::new();
    for Stripe { rows, qkv: [q, k, v], out } in stripes {
        let (q, k, v) = (q.tensor()?, k.tensor()?, v.tensor()?);
        let outputs = Outputs::new(ViewMut::bhld(out, q.shape())?);
        share = share.rows(rows.start, Inputs::new(q, k, v), outputs).keys(rows.start, k, v);
    }
    Ok(share)
}

/// Computes the whole prompt on rank 0, and returns how many numbers of this rank's are others.
fn compare(
    world: &SimpleCommunicator,
    asked: &Asked,
    attention: &Attention,
    stripes: &[Stripe; 2],
) -> Result<usize, Box<dyn Error>> {
    let [batch, heads, tokens, dim] = asked.shape;
    let mut whole = vec![0.0f32; batch * heads * tokens * dim];
    if world.rank() == 0 {
        let all = Stripe::new(asked, 0..tokens);
        let [q, k, v] = &all.qkv;
        let outputs = Outputs::new(ViewMut::bhld(&mut whole, asked.shape)?);
        let begin = Instant::now();
        sdpa::attention(attention, Inputs::new(q.tensor()?, k.tensor()?, v.tensor()?), outputs)?;
        println!("one process alone: {:.1} ms", 1e3 * begin.elapsed().as_secs_f64());
    }
    world.process_at_rank(0).broadcast_into(&mut whole[..]);
    let mut differ = 0;
    for Stripe { rows, out, .. } in stripes {
        for head in 0..batch * heads {
            let expected = &whole[(head * tokens + rows.start) * dim..(head * tokens + rows.end) * dim];
            let got = &out[head * rows.len() * dim..(head + 1) * rows.len() * dim];
            differ += got.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        }
    }
    Ok(differ)
}

/// Prints the reports of all ranks and draws them, on rank 0.
fn show(world: &SimpleCommunicator, asked: &Asked, report: &Report) -> Result<(), Box<dyn Error>> {
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let ms = |time: Duration| 1e3 * time.as_secs_f64();
    let [computing, copying, waiting] = [report.computing, report.copying, report.waiting].map(ms);
    let mine = [mib(report.sent), mib(report.received), computing, waiting, copying, ms(report.total)];
    if world.rank() != 0 {
        world.process_at_rank(0).gather_into(&mine[..]);
        return Ok(());
    }
    let mut all = vec![0.0f64; mine.len() * world.size() as usize];
    world.process_at_rank(0).gather_into_root(&mine[..], &mut all[..]);
    for (rank, numbers) in all.chunks(mine.len()).enumerate() {
        let [sent, received, computing, waiting, copying, total] = numbers.try_into()?;
        println!(
            "rank {rank}: sent {sent:.2} MiB, received {received:.2} MiB; computing {computing:.1} ms, copying {copying:.1} ms, \
             waiting {waiting:.1} ms of {total:.1} ms"
        );
    }
    let names: Vec<String> = (0..world.size()).map(|rank| format!("rank {rank}")).collect();
    let columns = ["MiB sent", "MiB received", "ms computing", "ms waiting"];
    let column = |at: usize| all.chunks(mine.len()).map(|numbers| numbers[at] as f32).collect::<Vec<_>>();
    // Bytes on one scale, times on another.
    let top = |of: [usize; 2]| of.into_iter().flat_map(column).fold(f32::MIN_POSITIVE, f32::max);
    let tops = [top([0, 1]), top([2, 3])];
    let panel = |(at, title): (usize, &&str)| bars(title, &names, &column(at), tops[at / 2]);
    let panels: Vec<_> = columns.iter().enumerate().map(panel).collect();
    let [batch, heads, tokens, dim] = asked.shape;
    let causal = if asked.causal { ", causal" } else { "" };
    let note = format!("{batch} × {heads} heads of {dim}, {tokens} tokens{causal}, {}", asked.dtype);
    save(&page("One prompt over ranks", &note, 2, &panels, None), Path::new(&asked.folder), "ring")
}

fn bars(title: &str, names: &[String], values: &[f32], top: f32) -> Picture {
    Bars { title, labels: Labels::new("", names), values, top, length: 220.0 }.picture()
}
