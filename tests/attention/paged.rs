//! Attention from pages: the same bits as from tensors and from a cache, however the pages lie and whatever is in those
//! that nobody has.

use crate::kv_support::{Pool, cache_of, same_full, same_oracle};
use crate::options::{Case, Wanted, check_against_oracle};
use crate::selected::random_lists;
use crate::support::{LAYOUTS, Layout, Rng, Tensor, execs};
use sdpa::{Alignment, Attention, BlockTable, Error, Exec, Inputs, Outputs, PageError, Pages, View, ViewMut};

/// Single keys, parts of panels and of blocks, whole ones, and more.
const PAGES: [usize; 9] = [1, 2, 3, 7, 16, 17, 64, 256, 300];
/// Pages outermost, with heads before rows and rows before heads.
const ORDERS: [Layout; 2] = [Layout::Bhld, Layout::Blhd];
const FILLS: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38];

fn paged<'a>(case: &'a Case, pool: &'a Pool) -> Inputs<'a> {
    Inputs::paged(case.q.view(), pool.pages())
}

/// Causal rows at the end of ragged sequences, as a server decodes them.
fn decode(rng: &mut Rng, sizes: [usize; 7], lens: &[usize]) -> Case {
    let mut case = Case::plain(rng, sizes);
    (case.causal, case.alignment, case.kv_lens) = (true, Some(Alignment::BottomRight), Some(lens.to_vec()));
    case
}

#[test]
fn pages_are_tensors_and_a_cache() {
    for (n, page) in PAGES.into_iter().enumerate() {
        for i in 0..18u64 {
            let seed = 100 * n as u64 + i;
            let mut rng = Rng::new(seed);
            let case = Case::random(&mut rng, 700_000).side_by_side();
            let selected = (i % 3 == 2).then(|| random_lists(&mut rng, &case));
            let case = Case { selected, ..case };
            let order = if i < 12 { ORDERS[i as usize % 2] } else { rng.pick(&LAYOUTS) };
            let values = if i < 12 { order } else { rng.pick(&LAYOUTS) };
            let fill = rng.pick(&FILLS);
            let pool = Pool::of(&case, page, [order, values], fill, &mut rng);
            let cache = cache_of(&case, &mut rng);
            for (isa, exec) in execs() {
                for wanted in [Wanted::LEAST, Wanted::ALL] {
                    let what = format!("pages of {page}, seed {seed}, {order:?} {values:?}, {isa}");
                    let expected = case.run(exec, wanted);
                    same_full(&what, &case.run_over(paged(&case, &pool), exec, wanted), &expected);
                    let cached = Inputs::cached(case.q.view(), &cache);
                    same_full(&format!("{what}, cache"), &case.run_over(cached, exec, wanted), &expected);
                }
            }
        }
    }
}

/// Lengths around pages and blocks, none among them, on all threads.
#[test]
fn ragged_lengths() {
    for page in PAGES {
        let mut rng = Rng::new(page as u64);
        let lens = [0, 1, page, page + 1, 2 * page - 1, 255, 256, 257, 0, 513];
        let longest = lens.iter().copied().max().expect("some");
        for (rows, d, dv) in [(1, 64, 64), (3, 17, 48), (20, 8, 5)] {
            let case = decode(&mut rng, [lens.len(), 4, 2, rows, longest, d, dv], &lens);
            for order in ORDERS {
                let pool = Pool::of(&case, page, [order; 2], f32::NAN, &mut rng);
                for (isa, exec) in execs() {
                    let what = format!("pages of {page}, {rows} rows, {order:?}, {isa}");
                    let expected = case.run(exec, Wanted::MASS);
                    for exec in [exec, exec.threads(64)] {
                        same_full(&what, &case.run_over(paged(&case, &pool), exec, Wanted::MASS), &expected);
                    }
                }
            }
        }
    }
    // All empty: no entries at all, and outputs of empty rows.
    let case = decode(&mut Rng::new(0), [2, 2, 1, 3, 0, 4, 4], &[0, 0]);
    let blank = Tensor::filled([0, 1, 5, 4], 0.0);
    let pool = Pool { k: blank.clone(), v: blank, entries: Vec::new(), lens: vec![0, 0] };
    for (isa, exec) in execs() {
        let got = case.run_over(paged(&case, &pool), exec, Wanted::ALL);
        same_full(&format!("{isa}: no keys"), &got, &case.run(exec, Wanted::ALL));
        assert!(got.out.data.iter().all(|x| x.to_bits() == 0) && got.lse.data.iter().all(|&x| x == f32::NEG_INFINITY));
    }
}

