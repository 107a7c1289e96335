//! Attention over ranks against one process, bit for bit, and every fault. The program runs itself under `mpirun`.
//!
//! `cargo test` runs all; `cargo test --test ranks -- cases --cases 200 --seed 7` more of one kind.

mod backward;
mod backward_faults;
mod cases;
mod faults;
mod heads;
mod launch;
mod memory;
#[path = "../../../tests/support/options/mod.rs"]
mod options;
mod step_faults;
mod steps;
#[path = "../../../tests/support/mod.rs"]
mod support;
mod travel;

use launch::{Launch, Outcome};
use sdpa_mpi::Split;
use std::time::Duration;

/// Time that ranks allow each other where none is at fault: much, for machines with more ranks than cores.
const PATIENT: Duration = Duration::from_secs(120);

/// Numbers of ranks that everything is run with.
const RANKS: [usize; 5] = [1, 2, 3, 4, 7];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match launch::role(&arguments) {
        Some((test, arguments)) => rank(&test, &arguments),
        None => drive(&arguments),
    }
}

/// One rank of a test.
fn rank(test: &str, arguments: &[String]) {
    let universe = mpi::initialize().expect("MPI, for the first time");
    let world = universe.world();
    match test {
        "cases" => cases::run(&world, launch::number(arguments, "--cases"), launch::number(arguments, "--seed")),
        "backward" => backward::run(&world, launch::number(arguments, "--cases"), launch::number(arguments, "--seed")),
        "heads" => heads::run(&world, launch::number(arguments, "--cases"), launch::number(arguments, "--seed")),
        "memory" => memory::run(&world, Split::Rows),
        "memory by heads" => memory::run(&world, Split::Heads),
        "backward memory" => memory::backward(&world),
        "ragged memory" => memory::ragged(&world),
        "steps" => steps::run(&world, launch::number(arguments, "--cases"), launch::number(arguments, "--seed")),
        "travel" => travel::run(&world),
        fault => faults::run(&world, fault),
    }
}

/// Starts the ranks of every test whose name contains the first argument, if there is one.
fn drive(arguments: &[String]) {
    if !launch::has_mpirun() {
        println!("skipped: all tests of ranks, since mpirun is not here");
        return;
    }
    let wanted = |name: &str| {
        arguments.first().is_none_or(|filter| filter.starts_with("-") || filter == "all" || name.contains(&**filter))
    };
    let given = |name: &str, default: &str| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).map_or(default.to_owned(), Clone::clone)
    };
    let (cases, seed) = (given("--cases", "200"), given("--seed", "1"));
    let mut failed = Vec::new();
    let mut run = |name: String, launch: Launch| {
        if wanted(&name) {
            let Outcome { problem, seconds } = launch.run();
            println!("{name}: {} ({seconds:.1} s)", problem.as_deref().unwrap_or("ok"));
            failed.extend(problem.map(|_| name));
        }
    };
    for ranks in RANKS {
        run(format!("cases on {ranks} ranks"), Launch::of("cases", ranks).with(&["--cases", &cases, "--seed", &seed]));
    }
    for ranks in RANKS {
        let launch = Launch::of("backward", ranks).with(&["--cases", &cases, "--seed", &seed]);
        run(format!("backward on {ranks} ranks"), launch);
    }
    for ranks in RANKS {
        run(format!("steps on {ranks} ranks"), Launch::of("steps", ranks).with(&["--cases", &cases, "--seed", &seed]));
    }
    for ranks in RANKS {
        run(format!("heads on {ranks} ranks"), Launch::of("heads", ranks).with(&["--cases", &cases, "--seed", &seed]));
    }
    for test in ["memory", "memory by heads", "backward memory", "ragged memory"] {
        run(format!("{test} on 4 ranks"), Launch::of(test, 4));
    }
    for ranks in RANKS {
        run(format!("travel on {ranks} ranks"), Launch::of("travel", ranks));
    }
    for fault in faults::all() {
        for ranks in [2, 3, 4, 7] {
            run(format!("fault {} on {ranks} ranks", fault.name), fault.launch(ranks));
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}
