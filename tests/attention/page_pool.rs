//! Pools of packed pages: the bits of a cache of the same format, however pages lie, were written before, and are shared.

use crate::counting::counted;
use crate::kv_support::{append_part, cuts, empty_cache, every_format, same_full, same_oracle};
use crate::options::{Case, Wanted};
use crate::selected::random_lists;
use crate::support::{Rng, Tensor, execs};
use sdpa::{
    Alignment, Attention, BlockTable, CacheFormat, Dtype, Error, Exec, Inputs, KvCache, KvShape, Outputs, PageError,
    PagePool, Plan, Precision, View, ViewMut, Workspace,
};

/// One panel, several, part of a block and more, a whole one, more.
const PAGES: [usize; 6] = [16, 32, 48, 64, 256, 272];

/// A pool, and which of its pages belong to whom.
struct Paged {
    pool: PagePool,
    entries: Vec<u32>,
    lens: Vec<usize>,
}

impl Paged {
    /// A pool of a cache's sizes and format with random pages for the sequences of a case; none of their keys are there; every
    /// page was written before.
    fn empty(case: &Case, like: &KvCache, page: usize, rng: &mut Rng) -> Self {
        let lens: Vec<usize> = (0..case.batch()).map(|b| case.kv_len(b)).collect();
        let width = lens.iter().map(|len| len.div_ceil(page)).max().unwrap_or(0) + rng.below(3);
        let pages = lens.iter().map(|len| len.div_ceil(page)).sum::<usize>() + rng.below(4);
        let mut order: Vec<u32> = (0..pages as u32).collect();
        (1..pages).for_each(|i| order.swap(i, rng.below(i + 1)));
        let mut entries = vec![u32::MAX; width * lens.len()];
        let mut free = order.iter().copied();
        for (b, len) in lens.iter().enumerate() {
            entries[b * width..][..len.div_ceil(page)].fill_with(|| free.next().expect("enough pages"));
        }
        let mut pool = pool_like(like, pages, page);
        let (k, v) = (rows_of(&pool, 0, pages * page, 30.0), rows_of(&pool, 1, pages * page, -30.0));
        if pages > 0 {
            let table = BlockTable { entries: &order, lens: &[pages * page] };
            pool.append(table, k.view(), v.view()).expect("they fit");
        }
        Self { pool, entries, lens }
    }

    fn table(&self) -> BlockTable<'_> {
        BlockTable { entries: &self.entries, lens: &self.lens }
    }

    /// Appends the keys of a case, each sequence's in random parts.
    fn filled(mut self, case: &Case, rng: &mut Rng) -> Self {
        let width = self.entries.len().checked_div(self.lens.len()).unwrap_or(0);
        for b in 0..case.batch() {
            for keys in cuts(case.kv_len(b), rng) {
                let part = |x: &Tensor| x.part(b..b + 1, 0..case.kv_heads(), keys.clone());
                let table = BlockTable { entries: &self.entries[b * width..][..width], lens: &[keys.end] };
                self.pool.append(table, part(&case.k).view(), part(&case.v).view()).expect("they fit");
            }
        }
        self
    }

    fn over<'a>(&'a self, case: &'a Case) -> Inputs<'a> {
        Inputs::paged(case.q.view(), self.pool.pages(self.table()).expect("a good table"))
    }
}

fn pool_like(cache: &KvCache, pages: usize, page: usize) -> PagePool {
    let pool = PagePool::new(pages, page, cache.shape(), cache.format()).expect("a pool");
    assert_eq!(pool.format(), cache.format());
    pool
}

/// Rows of a key (0) or a value (1).
fn rows_of(pool: &PagePool, which: usize, rows: usize, x: f32) -> Tensor {
    let KvShape { kv_heads, head_dim, value_dim } = pool.shape();
    Tensor::filled([1, kv_heads, rows, [head_dim, value_dim][which]], x)
}

fn cached(empty: &KvCache, case: &Case) -> KvCache {
    let mut cache = empty.clone();
    (0..case.batch()).for_each(|b| append_part(&mut cache, case, b, 0..case.kv_len(b)));
    cache
}

