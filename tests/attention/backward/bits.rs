//! Gradients have the same bits for any number of threads, instruction set, layout, batch, and grouped or repeated heads.

use super::support::Back;
use crate::counting::counted;
use crate::options::Case;
use crate::options::elements::SHORT;
use crate::options::mods::{Functions, Keep, Score};
use crate::support::{LAYOUTS, Rng, Tensor, assert_same_bits, execs};
use sdpa::{Dropout, Exec, Isa, Workspace};

/// Sizes with several key blocks and row blocks.
const SIZES: [[usize; 7]; 4] =
    [[1, 1, 1, 200, 700, 16, 16], [2, 4, 2, 97, 513, 33, 48], [1, 3, 1, 300, 300, 64, 64], [2, 2, 2, 5, 257, 8, 80]];

fn every(mut check: impl FnMut(&str, &mut Rng, &Back)) {
    for (n, sizes) in SIZES.into_iter().enumerate() {
        for seed in 0..4 {
            let mut rng = Rng::new(100 * n as u64 + seed);
            let case = Case::of_sizes(&mut rng, sizes);
            let dropout = (seed == 3).then_some(Dropout { p: 0.2, seed, offset: 1 });
            let back = Back { dropout, ..Back::of(&mut rng, case) };
            check(&format!("sizes {sizes:?}, seed {seed}"), &mut rng, &back);
        }
    }
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

#[test]
fn threads_and_instruction_sets_do_not_show() {
    let pools = [2, 3, 8].map(pool);
    every(|what, _, back| {
        let mut first: Option<super::support::Full> = None;
        for (isa, exec) in execs() {
            let alone = back.run(exec);
            if isa.has_fma() {
                first.get_or_insert_with(|| alone.clone()).same(&format!("{what}, {isa}"), &alone);
            }
            let mut workspace = Workspace::new();
            for pool in &pools {
                let threads = pool.current_num_threads();
                let together = pool.install(|| back.run_in(exec.threads(threads), &mut workspace));
                alone.same(&format!("{what}, {isa}, {threads} threads"), &together);
            }
        }
    });
}

#[test]
fn layouts_do_not_show() {
    every(|what, rng, back| {
        for (isa, exec) in execs() {
            let expected = back.run(exec);
            let other = |x: &Tensor, rng: &mut Rng| x.laid_out(rng.pick(&LAYOUTS));
            let Case { q, k, v, .. } = &back.case;
            let case = Case { q: other(q, rng), k: other(k, rng), v: other(v, rng), ..back.case.clone() };
            let laid = Back { case, d_out: other(&back.d_out, rng), ..back.clone() };
            expected.same(&format!("{what}, {isa}"), &laid.run(exec));
        }
    });
}

/// A sequence in a call of its own has the gradients that it has in a batch.
#[test]
fn a_batch_is_its_sequences() {
    every(|what, _, back| {
        let case = &back.case;
        // A sequence's number is part of what dropout goes by.
        if case.ragged.is_some() || case.bias.is_some() || back.dropout.is_some() {
            return;
        }
        for (isa, exec) in execs() {
            let whole = back.run(exec);
            for b in 0..case.batch() {
                let part = |x: &Tensor| x.part(b..b + 1, 0..x.shape[1], 0..x.shape[2]);
                let d_lse = back.d_lse.as_ref().map(part);
                let alone = Back { case: case.sequence(b), d_out: part(&back.d_out), d_lse, dropout: None }.run(exec);
                for ((name, got), (_, all)) in alone.named().into_iter().zip(whole.named()).take(3) {
                    assert_same_bits(&format!("{what}, {isa}, sequence {b}: {name}"), got, &part(all));
                }
            }
        }
    });
}

/// Grouped heads give what repeated ones give: the same gradients of queries, and sums of those of keys and values.
#[test]
fn grouped_heads_are_repeated_heads() {
    for seed in 0..6 {
        let mut rng = Rng::new(seed);
        let case = Case::of_sizes(&mut rng, [1, 6, 2, 130, 300, 24, 32]);
        let grouped = Back::of(&mut rng, Case { bias: None, ..case });
        let repeated = Back { case: grouped.case.repeated_heads(), ..grouped.clone() };
        for (isa, exec) in execs() {
            let (one, other) = (grouped.run(exec), repeated.run(exec));
            assert_same_bits(&format!("seed {seed}, {isa}: q"), &one.q, &other.q);
            for (name, sums, parts) in [("k", &one.k, &other.k), ("v", &one.v, &other.v)] {
                let added = Tensor::from_fn(sums.shape, |[b, h, l, d]| {
                    (1..3).fold(parts.get([b, 3 * h, l, d]), |sum, g| sum + parts.get([b, 3 * h + g, l, d]))
                });
                // Zeros are positive.
                let added = Tensor { data: added.data.iter().map(|x| x + 0.0).collect(), ..added };
                let error = sums.data.iter().zip(&added.data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error < 1e-4, "seed {seed}, {isa}, {name}: {error:e}");
            }
        }
    }
}

#[test]
fn short_elements_are_the_widened_call() {
    for (seed, dtype) in SHORT.into_iter().cycle().take(8).enumerate() {
        let mut rng = Rng::new(seed as u64);
        let case = Case::of_sizes(&mut rng, [2, 4, 2, 100, 270, [24, 32][seed % 2], 32]);
        let back = Back::of(&mut rng, Case { ragged: None, ..case });
        if back.case.q.shape[0] != 2 {
            continue;
        }
        for (isa, exec) in execs() {
            let [short, wide] = back.run_as(dtype, exec);
            for (name, (short, wide)) in ["q", "k", "v"].into_iter().zip(short.iter().zip(&wide)) {
                assert_eq!(short.bits(), wide.bits(), "seed {seed}, {isa}, {dtype}: {name}");
            }
        }
    }
}

#[test]
fn a_warm_call_allocates_nothing() {
    let mut rng = Rng::new(1);
    let functions = Functions { score: Some(Score::Bent), mask: Some((Keep::Bands(9), true)), prob: None };
    let case = Case { functions, ..Case::plain(&mut rng, [2, 4, 2, 150, 300, 32, 32]) };
    let back = Back::of(&mut rng, case);
    let [out, lse] = back.forward(Exec::serial());
    let (mut full, mut workspace) = (back.run(Exec::serial()), Workspace::new());
    for isa in Isa::available() {
        let exec = Exec::serial().isa(isa);
        back.run_into(exec, [&out, &lse], &mut full, &mut workspace);
        let warm = counted(|| back.run_into(exec, [&out, &lse], &mut full, &mut workspace));
        assert_eq!(warm, (0, 0), "{isa}");
    }
}
