//! Prefixes that sequences share, in forks of a cache, in pages and in tensors: they are read once, and no bit shows it.

mod alone;

use crate::counting::counted;
use crate::kv_support::{Pool, append_part, cache_of, every_format, same_full};
use crate::options::elements::Rounded;
use crate::options::{Case, Wanted};
use crate::support::{Layout, Rng, Tensor, assert_same_bits, execs, indices};
use sdpa::{
    Alignment, Attention, Dtype, Exec, Explanation, Inputs, KvCache, KvShape, Outputs, Plan, Precision, View, ViewMut,
    Workspace,
};

/// Keys of the longest sequence.
const LONGEST: usize = 1100;

/// Sequences, each but the first with the first keys of an earlier one.
struct Family {
    case: Case,
    /// Parent of each sequence, and the number of keys that it has from there.
    origins: Vec<(usize, usize)>,
}

impl Family {
    /// Gives the sequences of a case common prefixes, and lengths: whole blocks, parts of blocks, all, none.
    fn of(case: Case, rng: &mut Rng) -> Self {
        let (mut case, mut lens, mut origins) = (case, vec![LONGEST], vec![(0, 0)]);
        for b in 1..case.batch() {
            let parent = rng.below(b);
            let common = match rng.below(4) {
                0 => lens[parent],
                1 => rng.below(lens[parent] + 1),
                _ => lens[parent] / 256 * 256,
            };
            let own = rng.pick(&[0, 1, 3, 255, 256, 300]).min(LONGEST - common);
            for x in [&mut case.k, &mut case.v] {
                for [_, h, j, d] in indices([1, x.shape[1], common, x.shape[3]]) {
                    let same = x.get([parent, h, j, d]);
                    x.set([b, h, j, d], same);
                }
            }
            origins.push((parent, common));
            lens.push(common + own);
        }
        case.kv_lens = Some(lens);
        Self { case, origins }
    }

    /// Any options that a call over a cache can have; more often none.
    fn random(rng: &mut Rng, plain: bool) -> Self {
        let (heads, kv_heads) = rng.pick(&[(1, 1), (4, 2), (3, 1), (8, 2)]);
        let batch = rng.pick(&[2, 3, 5, 8]);
        let [d, dv] = [0, 1].map(|_| rng.pick(&[8, 16, 33, 64, 80]));
        let sizes = [batch, heads, kv_heads, rng.pick(&[1, 1, 2, 4]), LONGEST, d, dv];
        let case = loop {
            let case = if plain { Case::plain(rng, sizes) } else { Case::of_sizes(rng, sizes) };
            if case.ragged.is_none() && case.window.is_none() {
                break case;
            }
        };
        let last = Some(Alignment::BottomRight);
        Self::of(if plain { Case { causal: rng.below(3) > 0, alignment: last, ..case } } else { case }, rng)
    }

    /// The keys in an empty cache, by forks.
    fn forked(&self, mut cache: KvCache) -> KvCache {
        for (b, &(parent, common)) in self.origins.iter().enumerate() {
            if b > 0 {
                cache.fork(parent, b).unwrap();
                cache.truncate(b, common).unwrap();
            }
            append_part(&mut cache, &self.case, b, common..self.case.kv_len(b));
        }
        cache
    }

    /// Returns the pool with tables that name the parent's pages where these hold keys that are common.
    fn pooled(&self, pool: &Pool) -> Pool {
        let (mut pool, width, page) = (pool.clone(), pool.width(), pool.k.shape[2]);
        for (b, &(parent, common)) in self.origins.iter().enumerate() {
            let (before, after) = pool.entries.split_at_mut(b * width);
            let n = common / page;
            if b > 0 {
                after[..n].copy_from_slice(&before[parent * width..][..n]);
            }
        }
        pool
    }
}

fn every(seeds: core::ops::Range<u64>, plain: bool, mut check: impl FnMut(&str, &mut Rng, &Family, Exec)) {
    for seed in seeds {
        let mut rng = Rng::new(seed);
        let family = Family::random(&mut rng, plain);
        for (isa, exec) in execs() {
            for threads in [1, 64] {
                check(&format!("seed {seed}, {isa}"), &mut Rng::new(!seed), &family, exec.threads(threads));
            }
        }
    }
}

fn check_forks_and_pages(what: &str, rng: &mut Rng, family: &Family, exec: Exec) {
    let case = &family.case;
    let empty = KvCache::new(
        case.batch(),
        KvShape { kv_heads: case.kv_heads(), head_dim: case.k.shape[3], value_dim: case.v.shape[3] },
    )
    .unwrap();
    let expected = case.run(exec, Wanted::LEAST);
    let over = |source| case.run_over(source, exec, Wanted::LEAST);
    let forked = family.forked(empty);
    same_full(&format!("{what}, forks"), &over(Inputs::cached(case.q.view(), &forked)), &expected);
    let pool = Pool::of(case, rng.pick(&[1, 16, 17, 128, 256, 300]), [Layout::Bhld; 2], f32::NAN, rng);
    let shared = family.pooled(&pool);
    same_full(&format!("{what}, pages"), &over(Inputs::paged(case.q.view(), shared.pages())), &expected);
}