/// Holds calls over pages against calls over a cache, in every format.
fn check(seed: u64, case: &Case, page: usize) {
    for (format, empty) in every_format(&empty_cache(case)) {
        let mut rng = Rng::new(seed);
        let cache = cached(&empty, case);
        let pages = Paged::empty(case, &empty, page, &mut rng).filled(case, &mut rng);
        for (isa, exec) in execs() {
            for (wanted, threads) in [(Wanted::LEAST, 1), (Wanted::ALL, 64)] {
                let exec = exec.threads(threads);
                let what = format!("pages of {page}, seed {seed}, {format}, {isa}, {threads} threads");
                let expected = case.run_over(Inputs::cached(case.q.view(), &cache), exec, wanted);
                same_full(&what, &case.run_over(pages.over(case), exec, wanted), &expected);
            }
        }
    }
}

#[test]
fn pages_are_a_cache() {
    for (n, page) in PAGES.into_iter().enumerate() {
        for i in 0..6 {
            let seed = 100 * n as u64 + i;
            let case = Case::random(&mut Rng::new(seed), 300_000).side_by_side();
            check(seed, &case, page);
        }
    }
}

#[test]
fn rows_that_select_keys() {
    for (n, page) in PAGES.into_iter().enumerate() {
        for i in 0..4 {
            let seed = 100 * n as u64 + i;
            let rng = &mut Rng::new(seed ^ 0x5e1);
            let case = Case::random(rng, 300_000).side_by_side();
            check(seed, &Case { selected: Some(random_lists(rng, &case)), ..case }, page);
        }
    }
}

/// Lengths around panels, pages and blocks; few rows and many; odd and even lengths of keys.
#[test]
fn ragged_lengths() {
    for (n, page) in PAGES.into_iter().enumerate() {
        let lens = [0, 1, 15, 16, 17, page, page + 1, 2 * page - 1, 255, 256, 257, 0, 513];
        let longest = lens.iter().copied().max().expect("some");
        let shapes = [(1, 4, [64, 64]), (20, 4, [8, 5]), (3, 4, [17, 48]), (100, 2, [33, 80])];
        for (rows, heads, [d, dv]) in shapes.into_iter().skip(n % 2).step_by(2) {
            let mut case = Case::plain(&mut Rng::new(n as u64), [lens.len(), heads, 2, rows, longest, d, dv]);
            (case.causal, case.alignment) = (true, Some(Alignment::BottomRight));
            case.kv_lens = Some(lens.to_vec());
            check(n as u64, &case, page);
        }
    }
}

#[test]
fn native_precision() {
    for (seed, rows, d) in [(1, 1, 64), (2, 5, 17), (3, 40, 33), (4, 100, 128)] {
        let mut case = Case::plain(&mut Rng::new(seed), [2, 4, 2, rows, 600, d, 48]);
        case.precision = Precision::Native;
        check(seed, &case, 16);
    }
}

/// Values that are not finite, which formats of floats hold.
#[test]
fn visible_infinities_and_nan() {
    for x in [f32::INFINITY, f32::NAN, f32::NEG_INFINITY] {
        for rows in [2, 40] {
            let mut rng = Rng::new(5);
            let mut case = Case::plain(&mut rng, [1, 2, 1, rows, 300, 24, 72]);
            (case.causal, case.alignment) = (true, Some(Alignment::BottomRight));
            case.v.set([0, 0, 290, 67], x);
            for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
                let empty = empty_cache(&case).dtype(dtype).expect("an empty cache");
                let cache = cached(&empty, &case);
                let pages = Paged::empty(&case, &empty, 16, &mut rng).filled(&case, &mut rng);
                for (isa, exec) in execs() {
                    let expected = case.run_over(Inputs::cached(case.q.view(), &cache), exec, Wanted::ALL);
                    same_full(
                        &format!("{x}, {dtype:?}, {isa}"),
                        &case.run_over(pages.over(&case), exec, Wanted::ALL),
                        &expected,
                    );
                }
            }
        }
    }
}

