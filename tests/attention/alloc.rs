//! Memory: what a plan says it takes, and that a warm run takes none.

use crate::counting::counted;
use crate::support::{Tensor, Tensors, execs, outputs, unwritten};
use core::num::NonZeroUsize;
use sdpa::{
    Alignment, Attention, Bf16, BlockTable, Dtype, Exec, F16, Inputs, Isa, KeyScales, KvCache, Outputs, Pages, Plan,
    View, ViewMut, Window, Workspace,
};

fn rules() -> [Attention; 3] {
    let causal = Attention::new().causal();
    [Attention::new(), causal.align(Alignment::BottomRight), causal.align(Alignment::Offset(-3))]
}

/// Tensors in which every row is the same row: any length for the price of one.
fn endless(rows: usize, keys: usize, d: usize, dv: usize) -> Tensors {
    let mut tensors = Tensors::normal([1, 1, 1, 1, 1, d, dv], 0);
    let repeat = |x: &mut Tensor, n| (x.shape[2], x.strides[2]) = (n, 0);
    repeat(&mut tensors.q, rows);
    repeat(&mut tensors.k, keys);
    repeat(&mut tensors.v, keys);
    tensors
}

#[test]
fn the_counter_counts() {
    let (calls, bytes) = counted(|| drop(core::hint::black_box(vec![0u8; 1000])));
    assert_eq!((calls, bytes), (1, 1000));
}

#[test]
fn a_warm_run_allocates_nothing() {
    let all =
        [[1, 1, 1, 1, 1, 1, 1], [2, 6, 2, 100, 300, 20, 33], [1, 2, 1, 33, 520, 300, 16], [1, 1, 1, 7, 40, 16, 300]];
    for sizes in all {
        for layout in [crate::support::Layout::Bhld, crate::support::Layout::Transposed] {
            let mut tensors = Tensors::normal(sizes, 0).laid_out(layout, layout, layout);
            // Values that are not finite take a path of their own.
            for poison in [1.0, f32::INFINITY] {
                tensors.v.fill_row(sizes[4] - 1, poison);
                for (isa, exec) in execs() {
                    let mut workspace = Workspace::new();
                    for attention in rules() {
                        let mut answer = unwritten(&tensors.inputs());
                        let problem = attention.problem(tensors.inputs(), outputs(&mut answer)).unwrap();
                        let plan = Plan::new(&problem, exec);
                        problem.run(&plan, &mut workspace);
                        let held = workspace.bytes();
                        // Checking and planning anew allocate nothing either.
                        let warm = counted(|| {
                            let problem = attention.problem(tensors.inputs(), outputs(&mut answer)).unwrap();
                            assert_eq!(Plan::new(&problem, exec), plan);
                            problem.run(&plan, &mut workspace);
                        });
                        assert_eq!(warm, (0, 0), "{sizes:?} {layout:?} {isa}");
                        assert_eq!(workspace.bytes(), held);
                    }
                }
            }
        }
    }
}

