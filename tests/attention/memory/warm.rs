//! Warm runs allocate nothing: of any elements, layouts, options and sources.

use super::rules;
use crate::counting::counted;
use crate::kv_support::cache_of;
use crate::options::{Case, Wanted};
use crate::selected::random_lists;
use crate::support::{Rng, Tensor, Tensors, execs, outputs, unwritten};
use sdpa::{
    Attention, Bf16, BlockTable, Dtype, F16, Inputs, KvCache, KvShape, Outputs, Pages, Plan, View, ViewMut, Workspace,
};

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
            let mut cache = KvCache::new(b, KvShape { kv_heads: sizes[2], head_dim: sizes[5], value_dim: dv })
                .unwrap()
                .dtype(Dtype::F16)
                .unwrap();
            cache.append(view(&short_k, &k), view(&short_v, &v)).unwrap();
            let (mut out, shape) = (vec![F16::default(); b * h * l * dv], [b, h, l, dv]);
            for (isa, exec) in execs() {
                let mut workspace = Workspace::new();
                let mut call = |cached: bool| {
                    let q = view(&short_q, &q);
                    let inputs = match cached {
                        true => Inputs::cached(q, &cache),
                        false => Inputs::new(q, view(&short_k, &k), view(&short_v, &v)),
                    };
                    let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).unwrap());
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

#[test]
fn a_warm_run_allocates_nothing_with_any_options() {
    for seed in 500_000..500_150 {
        let case = Case::random(&mut Rng::new(seed), 200_000);
        for (isa, exec) in execs() {
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                let (mut full, mut workspace) = (case.unwritten(wanted), Workspace::new());
                case.run_into(exec, &mut full, &mut workspace);
                let held = workspace.bytes();
                // Checking and planning anew included.
                let warm = counted(|| {
                    case.run_into(exec, &mut full, &mut workspace);
                });
                assert_eq!(warm, (0, 0), "seed {seed}, {isa}");
                assert_eq!(workspace.bytes(), held);
            }
        }
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

/// Rows that select keys: from tensors, gathered in scratch, in place, and in blocks of few rows.
#[test]
fn a_warm_run_with_lists_allocates_nothing() {
    for seed in 0..12 {
        let rng = &mut Rng::new(seed);
        let rows = rng.pick(&[1, 3, 40]);
        let case = Case::plain(rng, [2, 4, 2, rows, 700, 32, 32]);
        let case = Case { selected: Some(random_lists(rng, &case)), ..case };
        let cache = cache_of(&case, rng);
        for (isa, exec) in execs() {
            for source in [case.inputs(), case.inputs_over(Inputs::cached(case.q.view(), &cache))] {
                let (mut full, mut workspace) = (case.unwritten(Wanted::MASS), Workspace::new());
                let problem = case.attention().problem(source, full.outputs()).expect("a good call");
                let plan = Plan::new(&problem, exec);
                problem.run(&plan, &mut workspace);
                let warm = counted(|| {
                    let problem = case.attention().problem(source, full.outputs()).expect("a good call");
                    assert_eq!(Plan::new(&problem, exec), plan);
                    problem.run(&plan, &mut workspace);
                });
                assert_eq!(warm, (0, 0), "seed {seed}, {isa}");
            }
        }
    }
}
