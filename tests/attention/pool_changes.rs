//! Tokens of pools kept, saved and loaded, and pools made smaller: what a cache of the same tokens does.

use crate::kv_support::{every_format, exact_and_others};
use crate::support::{Rng, Tensor, execs};
use sdpa::{
    Alignment, Attention, BlockTable, CacheFormat, Dtype, Error, Exec, Inputs, KvCache, KvShape, Outputs, PagePool,
    View, ViewMut,
};

const SHAPE: KvShape = KvShape { kv_heads: 2, head_dim: 24, value_dim: 40 };

/// Lengths of two sequences, and their pages of 16 keys; they share none.
const LENS: [usize; 2] = [300, 37];
const WIDTH: usize = 20;

fn entries() -> Vec<u32> {
    (0..2 * WIDTH as u32).map(|entry| entry * 7 % 40).collect()
}

/// A cache and a pool of the same tokens, and the table of the pool.
fn filled(empty: &KvCache) -> (KvCache, PagePool, Vec<u32>) {
    let (mut cache, entries) = (empty.clone(), entries());
    let mut pool = PagePool::new(48, 16, SHAPE, cache.format()).expect("a pool");
    for (b, n) in LENS.into_iter().enumerate() {
        let [k, v] = [24, 40].map(|dim| Tensor::normal([1, 2, n, dim], &mut Rng::new(b as u64)));
        cache.append_to(b, k.view(), v.view()).expect("they fit");
        let table = BlockTable { entries: &entries[b * WIDTH..][..WIDTH], lens: &[n] };
        pool.append(table, k.view(), v.view()).expect("they fit");
    }
    (cache, pool, entries)
}

fn caches() -> [(&'static str, KvCache); 12] {
    every_format(&KvCache::new(2, SHAPE).expect("good sizes"))
}

/// Output of rows at the end of each sequence.
fn attend(inputs: Inputs<'_>, exec: Exec<'_>) -> Vec<f32> {
    let mut out = vec![0.0; 2 * 4 * 2 * 40];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 4, 2, 40]).expect("it fits"));
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    attention.problem(inputs, outputs).expect("a good call").run_once(exec);
    out
}

#[track_caller]
fn same(what: &str, pool: &PagePool, table: BlockTable<'_>, cache: &KvCache) {
    assert_eq!(table.lens, cache.lens(), "{what}");
    let q = Tensor::normal([2, 4, 2, 24], &mut Rng::new(9));
    for (isa, exec) in execs() {
        let pages = Inputs::paged(q.view(), pool.pages(table).expect("a good table"));
        let (got, expected) = (attend(pages, exec), attend(Inputs::cached(q.view(), cache), exec));
        assert_eq!(got, expected, "{what}, {isa}");
    }
}

#[test]
fn kept_tokens_are_those_that_a_cache_keeps() {
    for (format, empty) in caches() {
        for (from, accepted) in
            [(290, vec![0, 1, 5, 9]), (200, vec![3, 4, 60, 99]), (17, vec![]), (0, vec![1, 255, 299])]
        {
            let (mut cache, mut pool, entries) = filled(&empty);
            pool.keep(BlockTable { entries: &entries, lens: &LENS }, 0, from, &accepted).expect("it has these");
            cache.keep(0, from, &accepted).expect("it has these");
            let lens = [from + accepted.len(), LENS[1]];
            same(&format!("{format}, {from}"), &pool, BlockTable { entries: &entries, lens: &lens }, &cache);
        }
    }
}

#[cfg(feature = "safetensors")]
#[test]
fn files_are_those_of_a_cache() {
    for (format, empty) in exact_and_others(&KvCache::new(2, SHAPE).expect("good sizes")) {
        let (cache, mut pool, entries) = filled(&empty);
        let table = BlockTable { entries: &entries, lens: &LENS };
        let file = pool.export(table).expect("a file");
        let imported = KvCache::import(&file).expect("the file of a cache");
        assert_eq!(imported.format(), cache.format(), "{format}");
        same(format, &pool, table, &imported);
        // Metadata are in no certain order.
        assert_eq!(file.len(), cache.export().expect("a file").len(), "{format}");
        let other: Vec<u32> = entries.iter().rev().copied().collect();
        let elsewhere = BlockTable { entries: &other, lens: &LENS };
        pool.import(elsewhere, &cache.export().expect("a file")).expect("the file of a cache");
        same(format, &pool, elsewhere, &cache);
    }
}

