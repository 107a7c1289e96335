//! Attention on the named workloads.

use crate::args::{Args, Part};
use crate::case::Case;
use crate::elements::{Elements, Limits};
use crate::failure::Result;
use crate::peer::OURS;
use crate::peers::PEERS;
use crate::reference::Reference;
use crate::rounded::Rounded;
use crate::session::{Session, Task, Workers};
use crate::support::{self, Workload};
use crate::table::{Report, Work};
use sdpa::Shape;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

pub(crate) fn compare(args: &Args) -> Result<Report> {
    let entries = args.choose(PEERS)?;
    let mut session = Session::new(args, Part::Attention)?;
    let mut references: HashMap<(&str, Elements), Reference> = HashMap::new();
    for &threads in &args.threads {
        let mut workers = Workers::start(&entries, threads, &mut session)?;
        let typed = args.workloads.iter().flat_map(|workload| args.elements.iter().map(move |&e| (workload, e)));
        for (workload, elements) in typed {
            let Some(due) = workers.due(&mut session, workload.name, elements) else { continue };
            eprint!("{}: the answer in f64{:40}\r", workload.name, "");
            let tensors = Rounded::new(*workload, elements);
            let reference = match references.entry((workload.name, elements)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => unknown.insert(Reference::compute(&tensors)?),
            };
            let task = Task {
                due,
                body: Case::write(&tensors, threads, session.folder())?,
                work: work(workload, elements),
                rows_checked: reference.rows(),
                limits: Limits::of(elements, reference.largest()),
            };
            drop(tensors);
            workers.run(&mut session, &task, |out| Ok(vec![reference.error(out)?]))?;
        }
    }
    Ok(session.report())
}

/// Most query rows of a key/value head whose step takes the time of reading keys and values: see ../../DESIGN.md.
const MEMORY_BOUND_ROWS: usize = 16;

/// A step is memory-bound, unless many query heads share a key; everything else is compute-bound.
fn work(workload: &Workload, elements: Elements) -> Work {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = workload.shape;
    match q_len {
        1 if heads / kv_heads <= MEMORY_BOUND_ROWS => {
            Work::Bytes((batch * kv_heads * kv_len * (head_dim + value_dim) * elements.bytes()) as f64)
        }
        _ => Work::Flops(workload.flops() as f64),
    }
}

/// The table that people read.
pub(crate) fn print(report: &Report, markdown: bool) -> String {
    let table = if markdown { report.markdown(OURS) } else { report.table(OURS) };
    let rate = "Rates: useful operations, or bytes of keys and values, over the median.";
    let exact = report.rows.iter().any(|row| row.elements == Elements::Bf16) && !support::isa().has_native_bf16();
    let bf16 = if exact {
        "bf16: Precision::Native has no effect on this machine, which has no fast dot products of pairs.\n"
    } else {
        ""
    };
    format!("{}\n\n{table}\n{rate}\n{bf16}\n{}{}", report.machine, report.ways(), report.notes())
}
