//! One prompt over all ranks, compared with one process bit for bit; what was moved, and how long each rank computed and
//! waited.
//!
//! ```sh
//! cargo build --release --example ring
//! mpirun -n 4 target/release/examples/ring --shape 1x8x8192x64 --causal --type f32
//! ```

#[path = "../../examples/pictures/mod.rs"]
mod pictures;

use indicatif::{ProgressBar, ProgressStyle};
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use pictures::{Bars, Labels, Picture, page, save};
use sdpa::{Attention, Bf16, Dtype, F16, Inputs, Outputs, Tensor, View, ViewMut};
use sdpa_mpi::{Ranks, Report, Share, zigzag};
use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const HELP: &str = "One prompt over all ranks of mpirun, compared with one process bit for bit.

--shape BxHxNxD   batch, heads, tokens, head_dim; by default 1x8x8192x64
--kv-heads N      key/value heads; by default as many as heads
--causal          a row sees no later keys
--type TYPE       f32, bf16 or f16: elements of q, k and v
--timeout S       seconds that nothing may come from another rank, by default 60
--folder F        where the picture goes, by default target/pictures";

/// What the command line asks for.
struct Asked {
    shape: [usize; 4],
    kv_heads: Option<usize>,
    causal: bool,
    dtype: Dtype,
    timeout: Duration,
    folder: PathBuf,
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
            "--timeout" => asked.timeout = Duration::try_from_secs_f64(value()?.parse()?)?,
            "--folder" => asked.folder = value()?.into(),
            "--help" => return Ok(None),
            _ => return Err(format!("{word}: not known; --help lists what is").into()),
        }
    }
    Ok(Some(asked))
}

/// Numbers of a tensor `[batch, heads, rows, dim]`, some rows of a longer one. Each number is made of its place there.
struct Numbers {
    f32: Vec<f32>,
    bf16: Vec<Bf16>,
    f16: Vec<F16>,
    shape: [usize; 4],
    dtype: Dtype,
}

impl Numbers {
    fn new([batch, heads, _, dim]: [usize; 4], rows: Range<usize>, seed: u64, dtype: Dtype) -> Self {
        let number = |place: u64| {
            let mut x = place.wrapping_add(seed << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((x ^ x >> 27) >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let mut numbers =
            Self { f32: vec![], bf16: vec![], f16: vec![], shape: [batch, heads, rows.len(), dim], dtype };
        for head in 0..batch * heads {
            for place in rows.start * dim..rows.end * dim {
                let x = number(((head as u64) << 40) + place as u64);
                match dtype {
                    Dtype::Bf16 => numbers.bf16.push(Bf16::from_f32(x)),
                    Dtype::F16 => numbers.f16.push(F16::from_f32(x)),
                    _ => numbers.f32.push(x),
                }
            }
        }
        numbers
    }

    fn tensor(&self) -> Result<Tensor<'_>, sdpa::Error> {
        Ok(match self.dtype {
            Dtype::Bf16 => View::bhld(&self.bf16, self.shape)?.into(),
            Dtype::F16 => View::bhld(&self.f16, self.shape)?.into(),
            _ => View::bhld(&self.f32, self.shape)?.into(),
        })
    }
}

/// One stretch of rows and the keys beside them.
struct Stripe {
    rows: Range<usize>,
    qkv: [Numbers; 3],
    out: Vec<f32>,
}

impl Stripe {
    fn new(asked: &Asked, rows: Range<usize>) -> Self {
        let [batch, heads, tokens, dim] = asked.shape;
        let of_keys = [batch, asked.kv_heads.unwrap_or(heads), tokens, dim];
        let numbers = |shape, seed| Numbers::new(shape, rows.clone(), seed, asked.dtype);
        let qkv = [numbers(asked.shape, 1), numbers(of_keys, 2), numbers(of_keys, 3)];
        let out = vec![0.0; batch * heads * rows.len() * dim];
        Self { rows, qkv, out }
    }
}

fn run(world: &SimpleCommunicator, asked: &Asked) -> Result<(), Box<dyn Error>> {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let tokens = asked.shape[2];
    let bar = progress_bar(tokens, rank);
    let progress = |done: usize, _: usize| bar.set_position(done as u64);
    let attention = if asked.causal { Attention::new().causal() } else { Attention::new() };
    let mut stripes = zigzag(tokens, rank, size).map(|rows| Stripe::new(asked, rows));
    let ranks = Ranks::new(world, asked.timeout).progress(&progress);
    world.barrier();
    let report = ranks.attention(&attention, share(&mut stripes)?)?;
    bar.finish_and_clear();
    let differ = compare(world, asked, &attention, &stripes)?;
    show(world, asked, &report)?;
    if differ > 0 {
        return Err(format!("{differ} numbers differ from those of one process").into());
    }
    if rank == 0 {
        println!("every bit is that of one process");
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
