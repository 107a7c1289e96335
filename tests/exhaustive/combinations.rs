//! Random combinations of all options, on every instruction set, against the `f64` oracle: `out`, LSE, the scores at
//! every point, and key weight sums. What errors are allowed: `crate::options::check_against_oracle`.

use crate::options::{Case, Wanted, check_against_oracle, larger, options_of};
use crate::support::Rng;
use sdpa::{Exec, Isa};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Runs `cases` cases, of at most `most` products; the worst error of each instruction set is printed.
fn compare(first_seed: u64, cases: usize, most: usize, progress: usize) {
    let start = Instant::now();
    let isas: Vec<Isa> = Isa::available().collect();
    let mut worst = vec![[(0.0, "none"); 2]; isas.len()];
    let (mut counts, mut sets) = (BTreeMap::new(), BTreeSet::new());
    for n in 0..cases {
        let seed = first_seed + n as u64;
        let case = Case::random(&mut Rng::new(seed), most);
        let oracle = case.oracle::<f64>();
        let options = options_of(&case);
        options.iter().for_each(|&(name, on)| *counts.entry(name).or_insert(0) += usize::from(on));
        sets.insert(options.map(|(_, on)| on));
        for (isa, worst) in isas.iter().zip(&mut worst) {
            // Scores out switch skipping off: half the cases go without.
            let wanted = if n % 2 == 0 { Wanted::ALL } else { Wanted::MASS };
            let full = case.run(Exec::serial().isa(*isa), wanted);
            let errors = check_against_oracle(&format!("seed {seed}, {isa}"), &case, &full, &oracle);
            *worst = [larger(worst[0], errors[0]), larger(worst[1], errors[1])];
        }
        if (n + 1).is_multiple_of(progress) {
            println!("{} of {cases} combinations, {:.1} s", n + 1, start.elapsed().as_secs_f64());
        }
    }
    println!("{} different sets of options; cases with each: {counts:?}", sets.len());
    assert!(counts.values().all(|&count| count > cases / 10), "an option is hardly tried: {counts:?}");
    println!("{cases} combinations on {} instruction sets; worst errors:", isas.len());
    for (isa, [(units, output), (times, other)]) in isas.iter().zip(worst) {
        println!("{isa}: {units:.2} ε·M in {output}; {times:.2} times naive f32's in {other}, where it was asked");
    }
}

#[test]
fn any_options_give_what_the_oracle_gives() {
    compare(0, 300, 2_000_000, 100);
}

#[test]
#[ignore = "slow: 5,000 combinations of options, for release builds"]
fn five_thousand_combinations() {
    compare(1_000_000, 5_000, 4_000_000, 500);
}
