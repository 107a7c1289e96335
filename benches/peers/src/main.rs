//! Times this crate and its peers alternately, and checks every answer; README.md says how and why.

mod args;
mod attention;
mod backward;
mod case;
mod elements;
mod embed;
mod failure;
mod folder;
mod neighbour;
mod peer;
mod peers;
#[path = "../../../examples/pictures/mod.rs"]
mod pictures;
mod protocol;
mod record;
mod reference;
mod rounded;
mod serve;
mod session;
#[path = "../../support/mod.rs"]
mod support;
mod sweep;
mod table;
mod timing;
mod worker;
mod workloads;

use args::{Args, Command, Part};
use failure::Result;
use peer::Home;
use peers::PEERS;
use std::process::ExitCode;
use table::Report;

/// Exit status if an answer is wrong, or a peer failed.
const FAILED: u8 = 1;
/// Exit status if an argument is wrong.
const REFUSED: u8 = 2;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(e) => {
            eprintln!("peers: {e}");
            ExitCode::from(REFUSED)
        }
    }
}

fn run() -> Result<ExitCode> {
    match args::parse(std::env::args().skip(1))? {
        Command::Help => {
            print!("{}", args::HELP);
            Ok(ExitCode::SUCCESS)
        }
        Command::Worker { of, name } => {
            work(of, &name)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Attention(args) => {
            mind_the_build();
            let report = attention::compare(&args)?;
            finish(&args, &report, &attention::print(&report, args.markdown))
        }
        Command::Sweep(args) => {
            mind_the_build();
            let report = attention::compare(&args)?;
            let code = finish(&args, &report, &attention::print(&report, args.markdown))?;
            pictures::save(&sweep::picture(&report, &args), &args.pictures, "peers-sweep")
                .map_err(|e| e.to_string())?;
            Ok(code)
        }
        Command::Backward(args) => {
            mind_the_build();
            let report = backward::compare(&args)?;
            finish(&args, &report, &backward::print(&report))
        }
        Command::Embed(args) => {
            mind_the_build();
            let report = embed::compare(&args)?;
            finish(&args, &report, &embed::print(&report, args.markdown))
        }
    }
}

/// Computes what the program asks for, until it asks no more.
fn work(of: Part, name: &str) -> Result<()> {
    let unknown = || format!("no peer is called {name}");
    match of {
        Part::Attention => {
            let mut peer = peers::rust_peer(name).ok_or_else(unknown)?;
            let home = PEERS.iter().find(|entry| entry.name == name).map(|entry| entry.home);
            let Some(Home::Rust { package }) = home else { return Err(format!("{name} is no worker").into()) };
            serve::serve(peers::version(package), &mut *peer)
        }
        Part::Gradients => {
            let (mut peer, package) = backward::rust_peer(name).ok_or_else(unknown)?;
            serve::serve(peers::version(package), &mut *peer)
        }
        Part::Embeddings => {
            let (mut peer, package) = embed::rust_peer(name).ok_or_else(unknown)?;
            serve::serve(peers::version(package), &mut *peer)
        }
    }
}

/// Says so if peers were compiled for less than this machine has.
fn mind_the_build() {
    #[cfg(target_arch = "x86_64")]
    if !cfg!(target_feature = "avx2") && std::arch::is_x86_feature_detected!("avx2") {
        eprintln!("peers: built for any x86-64, for which rten and candle are slower; run cargo in benches/peers");
    }
}

fn finish(args: &Args, report: &Report, text: &str) -> Result<ExitCode> {
    print!("{text}");
    if let Some(file) = &args.json {
        let json = serde_json::to_string_pretty(report)? + "\n";
        std::fs::write(file, json).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    let failed = report.left_out.iter().any(|left_out| left_out.failed);
    Ok(if failed { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}
