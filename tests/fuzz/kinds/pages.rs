//! Block tables, good and bad.

use crate::fuzzer::array::Array;
use crate::fuzzer::case::Case;
use crate::fuzzer::draw::{DTYPES, Home, numbers, small};
use crate::fuzzer::memory::Memory;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::place::AnyPlaced;
use crate::fuzzer::rng::Rng;
use crate::fuzzer::sources::{Pool, Source};
use crate::fuzzer::stage::{Stage, list};
use sdpa::{Exec, Isa};

/// A pool and a table in which any number may be wrong: refused if one is, otherwise the same as tensors.
pub(super) fn check(rng: &mut Rng) {
    let [pages, kv_heads, size] = [rng.below(5), rng.up_to(2), rng.pick(&[0, 1, 2, 5, 16, 100, 256])];
    let [sequences, width] = [rng.below(4), rng.below(4)];
    let (wrong, dims) = (rng.below(3), [1 + rng.below(20), 1 + rng.below(20)]);
    let dtypes = [(); 2].map(|()| rng.pick(&DTYPES));
    let shape = [pages, kv_heads, size];
    let mut other = shape;
    if wrong == 1 {
        other[rng.below(3)] += 1;
    }
    let k = numbers(rng, [pages, kv_heads, size, dims[0]], dtypes[0]);
    let v = numbers(rng, [other[0], other[1], other[2], dims[1]], dtypes[1]);
    let count = width * sequences + if wrong == 2 && rng.one_in(4) { 1 } else { 0 };
    let entries: Vec<u32> = (0..count).map(|_| entry(rng, pages)).collect();
    let width = count.checked_div(sequences).unwrap_or(0);
    let room = width * size;
    let lens: Vec<usize> = (0..sequences)
        .map(|_| match rng.below(6) {
            0 if wrong == 2 => rng.pick(&[room + 1, usize::MAX, usize::MAX / 2]),
            1 => room,
            _ => rng.below(room + 1),
        })
        .collect();
    // Only entries that a length reaches count.
    let used = |b: usize| &entries[b * width..][..lens[b].div_ceil(size.max(1))];
    let good = shape == other
        && count == width * sequences
        && lens.iter().all(|&len| len <= room)
        && (0..sequences).all(|b| used(b).iter().all(|&page| (page as usize) < pages));
    let pool = Pool {
        k: AnyPlaced::of(rng, &k, dtypes[0]),
        v: AnyPlaced::of(rng, &v, dtypes[1]),
        entries: list(rng, &entries),
        lens: list(rng, &lens),
    };
    let is_good = pool.pages().is_ok();
    assert_eq!(is_good, good, "pools {shape:?} {other:?}, entries {entries:?}, lengths {lens:?}: {:?}", pool.pages());
    if good {
        let gathered = [&k, &v].map(|x| gather(x, &entries, &lens, width));
        attend(rng, gathered, dtypes, pool);
    }
}

/// Mostly a page; pages may be had by several, and twice.
fn entry(rng: &mut Rng, pages: usize) -> u32 {
    match rng.below(12) {
        0 => pages as u32,
        1 => u32::MAX,
        _ => rng.below(pages) as u32,
    }
}

/// The rows that a table says.
fn gather(pool: &Array, entries: &[u32], lens: &[usize], width: usize) -> Array {
    let [_, heads, size, dim] = pool.shape;
    let longest = lens.iter().copied().max().unwrap_or(0);
    Array::from_fn([lens.len(), heads, longest, dim], |[b, h, j, c]| {
        if j >= lens[b] {
            return 0.0;
        }
        pool.get([entries[b * width + j / size] as usize, h, j % size, c])
    })
}

fn attend(rng: &mut Rng, [k, v]: [Array; 2], dtypes: [sdpa::Dtype; 2], pool: Pool) {
    let lens = Memory::slice(&pool.lens).to_vec();
    let case: Case = small(rng, [k, v], dtypes, lens);
    let isas: Vec<Isa> = Isa::available().collect();
    let exec = Exec::serial().isa(rng.pick(&isas));
    let wanted = Wanted::draw(rng);
    let tensors = Stage::new(rng, &case, Home::Tensors);
    let expected = tensors.run("tensors", &mut Outs::blank(rng, &case, wanted), exec);
    let paged = Stage::over(rng, &case, Source::Pool(pool));
    paged.run("pages", &mut Outs::blank(rng, &case, wanted), exec).same("pages", &expected);
}