/// Queries, keys and values of 16 bits, and outputs: from tensors, few rows and many, dense and strided, and from a cache.
#[test]
fn a_warm_run_on_short_elements_allocates_nothing() {
    let sizes =
        [[1, 1, 1, 1, 1, 1, 1], [2, 6, 2, 100, 300, 20, 33], [2, 6, 2, 1, 300, 20, 33], [1, 2, 1, 5, 40, 16, 300]];
    for sizes @ [b, h, _, l, _, _, dv] in sizes {
        for layout in [crate::support::Layout::Bhld, crate::support::Layout::Transposed] {
            let Tensors { q, k, v } = Tensors::normal(sizes, 0).laid_out(layout, layout, layout);
            let [short_q, short_v] = [&q, &v].map(|x| x.data.iter().map(|&x| Bf16::from_f32(x)).collect::<Vec<_>>());
            let short_k: Vec<_> = k.data.iter().map(|&x| F16::from_f32(x)).collect();
            fn view<'a, T>(data: &'a [T], x: &Tensor) -> View<'a, T> {
                View::from_strides(data, x.offset, x.shape, x.strides).unwrap()
            }
            let mut cache = KvCache::new(b, sizes[2], [sizes[5], dv]).unwrap().dtype(Dtype::F16).unwrap();
            cache.append(view(&short_k, &k), view(&short_v, &v)).unwrap();
            let (mut out, shape) = (vec![F16::default(); b * h * l * dv], [b, h, l, dv]);
            for (isa, exec) in execs() {
                let mut workspace = Workspace::new();
                let mut call = |cached: bool| {
                    let q = view(&short_q, &q);
                    let inputs = match cached {
                        true => Inputs::cached(q, &cache),
                        false => Inputs::of(q, view(&short_k, &k), view(&short_v, &v)),
                    };
                    let outputs = Outputs::of(ViewMut::bhld(&mut out, shape).unwrap());
                    let problem = Attention::new().problem(inputs, outputs).unwrap();
                    let plan = Plan::new(&problem, exec);
                    problem.run(&plan, &mut workspace);
                    assert!(workspace.bytes() >= plan.scratch_bytes());
                };
                for cached in [false, true] {
                    call(cached);
                    assert_eq!(counted(|| call(cached)), (0, 0), "{sizes:?} {layout:?} {isa}, cached: {cached}");
                }
            }
        }
    }
}

/// A step of a cache of 16 bits appends, rounds and attends in memory that is there.
#[test]
fn a_warm_step_on_short_elements_allocates_half_a_block() {
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for (isa, exec) in execs() {
            let mut cache = KvCache::new(1, 2, [20, 33]).unwrap().dtype(dtype).unwrap();
            for (i, (calls, bytes)) in steps(&mut cache, &attention, exec, 600).into_iter().enumerate() {
                if i % 256 == 0 {
                    assert!(
                        (2 * BLOCK..2 * BLOCK + 1024).contains(&bytes),
                        "{isa}, {dtype}: {bytes} bytes in step {i}"
                    );
                } else {
                    assert_eq!((calls, bytes), (0, 0), "{isa}, {dtype}, step {i}");
                }
            }
        }
    }
}

#[test]
fn a_cold_run_allocates_what_the_plan_says() {
    for (isa, exec) in execs() {
        for (d, dv) in [(1, 1), (64, 64), (80, 33), (128, 128), (300, 600), (1024, 1024)] {
            let tensors = endless(40, 300, d, dv);
            for attention in rules() {
                let mut answer = unwritten(&tensors.inputs());
                let problem = attention.problem(tensors.inputs(), outputs(&mut answer)).unwrap();
                let plan = Plan::new(&problem, exec);
                let mut workspace = Workspace::new();
                let (_, bytes) = counted(|| problem.run(&plan, &mut workspace));
                assert_eq!(workspace.bytes(), plan.scratch_bytes(), "{isa} {d} {dv}");
                // Besides the scratch: the list that holds it.
                let besides = bytes - plan.scratch_bytes();
                assert!(besides <= 256, "{isa} {d} {dv}: {besides} bytes more than the plan says");
            }
        }
    }
}

/// Scratch of a call, as planned, without running it.
fn planned(rows: usize, keys: usize, d: usize, dv: usize, exec: Exec) -> usize {
    let tensors = endless(rows, keys, d, dv);
    // Zeros that nobody touches cost nothing, whatever their number.
    let mut out = vec![0.0; rows * dv];
    let out = ViewMut::bhld(&mut out, [1, 1, rows, dv]).unwrap();
    let problem = Attention::new().problem(tensors.inputs(), Outputs::new(out)).unwrap();
    Plan::new(&problem, exec).scratch_bytes()
}

#[test]
fn scratch_is_bounded() {
    for isa in Isa::available() {
        for d in [1, 16, 64, 65, 128, 256, 257, 512, 1024] {
            for dv in [1, 16, 64, 65, 128, 256, 257, 512, 1024] {
                for threads in [1, 2, 8] {
                    let exec = Exec::serial().isa(isa).threads(threads);
                    for length in [1, 256, 8192] {
                        let bytes = planned(length, length, d, dv, exec);
                        assert!(bytes <= 1 << 20, "{isa} {d} {dv} length {length}: {bytes} bytes");
                    }
                }
            }
        }
    }
}

