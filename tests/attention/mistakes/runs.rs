//! 54–57: instruction sets, plans and workspaces that were made for something else.

use super::{ACCEPTED, Mistake, mistake, numbers};
use sdpa::{Attention, Bf16, Exec, Inputs, Isa, Outputs, Plan, Precision, View, ViewMut, Workspace};

pub(super) fn mistakes() -> Vec<Mistake> {
    let missing = Isa::known().filter(|name| Isa::available().all(|isa| isa.name() != *name));
    let mut all: Vec<_> = missing.map(lacking).collect();
    all.extend([lacking("avx1024"), lacking("")]);
    all.extend([
        mistake(54, "native precision without the instruction", native(), ACCEPTED),
        mistake(56, "plan of another shape", other_plan(), ACCEPTED),
        mistake(57, "workspace of another thread count", other_workspace(), ACCEPTED),
    ]);
    all
}

/// An [`Isa`] comes from the machine alone: there is none of a set that it lacks.
fn lacking(name: &'static str) -> Mistake {
    let got = Isa::from_name(name).map_or("none".to_owned(), |isa| format!("{isa}"));
    mistake(55, "an instruction set the machine lacks", got, "none")
}

const SHAPE: [usize; 4] = [1, 2, 300, 16];

/// Exact results, and a plan that says so.
fn native() -> String {
    let data: Vec<Bf16> = numbers(2 * 300 * 16).into_iter().map(Bf16::from_f32).collect();
    let x = View::bhld(&data, SHAPE).unwrap();
    let run = |isa, precision| {
        let mut out = vec![42.0; 2 * 300 * 16];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, SHAPE).unwrap());
        let problem = Attention::new().precision(precision).problem(Inputs::new(x, x, x), outputs).unwrap();
        let plan = Plan::new(&problem, Exec::serial().isa(isa));
        let explained = plan.explain(&problem, None).to_string();
        problem.run(&plan, &mut Workspace::new());
        (out, explained)
    };
    for isa in Isa::available().filter(|isa| !isa.has_native_bf16()) {
        let (got, explained) = run(isa, Precision::Native);
        assert_eq!(got, run(isa, Precision::Exact).0, "{isa}");
        let words = format!("{isa} has no fast bf16 dot product here; Native has no effect");
        assert!(explained.contains(&words), "{explained}");
    }
    ACCEPTED.to_owned()
}

/// Planned anew, with the same bits.
fn other_plan() -> String {
    let data = numbers(2 * 300 * 16);
    let run = |plan: Option<Plan>| {
        let x = View::bhld(&data, SHAPE).unwrap();
        let mut out = vec![42.0; 2 * 300 * 16];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, SHAPE).unwrap());
        let problem = Attention::new().problem(Inputs::new(x, x, x), outputs).unwrap();
        let own = Plan::new(&problem, Exec::serial());
        problem.run(&plan.unwrap_or(own), &mut Workspace::new());
        out
    };
    let (x, mut out) = ([0.5; 7 * 33], [0.0; 7 * 33]);
    let x = View::bhld(&x, [1, 1, 7, 33]).unwrap();
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 7, 33]).unwrap());
    let small = Attention::new().problem(Inputs::new(x, x, x), outputs).unwrap();
    assert_eq!(run(Some(Plan::new(&small, Exec::serial()))), run(None));
    ACCEPTED.to_owned()
}

/// Grown, or used in part, with the same bits.
fn other_workspace() -> String {
    let data = numbers(2 * 300 * 16);
    let x = View::bhld(&data, SHAPE).unwrap();
    let mut workspace = Workspace::new();
    let results = [1, 8, 2, 1].map(|threads| {
        let mut out = vec![42.0; 2 * 300 * 16];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, SHAPE).unwrap());
        let problem = Attention::new().problem(Inputs::new(x, x, x), outputs).unwrap();
        let plan = Plan::new(&problem, Exec::serial().threads(threads));
        problem.run(&plan, &mut workspace);
        out
    });
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    ACCEPTED.to_owned()
}
