//! Makes random calls of sdpa and checks them: README.md says how, `tests/fuzz/mod.rs` says what.

#[path = "../../tests/fuzz/mod.rs"]
mod fuzzer;

use std::process::ExitCode;
use std::time::Instant;

const HELP: &str = "\
Makes random calls of sdpa and checks them.

  --calls N    so many calls (default 10000)
  --seed N     of this seed (default 1)
  --only N     call number N of the seed, and no other
";

/// Calls between two lines that say how far it has come.
const PROGRESS: u64 = 1000;
/// Wrong calls after which it ends.
const ENOUGH: u64 = 20;
/// Exit status if an argument is wrong.
const REFUSED: u8 = 2;

#[derive(Debug)]
struct Args {
    calls: u64,
    seed: u64,
    only: Option<u64>,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
    let mut parsed = Args { calls: 10_000, seed: 1, only: None };
    while let Some(name) = args.next() {
        if name == "--help" {
            return Ok(None);
        }
        let value = args.next().ok_or_else(|| format!("{name}: a number is missing"))?;
        let number = value.parse().map_err(|e| format!("{name}: {value}: {e}"))?;
        match &*name {
            "--calls" => parsed.calls = number,
            "--seed" => parsed.seed = number,
            "--only" => parsed.only = Some(number),
            _ => return Err(format!("{name}: no such option; --help lists them")),
        }
    }
    Ok(Some(parsed))
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(e) => {
            eprintln!("fuzz: {e}");
            return ExitCode::from(REFUSED);
        }
    };
    fuzzer::watch();
    if run(&args) == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// How many calls went wrong.
fn run(args: &Args) -> u64 {
    let (start, calls) = (Instant::now(), args.only.map_or(0..args.calls, |number| number..number + 1));
    let (total, mut wrong) = (calls.end - calls.start, 0);
    for (done, number) in (1..).zip(calls) {
        wrong += u64::from(!fuzzer::call(args.seed, number));
        if done % PROGRESS == 0 || done == total || wrong == ENOUGH {
            println!("{done} of {total} calls, {wrong} wrong, {:.1} s", start.elapsed().as_secs_f64());
        }
        if wrong == ENOUGH {
            break;
        }
    }
    wrong
}
