//! The bits of a row depend on that row's inputs and on nothing else: not on threads, neighbours, batch, layout, head
//! sharing, register width, plan or what the memory held before.

use crate::support::{
    LAYOUTS, Layout, Rng, Sizes, Tensor, Tensors, assert_same, execs, offset_of, run, run_inputs, run_with,
};
use sdpa::{Alignment, Attention, Exec, Inputs, Outputs, Plan, Point, Problem, View, ViewMut, Workspace};

/// Around tiles, panels, groups, tasks and blocks; shared heads; dims that are whole vectors and that are not; so much memory that
/// it is asked for ahead, of which each head has little.
const SIZES: [Sizes; 10] = [
    [1, 1, 1, 1, 1, 1, 1],
    [2, 2, 1, 5, 17, 3, 15],
    [1, 4, 2, 7, 64, 64, 64],
    [2, 3, 3, 33, 257, 16, 33],
    [1, 6, 2, 97, 300, 40, 20],
    [1, 2, 1, 250, 255, 17, 72],
    [2, 2, 2, 100, 513, 32, 48],
    [1, 1, 1, 13, 520, 300, 16],
    [1, 1, 1, 20, 70, 16, 300],
    [2, 20, 20, 16, 16, 64, 64],
];

/// Full, and causal with rows at the end, in the middle and before the start of the keys.
fn rules() -> [(Attention, Option<Alignment>); 4] {
    let causal = |alignment| (Attention::new().causal().align(alignment), Some(alignment));
    [
        (Attention::new(), None),
        causal(Alignment::BottomRight),
        causal(Alignment::Offset(20)),
        causal(Alignment::Offset(-3)),
    ]
}

/// Every size, rule and instruction set, on the calling thread.
fn every(mut check: impl FnMut(&str, &Attention, Option<Alignment>, &Tensors, Exec)) {
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let tensors = Tensors::normal(sizes, seed as u64);
        for (attention, rule) in rules() {
            for (isa, exec) in execs() {
                check(&format!("{sizes:?} {rule:?} {isa}"), &attention, rule, &tensors, exec);
            }
        }
    }
}

/// The same rule for rows that start at `first`.
fn from_row(attention: &Attention, rule: Option<Alignment>, tensors: &Tensors, first: usize) -> Attention {
    let (rows, keys) = (tensors.q.shape[2], tensors.k.shape[2]);
    rule.map_or(*attention, |rule| attention.align(Alignment::Offset(offset_of(rule, rows, keys) + first as isize)))
}

#[test]
#[cfg(feature = "rayon")]
fn threads_do_not_show() {
    let causal = Attention::new().causal().align(Alignment::BottomRight);
    let sizes =
        [[2, 4, 2, 300, 300, 64, 64], [1, 1, 1, 700, 520, 32, 40], [1, 8, 1, 90, 600, 40, 64], [1, 2, 2, 3, 9, 4, 4]];
    for (seed, sizes) in sizes.into_iter().enumerate() {
        let tensors = Tensors::normal(sizes, seed as u64);
        for attention in [Attention::new(), causal] {
            for (isa, serial) in execs() {
                let expected = run(&attention, &tensors, serial);
                for threads in [1, 2, 3, 8] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    for repeat in 0..3 {
                        let got = pool.install(|| run(&attention, &tensors, Exec::default().isa(isa)));
                        assert_same(&format!("{sizes:?} {isa}, pool of {threads}, run {repeat}"), &got, &expected);
                        // More threads asked for than the pool has, and fewer.
                        let exec = Exec::default().isa(isa).threads(threads + 1);
                        assert_same(
                            &format!("{sizes:?} {isa}, {threads} + 1"),
                            &run(&attention, &tensors, exec),
                            &expected,
                        );
                    }
                }
            }
        }
    }
}

#[test]
#[cfg(feature = "rayon")]
fn threads_are_used_where_there_is_work() {
    let tensors = Tensors::normal([2, 4, 2, 300, 300, 64, 64], 0);
    let mut answer = crate::support::unwritten(&tensors.inputs());
    let problem = Attention::new().problem(tensors.inputs(), crate::support::outputs(&mut answer)).unwrap();
    assert_eq!(Plan::new(&problem, Exec::default().threads(3)).workers(), 3);
    assert_eq!(Plan::new(&problem, Exec::serial()).workers(), 1);
}

