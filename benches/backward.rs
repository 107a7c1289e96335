//! The backward pass: time of forward and backward together and of backward alone, as shares of the machine's peak, on
//! shapes that people train. `cargo bench --bench backward`, with a filter on names: `-- bert`.
//!
//! Operations are 2.5 times the forward pass's for backward and 3.5 times for both: five products of matrices beside two.
//!
//! Then pairs of alternating calls, as ratios: what dropout costs, what causal rows and windows save, and a second
//! thread. Their names begin with `ratio`: `-- ratio`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::{medians, random};
use sdpa::{
    Attention, BackwardPlan, Exec, Gradients, Inputs, Isa, Outputs, Plan, Saved, Shape, View, ViewMut, Workspace, probe,
};
use support::{WORKLOADS, Workload};

const NAMES: [&str; 7] = [
    "bert-512",
    "bert-b8-128",
    "gpt2-1024-causal",
    "long-4096",
    "llama-2048-gqa",
    "window-256-of-4096",
    "softcap-1024-causal",
];
const ROUNDS: usize = 7;

/// A call's tensors, results and gradients, and the memory that is kept between runs.
struct Step {
    attention: Attention,
    shape: Shape,
    tensors: [Vec<f32>; 4],
    out: Vec<f32>,
    lse: Vec<f32>,
    gradients: [Vec<f32>; 3],
    workspace: Workspace,
}

impl Step {
    fn new(workload: &Workload) -> Self {
        let shape = workload.shape;
        let [q, k, v, out] = sizes(&shape).map(|shape| shape.iter().product());
        Self {
            attention: workload.attention(),
            shape,
            tensors: [(q, 1), (k, 2), (v, 3), (out, 4)].map(|(n, seed)| random(n, seed)),
            out: vec![0.0; out],
            lse: vec![0.0; out / shape.value_dim],
            gradients: [q, k, v].map(|n| vec![0.0; n]),
            workspace: Workspace::new(),
        }
    }

    fn forward(&mut self, exec: Exec) {
        let [q, k, v, out] = sizes(&self.shape);
        let [b, h, l, _] = out;
        let outputs = Outputs::new(ViewMut::bhld(&mut self.out, out).expect("it fits"));
        let outputs = outputs.lse(ViewMut::bhl(&mut self.lse, [b, h, l]).expect("it fits"));
        let inputs = Inputs::new(view(&self.tensors[0], q), view(&self.tensors[1], k), view(&self.tensors[2], v));
        let problem = self.attention.problem(inputs, outputs).expect("a good call");
        let plan = Plan::new(&problem, exec);
        problem.run(&plan, &mut self.workspace);
    }

    fn backward(&mut self, exec: Exec) {
        let [q, k, v, out] = sizes(&self.shape);
        let [b, h, l, _] = out;
        let inputs = Inputs::new(view(&self.tensors[0], q), view(&self.tensors[1], k), view(&self.tensors[2], v));
        let saved = Saved::new(view(&self.out, out), view(&self.lse, [b, h, l, 1]), view(&self.tensors[3], out));
        let [dq, dk, dv] = &mut self.gradients;
        let gradients = Gradients::new()
            .q(ViewMut::bhld(dq, q).expect("it fits"))
            .k(ViewMut::bhld(dk, k).expect("it fits"))
            .v(ViewMut::bhld(dv, v).expect("it fits"));
        let problem = self.attention.backward(inputs, saved, gradients).expect("a good call");
        let plan = BackwardPlan::new(&problem, exec);
        problem.run(&plan, &mut self.workspace).expect("memory");
    }
}

/// Shapes of q, k, v and the output.
fn sizes(shape: &Shape) -> [[usize; 4]; 4] {
    let &Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    [
        [batch, heads, q_len, head_dim],
        [batch, kv_heads, kv_len, head_dim],
        [batch, kv_heads, kv_len, value_dim],
        [batch, heads, q_len, value_dim],
    ]
}

fn view(data: &[f32], shape: [usize; 4]) -> View<'_> {
    View::bhld(data, shape).expect("data of this shape")
}

