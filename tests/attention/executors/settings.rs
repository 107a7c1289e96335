//! Calls, states and merges run on the threads that their settings name.

use super::pools::Recorded;
use crate::support::{Answer, Tensors, assert_same, outputs, unwritten};
use sdpa::parts::{BackwardState, BlockStates, KeyGradientShape, KeyGradientSums, RowStates};
use sdpa::{
    Attention, AttnState, BackwardPlan, Exec, Executor, Gradients, Inputs, Mods, Outputs, Plan, Position, Run, Saved,
    ThreadPool, ViewMut, Workspace,
};

const SIZES: [usize; 7] = [1, 4, 4, 210, 600, 20, 33];

/// Calls `work` with settings of one thread, of an executor that records its calls, and of a pool: all give the same, and
/// the executor is called.
fn same<T: PartialEq>(what: &str, work: impl Fn(Exec<'_>) -> T) {
    let (recorded, pool) = (Recorded::new(3), ThreadPool::new(3).unwrap());
    let expected = work(Exec::serial());
    assert!(work(Exec::on(&recorded)) == expected, "{what}: other numbers on an executor");
    assert!(!recorded.calls().is_empty(), "{what}: the executor was not called");
    assert!(work(Exec::on(&pool)) == expected, "{what}: other numbers on a pool");
}

fn written(inputs: Inputs<'_>, write: impl FnOnce(Outputs<'_>)) -> [Vec<f32>; 2] {
    let mut answer = unwritten(&inputs);
    write(outputs(&mut answer));
    [answer.out.data, answer.lse.data]
}

#[test]
fn calls_run_on_the_executor_of_their_settings() {
    let tensors = Tensors::normal(SIZES, 15);
    let mods = Mods::new().mask(|at: Position| !at.key.is_multiple_of(3));
    same("run_once", |exec| {
        written(tensors.inputs(), |outputs| {
            Attention::new().problem(tensors.inputs(), outputs).unwrap().run_once(exec);
        })
    });
    same("run_once_with", |exec| {
        written(tensors.inputs(), |outputs| {
            let problem = Attention::new().problem(tensors.inputs(), outputs).unwrap();
            problem.run_once_with(exec, Run::new().mods(&mods)).unwrap();
        })
    });
    same("unfused", |exec| {
        written(tensors.inputs(), |outputs| {
            sdpa_unfused::attention(&Attention::new(), tensors.inputs(), outputs, exec).unwrap();
        })
    });
}

#[test]
fn calls_without_settings_run_on_the_executor_of_the_run() {
    let tensors = Tensors::normal(SIZES, 16);
    let (recorded, other) = (Recorded::new(2), Recorded::new(2));
    written(tensors.inputs(), |outputs| {
        let run = Run::new().executor(&recorded);
        sdpa::attention_with(&Attention::new(), tensors.inputs(), outputs, run).unwrap();
    });
    assert_eq!(recorded.calls(), [2], "planned for the threads of the executor");
    // The run's goes before that of the settings.
    written(tensors.inputs(), |outputs| {
        let problem = Attention::new().problem(tensors.inputs(), outputs).unwrap();
        problem.run_once_with(Exec::on(&other), Run::new().executor(&recorded)).unwrap();
    });
    assert_eq!((recorded.calls().len(), other.calls().len()), (2, 0));
}

#[test]
fn states_run_on_the_executor_of_their_settings() {
    let tensors = Tensors::normal(SIZES, 17);
    let mods = Mods::new().mask(|at: Position| !at.key.is_multiple_of(3));
    for functions in [false, true] {
        same("state", |exec| {
            let mut state = AttnState::from_inputs(Attention::new(), tensors.inputs(), exec).unwrap();
            if functions {
                state = state.mods(&mods).unwrap();
            }
            state.push(tensors.k.view(), tensors.v.view()).unwrap();
            written(tensors.inputs(), |outputs| state.read(outputs).unwrap())
        });
    }
    let few = Tensors::normal([1, 8, 8, 8, 3000, 64, 64], 18);
    same("states of blocks", |exec| {
        let (mut blocks, mut rows) = (BlockStates::new(), RowStates::new([1, 8, 8, 64]).unwrap());
        blocks.compute(&Attention::new(), few.inputs(), 0, exec).unwrap();
        rows.fold(&blocks).unwrap();
        written(few.inputs(), |outputs| rows.write(None, outputs, exec).unwrap())
    });
}

/// Saved results of a call over the tensors.
fn saved<'a>(tensors: &'a Tensors, answer: &'a mut Answer) -> Saved<'a> {
    Attention::new().problem(tensors.inputs(), outputs(answer)).unwrap().run_once(Exec::serial());
    Saved::new(answer.out.view(), answer.lse.view(), answer.out.view())
}