/// Sequences that begin alike have their first pages in common; one ends inside a page that another goes on in.
#[test]
fn shared_pages() {
    for page in PAGES {
        let mut rng = Rng::new(page as u64);
        let shared = 2 * page;
        let lens = [shared + 5, shared, shared + page + 1, shared - page / 2, shared + 5];
        let longest = shared + page + 5;
        let mut case = decode(&mut rng, [5, 4, 2, 2, longest, 24, 33], &lens);
        for x in [&mut case.k, &mut case.v] {
            let first = x.part(0..1, 0..2, 0..shared);
            for at @ [_, h, j, c] in crate::support::indices([5, 2, shared, first.shape[3]]) {
                x.set(at, first.get([0, h, j, c]));
            }
        }
        let case = case.side_by_side();
        for order in ORDERS {
            let mut pool = Pool::of(&case, page, [order; 2], f32::NAN, &mut rng);
            let width = pool.width();
            for b in 1..5 {
                let used = pool.lens[b].div_ceil(page);
                pool.entries.copy_within(0..2.min(used), b * width);
            }
            for (isa, exec) in execs() {
                let what = format!("pages of {page}, {order:?}, {isa}");
                let got = case.run_over(paged(&case, &pool), exec, Wanted::ALL);
                same_full(&what, &got, &case.run(exec, Wanted::ALL));
                // The same question twice has the same answer: a fork in one pool.
                let row = |b| case.q.part(b..b + 1, 0..4, 0..2);
                assert!(row(0).data != row(4).data, "different queries, or this says nothing");
            }
        }
    }
}

/// A page that stands for several of one sequence.
#[test]
fn one_page_many_times() {
    let mut rng = Rng::new(9);
    for (page, times) in [(1, 300), (16, 20), (100, 3)] {
        let mut case = decode(&mut rng, [1, 2, 1, 3, page * times, 20, 16], &[page * times]);
        for x in [&mut case.k, &mut case.v] {
            *x = Tensor::from_fn(x.shape, |[b, h, j, c]| x.get([b, h, j % page, c]));
        }
        let (k, v) = (case.k.rows(0..page), case.v.rows(0..page));
        let pool = Pool { k, v, entries: vec![0; times], lens: vec![page * times] };
        for (isa, exec) in execs() {
            let got = case.run_over(paged(&case, &pool), exec, Wanted::ALL);
            same_full(&format!("page of {page}, {times} times, {isa}"), &got, &case.run(exec, Wanted::ALL));
        }
    }
}

/// What was in a page before, what is in free ones and behind the last key.
#[test]
fn stale_pages_do_not_matter() {
    for page in PAGES {
        let mut rng = Rng::new(page as u64);
        let lens = [3 * page / 2 + 1, 1, 270, 0];
        let longest = lens.iter().copied().max().expect("some");
        let case = decode(&mut rng, [4, 2, 2, 2, longest, 16, 32], &lens).side_by_side();
        let clean = Pool::of(&case, page, [Layout::Blhd; 2], 0.0, &mut Rng::new(1));
        for (isa, exec) in execs() {
            let expected = case.run_over(paged(&case, &clean), exec, Wanted::ALL);
            for fill in FILLS {
                // The same seed, so the same table: but for what nobody has, the same pool.
                let pool = Pool::of(&case, page, [Layout::Blhd; 2], fill, &mut Rng::new(1));
                assert_eq!(pool.entries, clean.entries);
                let what = format!("pages of {page}, {fill}, {isa}");
                same_full(&what, &case.run_over(paged(&case, &pool), exec, Wanted::ALL), &expected);
            }
        }
    }
}

/// Pages written token by token while sequences are decoded: each step is the row of the prefill.
#[test]
fn decoding_into_pages() {
    let mut rng = Rng::new(4);
    for page in [1, 16, 17, 256] {
        let case = decode(&mut rng, [1, 4, 2, 300, 300, 20, 33], &[300]);
        let mut pool = Pool::of(&case, page, [Layout::Blhd; 2], f32::NAN, &mut rng);
        for (isa, exec) in execs() {
            // As before the first token, but for the gaps.
            pool.k.data.fill(f32::NAN);
            pool.v.data.fill(f32::NAN);
            let whole = case.run(exec, Wanted::LEAST);
            for i in 0..300 {
                pool.write(&case, 0, i..i + 1);
                pool.lens[0] = i + 1;
                let step = case.chunk(i..i + 1, i + 1);
                let got = step.run_over(paged(&step, &pool), exec, Wanted::LEAST);
                crate::options::same_rows(
                    &format!("pages of {page}, token {i}, {isa}"),
                    (&step, &got),
                    (&case, &whole),
                    |[b, h, _]| Some([b, h, i]),
                );
            }
        }
    }
}