/// The oracle reads pages, too.
#[test]
fn the_oracle_answers_alike() {
    let mut rng = Rng::new(3);
    let case = Case::plain(&mut rng, [2, 2, 1, 2, 40, 9, 7]);
    for (format, empty) in every_format(&empty_cache(&case)) {
        let pages = Paged::empty(&case, &empty, 16, &mut rng).filled(&case, &mut rng);
        let cache = cached(&empty, &case);
        let [got, expected] = [pages.over(&case), Inputs::cached(case.q.view(), &cache)].map(|x| case.oracle_over(x));
        same_oracle(format, &got, &expected);
    }
}

/// Sequences that begin with the same pages: read once, with the bits of each alone; then one goes on in a copy.
#[test]
fn shared_pages_and_copies() {
    let (page, prompt, sequences) = (64, 512, 4);
    for (format, empty) in
        every_format(&KvCache::new(1, KvShape { kv_heads: 2, head_dim: 32, value_dim: 48 }).expect("good sizes"))
    {
        let mut rng = Rng::new(11);
        let mut pool = pool_like(&empty, 30, page);
        let [k, v] = [32, 48].map(|dim| Tensor::normal([1, 2, prompt + 1, dim], &mut rng));
        let whole: Vec<u32> = (0..9).collect();
        pool.append(BlockTable { entries: &whole, lens: &[prompt + 1] }, k.view(), v.view()).expect("they fit");
        // Page 8, with one key in use, is copied for each of the others.
        pool.copy_pages(&[[8, 20], [8, 21], [20, 22]]).expect("pages of the pool");
        let entries: Vec<u32> = [8, 20, 21, 22].into_iter().flat_map(|own| (0..8).chain([own])).collect();
        let lens = [prompt + 2; 4];
        let new = [32, 48].map(|dim| Tensor::normal([sequences, 2, 1, dim], &mut rng));
        let table = BlockTable { entries: &entries, lens: &lens };
        pool.append(table, new[0].view(), new[1].view()).expect("they fit");
        let q = Tensor::normal([sequences, 8, 1, 32], &mut rng);
        for (isa, exec) in execs() {
            let mut out = vec![0.0; sequences * 8 * 48];
            let inputs = Inputs::paged(q.view(), pool.pages(table).expect("a good table"));
            let outputs = Outputs::new(ViewMut::bhld(&mut out, [sequences, 8, 1, 48]).expect("it fits"));
            let problem = Attention::new().problem(inputs, outputs).expect("a good call");
            let plan = Plan::new(&problem, exec);
            // Two blocks of 256 keys, of two heads, for three more sequences.
            let [key, value] = problem_bytes(&pool);
            let saved = (3 * 2 * 256 * 2 * (key + value)) as f64;
            assert_eq!(plan.explain(&problem, None).shared_bytes, saved, "{format}, {isa}");
            problem.run(&plan, &mut Workspace::new());
            for b in 0..sequences {
                let mut alone = vec![0.0; 8 * 48];
                let table = BlockTable { entries: &entries[9 * b..][..9], lens: &lens[..1] };
                let q = q.part(b..b + 1, 0..8, 0..1);
                let inputs = Inputs::paged(q.view(), pool.pages(table).expect("a good table"));
                let outputs = Outputs::new(ViewMut::bhld(&mut alone, [1, 8, 1, 48]).expect("it fits"));
                Attention::new().problem(inputs, outputs).expect("a good call").run_once(exec);
                assert_eq!(out[b * 8 * 48..][..8 * 48], alone, "{format}, {isa}, sequence {b}");
            }
        }
    }
}

/// Bytes of a key and a value of one head, without scales.
fn problem_bytes(pool: &PagePool) -> [usize; 2] {
    let bytes = |format: CacheFormat<'_>, dim: usize| match format {
        CacheFormat::Elements(dtype) => dim * dtype.bytes(),
        CacheFormat::Int4(_) => dim / 2,
        _ => dim,
    };
    let (format, KvShape { head_dim, value_dim, .. }) = (pool.format(), pool.shape());
    [bytes(format.keys, head_dim), bytes(format.values, value_dim)]
}

