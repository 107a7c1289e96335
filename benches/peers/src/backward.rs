//! Forward and backward of the named workloads: gradients in queries, keys and values.

#[cfg(feature = "candle")]
mod candle;
mod ours;

use crate::args::{Args, Part};
use crate::case::{self, Case};
use crate::elements::{Elements, Limits, WRONG};
use crate::failure::Result;
use crate::peer::{ACCURATE, Entry, Home, NATIVE, OURS, Peer, python, rust};
use crate::rounded::{Qkv, Rounded};
use crate::session::{Session, Task, Workers};
use crate::support::{self, Workload};
use crate::table::{self, Report, Work, aligned};
use ours::Way;
use rayon::prelude::*;
use sdpa::{Inputs, Mods, Shape, View, naive};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Largest error of a gradient that does not count as wrong. Gradients in bf16, which are rounded to 8 bits and may be summed
/// so, are compared, not judged.
fn wrong(elements: Elements) -> f64 {
    match elements {
        Elements::F32 => WRONG,
        _ => 1.0,
    }
}

/// A call and the gradient in its output, `[batch, heads, rows, dim]` in a file of f32 that its elements can hold.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Step {
    #[serde(flatten)]
    case: Case,
    d_out: PathBuf,
}

/// Ours on inputs of 16 bits, with output and gradients in f32.
const WIDE: &str = "sdpa-f32-out";

const BOTH: &[Elements] = &[Elements::F32, Elements::Bf16];

const ENTRIES: &[Entry] = &[
    rust(OURS, "sdpa").takes(BOTH),
    rust(NATIVE, "sdpa").takes(&[Elements::Bf16]),
    rust(ACCURATE, "sdpa").takes(BOTH),
    rust(WIDE, "sdpa").takes(&[Elements::Bf16]),
    rust("unfused", "matrixmultiply"),
    #[cfg(feature = "candle")]
    rust("candle", "candle-core"),
    python("torch").takes(BOTH),
];

/// The code behind a name, and its package.
pub(crate) fn rust_peer(name: &str) -> Option<(Box<dyn Peer<Step>>, &'static str)> {
    let entry = ENTRIES.iter().find(|entry| entry.name == name)?;
    let Home::Rust { package } = entry.home else { return None };
    let peer: Box<dyn Peer<Step>> = match name {
        OURS => Box::new(ours::Ours::new(Way::Exact)),
        NATIVE => Box::new(ours::Ours::new(Way::Native)),
        ACCURATE => Box::new(ours::Ours::new(Way::Accurate)),
        WIDE => Box::new(ours::Ours::new(Way::Wide)),
        "unfused" => Box::new(ours::Ours::new(Way::Unfused)),
        #[cfg(feature = "candle")]
        "candle" => Box::new(candle::Plain::default()),
        _ => return None,
    };
    Some((peer, package))
}

pub(crate) fn compare(args: &Args) -> Result<Report> {
    let entries = args.choose(ENTRIES)?;
    let mut session = Session::new(args, Part::Gradients)?;
    for &threads in &args.threads {
        let mut workers = Workers::start(&entries, threads, &mut session)?;
        let typed = args.workloads.iter().flat_map(|workload| args.elements.iter().map(move |&e| (workload, e)));
        for (&workload, elements) in typed {
            let Some(due) = workers.due(&mut session, workload.name, elements) else { continue };
            eprint!("{}: the gradients in f64{:40}\r", workload.name, "");
            let tensors = Tensors::new(workload, elements);
            let reference = Reference::compute(&tensors)?;
            let folder = session.folder();
            let body = Step { case: Case::write(&tensors.rounded, threads, folder)?, d_out: folder.join("d_out") };
            case::write(&body.d_out, &tensors.d_out)?;
            drop(tensors);
            let task = Task {
                due,
                body,
                work: Work::Flops(3.5 * workload.flops() as f64),
                rows_checked: reference.rows(),
                limits: Limits { own: wrong(elements), in_bf16: wrong(Elements::Bf16) },
            };
            workers.run(&mut session, &task, |gradients| reference.errors(gradients))?;
        }
    }
    Ok(session.report())
}

/// The table that people read.
pub(crate) fn print(report: &Report) -> String {
    let headings = [
        "task",
        "threads",
        "elements",
        "peer",
        "median",
        "rate",
        "ours / its",
        "error of dq",
        "of dk",
        "of dv",
        "runs",
    ];
    let mut lines = vec![headings.map(String::from)];
    for group in report.groups() {
        let ours = group.iter().find(|row| row.peer == OURS).and_then(|row| row.seconds);
        for row in group {
            let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
            let [dq, dk, dv] = [0, 1, 2].map(|i| or_dash(row.errors.get(i).map(|error| format!("{error:.1e}"))));
            lines.push([
                row.title(),
                row.threads.to_string(),
                row.elements.name().to_owned(),
                row.peer.clone(),
                or_dash(row.seconds.map(table::time)),
                or_dash(row.seconds.map(|seconds| row.work.rate(seconds))),
                or_dash(row.seconds.zip(ours).map(|(its, ours)| format!("{:.3}", ours / its))),
                dq,
                dk,
                dv,
                row.runs.to_string(),
            ]);
        }
    }
    let table = aligned(&lines, &[true, false, true, true, false, false, false, false, false, false, false]);
    let rate = "Times: forward and backward. Rates: 3.5 times the forward pass's useful operations. Errors: largest, absolute, \
                against f64.";
    format!("{}\n\n{table}\n{rate}\n\n{}{}", report.machine, report.ways(), report.notes())
}