#[test]
fn the_oracle_sees_the_same_through_pages() {
    for seed in 0..27 {
        let mut rng = Rng::new(60_000 + seed);
        let case = Case::random(&mut rng, 100_000).side_by_side();
        let pool = Pool::of(&case, PAGES[seed as usize % 9], [rng.pick(&LAYOUTS); 2], f32::NAN, &mut rng);
        let oracle = case.oracle_over::<f64>(paged(&case, &pool));
        same_oracle(&format!("seed {seed}"), &oracle, &case.oracle());
        for (isa, exec) in execs() {
            let got = case.run_over(paged(&case, &pool), exec, Wanted::ALL);
            check_against_oracle(&format!("seed {seed}, {isa}"), &case, &got, &oracle);
        }
    }
}

/// A pool of six pages of four keys, two heads, dims 3 and 5.
fn six() -> Pool {
    let (k, v) = ([6, 2, 4, 3], [6, 2, 4, 5]);
    let blank = |shape| Tensor::filled(shape, 0.5);
    Pool { k: blank(k), v: blank(v), entries: vec![5, 0, 3, 1, 2, 4], lens: vec![12, 9] }
}

#[track_caller]
fn refused(pool: &Pool, expected: PageError, words: &str) {
    let error = pool.try_pages().expect_err("nothing wrong was found");
    assert_eq!((error.to_string().as_str(), &error), (words, &expected));
    let error = Error::from(error);
    assert_eq!((error.to_string().as_str(), error), (words, Error::Pages(expected)));
}

#[test]
fn hostile_entries() {
    assert!(six().try_pages().is_ok());
    for (sequence, entry, page) in [(0, 0, 6), (0, 2, u32::MAX), (1, 1, 7), (1, 2, 1 << 31)] {
        let mut pool = six();
        pool.entries[3 * sequence + entry] = page;
        let words =
            format!("block table: entry {entry} of sequence {sequence} is page {page}, but the pool has 6 pages");
        refused(&pool, PageError::Page { sequence, entry, page, pages: 6 }, &words);
        // The first wrong one is named.
        pool.entries[5] = 99;
        refused(&pool, PageError::Page { sequence, entry, page: pool.entries[3 * sequence + entry], pages: 6 }, &{
            let page = pool.entries[3 * sequence + entry];
            format!("block table: entry {entry} of sequence {sequence} is page {page}, but the pool has 6 pages")
        });
    }
    // A pool without pages has none.
    let mut pool = six();
    (pool.k, pool.v) = (Tensor::filled([0, 2, 4, 3], 0.0), Tensor::filled([0, 2, 4, 5], 0.0));
    let words = "block table: entry 0 of sequence 0 is page 5, but the pool has 0 pages";
    refused(&pool, PageError::Page { sequence: 0, entry: 0, page: 5, pages: 0 }, words);
}

#[test]
fn entries_beyond_the_length_may_be_anything() {
    for (lens, unused) in [([8, 9], vec![2]), ([0, 4], vec![0, 1, 2, 4, 5]), ([4, 8], vec![1, 2, 5])] {
        let mut pool = six();
        pool.lens = lens.to_vec();
        for at in unused {
            pool.entries[at] = u32::MAX;
        }
        let case = Case::plain(&mut Rng::new(1), [2, 2, 2, 1, 9, 3, 5]);
        let longest = lens[0].max(lens[1]);
        let case = Case {
            k: Tensor::filled([2, 2, longest, 3], 0.5),
            v: Tensor::filled([2, 2, longest, 5], 0.5),
            kv_lens: Some(lens.to_vec()),
            ..case
        };
        let exec = Exec::serial();
        same_full(
            &format!("{lens:?}"),
            &case.run_over(paged(&case, &pool), exec, Wanted::ALL),
            &case.run(exec, Wanted::ALL),
        );
    }
}

#[test]
fn hostile_lengths() {
    for (sequence, len) in [(0, 13), (1, 13), (1, 1 << 40), (0, usize::MAX)] {
        let mut pool = six();
        pool.lens[sequence] = len;
        let words = format!("block table: sequence {sequence} has {len} keys, but its 3 entries of 4 have room for 12");
        refused(&pool, PageError::Length { sequence, len, entries: 3, page_size: 4 }, &words);
    }
    // One page more than there is room for, by a table of one entry.
    let pool = Pool { entries: vec![0, 1], lens: vec![4, 5], ..six() };
    let words = "block table: sequence 1 has 5 keys, but its 1 entries of 4 have room for 4";
    refused(&pool, PageError::Length { sequence: 1, len: 5, entries: 1, page_size: 4 }, words);
    // Pages of no keys have room for none.
    let mut pool = six();
    (pool.k, pool.v) = (Tensor::filled([6, 2, 0, 3], 0.0), Tensor::filled([6, 2, 0, 5], 0.0));
    let words = "pages: the page size is 0, but sequence 0 of the block table has 12 keys";
    refused(&pool, PageError::Length { sequence: 0, len: 12, entries: 3, page_size: 0 }, words);
    pool.lens = vec![0, 0];
    assert_eq!(pool.pages().page_size(), 0);
}