#[test]
fn a_row_alone_is_the_row_of_the_call() {
    every(|what, attention, rule, tensors, exec| {
        let whole = run(attention, tensors, exec);
        let rows = tensors.q.shape[2];
        let edges = [0, 1, 4, 5, 6, 7, 15, 16, 95, 96, 97];
        for i in edges.into_iter().chain([rows / 2, rows - 1]).filter(|&i| i < rows) {
            let attention = from_row(attention, rule, tensors, i);
            let alone = run(&attention, &tensors.with_rows(i..i + 1), exec);
            assert_same(&format!("{what}, row {i}"), &alone, &whole.rows(i..i + 1));
        }
    });
}

#[test]
fn rows_can_be_split() {
    let mut rng = Rng::new(1);
    every(|what, attention, rule, tensors, exec| {
        let whole = run(attention, tensors, exec);
        let rows = tensors.q.shape[2];
        let mut first = 0;
        while first < rows {
            let last = rows.min(first + 1 + rng.below(rows));
            let attention = from_row(attention, rule, tensors, first);
            let part = run(&attention, &tensors.with_rows(first..last), exec);
            assert_same(&format!("{what}, rows {first}..{last}"), &part, &whole.rows(first..last));
            first = last;
        }
    });
}

#[test]
fn batches_and_heads_do_not_see_each_other() {
    every(|what, attention, _, tensors, exec| {
        let whole = run(attention, tensors, exec);
        let ([batch, heads, rows, _], [_, kv_heads, keys, _]) = (tensors.q.shape, tensors.k.shape);
        for b in 0..batch {
            let alone = Tensors {
                q: tensors.q.part(b..b + 1, 0..heads, 0..rows),
                k: tensors.k.part(b..b + 1, 0..kv_heads, 0..keys),
                v: tensors.v.part(b..b + 1, 0..kv_heads, 0..keys),
            };
            let expected = whole.part(b..b + 1, 0..heads, 0..rows);
            assert_same(&format!("{what}, batch {b}"), &run(attention, &alone, exec), &expected);
        }
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            let alone = Tensors {
                q: tensors.q.part(0..batch, h..h + 1, 0..rows),
                k: tensors.k.part(0..batch, g..g + 1, 0..keys),
                v: tensors.v.part(0..batch, g..g + 1, 0..keys),
            };
            let expected = whole.part(0..batch, h..h + 1, 0..rows);
            assert_same(&format!("{what}, head {h}"), &run(attention, &alone, exec), &expected);
        }
    });
}

#[test]
fn the_order_of_a_batch_does_not_show() {
    let order = [3, 0, 4, 1, 2];
    let tensors = Tensors::normal([5, 4, 2, 37, 90, 24, 40], 9);
    let permuted = |x: &Tensor| Tensor::from_fn(x.shape, |[b, h, l, d]| x.get([order[b], h, l, d]));
    let moved = Tensors { q: permuted(&tensors.q), k: permuted(&tensors.k), v: permuted(&tensors.v) };
    for (attention, rule) in rules() {
        for (isa, exec) in execs() {
            let (whole, moved) = (run(&attention, &tensors, exec), run(&attention, &moved, exec));
            for (to, from) in order.into_iter().enumerate() {
                let what = format!("{rule:?} {isa}: batch {from} at {to}");
                assert_same(&what, &moved.part(to..to + 1, 0..4, 0..37), &whole.part(from..from + 1, 0..4, 0..37));
            }
        }
    }
}

#[test]
fn layouts_do_not_show() {
    let mut rng = Rng::new(2);
    every(|what, attention, _, tensors, exec| {
        let expected = run(attention, tensors, exec);
        for layout in LAYOUTS {
            let got = run(attention, &tensors.laid_out(layout, layout, layout), exec);
            assert_same(&format!("{what} {layout:?}"), &got, &expected);
        }
        let [q, k, v] = core::array::from_fn(|_| rng.pick(&LAYOUTS));
        let got = run(attention, &tensors.laid_out(q, k, v), exec);
        assert_same(&format!("{what} {q:?} {k:?} {v:?}"), &got, &expected);
    });
}

