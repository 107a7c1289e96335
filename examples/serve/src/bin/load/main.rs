//! Load generator: measures the capacity of a server on this machine, then asks it at random times, at fractions and multiples of
//! that, and draws what it answers.
//!
//! ```text
//! cargo run --release --bin load                            # beside a server that runs
//! cargo run --release --bin load -- --minutes 10 --rate 0.8 # one long run
//! ```

mod arguments;
mod client;
mod measured;
mod metrics;
mod picture;
#[path = "../../../../pictures/mod.rs"]
mod pictures;
mod run;
mod workload;

use arguments::{Arguments, HELP};
use client::Asker;
use measured::{HEAD, Measured};
use std::process::ExitCode;
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Requests under way while the capacity is measured.
const CROWD: usize = 48;

fn main() -> ExitCode {
    match Arguments::read(std::env::args().skip(1)) {
        Ok(None) => {
            print!("{HELP}");
            ExitCode::SUCCESS
        }
        Ok(Some(arguments)) => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let done = runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(work(&arguments)));
            ended(done, ExitCode::FAILURE)
        }
        Err(error) => ended(Err(error), ExitCode::from(2)),
    }
}

fn ended(done: Result<()>, status: ExitCode) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("load: {error}");
            status
        }
    }
}

async fn work(arguments: &Arguments) -> Result<()> {
    let asker = Asker::new(arguments);
    let crowd = run::crowd(&asker, CROWD, arguments.length).await?;
    let capacity = crowd.done_per_second();
    println!("capacity: {capacity:.1} requests/s ({CROWD} at once), {:.0} letters/s", crowd.letters_per_second());
    if let Some(minutes) = arguments.minutes {
        let length = Duration::from_secs(60 * minutes);
        return run::long(&asker, (arguments.rate, arguments.rate * capacity), length).await?.judge();
    }
    println!("\n{HEAD}");
    let mut all: Vec<Measured> = Vec::new();
    for &load in &arguments.loads {
        let measured = run::arrivals(&asker, (load, load * capacity), arguments.length).await?;
        println!("{}", measured.row());
        all.push(measured);
    }
    pictures::save(&picture::picture(&all), &arguments.folder, "serve")
}