#[cfg(feature = "safetensors")]
#[test]
fn files_that_do_not_fit_are_refused_and_nothing_is_written() {
    let [_, _, _, (_, int8), (_, by_channel), (_, int4), ..] = caches();
    let (cache, mut pool, entries) = filled(&int8);
    let table = BlockTable { entries: &entries, lens: &LENS };
    let file = pool.export(table).expect("a file");
    let mut refused = |lens: &[usize], file: &[u8]| {
        let width = WIDTH * lens.len();
        let refused = pool.import(BlockTable { entries: &entries[..width], lens }, file).expect_err("it does not fit");
        same("as before", &pool, table, &cache);
        refused.to_string()
    };
    assert_eq!(refused(&LENS[..1], &file), "table: number of sequences is 1, but the file has 2");
    assert_eq!(
        refused(&[300, 36], &file),
        "lengths of the block table: entry 1 is 36, but must be exactly 37, the length in the file"
    );
    assert!(refused(&LENS, &file[..file.len() - 1]).starts_with("import: the file has"));
    let elements = |cache: &KvCache| filled(cache).0.export().expect("a file");
    assert_eq!(
        refused(&LENS, &elements(&int4)),
        "import: keys of the file are Int4, but those of the pool are Int8PerToken"
    );
    assert_eq!(
        refused(&LENS, &elements(&by_channel)),
        "import: keys of the file are Int8PerChannel, but those of the pool are Int8PerToken"
    );
    let narrow = KvCache::new(2, KvShape { head_dim: 23, ..SHAPE }).and_then(|cache| cache.export()).expect("a file");
    assert_eq!(refused(&[0, 0], &narrow), "file: head_dim is 23, but the pool has 24");
    let shape = KvShape { head_dim: 40, ..SHAPE };
    let mut wide = PagePool::new(8, 16, shape, CacheFormat::Int8PerToken).expect("a pool");
    let latent = KvCache::new(0, shape).and_then(KvCache::latent).and_then(|cache| cache.export()).expect("a file");
    assert_eq!(
        wide.import(BlockTable { entries: &[], lens: &[] }, &latent).expect_err("latent").to_string(),
        "import: the cache in the file is latent or sliding, which the sequences of a pool are not"
    );
}

#[test]
fn a_smaller_pool_has_its_first_pages_and_less_memory() {
    for (format, empty) in caches() {
        let (cache, mut pool, entries) = filled(&empty);
        let before = pool.bytes();
        let refused = pool.shrink(49).expect_err("it has 48");
        assert_eq!(
            refused.to_string(),
            "page pool: number of pages is 49, but must be at most 48, the pages that the pool has"
        );
        pool.shrink(40).expect("there is memory");
        assert_eq!(pool.page_count(), 40);
        assert!(pool.bytes() < before && pool.bytes() * 48 <= before * 41, "{format}: {} of {before}", pool.bytes());
        same(format, &pool, BlockTable { entries: &entries, lens: &LENS }, &cache);
        assert!(pool.pages(BlockTable { entries: &[40], lens: &[1] }).is_err());
        pool.shrink(0).expect("nothing");
    }
}

#[test]
fn what_a_pool_cannot_keep_is_refused() {
    let shape = KvShape { kv_heads: 1, head_dim: 1, value_dim: 1 };
    let mut pool = PagePool::new(4, 16, shape, CacheFormat::Elements(Dtype::F32)).expect("a pool");
    let rows: Vec<f32> = (0..40).map(|i| i as f32).collect();
    let rows = View::bhld(&rows, [1, 1, 40, 1]).expect("it fits");
    pool.append(BlockTable { entries: &[2, 0, 3], lens: &[40] }, rows, rows).expect("they fit");
    let mut said = |entries: &[u32], lens: &[usize], sequence, from, accepted: &[usize]| {
        let table = BlockTable { entries, lens };
        let error: Error = pool.keep(table, sequence, from, accepted).expect_err("a mistake");
        let q = View::bhld(&[1.0], [1, 1, 1, 1]).expect("it fits");
        let whole = BlockTable { entries: &[2, 0, 3], lens: &[40] };
        let held =
            Inputs::paged(q, pool.pages(whole).expect("a good table")).key_values().expect("a value for each key");
        assert!((0..40).all(|j| held.key([0, 0, j, 0]) == Some(j as f32)), "a refused change changed the pool");
        error.to_string()
    };
    let one: (&[u32], &[usize]) = (&[2, 0, 3], &[40]);
    assert_eq!(
        said(one.0, one.1, 1, 0, &[]),
        "sequence: index is 1, but must be at most 0, the last one of the block table"
    );
    assert_eq!(said(&[], &[], 0, 0, &[]), "block table: number of sequences is 0, but must be at least 1");
    assert_eq!(said(one.0, one.1, 0, 41, &[]), "from: 41, but sequence 0 has 40 keys");
    assert_eq!(
        said(one.0, one.1, 0, 38, &[0, 2]),
        "accepted: entry 1 is 2, but must be at most 1, the last token of the sequence, counted from `from`"
    );
    assert_eq!(
        said(&[2, 0, 3, 1, 0, 3], &[40, 20], 0, 17, &[1]),
        "block table: tokens would be written to page 0, which sequences 0 and 1 share (a page that is shared is copied \
         first)"
    );
    // Wherever the other sequence has the page, and this one has it again.
    assert!(said(&[2, 0, 3, 0, 1, 3], &[40, 20], 0, 17, &[1]).contains("page 0, which sequences 0 and 1 share"));
    assert!(said(&[2, 0, 3, 1, 0, 3], &[40, 40], 1, 17, &[1]).contains("page 0, which sequences 0 and 1 share"));
    for entries in [[2, 0, 0], [0, 0, 3]] {
        assert_eq!(
            said(&entries, &[40], 0, 17, &[1]),
            "block table: tokens would be written to page 0, which sequence 0 has twice"
        );
    }
    assert!(said(&[2, 0, 4], &[40], 0, 17, &[1]).starts_with("block table: entry 2 of sequence 0 is page 4"));
    // Tokens that stay where they are write nothing, so their pages may be shared.
    pool.keep(BlockTable { entries: &[2, 0, 3, 2, 0, 3], lens: &[40, 40] }, 0, 17, &[0, 1]).expect("nothing moves");
}