#[test]
fn layouts_of_outputs_do_not_show() {
    every(|what, attention, _, tensors, exec| {
        let expected = run(attention, tensors, exec);
        for layout in LAYOUTS {
            let mut out = expected.out.laid_out(layout);
            let mut lse = expected.lse.laid_out(layout);
            let blank = out.data.clone();
            out.data.fill(7.0);
            lse.data.fill(7.0);
            let view = |x: &mut Tensor| (x.offset, x.shape, x.strides);
            let ((o, shape, strides), (lo, lshape, lstrides)) = (view(&mut out), view(&mut lse));
            let outputs = sdpa::Outputs::new(sdpa::ViewMut::from_strides(&mut out.data, o, shape, strides).unwrap())
                .lse(sdpa::ViewMut::from_strides(&mut lse.data, lo, lshape, lstrides).unwrap());
            attention.problem(tensors.inputs(), outputs).unwrap().run_once(exec);
            // Gaps between the elements are nobody's to write.
            let gaps = blank.iter().zip(&out.data).filter(|(was, _)| was.is_nan());
            assert!(gaps.into_iter().all(|(_, now)| *now == 7.0), "{what} {layout:?}: wrote between the elements");
            assert_same(&format!("{what} {layout:?}"), &crate::support::Answer { out, lse }, &expected);
        }
    });
}

#[test]
fn named_layouts_are_what_they_say() {
    let sizes @ [b, h, hkv, l, _, d, _] = [2, 6, 2, 37, 37, 24, 24];
    let Tensors { q, k, v } = Tensors::normal(sizes, 3);
    let tensors = Tensors { q, k, v };
    // Rows of q heads, k heads, v heads, side by side.
    let mut packed = Vec::new();
    for [b, l, ..] in crate::support::indices([b, l, 1, 1]) {
        for (x, heads) in [(&tensors.q, h), (&tensors.k, hkv), (&tensors.v, hkv)] {
            packed.extend((0..heads * d).map(|n| x.get([b, n / d, l, n % d])));
        }
    }
    // Written where they are read.
    let mut other = vec![0.0; packed.len()];
    let of_packed = ViewMut::packed_qkv(&mut other, [b, l, h, d], hkv).unwrap();
    for (mut view, x) in of_packed.into_iter().zip([&tensors.q, &tensors.k, &tensors.v]) {
        crate::support::indices(x.shape).for_each(|at| *view.get_mut(at).unwrap() = x.get(at));
    }
    assert_eq!(other, packed);
    let [pq, pk, pv] = View::packed_qkv(&packed, [b, l, h, d], hkv).unwrap();
    let blhd = tensors.laid_out(Layout::Blhd, Layout::Blhd, Layout::Blhd);
    let of_blhd = |x: &'static str| {
        let (x, heads) = match x {
            "q" => (&blhd.q, h),
            "k" => (&blhd.k, hkv),
            _ => (&blhd.v, hkv),
        };
        View::blhd(&x.data, [b, l, heads, d]).unwrap()
    };
    for (attention, _) in rules() {
        for (isa, exec) in execs() {
            let expected = run(&attention, &tensors, exec);
            let got = run_inputs(&attention, Inputs::new(pq, pk, pv), exec);
            assert_same(&format!("{isa}, packed"), &got, &expected);
            let got = run_inputs(&attention, Inputs::new(of_blhd("q"), of_blhd("k"), of_blhd("v")), exec);
            assert_same(&format!("{isa}, blhd"), &got, &expected);
        }
    }
}

/// `x` with every index along the dimensions named replaced by 0: what a stride of 0 shows.
fn repeated(x: &Tensor, dims: [bool; 4]) -> (Tensor, Tensor) {
    let keep = |i: [usize; 4]| core::array::from_fn(|n| if dims[n] { 0 } else { i[n] });
    let mut broadcast = x.clone();
    for (stride, dim) in broadcast.strides.iter_mut().zip(dims) {
        *stride = if dim { 0 } else { *stride };
    }
    (broadcast, Tensor::from_fn(x.shape, |i| x.get(keep(i))))
}

#[test]
fn broadcasts_are_repetitions() {
    let tensors = Tensors::normal([2, 4, 2, 20, 70, 24, 40], 4);
    for bits in 0..16 {
        let dims = core::array::from_fn(|n| bits >> n & 1 == 1);
        let ((q, q2), (k, k2), (v, v2)) =
            (repeated(&tensors.q, dims), repeated(&tensors.k, dims), repeated(&tensors.v, dims));
        for (attention, rule) in rules() {
            for (isa, exec) in execs() {
                let zero = Tensors { q: q.clone(), k: k.clone(), v: v.clone() };
                let copied = Tensors { q: q2.clone(), k: k2.clone(), v: v2.clone() };
                let what = format!("{rule:?} {isa}, stride 0 in {dims:?}");
                assert_same(&what, &run(&attention, &zero, exec), &run(&attention, &copied, exec));
            }
        }
    }
}