#[test]
fn forks_and_pages_are_tensors() {
    every(0..24, true, check_forks_and_pages);
}

/// A bias, a mask, functions: each row is then treated by its place.
#[test]
fn with_any_options() {
    every(100..130, false, check_forks_and_pages);
}

#[test]
fn every_format_of_a_cache() {
    for precision in [Precision::Exact, Precision::Native] {
        every(200..206, true, |what, rng, family, exec| {
            let case = Case { precision, ..family.case.clone() };
            let empty = KvCache::new(
                case.batch(),
                KvShape { kv_heads: case.kv_heads(), head_dim: case.k.shape[3], value_dim: case.v.shape[3] },
            )
            .unwrap();
            let _ = cache_of(&case, rng);
            for (format, empty) in every_format(&empty) {
                let mut alone = empty.clone();
                (0..case.batch()).for_each(|b| append_part(&mut alone, &case, b, 0..case.kv_len(b)));
                let over = |cache| case.run_over(Inputs::cached(case.q.view(), cache), exec, Wanted::LEAST);
                same_full(&format!("{what}, {format}"), &over(&family.forked(empty)), &over(&alone));
            }
        });
    }
}

/// Values that are not finite, in the prefix: the rows of all its sequences take them in as if each were alone.
#[test]
fn infinities_and_nan_in_a_prefix() {
    every(300..312, true, |what, rng, family, exec| {
        let mut case = family.case.clone();
        let common = family.origins.iter().map(|&(_, common)| common).max().unwrap().max(1);
        for x in [f32::INFINITY, f32::NAN, f32::NEG_INFINITY] {
            let (j, d) = (rng.below(common), rng.below(case.v.shape[3]));
            (0..case.kv_heads()).for_each(|h| case.v.set([0, h, j, d], x));
        }
        let origins = family.origins.clone();
        // Children have it from their parents.
        for (b, &(parent, common)) in origins.iter().enumerate().skip(1) {
            for [_, h, j, d] in indices([1, case.kv_heads(), common, case.v.shape[3]]) {
                let same = case.v.get([parent, h, j, d]);
                case.v.set([b, h, j, d], same);
            }
        }
        check_forks_and_pages(what, rng, &Family { case, origins }, exec);
    });
}

/// A prefix of one block, which is all of the first sequence: its worker has all that the sequence sees, and not all that those
/// beside it see. Also with NaN in a value of the prefix.
#[test]
fn a_sequence_of_one_block_beside_longer_ones() {
    let mut rng = Rng::new(21);
    let sizes = [4, 16, 1, 1, LONGEST, 80, 80];
    let case = Case { kv_lens: Some(vec![256, 256, LONGEST, LONGEST]), ..Case::plain(&mut rng, sizes) };
    // The last has one block of its own.
    let origins = vec![(0, 0), (0, 256), (0, 256), (2, 1024)];
    for nan in [None, Some([0, 0, 7, 3])] {
        let mut case = case.clone();
        if let Some(at) = nan {
            case.v.set(at, f32::NAN);
        }
        for (b, &(parent, common)) in origins.iter().enumerate().skip(1) {
            for x in [&mut case.k, &mut case.v] {
                for [_, h, j, d] in indices([1, 1, common, 80]) {
                    let same = x.get([parent, h, j, d]);
                    x.set([b, h, j, d], same);
                }
            }
        }
        let family = Family { case, origins: origins.clone() };
        let (case, cache) = (
            &family.case,
            family.forked(KvCache::new(4, KvShape { kv_heads: 1, head_dim: 80, value_dim: 80 }).unwrap()),
        );
        for (isa, exec) in execs() {
            let expected = case.run(exec.threads(1), Wanted::LEAST);
            let mut workspace = Workspace::new();
            for threads in [1, 2, 64, 1] {
                // After the first time memory holds what it has left.
                for _ in 0..5 {
                    let mut full = case.unwritten(Wanted::LEAST);
                    let inputs = Inputs::cached(case.q.view(), &cache);
                    case.run_over_into(inputs, exec.threads(threads), &mut full, &mut workspace);
                    same_full(&format!("{isa}, {threads} threads"), &full, &expected);
                }
            }
        }
    }
}

