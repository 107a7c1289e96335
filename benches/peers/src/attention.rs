//! Attention on the named workloads.

use crate::args::{Args, Part};
use crate::case::Case;
use crate::failure::Result;
use crate::peers::{OURS, PEERS};
use crate::reference::Reference;
use crate::session::{Folder, Task, WRONG, Workers};
use crate::support::{self, Workload};
use crate::table::{Report, Work};
use sdpa::Shape;
use std::collections::HashMap;

pub(crate) fn compare(args: &Args) -> Result<Report> {
    let entries = args.choose(PEERS)?;
    let folder = Folder::new()?;
    let mut report = Report { machine: support::machine(), rows: Vec::new(), left_out: Vec::new() };
    let mut references: HashMap<&str, Reference> = HashMap::new();
    for &threads in &args.threads {
        let mut workers = Workers::start(&entries, Part::Attention, threads, args, &mut report)?;
        for workload in &args.workloads {
            eprint!("{}: the answer in f64{:40}\r", workload.name, "");
            let tensors = workload.tensors();
            let reference = match references.entry(workload.name) {
                std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::hash_map::Entry::Vacant(unknown) => unknown.insert(Reference::compute(&tensors)?),
            };
            let task = Task {
                name: workload.name.to_owned(),
                threads,
                body: Case::write(&tensors, threads, folder.as_ref())?,
                work: work(workload),
                rows_checked: reference.rows(),
                wrong: WRONG,
            };
            drop(tensors);
            workers.run(&task, |out| Ok(vec![reference.error(out)?]), args.seconds, &folder, &mut report);
        }
    }
    Ok(report)
}

/// One row a head is bound by reading keys and values; everything else by arithmetic.
fn work(workload: &Workload) -> Work {
    let Shape { batch, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = workload.shape;
    match q_len {
        1 => Work::Bytes((batch * kv_heads * kv_len * (head_dim + value_dim) * size_of::<f32>()) as f64),
        _ => Work::Flops(workload.flops() as f64),
    }
}

/// The table that people read.
pub(crate) fn print(report: &Report, markdown: bool) -> String {
    let table = if markdown { report.markdown(OURS) } else { report.table(OURS) };
    let rate = "Rates: useful operations, or bytes of keys and values, over the median.";
    format!("{}\n\n{table}\n{rate}\n\n{}{}", report.machine, report.ways(), report.notes())
}
