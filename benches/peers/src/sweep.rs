//! GFLOP/s against length: a panel for every number of threads.

use crate::args::Args;
use crate::elements::Elements;
use crate::neighbour::Neighbour;
use crate::peers::PEERS;
use crate::pictures::{Axis, Level, LineChart, Picture, Scale, Series, page};
use crate::support::Workload;
use crate::table::{Report, Row, Work};
use sdpa::{Isa, probe};

/// Of the frame of a panel.
const SIZE: (f64, f64) = (420.0, 220.0);
/// More lines than colours cannot be told apart.
const LINES: usize = 7;

/// Draws the curves of ours and of the peers that are fastest at the greatest length, in the first type of elements, beside the
/// first neighbour.
pub(crate) fn picture(report: &Report, args: &Args) -> Picture {
    let names = fastest(report, args);
    let peak = Isa::available().map(probe::peak_flops).fold(0.0, f64::max) / 1e9;
    let mut plots = Vec::new();
    let mut legend = None;
    let elements = args.elements[0];
    for &threads in &args.threads {
        let points = |peer: &&str| {
            let rate = |workload| rate(report, peer, (threads, elements, args.beside[0]), workload).unwrap_or(f64::NAN);
            args.workloads.iter().map(|workload| (workload.shape.q_len as f64, rate(workload))).collect::<Vec<_>>()
        };
        let points: Vec<_> = names.iter().map(points).collect();
        let series: Vec<_> = names.iter().zip(&points).map(|(name, points)| Series { name, points }).collect();
        let chart = LineChart {
            title: &format!("{threads} thread{}", if threads == 1 { "" } else { "s" }),
            x: Axis { title: "length (rows and keys)", scale: Scale::Log2 },
            y: Axis { title: "GFLOP/s", scale: Scale::Linear },
            series: &series,
            levels: &[Level { name: "peak", y: peak * threads as f64 }],
            size: SIZE,
        };
        plots.push(chart.plot());
        legend = Some(chart.legend());
    }
    let note = "12 heads of 64, as many keys as rows, nothing masked. Medians, libraries measured alternately, every answer checked \
                against f64.\nDashed: what the cores do in products and sums alone.";
    page("Attention: GFLOP/s against length", note, 2, &plots, legend)
}

/// Useful operations over the median, in 10⁹ a second; nothing if the peer did not take part.
fn rate(report: &Report, peer: &str, place: (usize, Elements, Neighbour), workload: &Workload) -> Option<f64> {
    let mine = |row: &&Row| {
        (&*row.task, &*row.peer) == (workload.name, peer) && (row.threads, row.elements, row.beside) == place
    };
    let row = report.rows.iter().find(mine)?;
    let Work::Flops(flops) = row.work else { return None };
    Some(flops / row.seconds? / 1e9)
}

/// Ours first, then the peers in the order of their rates at the greatest length.
fn fastest(report: &Report, args: &Args) -> Vec<&'static str> {
    let at = |peer| {
        let place = (*args.threads.first()?, args.elements[0], args.beside[0]);
        Some(rate(report, peer, place, args.workloads.last()?).unwrap_or(0.0))
    };
    let mut names: Vec<_> = PEERS.iter().map(|entry| entry.name).collect();
    names[1..].sort_by(|a, b| at(b).partial_cmp(&at(a)).expect("rates are finite"));
    names.retain(|peer| report.rows.iter().any(|row| row.peer == *peer));
    names.truncate(LINES);
    names
}