/// A pool of zero strides may have pages of any size. Positions are counted in `isize`.
#[test]
fn more_keys_than_positions_count() {
    let row = [0.5f32; 4];
    let size = isize::MAX as usize;
    let pool = View::from_strides(&row, 0, [1, 1, size, 1], [0; 4]).unwrap();
    let pages = |len| Pages::new(pool, pool, BlockTable { entries: &[0, 0], lens: &[len] }).map(drop);
    assert!(pages(size).is_ok());
    for len in [size + 1, 2 * size] {
        let error = pages(len).unwrap_err();
        assert_eq!(error, PageError::TooLong { sequence: 0, len });
        let words = format!("block table: sequence 0 has {len} keys, but positions end at {size}");
        assert_eq!(error.to_string(), words);
    }
}

#[test]
fn entries_that_cannot_be_shared_out() {
    let words = |n, s: usize| format!("block table: {n} entries cannot be shared out evenly over {s} sequences");
    for (entries, lens) in [(vec![0; 5], vec![1, 1]), (vec![0; 1], vec![0, 0]), (vec![0; 3], Vec::new())] {
        let (n, s) = (entries.len(), lens.len());
        let pool = Pool { entries, lens, ..six() };
        refused(&pool, PageError::Entries { entries: n, sequences: s }, &words(n, s));
    }
    // No entries do for sequences without keys, and nothing for none.
    for lens in [vec![0, 0], Vec::new()] {
        assert!(Pool { entries: Vec::new(), lens, ..six() }.try_pages().is_ok());
    }
}

#[test]
fn pools_that_differ() {
    for (at, size, what) in [(0, 7, "number of pages"), (1, 1, "heads"), (2, 5, "page size")] {
        let mut pool = six();
        let mut shape = pool.v.shape;
        let keys = core::mem::replace(&mut shape[at], size);
        pool.v = Tensor::filled(shape, 0.0);
        let words = format!("the pools differ in their {what}: {keys} for keys, {size} for values");
        refused(&pool, PageError::Pools { what, keys, values: size }, &words);
    }
}

#[test]
fn calls_that_do_not_fit_the_pages() {
    let pool = six();
    let says = |words: &str, shape: [usize; 4], change: fn(Inputs<'_>) -> Inputs<'_>| {
        let q = Tensor::filled(shape, 0.0);
        let [b, h, l, _] = shape;
        let mut out = vec![42.0; b * h * l * 5];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [b, h, l, 5]).unwrap());
        let inputs = change(Inputs::paged(q.view(), pool.pages()));
        let error = sdpa::attention(&Attention::new(), inputs, outputs).unwrap_err();
        assert_eq!(error.to_string(), words);
        assert!(out.iter().all(|&x| x == 42.0), "a refused call wrote: {words}");
    };
    says("pages: number of sequences is 2, but q (batch) has 3", [3, 2, 1, 3], |inputs| inputs);
    says("pages: head_dim is 3, but q has 4", [2, 2, 1, 4], |inputs| inputs);
    says("q: 3 heads are no multiple of the 2 heads of pages", [2, 3, 1, 3], |inputs| inputs);
    says("kv_lens: needs tensors; caches and pages have their own lengths", [2, 2, 1, 3], |inputs| {
        inputs.kv_lens(&[12, 9])
    });
    let mut one = six();
    (one.lens, one.entries) = (vec![4], vec![0]);
    let q = Tensor::filled([1, 2, 1, 3], 0.0);
    let table = BlockTable { entries: &one.entries, lens: &one.lens };
    let pages = Pages::new(one.k.view(), one.v.view(), table).unwrap();
    let mut out = vec![0.0; 10];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, 1, 5]).unwrap());
    let inputs = Inputs::paged(q.view(), pages).ragged(&[0, 1], &[0, 4]);
    let error = Attention::new().problem(inputs, outputs).unwrap_err();
    assert_eq!(error.to_string(), "ragged: needs tensors; caches and pages have their own lengths");
}
