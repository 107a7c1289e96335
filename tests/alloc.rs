//! Memory: what a plan says it takes, and that a warm run takes none.

#[path = "support/counting.rs"]
mod counting;
mod support;

use counting::counted;
use sdpa::{Alignment, Attention, Exec, Isa, Outputs, Plan, ViewMut, Workspace};
use support::{Tensor, Tensors, execs, outputs, unwritten};

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
        for layout in [support::Layout::Bhld, support::Layout::Transposed] {
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