/// A workload's queries, keys, values and gradient in the output, as the elements hold them.
struct Tensors {
    rounded: Rounded,
    d_out: Vec<f32>,
}

impl Tensors {
    fn new(workload: Workload, elements: Elements) -> Self {
        let Shape { batch, heads, q_len, value_dim, .. } = workload.shape;
        let mut normal = support::normal(43);
        let d_out = (0..batch * heads * q_len * value_dim).map(|_| elements.rounded(normal())).collect();
        Self { rounded: Rounded::new(workload, elements), d_out }
    }

    /// Key/value head `n` of all batches and the query heads on it, as a separate call.
    fn gradients(&self, n: usize) -> Result<[Vec<f64>; 3]> {
        let Rounded { workload, qkv: Qkv { q, k, v }, .. } = &self.rounded;
        let Shape { heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = workload.shape;
        let group = heads / kv_heads;
        let part = |data, [heads, rows, dim]: [usize; 3]| {
            let len = heads * rows * dim;
            let data: &[f32] = data;
            View::bhld(&data[n * len..][..len], [1, heads, rows, dim])
        };
        let inputs = Inputs::new(
            part(q, [group, q_len, head_dim])?,
            part(k, [1, kv_len, head_dim])?,
            part(v, [1, kv_len, value_dim])?,
        );
        let d_out = part(&self.d_out, [group, q_len, value_dim])?;
        let gradient = naive::gradients::<f64, _, _, _>(&workload.attention(), &inputs, d_out, None, &Mods::new())?;
        Ok([gradient.q, gradient.k, gradient.v])
    }
}

/// Pairs of row and key worth their time: some seconds. Of more, key/value heads are a sample, the first and the last
/// among them.
const BUDGET: usize = 1 << 25;

/// Gradients in f64 of some key/value heads.
struct Reference {
    shape: Shape,
    heads: Vec<(usize, [Vec<f64>; 3])>,
}

/// The key/value heads that are worth their time.
fn choose(shape: &Shape) -> Vec<usize> {
    let all = shape.batch * shape.kv_heads;
    let each = shape.heads / shape.kv_heads * shape.q_len * shape.kv_len;
    let some = (BUDGET / each.max(1)).clamp(2, all.max(2)).min(all);
    (0..some).map(|n| if some == 1 { 0 } else { n * (all - 1) / (some - 1) }).collect()
}

impl Reference {
    fn compute(tensors: &Tensors) -> Result<Self> {
        let heads = choose(&tensors.rounded.workload.shape).into_par_iter().map(|n| Ok((n, tensors.gradients(n)?)));
        Ok(Self { shape: tensors.rounded.workload.shape, heads: heads.collect::<Result<_>>()? })
    }

    /// Rows of queries that have an answer, and all rows.
    fn rows(&self) -> [usize; 2] {
        let Shape { batch, heads, kv_heads, q_len, .. } = self.shape;
        [self.heads.len() * (heads / kv_heads) * q_len, batch * heads * q_len]
    }

    /// The largest absolute errors of dq, dk and dv, which lie end to end; infinite if an element is not finite.
    fn errors(&self, gradients: &[f32]) -> Result<Vec<f64>> {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let keys = batch * kv_heads * kv_len;
        let lens = [batch * heads * q_len * head_dim, keys * head_dim, keys * value_dim];
        let wanted: usize = lens.iter().sum();
        if gradients.len() != wanted {
            return Err(format!("{} elements of gradients, but {wanted} wanted", gradients.len()).into());
        }
        let starts = [0, lens[0], lens[0] + lens[1]];
        let error = |i: usize| {
            let all = &gradients[starts[i]..][..lens[i]];
            if !all.iter().all(|x| x.is_finite()) {
                return f64::INFINITY;
            }
            let errors = self.heads.iter().flat_map(|(n, wanted)| {
                let wanted = &wanted[i];
                wanted.iter().zip(&all[n * wanted.len()..]).map(|(want, &got)| (want - f64::from(got)).abs())
            });
            errors.fold(0.0, f64::max)
        };
        Ok((0..3).map(error).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;

    /// On something with odd sizes.
    #[test]
    fn rust_peers_are_right() {
        let folder = Folder::new().unwrap();
        let odd = *support::WORKLOADS.iter().find(|workload| workload.name == "odd").unwrap();
        // Gradients rounded to bf16, and those by products of it, are off by some of its steps.
        for (elements, limit) in [(Elements::F32, WRONG), (Elements::Bf16, 1.0 / 32.0)] {
            let tensors = Tensors::new(odd, elements);
            let reference = Reference::compute(&tensors).unwrap();
            let case = Case::write(&tensors.rounded, 2, folder.as_ref()).unwrap();
            let step = Step { case, d_out: folder.path("d_out") };
            case::write(&step.d_out, &tensors.d_out).unwrap();
            for entry in ENTRIES.iter().filter(|entry| entry.elements.contains(&elements)) {
                let Some((mut peer, _)) = rust_peer(entry.name) else { continue };
                if peer.supports(&step).is_err() {
                    continue;
                }
                peer.prepare(&step).unwrap();
                peer.run().unwrap();
                let gradients = peer.output().unwrap();
                let errors = reference.errors(&gradients).unwrap();
                let right = errors.iter().all(|&error| error < limit);
                assert!(right, "{}, {}: {errors:?}", entry.name, elements.name());
                let mut wrong = gradients;
                wrong[7] += 0.5;
                assert!((reference.errors(&wrong).unwrap()[0] - 0.5).abs() < limit);
            }
        }
    }
}