#[test]
fn scratch_does_not_grow_with_the_keys() {
    for (isa, exec) in execs() {
        for (d, dv) in [(64, 64), (128, 128), (300, 20), (1024, 1024)] {
            assert_eq!(planned(256, 256, d, dv, exec), planned(256, 8192, d, dv, exec), "{isa} {d} {dv}");
            assert_eq!(planned(1, 256, d, dv, exec), planned(1, 1 << 40, d, dv, exec), "{isa} {d} {dv}");
        }
    }
}

#[test]
fn a_long_run_takes_what_the_plan_says() {
    let exec = Exec::serial();
    let tensors = endless(8192, 8192, 64, 64);
    let mut answer = unwritten(&tensors.inputs());
    let problem = Attention::new().causal().problem(tensors.inputs(), outputs(&mut answer)).unwrap();
    let plan = Plan::new(&problem, exec);
    let mut workspace = Workspace::new();
    let (_, bytes) = counted(|| problem.run(&plan, &mut workspace));
    assert_eq!(workspace.bytes(), plan.scratch_bytes());
    assert!(bytes <= plan.scratch_bytes() + 256, "{bytes} bytes, planned {}", plan.scratch_bytes());
}

/// Floats of a block of 256 keys of 20 and values of 33, which take 48, for two heads.
const BLOCK: usize = 256 * 2 * (20 + 48);

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
        let mut cache = KvCache::new(1, 2, [20, 33]).unwrap();
        for (i, (calls, bytes)) in steps(&mut cache, &attention, exec, 1100).into_iter().enumerate() {
            if i % 256 == 0 {
                // The block, its counter, and now and then a longer list of blocks.
                assert!((1..=4).contains(&calls), "{isa}: {calls} allocations in step {i}");
                assert!((4 * BLOCK..4 * BLOCK + 1024 + GATHERED).contains(&bytes), "{isa}: {bytes} bytes in step {i}");
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
            let mut cache = KvCache::new(1, 2, [20, 33]).unwrap().int8(keys).unwrap();
            for (i, (calls, bytes)) in steps(&mut cache, &attention, exec, 600).into_iter().enumerate() {
                // The block with its scales; what blocks gather where keys are shared out; and lists.
                let (most, room) = if i % 256 == 0 { (4, BLOCK + 2 * 2048 + 8192) } else { (0, 0) };
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
        let mut cache = KvCache::sliding(1, 2, [20, 33], NonZeroUsize::new(300).unwrap(), 4).unwrap();
        let (mut blocks, mut calls_late) = (0, 0);
        for (i, (calls, bytes)) in steps(&mut cache, &attention, exec, 3000).into_iter().enumerate() {
            blocks += bytes / (4 * BLOCK);
            if !i.is_multiple_of(256) {
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

#[test]
fn a_warm_call_over_pages_allocates_nothing() {
    let Tensors { q, k, v } = Tensors::normal([2, 4, 2, 3, 600, 20, 33], 0);
    // Pages of seven keys of a pool that is the tensors' memory: the first of them for one sequence, others for the other.
    let pool = |x: &Tensor| {
        let d = x.shape[3];
        Tensor { shape: [160, 2, 7, d], strides: [7 * d as isize, 0, d as isize, 1], ..x.clone() }
    };
    let (k, v) = (pool(&k), pool(&v));
    let entries: Vec<u32> = (0..86).chain((0..86).map(|i| 159 - i)).collect();
    for (isa, exec) in execs() {
        let (mut workspace, mut out) = (Workspace::new(), vec![0.0; 2 * 4 * 3 * 33]);
        let mut call = || {
            let pages = Pages::new(k.view(), v.view(), BlockTable { entries: &entries, lens: &[600, 257] }).unwrap();
            let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 4, 3, 33]).unwrap());
            let problem = Attention::new().problem(Inputs::paged(q.view(), pages), outputs).unwrap();
            let plan = Plan::new(&problem, exec);
            problem.run(&plan, &mut workspace);
        };
        call();
        assert_eq!(counted(call), (0, 0), "{isa}");
    }
}