/// One prompt and steps of others in one append and one call, with the bits of a cache.
#[test]
fn mixed_batches() {
    let (heads, dims, rows) = ([4, 2], [16, 24], [1, 30, 2]);
    let before = [300, 0, 17];
    let ends = [0, 1, 31, 33];
    for (format, empty) in every_format(
        &KvCache::new(3, KvShape { kv_heads: heads[1], head_dim: dims[0], value_dim: dims[1] }).expect("good sizes"),
    ) {
        let mut rng = Rng::new(21);
        let (mut cache, mut pool) = (empty.clone(), pool_like(&empty, 40, 16));
        let entries: Vec<u32> = (0..3 * 20).map(|n| if n < 20 { 39 - n } else { n % 20 + 10 * (n / 20 - 1) }).collect();
        let table = |lens| BlockTable { entries: &entries, lens };
        let tokens = |n| dims.map(|dim| Tensor::normal([1, heads[1], n, dim], &mut Rng::new(n as u64)));
        for (b, n) in before.into_iter().enumerate() {
            let [k, v] = tokens(n);
            cache.append_to(b, k.view(), v.view()).expect("they fit");
            let table = BlockTable { entries: &entries[20 * b..][..20], lens: &[n] };
            pool.append(table, k.view(), v.view()).expect("they fit");
        }
        let [k, v] = tokens(33);
        cache.append_ragged(&[0, 1, 2], &ends, k.view(), v.view()).expect("they fit");
        let lens: Vec<usize> = before.iter().zip(rows).map(|(n, rows)| n + rows).collect();
        pool.append_ragged(table(&lens), &ends, k.view(), v.view()).expect("they fit");
        let q = Tensor::normal([1, heads[0], 33, dims[0]], &mut rng);
        let attention = Attention::new().causal().align(Alignment::BottomRight);
        for (isa, exec) in execs() {
            let run = |inputs: Inputs<'_>, exec: Exec| {
                let mut out = vec![0.0; heads[0] * 33 * dims[1]];
                let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, heads[0], 33, dims[1]]).expect("it fits"));
                attention.problem(inputs.ragged_queries(&ends), outputs).expect("a good call").run_once(exec);
                out
            };
            let pages = pool.pages(table(&lens)).expect("a good table");
            let expected = run(Inputs::cached(q.view(), &cache), exec);
            assert_eq!(run(Inputs::paged(q.view(), pages), exec), expected, "{format}, {isa}");
        }
    }
}

#[test]
fn a_warm_step_allocates_nothing() {
    for (format, empty) in
        every_format(&KvCache::new(2, KvShape { kv_heads: 2, head_dim: 24, value_dim: 40 }).expect("good sizes"))
    {
        let mut pool = pool_like(&empty, 64, 16);
        let entries: Vec<u32> = (0..60).rev().collect();
        let [k, v] = [24, 40].map(|dim| Tensor::filled([2, 2, 400, dim], 0.5));
        pool.append(BlockTable { entries: &entries, lens: &[400; 2] }, k.view(), v.view()).expect("they fit");
        let [k, v] = [24, 40].map(|dim| Tensor::filled([2, 2, 1, dim], 0.5));
        for (isa, exec) in execs() {
            let (mut workspace, mut out, q) = (Workspace::new(), vec![0.0; 2 * 4 * 40], vec![0.1; 2 * 4 * 24]);
            let mut step = || {
                let table = BlockTable { entries: &entries, lens: &[401, 401] };
                pool.append(table, k.view(), v.view()).expect("they fit");
                let q = View::bhld(&q, [2, 4, 1, 24]).expect("it fits");
                let inputs = Inputs::paged(q, pool.pages(table).expect("a good table"));
                let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 4, 1, 40]).expect("it fits"));
                let problem = Attention::new().problem(inputs, outputs).expect("a good call");
                let plan = Plan::new(&problem, exec);
                problem.run(&plan, &mut workspace);
            };
            step();
            assert_eq!(counted(step), (0, 0), "{format}, {isa}");
        }
    }
}