/// Some of the sequences, in another order, with different numbers of rows; one of them has too many to be split.
#[test]
fn a_mixed_batch_of_some_forks() {
    let mut rng = Rng::new(7);
    let (heads, dim) = ([4, 2], 32);
    let family = Family::of(Case::plain(&mut rng, [6, heads[0], heads[1], 1, LONGEST, dim, dim]), &mut rng);
    let cache = family.forked(KvCache::new(6, KvShape { kv_heads: heads[1], head_dim: dim, value_dim: dim }).unwrap());
    let rows = [1, 40, 2, 1, 3];
    let sequences = [5, 2, 0, 4, 1];
    let ends: Vec<usize> = (0..=rows.len()).map(|n| rows[..n].iter().sum()).collect();
    let total = ends[rows.len()];
    let q = Tensor::normal([1, heads[0], total, dim], &mut rng);
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    for (isa, exec) in execs() {
        for threads in [1, 8] {
            let run = |q: View<'_>, ends: &[usize], sequences: &[usize]| {
                let shape = q.shape();
                let mut out = vec![f32::NAN; shape.iter().product()];
                let inputs = Inputs::cached(q, &cache).sequences(sequences).ragged_queries(ends);
                let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).unwrap());
                attention.problem(inputs, outputs).unwrap().run_once(exec.threads(threads));
                Tensor { data: out, ..Tensor::filled(shape, 0.0) }
            };
            let together = run(q.view(), &ends, &sequences);
            for (n, window) in ends.windows(2).enumerate() {
                let alone = q.rows(window[0]..window[1]);
                let alone = run(alone.view(), &[0, rows[n]], &sequences[n..=n]);
                assert_same_bits(&format!("{isa}, sequence {n}"), &together.rows(window[0]..window[1]), &alone);
            }
        }
    }
}

/// A tensor of one sequence as that of a whole batch.
fn broadcast(x: &Tensor, batch: usize) -> View<'_> {
    let [_, h, l, d] = x.shape;
    View::from_strides(&x.data, 0, [batch, h, l, d], [0, (l * d) as isize, d as isize, 1]).unwrap()
}

/// Two sequences that share all their pages, then one with more rows than theirs together.
#[test]
fn few_gathered_rows_before_many() {
    let mut rng = Rng::new(12);
    let case = Case { kv_lens: Some(vec![512, 512, 300]), ..Case::plain(&mut rng, [3, 1, 1, 1, 512, 16, 16]) };
    let mut pool = Pool::of(&case, 256, [Layout::Bhld; 2], f32::NAN, &mut rng);
    let width = pool.width();
    pool.entries.copy_within(0..2, width);
    let q = Tensor::normal([1, 1, 12, 16], &mut rng);
    let run = |exec: Exec, q: View<'_>, ends: &[usize], sequences: &[usize]| {
        let mut out = Tensor::filled(q.shape(), f32::NAN);
        let inputs = Inputs::paged(q, pool.pages()).sequences(sequences).ragged_queries(ends);
        let outputs = Outputs::new(ViewMut::bhld(&mut out.data, q.shape()).unwrap());
        Attention::new().problem(inputs, outputs).unwrap().run_once(exec);
        out
    };
    for (isa, exec) in execs() {
        let together = run(exec, q.view(), &[0, 1, 2, 12], &[0, 1, 2]);
        for (n, rows) in [0..1, 1..2, 2..12].into_iter().enumerate() {
            let alone = run(exec, q.rows(rows.clone()).view(), &[0, rows.len()], &[n]);
            assert_same_bits(&format!("{isa}, sequence {n}"), &together.rows(rows), &alone);
        }
    }
}

/// Sequences without heads have no rows to gather, however many rows their queries have.
#[test]
fn forks_without_query_heads_return_at_once() {
    let mut cache = KvCache::new(2, KvShape { kv_heads: 1, head_dim: 16, value_dim: 16 }).unwrap();
    let kv = Tensor::filled([1, 1, 600, 16], 0.5);
    cache.append_to(0, kv.view(), kv.view()).unwrap();
    cache.fork(0, 1).unwrap();
    for rows in [1, 1usize << 60] {
        let shape = [1, 0, 2 * rows, 16];
        let q = View::<f32>::from_strides(&[], 0, shape, [0; 4]).unwrap();
        let out = ViewMut::<f32>::from_strides(&mut [], 0, shape, [0; 4]).unwrap();
        let ends = [0, rows, 2 * rows];
        let inputs = Inputs::cached(q, &cache).ragged_queries(&ends);
        Attention::new().problem(inputs, Outputs::new(out)).unwrap().run_once(Exec::serial());
    }
}