#[test]
fn backward_calls_and_states_run_on_the_executor_of_their_settings() {
    let tensors = Tensors::normal(SIZES, 19);
    let mut answer = unwritten(&tensors.inputs());
    let saved = saved(&tensors, &mut answer);
    let [_, heads, _, rows, keys, dim, width] = SIZES;
    let dq = |write: &dyn Fn(Gradients<'_>)| {
        let mut dq = vec![0.0; heads * rows * dim];
        write(Gradients::new().q(ViewMut::bhld(&mut dq, [1, heads, rows, dim]).unwrap()));
        dq
    };
    same("backward", |exec| {
        dq(&|gradients| Attention::new().backward(tensors.inputs(), saved, gradients).unwrap().run_once(exec).unwrap())
    });
    same("unfused backward", |exec| {
        dq(&|gradients| {
            sdpa_unfused::attention_backward(&Attention::new(), tensors.inputs(), saved, gradients, exec).unwrap();
        })
    });
    let mods = Mods::new().mask(|at: Position| !at.key.is_multiple_of(3));
    for functions in [false, true] {
        same("backward state", |exec| {
            let mut state = BackwardState::new(Attention::new(), tensors.inputs(), saved, exec).unwrap();
            if functions {
                state = state.mods(&mods).unwrap();
            }
            let shape = KeyGradientShape { batch: 1, heads, keys, head_dim: dim, value_dim: width };
            let mut sums = KeyGradientSums::new(shape).unwrap();
            state.push(tensors.k.view(), tensors.v.view(), &mut sums).unwrap();
            let mut dq = vec![0.0; heads * rows * dim];
            state.write(Gradients::new().q(ViewMut::bhld(&mut dq, [1, heads, rows, dim]).unwrap())).unwrap();
            (dq, sums)
        });
    }
}

#[test]
fn a_plan_kept_from_one_executor_runs_on_another() {
    let tensors = Tensors::normal(SIZES, 20);
    let (recorded, pool) = (Recorded::new(3), ThreadPool::new(2).unwrap());
    let mut first = unwritten(&tensors.inputs());
    let problem = Attention::new().problem(tensors.inputs(), outputs(&mut first)).unwrap();
    let plan = Plan::new(&problem, Exec::on(&recorded));
    problem.run_once(Exec::serial());
    for executor in [&pool as &dyn Executor, &recorded] {
        let mut answer = unwritten(&tensors.inputs());
        let problem = Attention::new().problem(tensors.inputs(), outputs(&mut answer)).unwrap();
        problem.run_with(&plan, &mut Workspace::new(), Run::new().executor(executor)).unwrap();
        assert_same("another executor", &answer, &first);
    }
    assert_eq!(recorded.calls(), [3]);
}

#[test]
fn a_panic_in_a_function_passes_through_the_pool() {
    let (tensors, pool) = (Tensors::normal(SIZES, 21), ThreadPool::new(3).unwrap());
    let mods = Mods::new().mask(|at: Position| {
        assert!(at.key < 500, "a key too far");
        true
    });
    let expected = written(tensors.inputs(), |outputs| {
        Attention::new().problem(tensors.inputs(), outputs).unwrap().run_once(Exec::serial());
    });
    for _ in 0..3 {
        let mut answer = unwritten(&tensors.inputs());
        let problem = Attention::new().problem(tensors.inputs(), outputs(&mut answer)).unwrap();
        let run = || problem.run_once_with(Exec::on(&pool), Run::new().mods(&mods));
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).expect_err("a panic");
        assert_eq!(*panic.downcast::<&str>().unwrap(), "a key too far");
        let after = written(tensors.inputs(), |outputs| {
            Attention::new().problem(tensors.inputs(), outputs).unwrap().run_once(Exec::on(&pool));
        });
        assert!(after == expected, "after a panic");
    }
}

#[test]
fn callers_at_once_share_a_pool() {
    let (tensors, pool) = (Tensors::normal(SIZES, 22), ThreadPool::new(3).unwrap());
    let call = |exec: Exec<'_>| {
        written(tensors.inputs(), |outputs| {
            Attention::new().problem(tensors.inputs(), outputs).unwrap().run_once(exec);
        })
    };
    let expected = call(Exec::serial());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..10).for_each(|_| assert!(call(Exec::on(&pool)) == expected, "callers at once")));
        }
    });
}

#[test]
fn warm_backward_calls_on_a_pool_allocate_nothing() {
    let (tensors, pool) = (Tensors::normal(SIZES, 23), ThreadPool::new(3).unwrap());
    let mut answer = unwritten(&tensors.inputs());
    let saved = saved(&tensors, &mut answer);
    let (mut workspace, mut dq) = (Workspace::new(), vec![0.0; 4 * 210 * 20]);
    let mut call = || {
        let gradients = Gradients::new().q(ViewMut::bhld(&mut dq, [1, 4, 210, 20]).unwrap());
        let problem = Attention::new().backward(tensors.inputs(), saved, gradients).unwrap();
        let plan = BackwardPlan::new(&problem, Exec::on(&pool));
        problem.run_with(&plan, &mut workspace, Run::new().executor(&pool)).unwrap();
    };
    call();
    assert_eq!(crate::counting::counted(call), (0, 0));
}
