//! Random calls with random options, shared out at random: each rank holds its rows against one process's.

use crate::PATIENT;
use crate::launch::FINE;
use crate::options::elements::{DTYPES, Rounded};
use crate::options::mods::{Functions, with_mods};
use crate::options::{Case, Full, Wanted};
use crate::support::{Rng, Tensor, assert_same_bits};
use core::ops::Range;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{Alignment, Exec, Inputs, Workspace};
use sdpa_mpi::{Ranks, Report, Share, zigzag};

/// Products of a case, at most.
const MOST: usize = 1_500_000;

/// A call, and which rank has which of its rows and keys.
pub(crate) struct Shared {
    pub(crate) case: Case,
    pub(crate) qkv: [Rounded; 3],
    pub(crate) rows: Vec<Vec<Range<usize>>>,
    pub(crate) keys: Vec<Vec<Range<usize>>>,
}

/// One case in so many is long: its keys travel in several parcels, of several pieces each. One has many rows and keys of few heads.
const LONG: u64 = 25;
const WIDE: u64 = 5;

/// One case in so many has sequences of lengths of their own, whose rows stand at the end of their keys.
const AT_ENDS: u64 = 8;

/// A random case that can be shared out: no weight function.
fn shareable(rng: &mut Rng, number: u64) -> Case {
    let mut case = match number {
        n if n % LONG == LONG - 1 => Case::of_sizes(rng, [1, 2, 1, 20, 40_000, 64, 80]),
        n if n % WIDE == WIDE - 1 => {
            let (batch, rows, keys) = (1 + rng.below(2), rng.below(700), rng.below(1500));
            Case::of_sizes(rng, [batch, 2, 1, rows, keys, 8, 16])
        }
        _ => Case::random(rng, MOST),
    };
    if number % AT_ENDS == AT_ENDS - 1 {
        case.alignment = Some(Alignment::BottomRight);
        case.causal |= case.window.is_none();
        case.kv_lens = Some((0..case.batch()).map(|b| rng.below(case.keys(b) + 1)).collect());
    }
    let square = (0..case.batch()).all(|b| case.rows(b) == case.kv_len(b));
    let alignment = if square && rng.below(2) == 0 { None } else { case.alignment };
    Case { alignment, functions: Functions { prob: None, ..case.functions }, ..case }
}

/// Shares positions out: at random, in stretches of any length and order, or as stripes.
fn shared_out(n: usize, ranks: usize, rng: &mut Rng) -> Vec<Vec<Range<usize>>> {
    let mut shares = vec![Vec::new(); ranks];
    match rng.below(4) {
        0 => (0..ranks).for_each(|rank| shares[rank].extend(zigzag(n, rank, ranks))),
        1 => (0..ranks).for_each(|rank| shares[rank].push(n * rank / ranks..n * (rank + 1) / ranks)),
        _ => {
            let mut at = 0;
            while at < n {
                let most = if rng.below(2) == 0 { n } else { 1 + n / ranks };
                let end = n.min(at + 1 + rng.below(most));
                shares[rng.below(ranks)].push(at..end);
                at = end;
            }
            shares.iter_mut().filter(|share| share.len() > 1).for_each(|share| share.rotate_left(1));
        }
    }
    shares
}

impl Shared {
    /// The case of this number.
    pub(crate) fn random(rng: &mut Rng, ranks: usize, number: u64) -> Self {
        let case = shareable(rng, number);
        Self::of(case, rng, ranks)
    }

    /// Shares a case out at random.
    pub(crate) fn of(mut case: Case, rng: &mut Rng, ranks: usize) -> Self {
        let qkv = [&case.q, &case.k, &case.v].map(|x| Rounded::new(x, rng.pick(&DTYPES)));
        let [q, k, v] = qkv.each_ref().map(|x| x.wide.clone());
        (case.q, case.k, case.v) = (q, k, v);
        let (rows, keys) = (case.q.shape[2], case.k.shape[2]);
        let rows = shared_out(rows, ranks, rng);
        let keys =
            if rng.below(2) == 0 && case.q.shape[2] == keys { rows.clone() } else { shared_out(keys, ranks, rng) };
        Self { case, qkv, rows, keys }
    }

    /// Returns true if the sequences of a batch are computed one by one, since their rows stand at the ends of their own keys.
    pub(crate) fn is_one_by_one(&self) -> bool {
        let Case { alignment, kv_lens, ragged, .. } = &self.case;
        let differ = kv_lens.as_ref().is_some_and(|lens| lens.iter().any(|&len| len != lens[0]));
        differ && ragged.is_none() && *alignment == Some(Alignment::BottomRight)
    }

    /// Keys that ranks tell apart: those of each sequence, where they are computed one by one, as some stretch of rows says.
    pub(crate) fn keys_told(&self) -> usize {
        let [batch, _, keys, _] = self.case.k.shape;
        let told = self.rows.iter().any(|stretches| !stretches.is_empty());
        if told && self.is_one_by_one() { batch * keys } else { keys }
    }

    /// What one process makes of it.
    pub(crate) fn whole(&self) -> Full {
        self.whole_of(1)
    }