/// More sequences than one gathering takes, all with one prompt; keys and values of tensors that a batch broadcasts.
#[test]
fn many_sequences_and_broadcast_tensors() {
    for (batch, [heads, kv_heads], d) in [(130, [2, 1], 16), (40, [8, 1], 16), (7, [2, 2], 272)] {
        let mut rng = Rng::new(batch as u64);
        let mut case = Case::plain(&mut rng, [batch, heads, kv_heads, 1, 600, d, 16]);
        let one = |x: &Tensor| x.part(0..1, 0..kv_heads, 0..600);
        let [k, v] = [one(&case.k), one(&case.v)];
        for (all, one) in [(&mut case.k, &k), (&mut case.v, &v)] {
            *all = Tensor::from_fn(all.shape, |[_, h, j, d]| one.get([0, h, j, d]));
        }
        case.kv_lens = Some(vec![600; batch]);
        let mut cache = KvCache::new(batch, KvShape { kv_heads, head_dim: d, value_dim: 16 }).unwrap();
        append_part(&mut cache, &case, 0, 0..600);
        (1..batch).for_each(|b| cache.fork(0, b).unwrap());
        for (isa, exec) in execs() {
            let expected = case.run(exec, Wanted::LEAST);
            let cached = case.run_over(Inputs::cached(case.q.view(), &cache), exec, Wanted::LEAST);
            same_full(&format!("{isa}, {batch} forks"), &cached, &expected);
            let lens = case.kv_lens.as_ref().unwrap();
            let tensors = Inputs::new(case.q.view(), broadcast(&k, batch), broadcast(&v, batch)).kv_lens(lens);
            let got = case.run_over(tensors, exec, Wanted::LEAST);
            same_full(&format!("{isa}, {batch} from one tensor"), &got, &expected);
        }
    }
}

/// Queries of 16 bits are gathered widened, which is exact.
#[test]
fn short_queries() {
    let mut rng = Rng::new(3);
    let family = Family::random(&mut rng, true);
    let short = Rounded::new(&family.case.q, Dtype::Bf16);
    let case = Case { q: short.wide.clone(), ..family.case.clone() };
    let cache = family.forked(
        KvCache::new(
            case.batch(),
            KvShape { kv_heads: case.kv_heads(), head_dim: case.k.shape[3], value_dim: case.v.shape[3] },
        )
        .unwrap(),
    );
    for (isa, exec) in execs() {
        let expected = case.run(exec, Wanted::LEAST);
        let got = case.run_over(Inputs::cached(short.view(), &cache), exec, Wanted::LEAST);
        same_full(&format!("{isa}"), &got, &expected);
    }
}

/// Four sequences of 700 keys in a cache of f32, 2 heads of 16; `forks` of them are forks of the first.
fn explained(forks: usize, rows: usize) -> Explanation {
    let mut rng = Rng::new(1);
    let case = Case { kv_lens: Some(vec![700; 4]), ..Case::plain(&mut rng, [4, 2, 2, rows, 700, 16, 16]) };
    let mut cache = KvCache::new(4, KvShape { kv_heads: 2, head_dim: 16, value_dim: 16 }).unwrap();
    (0..4 - forks).for_each(|b| append_part(&mut cache, &case, b, 0..700));
    (4 - forks..4).for_each(|b| cache.fork(0, b).unwrap());
    let mut out = vec![0.0; 4 * 2 * rows * 16];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [4, 2, rows, 16]).unwrap());
    let problem = Attention::new().problem(Inputs::cached(case.q.view(), &cache), outputs).unwrap();
    Plan::new(&problem, Exec::serial()).explain(&problem, None)
}

#[test]
fn explain_counts_the_bytes_that_are_shared() {
    // Two whole blocks of a fork, in two heads.
    let fork = 2 * 256 * 2 * (16 + 16) * 4;
    for forks in 0..4 {
        assert_eq!(explained(forks, 1).shared_bytes, (forks * fork) as f64);
    }
    let text = explained(3, 1).to_string();
    assert!(text.contains(" MB of tensors, 0.4 MB of them shared and not read again"), "{text}");
    assert!(!explained(0, 1).to_string().contains("shared"));
    // Many rows are shared out, not key blocks.
    assert_eq!(explained(3, 40).shared_bytes, 0.0);
}

/// Who shares with whom is found again for each call, in memory that is kept.
#[test]
fn a_warm_call_allocates_nothing() {
    let mut rng = Rng::new(2);
    let family = Family::random(&mut rng, true);
    let case = &family.case;
    let cache = family.forked(
        KvCache::new(
            case.batch(),
            KvShape { kv_heads: case.kv_heads(), head_dim: case.k.shape[3], value_dim: case.v.shape[3] },
        )
        .unwrap(),
    );
    let (mut full, mut workspace) = (case.unwritten(Wanted::LEAST), Workspace::new());
    let mut run = || {
        case.run_over_into(Inputs::cached(case.q.view(), &cache), Exec::serial(), &mut full, &mut workspace);
    };
    run();
    assert_eq!(counted(run).0, 0);
}
