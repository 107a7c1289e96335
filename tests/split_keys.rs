//! Blocks of keys shared out where rows are few: plans for other problems of the same shape, and dimensions of any size.

mod support;

use sdpa::{Alignment, Attention, Exec, Inputs, Outputs, Plan, View, ViewMut, Workspace};
use support::{Tensors, execs};

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
        assert!(plan.gathered_bytes() > 0, "{isa}");
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
        assert_eq!(plan.gathered_bytes(), 0);
        problem.run(&plan, &mut Workspace::new());
        outs.push(out);
    }
    assert_eq!(outs[0], outs[1]);
}

/// Few rows meet values wider than a tile in runs of keys, their sums waiting where the results go; many rows do not.
#[test]
fn few_rows_and_wide_values_are_rows_of_a_whole() {
    const WHOLE: usize = 40;
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    for (isa, exec) in execs() {
        for (keys, width) in
            [1, 63, 64, 65, 127, 129, 192, 255, 256, 257, 321].into_iter().zip([65, 128, 80, 144].into_iter().cycle())
        {
            let tensors = Tensors::normal([1, 2, 1, WHOLE, keys, 16, width], 7);
            let run = |q: View<'_>, rows: usize| {
                let mut out = vec![f32::NAN; 2 * rows * width];
                let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, rows, width]).unwrap());
                let problem = attention.problem(Inputs::new(q, tensors.k.view(), tensors.v.view()), outputs).unwrap();
                let plan = Plan::new(&problem, exec);
                problem.run(&plan, &mut Workspace::new());
                out
            };
            let whole = run(tensors.q.view(), WHOLE);
            for rows in [1, 3, 8] {
                let skipped = WHOLE - rows;
                let tail: Vec<f32> =
                    tensors.q.data.chunks_exact(WHOLE * 16).flat_map(|head| &head[skipped * 16..]).copied().collect();
                let few = run(View::bhld(&tail, [1, 2, rows, 16]).unwrap(), rows);
                let expected: Vec<f32> =
                    whole.chunks_exact(WHOLE * width).flat_map(|head| &head[skipped * width..]).copied().collect();
                assert!(
                    few.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{isa}, {keys} keys, {rows} rows, {width} wide"
                );
            }
        }
    }
}
