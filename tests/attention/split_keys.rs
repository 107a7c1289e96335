//! Blocks of keys shared out where rows are few: plans for other problems of the same shape, and dimensions of any size.

use crate::memory::held;
use crate::support::{LAYOUTS, Tensors, execs};
use sdpa::{
    Alignment, Attention, BlockTable, Exec, Inputs, Mods, Outputs, Pages, Plan, Position, Run, ThreadPool, View,
    ViewMut, Window, Workspace,
};
use std::time::Duration;

/// One row against several blocks, by a plan for somebody else's problem.
#[test]
fn a_plan_for_a_batch_serves_ragged_sequences_of_its_shape() {
    let tensors = Tensors::normal([2, 4, 2, 1, 300, 16, 16], 3);
    let shape = [2, 4, 1, 16];
    for (isa, exec) in execs() {
        let mut out = vec![0.0; 2 * 4 * 16];
        let problem =
            Attention::new().problem(tensors.inputs(), Outputs::new(ViewMut::bhld(&mut out, shape).unwrap())).unwrap();
        let plan = Plan::new(&problem, exec);
        assert!(plan.partials_bytes() > 0, "{isa}");
        problem.run(&plan, &mut Workspace::new());
        // The same numbers end to end: rows before heads.
        let relaid = |from: View<'_>, rows: usize, heads: usize| -> Vec<f32> {
            let mut to = Vec::new();
            for b in 0..2 {
                for l in 0..rows {
                    for h in 0..heads {
                        to.extend((0..16).map(|d| *from.get([b, h, l, d]).unwrap()));
                    }
                }
            }
            to
        };
        let (q, k, v) =
            (relaid(tensors.q.view(), 1, 4), relaid(tensors.k.view(), 300, 2), relaid(tensors.v.view(), 300, 2));
        let inputs = Inputs::new(
            View::blhd(&q, [1, 2, 4, 16]).unwrap(),
            View::blhd(&k, [1, 600, 2, 16]).unwrap(),
            View::blhd(&v, [1, 600, 2, 16]).unwrap(),
        );
        let mut ragged = vec![0.0; 2 * 4 * 16];
        let problem = Attention::new()
            .problem(
                inputs.ragged(&[0, 1, 2], &[0, 300, 600]),
                Outputs::new(ViewMut::blhd(&mut ragged, [1, 2, 4, 16]).unwrap()),
            )
            .unwrap();
        problem.run(&plan, &mut Workspace::new());
        assert_eq!(out, ragged, "{isa}");
    }
}

/// Units are taken in the order in which their memory lies: block by block, or head by head.
#[test]
fn the_order_of_units_does_not_show() {
    let tensors = Tensors::normal([2, 6, 3, 2, 600, 16, 80], 8);
    for (isa, exec) in execs() {
        let run = |tensors: &Tensors| {
            let mut out = vec![0.0; 2 * 6 * 2 * 80];
            let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 6, 2, 80]).unwrap());
            let problem = Attention::new().problem(tensors.inputs(), outputs).unwrap();
            let plan = Plan::new(&problem, exec);
            assert!(plan.partials_bytes() > 0, "{isa}");
            problem.run(&plan, &mut Workspace::new());
            out
        };
        let expected = run(&tensors);
        for layout in LAYOUTS {
            assert_eq!(run(&tensors.laid_out(layout, layout, layout)), expected, "{isa}, {layout:?}");
        }
    }
}

/// Keys so long that a task has fewer rows than share a head.
#[test]
fn the_longest_keys_are_not_shared_out() {
    let dim = 20_000;
    let tensors = Tensors::normal([1, 4, 1, 1, 257, dim, 16], 5);
    let mut outs = Vec::new();
    for threads in [1, 2] {
        let mut out = vec![0.0; 4 * 16];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 4, 1, 16]).unwrap());
        let problem = Attention::new().problem(tensors.inputs(), outputs).unwrap();
        let plan = Plan::new(&problem, Exec::default().threads(threads));
        assert_eq!(plan.partials_bytes(), 0);
        problem.run(&plan, &mut Workspace::new());
        outs.push(out);
    }
    assert_eq!(outs[0], outs[1]);
}

/// Few rows meet values wider than a tile in runs of keys, their sums waiting where the results go; many rows do not.
#[test]
fn few_rows_and_wide_values_are_rows_of_a_whole() {
    const ROWS: usize = 40;
    const DIM: usize = 16;
    let keys = [1, 63, 64, 65, 127, 129, 192, 255, 256, 257, 321];
    // With the window a row's keys begin and end inside a run.
    let options = [Attention::new().causal(), Attention::new().window(Window::inclusive(Some(70), Some(2)))];
    for ((isa, exec), attention) in execs().flat_map(|exec| options.map(|attention| (exec, attention))) {
        for (keys, width) in keys.into_iter().zip([65, 128, 80, 144].into_iter().cycle()) {
            let tensors = Tensors::normal([1, 2, 1, ROWS, keys, DIM, width], 7);
            let run = |q: &[f32], rows: usize| {
                let mut out = vec![f32::NAN; 2 * rows * width];
                let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, rows, width]).unwrap());
                let q = View::bhld(q, [1, 2, rows, DIM]).unwrap();
                let inputs = Inputs::new(q, tensors.k.view(), tensors.v.view());
                let problem = attention.align(Alignment::BottomRight).problem(inputs, outputs).unwrap();
                let plan = Plan::new(&problem, exec);
                problem.run(&plan, &mut Workspace::new());
                out
            };
            let last = |rows: usize, of: &[f32], dim: usize| -> Vec<f32> {
                of.chunks_exact(ROWS * dim).flat_map(|head| &head[(ROWS - rows) * dim..]).copied().collect()
            };
            let whole = run(&tensors.q.data, ROWS);
            for rows in [1, 3, 8] {
                let few = run(&last(rows, &tensors.q.data, DIM), rows);
                let same = few.iter().zip(last(rows, &whole, width)).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{isa}, {keys} keys, {rows} rows, {width} wide");
            }
        }
    }
}