#[test]
fn bad_pools_and_tables_are_refused() {
    let said = |result: Result<(), Error>| result.expect_err("a mistake").to_string();
    let new = |size, dims: [usize; 2], format| {
        PagePool::new(4, size, KvShape { kv_heads: 2, head_dim: dims[0], value_dim: dims[1] }, format)
    };
    let floats = CacheFormat::Elements(Dtype::F32);
    assert_eq!(
        said(new(20, [8, 8], floats).map(drop)),
        "page pool: pages have 20 keys, but must have 16 or a multiple of that"
    );
    assert!(matches!(new(0, [8, 8], floats), Err(Error::Pages(PageError::PageSize { page_size: 0 }))));
    assert_eq!(said(new(16, [8, 0], floats).map(drop)), "page pool: value_dim is 0, but must be at least 1");
    assert_eq!(
        said(new(16, [8, 6], CacheFormat::Int8PerChannel(&[1.0; 8])).map(drop)),
        "key scales: length is 8, but the pool (kv_heads × head_dim) has 16"
    );
    let much = |pages| PagePool::new(pages, 16, KvShape { kv_heads: 3, head_dim: 8, value_dim: 8 }, floats);
    assert!(matches!(much(1 << 50), Err(Error::Memory { what: "page pool", .. })), "{:?}", much(1 << 50));
    let pages = usize::MAX / 2;
    assert_eq!(much(pages).err(), Some(Error::TooLarge { what: "page pool", sizes: [pages, 16, 3, 16] }));
    let mut pool = new(16, [8, 6], floats).expect("a pool");
    let [k, v] = [8, 6].map(|dim| Tensor::filled([2, 2, 3, dim], 0.5));
    let append = |pool: &mut PagePool, entries: &[u32], lens: &[usize]| {
        said(pool.append(BlockTable { entries, lens }, k.view(), v.view()))
    };
    assert_eq!(
        append(&mut pool, &[0, 4], &[3, 3]),
        "block table: entry 0 of sequence 1 is page 4, but the pool has 4 pages"
    );
    assert_eq!(
        append(&mut pool, &[0, 1], &[3, 2]),
        "block table: sequence 1 has 2 keys, but 3 are appended to it (lengths count them already)"
    );
    assert_eq!(
        append(&mut pool, &[2, 2], &[3, 3]),
        "block table: tokens would be written to page 2, which sequences 0 and 1 share (a page that is shared is copied \
         first)"
    );
    assert_eq!(
        append(&mut pool, &[0, 1, 3, 3], &[3, 17]),
        "block table: tokens would be written to page 3, which sequence 1 has twice"
    );
    assert_eq!(append(&mut pool, &[0], &[3]), "k: batch is 2, but the block table has 1");
    let table = BlockTable { entries: &[0, 1], lens: &[3, 3] };
    assert_eq!(said(pool.append(table, v.view(), v.view())), "k: head_dim is 6, but the pool has 8");
    assert_eq!(
        said(pool.append_ragged(table, &[0, 2], k.part(0..1, 0..2, 0..2).view(), v.part(0..1, 0..2, 0..2).view())),
        "ends: number of sequences is 1, but the block table has 2"
    );
    assert_eq!(
        said(pool.copy_pages(&[[0, 1], [2, 4]])),
        "copies: entry 1 is 4, but must be at most 3, the last page of the pool"
    );
    // Nothing was written.
    let pages = BlockTable { entries: &[0, 1, 2, 3], lens: &[64] };
    let q = Tensor::filled([1, 2, 1, 8], 1.0);
    let held =
        Inputs::paged(q.view(), pool.pages(pages).expect("a good table")).key_values().expect("a value for each key");
    assert!((0..64).all(|j| held.key([0, 1, j, 7]) == Some(0.0) && held.value([0, 0, j, 5]) == Some(0.0)));
    let mut pool = new(16, [8, 6], CacheFormat::Int8PerToken).expect("a pool");
    let mut bad = k.clone();
    bad.set([1, 0, 2, 3], f32::NAN);
    assert!(matches!(pool.append(table, bad.view(), v.view()), Err(Error::Row { argument: "k", row: 2, .. })));
    pool.append(table, k.view(), v.view()).expect("they fit");
}

/// Values as wide as several panels, equally wide and not, and wider than what is packed at once.
#[test]
fn wide_values() {
    for (n, value_dim) in [80, 96, 112, 128, 144, 272, 512].into_iter().enumerate() {
        for rows in [1, 30] {
            let mut case = Case::plain(&mut Rng::new(n as u64), [2, 2, 1, rows, 400, 16, value_dim]);
            case.kv_lens = Some(vec![368, 400]);
            check(n as u64, &case, [16, 48, 80][n % 3]);
        }
    }
}
