//! Decoding steps from a cache allocate a block of keys when one begins, and nothing else.

use crate::counting::counted;
use crate::support::{Tensors, execs};
use core::num::NonZeroUsize;
use sdpa::{
    Alignment, Attention, Dtype, Exec, Inputs, KeyScales, KvCache, KvShape, Outputs, Plan, ViewMut, Window, Workspace,
};

/// Floats of a block of 256 keys of 20 and values of 33, which take 48, for two heads.
const BLOCK: usize = 256 * 2 * (20 + 48);

/// Floats of the block that step `i` begins: the first is for 16 keys, and grows by doubling. `None` if it begins none.
fn begins(i: usize) -> Option<usize> {
    match i {
        0 | 16 | 32 | 64 | 128 => Some(BLOCK / 256 * 16.max(2 * i)),
        _ => i.is_multiple_of(256).then_some(BLOCK),
    }
}

/// Bytes for what eight blocks gather: two heads, two rows of 48, maxima and sums in whole vectors. Doubles as it grows.
const GATHERED: usize = 4 * 8 * 2 * (2 * 16 + 2 * 48);

/// One step after another: appends a token, attends to it. Returns allocations and bytes of each.
fn steps(cache: &mut KvCache, attention: &Attention, exec: Exec, n: usize) -> Vec<(usize, usize)> {
    let Tensors { q, k, v } = Tensors::normal([1, 4, 2, 1, 1, 20, 33], 0);
    let (mut out, mut lse, mut workspace) = (vec![0.0; 4 * 33], vec![0.0; 4], Workspace::new());
    let mut step = |cache: &mut KvCache| {
        cache.append(k.view(), v.view()).unwrap();
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 4, 1, 33]).unwrap());
        let outputs = outputs.lse(ViewMut::bhl(&mut lse, [1, 4, 1]).unwrap());
        let problem = attention.problem(Inputs::cached(q.view(), cache), outputs).unwrap();
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, &mut workspace);
    };
    // The longest warms the workspace, on a cache of its own: where keys are shared out, it grows with their number.
    let mut longest = cache.clone();
    (1..n).for_each(|_| longest.append(k.view(), v.view()).unwrap());
    step(&mut longest);
    drop(longest);
    (0..n).map(|_| counted(|| step(cache))).collect()
}

#[test]
fn a_warm_step_allocates_a_block_every_256th_time() {
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    for (isa, exec) in execs() {
        let mut cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 20, value_dim: 33 }).unwrap();
        for (i, (calls, bytes)) in steps(&mut cache, &attention, exec, 1100).into_iter().enumerate() {
            if let Some(block) = begins(i) {
                // The block, its counter, and now and then a longer list of blocks.
                assert!((1..=4).contains(&calls), "{isa}: {calls} allocations in step {i}");
                assert!((4 * block..4 * block + 1024 + GATHERED).contains(&bytes), "{isa}: {bytes} bytes in step {i}");
            } else {
                assert_eq!((calls, bytes), (0, 0), "{isa}, step {i}");
            }
        }
        // Rolled back, the memory is there to be used again: of blocks, of whole ones that are left, of none.
        for len in [1030, 512, 511, 3, 0] {
            cache.truncate(0, len).unwrap();
            let again = 1100 - len;
            for (i, counts) in steps(&mut cache, &attention, exec, again).into_iter().enumerate() {
                let grows = (len + i).is_multiple_of(256) && counts.0 == 1 && counts.1 <= GATHERED;
                assert!(counts == (0, 0) || grows, "{isa}, step {i} after a rollback to {len}: {counts:?}");
            }
        }
    }
}

#[test]
fn a_warm_step_of_an_int8_cache_allocates_a_block_every_256th_time() {
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    for (isa, exec) in execs() {
        for keys in [KeyScales::PerToken, KeyScales::PerChannel(vec![0.05; 2 * 20])] {
            let mut cache =
                KvCache::new(1, KvShape { kv_heads: 2, head_dim: 20, value_dim: 33 }).unwrap().int8(keys).unwrap();
            for (i, (calls, bytes)) in steps(&mut cache, &attention, exec, 600).into_iter().enumerate() {
                // The block with its scales; what blocks gather where keys are shared out; and lists.
                let (most, room) = if begins(i).is_some() { (4, BLOCK + 2 * 2048 + 8192) } else { (0, 0) };
                assert!(calls <= most && bytes <= room, "{isa}: {calls} allocations, {bytes} bytes in step {i}");
            }
        }
    }
}

#[test]
fn a_warm_step_of_a_sliding_cache_allocates_nothing() {
    let window = Window::last_tokens(NonZeroUsize::new(300).unwrap()).keep_first(4);
    let attention = Attention::new().window(window).align(Alignment::BottomRight);
    for (isa, exec) in execs() {
        let mut cache = KvCache::sliding(
            1,
            KvShape { kv_heads: 2, head_dim: 20, value_dim: 33 },
            NonZeroUsize::new(300).unwrap(),
            4,
        )
        .unwrap();
        let (mut blocks, mut calls_late) = (0, 0);
        for (i, (calls, bytes)) in steps(&mut cache, &attention, exec, 3000).into_iter().enumerate() {
            blocks += bytes / (4 * BLOCK);
            if begins(i).is_none() {
                // A list of spare blocks, once.
                assert!(calls <= usize::from(i < 1024) && bytes < 1024, "{isa}: {calls}, {bytes} bytes in step {i}");
            } else if i > 1024 {
                assert!(bytes < 1024, "{isa}: {bytes} bytes in step {i}");
                calls_late += calls;
            }
        }
        // Only the list of blocks, which doubles, is still allocated.
        assert!(blocks <= 4 && calls_late <= 2, "{isa}: {blocks} blocks, {calls_late} late allocations");
    }
}

/// A step of a cache of 16 bits appends, rounds and attends in memory that is there.
#[test]
fn a_warm_step_on_short_elements_allocates_half_a_block() {
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for (isa, exec) in execs() {
            let mut cache =
                KvCache::new(1, KvShape { kv_heads: 2, head_dim: 20, value_dim: 33 }).unwrap().dtype(dtype).unwrap();
            for (i, (calls, bytes)) in steps(&mut cache, &attention, exec, 600).into_iter().enumerate() {
                if let Some(block) = begins(i) {
                    assert!(
                        (2 * block..2 * block + 1024).contains(&bytes),
                        "{isa}, {dtype}: {bytes} bytes in step {i}"
                    );
                } else {
                    assert_eq!((calls, bytes), (0, 0), "{isa}, {dtype}, step {i}");
                }
            }
        }
    }
}