/// Memory is for the blocks that each sequence sees, not for the longest sequence in place of all.
#[test]
fn what_blocks_gather_goes_by_what_each_sequence_sees() {
    const PAGE: usize = 1 << 16;
    let (heads, dim) = ([32, 8], 128);
    let row = vec![0.5f32; dim];
    let pool = View::from_strides(&row, 0, [1, heads[1], PAGE, dim], [0, 0, 0, 1]).unwrap();
    let bytes = |short: usize, long: usize| {
        let lens: Vec<usize> = (0..short).map(|_| 1).chain([long]).collect();
        let width = long.div_ceil(PAGE);
        let entries = vec![0; width * lens.len()];
        let pages = Pages::new(pool, pool, BlockTable { entries: &entries, lens: &lens }).unwrap();
        let shape = [lens.len(), heads[0], 1, dim];
        let q = View::from_strides(&row, 0, shape, [0, 0, 0, 1]).unwrap();
        let mut out = vec![0.0; lens.len() * heads[0] * dim];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).unwrap());
        let problem = Attention::new().problem(Inputs::paged(q, pages), outputs).unwrap();
        Plan::new(&problem, Exec::serial()).partials_bytes()
    };
    // Four rows share a head: two vectors of maxima and sums, four rows of outputs.
    let unit = 4 * (2 * 16 + 4 * dim);
    for (short, long) in [(1000, 1_000_000usize), (63, 128 << 10), (0, 257)] {
        let results = unit * heads[1] * (short + long.div_ceil(256));
        assert_eq!(bytes(short, long), held(results, short + 1), "{short} of 1, one of {long}");
    }
    // Too much in proportion: rows are shared out.
    assert_eq!(bytes(3000, 300), 0);
}

/// Keys that no row sees take no memory, however many there are.
#[test]
fn keys_that_nobody_sees_take_no_memory() {
    const KEYS: usize = 1 << 40;
    let tensors = Tensors::normal([1, 2, 1, 2, 5, 16, 16], 4);
    let row = &tensors.k.data[..16];
    let kv = |keys| View::from_strides(row, 0, [1, 1, keys, 16], [0, 0, 0, 1]).unwrap();
    let run = |attention: Attention, inputs: Inputs<'_>, exec| {
        let mut out = vec![f32::NAN; 2 * 2 * 16];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, 2, 16]).unwrap());
        let problem = attention.problem(inputs, outputs).unwrap();
        let plan = Plan::new(&problem, exec);
        assert!(plan.partials_bytes() < 1 << 20);
        problem.run(&plan, &mut Workspace::new());
        out
    };
    for (_, exec) in execs() {
        let inputs = |keys| Inputs::new(tensors.q.view(), kv(keys), kv(keys));
        let (all, few) = (Attention::new(), Attention::new().causal().align(Alignment::TopLeft));
        assert_eq!(run(all, inputs(KEYS).kv_lens(&[5]), exec), run(all, inputs(5), exec));
        assert_eq!(run(few, inputs(KEYS), exec), run(few, inputs(2), exec));
    }
}

/// A worker that has nothing more to accumulate waits a little, then leaves the merge to the one that still has.
#[test]
fn whoever_comes_too_early_does_not_merge() {
    let tensors = Tensors::normal([1, 1, 1, 1, 4096, 16, 16], 9);
    let pool = ThreadPool::new(2).unwrap();
    let run = |exec: Exec<'_>, late: usize| {
        let mods = Mods::new().score(move |score: f32, at: Position| {
            if at.key == late {
                std::thread::sleep(Duration::from_millis(20));
            }
            score
        });
        let mut out = vec![f32::NAN; 16];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 16]).unwrap());
        let problem = Attention::new().problem(tensors.inputs(), outputs).unwrap();
        let plan = Plan::new(&problem, exec);
        assert!(plan.partials_bytes() > 0, "{plan}");
        problem.run_once_with(exec, Run::new().mods(&mods)).unwrap();
        out
    };
    let expected = run(Exec::serial(), usize::MAX);
    for late in [0, 300, 4095] {
        let exec = Exec::on(&pool).threads(2);
        assert_eq!(run(exec, late), expected, "key {late} takes long");
    }
}