    /// What one process makes of it, with so many columns of log-sum-exps.
    pub(crate) fn whole_of(&self, columns: usize) -> Full {
        let [q, k, v] = self.qkv.each_ref().map(Rounded::view);
        let mut inputs = self.case.inputs_over(Inputs::new(q, k, v));
        inputs = self.case.kv_lens.as_ref().map_or(inputs, |lens| inputs.kv_lens(lens));
        inputs = self.case.ragged.as_ref().map_or(inputs, |[q, k]| inputs.ragged(q, k));
        let mut full = self.case.unwritten(Wanted::LEAST);
        let [batch, heads, rows, _] = full.lse.shape;
        full.lse = Tensor::filled([batch, heads, rows, columns], f32::NAN);
        self.case.run_outputs(inputs, Exec::serial(), full.outputs(), &mut Workspace::new());
        full
    }

    /// The rows of a bias or mask that belong to some of the call: those of ragged sequences lie end to end, as in the queries.
    pub(crate) fn cut(&self, x: &Tensor, rows: &Range<usize>) -> Tensor {
        match (&self.case.ragged, x.shape) {
            (_, [_, _, 1, _]) => x.clone(),
            (None, _) => x.rows(rows.clone()),
            (Some([ends, _]), [batch, heads, _, columns]) => {
                Tensor::from_fn([1, heads, rows.len(), columns], |[_, h, l, j]| {
                    let sequence = ends.partition_point(|&end| end <= rows.start + l) - 1;
                    x.get([if batch == 1 { 0 } else { sequence }, h, rows.start + l - ends[sequence], j])
                })
            }
        }
    }

    /// The options that some rows have.
    pub(crate) fn part(&self, rows: &Range<usize>) -> Case {
        let case = &self.case;
        let cut = |x: &Tensor| self.cut(x, rows);
        Case {
            q: case.q.rows(rows.clone()),
            bias: case.bias.as_ref().map(|bias| Rounded::new(&cut(&bias.wide), bias.dtype())),
            mask: case.mask.as_ref().map(|mask| mask.over(cut(&mask.tensor))),
            ..case.clone()
        }
    }

    /// Runs a rank's part.
    pub(crate) fn run(
        &self,
        ranks: &Ranks<'_>,
        rank: usize,
        parts: &mut [(Case, Full)],
    ) -> Result<Report, sdpa_mpi::Error> {
        let [q, k, v] = self.qkv.each_ref().map(Rounded::view);
        let mut share = Share::new();
        for ((case, full), rows) in parts.iter_mut().zip(&self.rows[rank]) {
            let inputs = case.inputs_over(Inputs::new(q.rows_in(rows.clone()).expect("rows"), k, v));
            let inputs = case.kv_lens.as_ref().map_or(inputs, |lens| inputs.kv_lens(lens));
            let inputs = case.ragged.as_ref().map_or(inputs, |[q, k]| inputs.ragged(q, k));
            share = share.rows(rows.start, inputs, full.outputs());
        }
        for keys in &self.keys[rank] {
            let [k, v] = [k, v].map(|x| x.rows_in(keys.clone()).expect("keys"));
            share = share.keys(keys.start, k, v);
        }
        with_mods!(self.case, |mods| ranks.attention_with(&self.case.attention(), share, &mods))
    }

    /// Holds a rank's rows against those of one process.
    pub(crate) fn compare(&self, what: &str, rank: usize, parts: &[(Case, Full)], whole: &Full) {
        for ((_, full), rows) in parts.iter().zip(&self.rows[rank]) {
            assert_same_bits(&format!("{what}, rows {rows:?}: out"), &full.out, &whole.out.rows(rows.clone()));
            assert_same_bits(&format!("{what}, rows {rows:?}: lse"), &full.lse, &whole.lse.rows(rows.clone()));
        }
    }

    /// The parts of a rank, not yet computed.
    pub(crate) fn parts(&self, rank: usize) -> Vec<(Case, Full)> {
        let part = |rows| {
            let case = self.part(rows);
            let full = case.unwritten(Wanted::LEAST);
            (case, full)
        };
        self.rows[rank].iter().map(part).collect()
    }
}

pub(crate) fn run(world: &SimpleCommunicator, cases: u64, seed: u64) {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("two threads");
    let ranks = [Ranks::new(world, PATIENT).exec(Exec::serial()), Ranks::new(world, PATIENT).pool(&pool)];
    let mut moved = [0usize; 2];
    for case in 0..cases {
        let mut rng = Rng::new(seed * 1_000_003 + case);
        let shared = Shared::random(&mut rng, size, case);
        let whole = shared.whole();
        let mut parts = shared.parts(rank);
        let what = format!("seed {seed}, case {case}, rank {rank} of {size}");
        let report =
            shared.run(&ranks[case as usize % 2], rank, &mut parts).unwrap_or_else(|error| panic!("{what}: {error}"));
        shared.compare(&what, rank, &parts, &whole);
        assert_eq!(report.computed + report.hidden, shared.keys_told(), "{what}");
        moved = [moved[0] + report.sent, moved[1] + report.received];
    }
    let mut all = [0usize; 2];
    world.all_reduce_into(&moved[..], &mut all[..], mpi::collective::SystemOperation::sum());
    assert_eq!(all[0], all[1], "what is sent is received");
    println!("{rank}: {FINE}");
}
