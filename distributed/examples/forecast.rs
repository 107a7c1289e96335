//! Forecast of prompts over 1 to 64 ranks, from figures that you give: no rank runs. The tables of docs/distributed.md.
//!
//! ```sh
//! cargo run --release --example forecast -- --gflops 1200 --latency 20
//! ```

mod start;

use sdpa_mpi::{Costs, Forecast, Split, Workload};
use start::{Done, Options, Words};

const HELP: &str = "Forecast of causal prompts over ranks, by rows and by heads.

--gflops N       a rank's GFLOP/s in attention, by default 1200: 16 cores
--latency N      µs of a message, by default 20
--heads QxKxD    query heads, key/value heads and their length, by default 32x8x128
--element N      bytes of an element, by default 2";

/// Arguments of the command line.
struct Asked {
    gflops: f64,
    /// In µs.
    latency: f64,
    /// Query heads, key/value heads, length.
    heads: [usize; 3],
    element: usize,
}

impl Default for Asked {
    fn default() -> Self {
        Self { gflops: 1200.0, latency: 20.0, heads: [32, 8, 128], element: 2 }
    }
}

impl Options for Asked {
    const HELP: &str = HELP;

    fn take(&mut self, option: &str, words: &mut Words) -> Done<bool> {
        match option {
            "--gflops" => self.gflops = words.parsed()?,
            "--latency" => self.latency = words.parsed()?,
            "--heads" => self.heads = words.sizes("32x8x128")?,
            "--element" => self.element = words.parsed()?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn main() -> Done {
    let Some(Asked { gflops, latency, heads: sizes, element }) = start::options()? else { return Ok(()) };
    let (flops, latency) = (1e9 * gflops, 1e-6 * latency);
    let [heads, kv_heads, dim] = sizes;
    let workload = |keys: usize| Workload {
        batch: 1,
        heads: [heads, kv_heads],
        dims: [dim; 2],
        rows: keys,
        keys,
        visible: 0.5,
        bytes: [element; 3],
        options: [0; 2],
    };
    println!("seconds by rows / by heads; * marks the shorter\n");
    println!("| keys | Gbit/s | 2 ranks | 4 ranks | 8 ranks | 16 ranks | 32 ranks | 64 ranks |");
    println!("|---|---|---|---|---|---|---|---|");
    for keys in [4 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20] {
        for gbit in [10.0, 25.0, 100.0] {
            let costs = Costs { bytes: gbit * 1e9 / 8.0, latency, flops };
            let cells = [2, 4, 8, 16, 32, 64].map(|ranks| {
                let forecast = Forecast::new(workload(keys), ranks, costs);
                let [rows, heads] = [forecast.rows.total, forecast.heads.total].map(seconds);
                match forecast.choice() {
                    Split::Heads => format!("{rows} / {heads}*"),
                    _ => format!("{rows}* / {heads}"),
                }
            });
            println!("| {keys} | {gbit} | {} |", cells.join(" | "));
        }
    }
    Ok(())
}

/// Seconds in three digits.
fn seconds(time: f64) -> String {
    match time {
        time if time < 0.1 => format!("{time:.4}"),
        time if time < 10.0 => format!("{time:.2}"),
        time => format!("{time:.0}"),
    }
}
