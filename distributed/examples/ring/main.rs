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
mod turns;

use indicatif::{ProgressBar, ProgressStyle};
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use numbers::Stripe;
use pictures::{Bars, Labels, Picture, page, save};
use sdpa::{Attention, Dtype, Inputs, Outputs, ViewMut};
use sdpa_mpi::{Ranks, Report, Share, Split, zigzag};
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

fn main() -> Result<(), Box<dyn Error>> {
    let Some(asked) = asked()? else {
        println!("{HELP}");
        return Ok(());
    };
    let universe = mpi::initialize().ok_or("MPI has begun already")?;
    let world = universe.world();
    // Without the end of MPI, which would wait for ranks that are gone.
    run(&world, &asked).map_err(|error| {
        eprintln!("rank {}: {error}", world.rank());
        std::process::exit(1)
    })
}

/// Reads the command line; `None` asks for help.
fn asked() -> Result<Option<Asked>, Box<dyn Error>> {
    let mut asked = Asked {
        shape: [1, 8, 8192, 64],
        kv_heads: None,
        causal: false,
        dtype: Dtype::F32,
        way: Way::Rows,
        memory: None,
        turns: 0,
        timeout: Duration::from_secs(60),
        folder: PathBuf::from("target/pictures"),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word}: a value is missing"));
        match word.as_str() {
            "--shape" => {
                let sizes: Vec<usize> = value()?.split('x').map(str::parse).collect::<Result<_, _>>()?;
                asked.shape = sizes.try_into().map_err(|_| "--shape: four sizes, as 1x8x8192x64")?;
            }
            "--kv-heads" => asked.kv_heads = Some(value()?.parse()?),
            "--causal" => asked.causal = true,
            "--type" => {
                let name = value()?;
                let found = [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().find(|dtype| dtype.to_string() == name);
                asked.dtype = found.ok_or(format!("--type {name}: but must be f32, bf16 or f16"))?;
            }
            "--split" => {
                asked.way = match value()?.as_str() {
                    "rows" => Way::Rows,
                    "heads" => Way::Heads,
                    "chosen" => Way::Chosen,
                    other => return Err(format!("--split {other}: but must be rows, heads or chosen").into()),
                }
            }
            "--memory" => asked.memory = Some(value()?.parse::<usize>()? << 20),
            "--turns" => asked.turns = value()?.parse()?,
            "--timeout" => asked.timeout = Duration::try_from_secs_f64(value()?.parse()?)?,
            "--folder" => asked.folder = value()?.into(),
            "--help" => return Ok(None),
            _ => return Err(format!("{word}: not known; --help lists what is").into()),
        }
    }
    Ok(Some(asked))
}

fn run(world: &SimpleCommunicator, asked: &Asked) -> Result<(), Box<dyn Error>> {
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
    let mine = [mib(report.sent), mib(report.received), ms(report.computing), ms(report.waiting), ms(report.total)];
    if world.rank() != 0 {
        world.process_at_rank(0).gather_into(&mine[..]);
        return Ok(());
    }
    let mut all = vec![0.0f64; mine.len() * world.size() as usize];
    world.process_at_rank(0).gather_into_root(&mine[..], &mut all[..]);
    for (rank, numbers) in all.chunks(mine.len()).enumerate() {
        let [sent, received, computing, waiting, total] = numbers.try_into()?;
        println!(
            "rank {rank}: sent {sent:.2} MiB, received {received:.2} MiB; computing {computing:.1} ms, waiting {waiting:.1} ms of {total:.1} ms"
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