#[test]
fn shared_heads_are_repeated_heads() {
    for (heads, kv_heads) in [(6, 1), (6, 2), (6, 3), (8, 1)] {
        for rows in [1, 3, 40] {
            let tensors = Tensors::normal([2, heads, kv_heads, rows, 270, 24, 40], 5);
            let repeat = |x: &Tensor| {
                let [b, _, l, d] = x.shape;
                Tensor::from_fn([b, heads, l, d], |[b, h, l, d]| x.get([b, h / (heads / kv_heads), l, d]))
            };
            let apart = Tensors { q: tensors.q.clone(), k: repeat(&tensors.k), v: repeat(&tensors.v) };
            for (attention, rule) in rules() {
                for (isa, exec) in execs() {
                    let what = format!("{rule:?} {isa}, {heads} heads on {kv_heads}, {rows} rows");
                    assert_same(&what, &run(&attention, &tensors, exec), &run(&attention, &apart, exec));
                }
            }
        }
    }
}

#[test]
fn register_width_does_not_show() {
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let tensors = Tensors::normal(sizes, seed as u64);
        for (attention, rule) in rules() {
            let mut fused = execs().filter(|(isa, _)| isa.has_fma());
            let Some((first, exec)) = fused.next() else { return };
            let expected = run(&attention, &tensors, exec);
            for (isa, exec) in fused {
                let what = format!("{sizes:?} {rule:?}: {isa} against {first}");
                assert_same(&what, &run(&attention, &tensors, exec), &expected);
            }
        }
    }
}

#[test]
fn plans_and_memory_do_not_show() {
    let mut workspace = Workspace::new();
    let other = Tensors::normal([3, 2, 2, 50, 40, 8, 100], 6);
    let mut answer = crate::support::unwritten(&other.inputs());
    let problem = Attention::new().problem(other.inputs(), crate::support::outputs(&mut answer)).unwrap();
    let foreign: Vec<Plan> = execs().map(|(_, exec)| Plan::new(&problem, exec)).collect();
    every(|what, attention, _, tensors, exec| {
        let expected = run(attention, tensors, exec);
        for repeat in 0..2 {
            let got = run_with(attention, tensors, exec, None, &mut workspace);
            assert_same(&format!("{what}, used workspace, run {repeat}"), &got, &expected);
        }
        let plan = foreign.iter().find(|plan| what.ends_with(plan.isa().name())).unwrap();
        let got = run_with(attention, tensors, exec, Some(plan), &mut workspace);
        assert_same(&format!("{what}, plan of another shape"), &got, &expected);
    });
}

/// A plan that divides the keys of few rows, given to a call of the same shape that needs whole rows.
#[test]
fn a_plan_that_divides_keys_serves_a_call_that_writes_scores() {
    let [q_shape, of_scores] = [[1, 2, 3, 8], [1, 2, 3, 600]];
    let tensors = Tensors::normal([1, 2, 2, 3, 600, 8, 8], 7);
    let written = |plan_of: &dyn Fn(&Problem<'_>) -> Plan| {
        let (mut out, mut scores) = (vec![9.0; 2 * 3 * 8], vec![9.0; 2 * 3 * 600]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, q_shape).unwrap());
        let outputs = outputs.scores(Point::Raw, ViewMut::bhld(&mut scores, of_scores).unwrap());
        let problem = Attention::new().problem(tensors.inputs(), outputs).unwrap();
        let plan = plan_of(&problem);
        problem.run(&plan, &mut Workspace::new());
        [out, scores].map(|numbers| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    for (what, exec) in execs() {
        let mut out = vec![0.0; 2 * 3 * 8];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, q_shape).unwrap());
        let dividing = Plan::new(&Attention::new().problem(tensors.inputs(), outputs).unwrap(), exec);
        assert!(dividing.partials_bytes() > 0, "{what}: keys are not divided");
        assert!(written(&|_| dividing) == written(&|problem| Plan::new(problem, exec)), "{what}");
    }
}