fn compare(workload: &Workload, isa: Isa, threads: usize) {
    let exec = Exec::default().isa(isa).threads(threads);
    let flops = workload.flops() as f64;
    let [mut both, mut back] = [Step::new(workload), Step::new(workload)];
    back.forward(exec);
    let rounds = if support::test_mode() { 1 } else { ROUNDS };
    let [both, back] = medians(
        rounds,
        [
            &mut || {
                both.forward(exec);
                both.backward(exec);
            },
            &mut || back.backward(exec),
        ],
    );
    let peak = probe::peak_flops(isa) * threads as f64;
    let share = |operations: f64, seconds: f64| 100.0 * operations * flops / seconds / peak;
    println!(
        "{:20} {isa:8} {threads} thread(s)  forward + backward {:9.2} ms ({:3.0} % of peak)  backward {:9.2} ms ({:3.0} %)",
        workload.name,
        both * 1e3,
        share(3.5, both),
        back * 1e3,
        share(2.5, back)
    );
}

/// A call as another one changes it.
#[derive(Clone, Copy)]
struct Case {
    workload: Workload,
    attention: Attention,
    threads: usize,
}

impl Case {
    fn new(workload: Workload) -> Self {
        Self { workload, attention: workload.attention(), threads: 1 }
    }

    fn dropout(self, p: f32) -> Self {
        Self { attention: self.attention.dropout(p, 42, 0), ..self }
    }
}

/// A name, a call, and the call that it is held against.
fn ratios() -> Vec<(&'static str, Case, Case)> {
    let named = |name| *WORKLOADS.iter().find(|workload| workload.name == name).expect("a workload of that name");
    let [bert, gpt2, long, window] =
        ["bert-512", "gpt2-1024-causal", "long-4096", "window-256-of-4096"].map(named).map(Workload::for_mode);
    let full = Case::new(Workload { causal: false, ..gpt2 });
    let one_head = Case::new(Workload { shape: Shape { heads: 1, kv_heads: 1, ..long.shape }, ..long });
    let [bert, gpt2, long, window] = [bert, gpt2, long, window].map(Case::new);
    vec![
        ("ratio: dropout over none, bert-512", bert.dropout(0.1), bert),
        ("ratio: dropout over none, gpt2-1024-causal", gpt2.dropout(0.1), gpt2),
        ("ratio: causal over full, 1024", gpt2, full),
        ("ratio: window of 256 over full, 4096", window, long),
        ("ratio: two threads over one, one head of 4096", Case { threads: 2, ..one_head }, one_head),
    ]
}

/// Times a pair alternately, forward, and forward and backward.
fn compare_pair(name: &str, case: Case, against: Case) {
    let step = |case: &Case| Step { attention: case.attention, ..Step::new(&case.workload) };
    let exec = |case: &Case| support::exec(case.threads);
    let [mut first, mut second, mut third, mut fourth] = [&case, &against, &case, &against].map(step);
    let rounds = if support::test_mode() { 1 } else { ROUNDS };
    let [forward, forward_against, both, both_against] = medians(
        rounds,
        [
            &mut || first.forward(exec(&case)),
            &mut || second.forward(exec(&against)),
            &mut || {
                third.forward(exec(&case));
                third.backward(exec(&case));
            },
            &mut || {
                fourth.forward(exec(&against));
                fourth.backward(exec(&against));
            },
        ],
    );
    println!("{name:46} forward {:.3}, forward + backward {:.3}", forward / forward_against, both / both_against);
}

fn main() {
    support::print_machine();
    let filter: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wanted = |name: &str| filter.is_empty() || filter.iter().any(|f| name.contains(f.as_str()));
    for workload in WORKLOADS.iter().filter(|workload| NAMES.contains(&workload.name) && wanted(workload.name)) {
        let workload = workload.for_mode();
        // The portable backend takes minutes for the larger ones, and nobody trains on it.
        for isa in Isa::available().filter(|isa| isa.has_fma() || support::test_mode()) {
            for threads in support::thread_counts() {
                compare(&workload, isa, threads);
            }
        }
    }
    for (name, case, against) in ratios().into_iter().filter(|(name, ..)| wanted(name)) {
        compare_pair(name, case, against);
    }
}
