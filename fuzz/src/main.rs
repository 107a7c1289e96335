//! Makes random cases of sdpa's calls and checks them: README.md says how, `tests/fuzz/mod.rs` says what.

#[path = "../../tests/fuzz/mod.rs"]
mod fuzzer;
mod layers;
#[path = "../../layers/tests/layers/linear_attention_support/mod.rs"]
mod linear_attention_support;
#[path = "../../tests/support/mod.rs"]
mod support;

use fuzzer::{KINDS, Kind, bits};
use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

const HELP: &str = "\
Makes random cases of sdpa's calls and checks them.

  --cases N    so many cases of each kind (default 1000)
  --kind NAME  of this kind, and no other
  --seed N     of this seed (default 1)
  --only N     case number N, and no other
  --threads N  on so many threads (default: all there are)
  --bits PER   checks nothing: makes calls of all kinds, and prints a hash of what they wrote on each instruction set
               per so many calls; --cases and --only as above
  --first N    from call number N on

Kinds: ";

/// Cases between two lines that say how far it has come.
const PROGRESS: u64 = 10_000;
/// Exit status if an argument is wrong.
const REFUSED: u8 = 2;

#[derive(Debug)]
struct Args {
    cases: u64,
    kind: Option<&'static Kind>,
    seed: u64,
    only: Option<u64>,
    first: u64,
    threads: usize,
    bits: Option<u64>,
}

impl Args {
    fn numbers(&self) -> Range<u64> {
        self.only.map_or(self.first..self.first + self.cases, |number| number..number + 1)
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut parsed = Args { cases: 1000, kind: None, seed: 1, only: None, first: 0, threads, bits: None };
    while let Some(name) = args.next() {
        if name == "--help" {
            return Ok(None);
        }
        let value = args.next().ok_or_else(|| format!("{name}: a value is missing"))?;
        if name == "--kind" {
            let kind = kinds().find(|kind| kind.name == value);
            parsed.kind = Some(kind.ok_or_else(|| format!("{name}: {value}: no such kind; --help lists them"))?);
            continue;
        }
        let number = value.parse().map_err(|e| format!("{name}: {value}: {e}"))?;
        match &*name {
            "--cases" => parsed.cases = number,
            "--seed" => parsed.seed = number,
            "--only" => parsed.only = Some(number),
            "--first" => parsed.first = number,
            "--bits" => parsed.bits = Some(number.max(1)),
            "--threads" => parsed.threads = usize::try_from(number).unwrap_or(threads).clamp(1, threads),
            _ => return Err(format!("{name}: no such option; --help lists them")),
        }
    }
    Ok(Some(parsed))
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            println!("{HELP}{}", kinds().map(|kind| kind.name).collect::<Vec<_>>().join(", "));
            return ExitCode::SUCCESS;
        }
        Err(e) => {
            eprintln!("fuzz: {e}");
            return ExitCode::from(REFUSED);
        }
    };
    fuzzer::watch();
    if let Some(per) = args.bits {
        print_bits(&args, per);
        return ExitCode::SUCCESS;
    }
    let kinds = kinds().filter(|kind| args.kind.is_none_or(|of| of.name == kind.name));
    let wrong: u64 = kinds.map(|kind| run(kind, &args)).sum();
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Every kind there is, of `sdpa` and of its layers.
fn kinds() -> impl Iterator<Item = &'static Kind> {
    KINDS.iter().chain(&layers::KINDS)
}

/// How many cases of a kind went wrong.
fn run(kind: &'static Kind, args: &Args) -> u64 {
    let (start, numbers) = (Instant::now(), args.numbers());
    let (mut wrong, mut next) = (0, numbers.start);
    while next < numbers.end && wrong < fuzzer::ENOUGH {
        let end = numbers.end.min(next + PROGRESS);
        wrong += fuzzer::run(kind, args.seed, next..end, args.threads);
        next = end;
        let (name, done, seconds) = (kind.name, next - numbers.start, start.elapsed().as_secs_f64());
        println!("{name}: {done} of {} cases, {wrong} wrong, {seconds:.1} s", numbers.end - numbers.start);
    }
    wrong
}

/// Prints a line for so many calls each: their numbers, and a hash of what they wrote on each instruction set; of one call,
/// what it is.
fn print_bits(args: &Args, per: u64) {
    let (mut numbers, start) = (args.numbers(), Instant::now());
    while !numbers.is_empty() {
        let these = numbers.start..numbers.end.min(numbers.start + per);
        let calls = bits::calls(these.clone(), args.threads, bits::call);
        let hashes: Vec<String> =
            bits::together(&calls).into_iter().map(|(isa, hash)| format!("{isa} {hash:016x}")).collect();
        let what = if per == 1 { &*calls[0].what } else { "" };
        println!("{} {} {what}", these.start, hashes.join(" "));
        numbers.start = these.end;
    }
    eprintln!("{} calls, {:.1} s", args.numbers().count(), start.elapsed().as_secs_f64());
}
