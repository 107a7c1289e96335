//! What is printed: a line for each peer, or one for each task; and what is written for programs.

use crate::elements::Elements;
use crate::neighbour::Neighbour;
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// What bounds a task, and how much of it there is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Work {
    /// Useful floating-point operations.
    Flops(f64),
    /// Bytes that must be read.
    Bytes(f64),
    /// Tokens, those of padding not counted.
    Tokens(f64),
}

impl Work {
    pub(crate) fn rate(self, seconds: f64) -> String {
        match self {
            Self::Flops(n) => format!("{:.1} GFLOP/s", n / seconds / 1e9),
            Self::Bytes(n) => format!("{:.1} GB/s", n / seconds / 1e9),
            Self::Tokens(n) => format!("{:.0} tokens/s", n / seconds),
        }
    }
}

/// One peer on one task.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) task: String,
    pub(crate) threads: usize,
    pub(crate) elements: Elements,
    pub(crate) beside: Neighbour,
    pub(crate) peer: String,
    pub(crate) version: String,
    pub(crate) how: String,
    pub(crate) work: Work,
    /// Median; nothing if it was not timed.
    pub(crate) seconds: Option<f64>,
    pub(crate) least_seconds: Option<f64>,
    pub(crate) runs: usize,
    pub(crate) max_abs_error: f64,
    /// Largest absolute error of each part of the answer: of the output, or of each gradient.
    pub(crate) errors: Vec<f64>,
    /// Of how many.
    pub(crate) rows_checked: [usize; 2],
}

/// One that did not take part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LeftOut {
    pub(crate) task: String,
    pub(crate) threads: usize,
    /// Nothing if it took no part in anything.
    pub(crate) elements: Option<Elements>,
    pub(crate) peer: String,
    pub(crate) why: String,
    /// True if it should have.
    pub(crate) failed: bool,
}

/// Everything there is to say.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) machine: String,
    pub(crate) rows: Vec<Row>,
    pub(crate) left_out: Vec<LeftOut>,
}

/// Four digits and a unit.
pub(crate) fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s < 1e-3 => (s * 1e6, "µs"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let decimals = 3usize.saturating_sub(value.log10().floor().max(0.0) as usize);
    format!("{value:.decimals$} {unit}")
}

impl Row {
    /// The task, and what it was measured beside, if that was something.
    pub(crate) fn title(&self) -> String {
        match self.beside {
            Neighbour::Nothing => self.task.clone(),
            beside => format!("{} beside {}", self.task, beside.name()),
        }
    }

    /// A line to be read while others are still measured.
    pub(crate) fn line(&self) -> String {
        let timed = self.seconds.map(|seconds| format!("{}, {}, ", time(seconds), self.work.rate(seconds)));
        let (title, threads, elements, peer) = (self.title(), self.threads, self.elements.name(), &self.peer);
        let timed = timed.unwrap_or_default();
        format!("{title}, {threads} thread(s), {elements}: {peer}: {timed}off by {:.1e}", self.max_abs_error)
    }
}

impl Report {
    /// Rows of one task on one number of threads, in elements of one type, beside one neighbour, the fastest first.
    pub(crate) fn groups(&self) -> Vec<Vec<&Row>> {
        let mut groups: Vec<Vec<&Row>> = Vec::new();
        for row in &self.rows {
            let place = |row: &Row| (row.threads, row.elements, row.beside);
            let same = |group: &&mut Vec<&Row>| group[0].task == row.task && place(group[0]) == place(row);
            match groups.iter_mut().find(same) {
                Some(group) => group.push(row),
                None => groups.push(vec![row]),
            }
        }
        // Tasks in the order in which they came up, each in its types, on its numbers of threads, quiet and not.
        let place = |task: &str| self.rows.iter().position(|row| row.task == task);
        groups.sort_by_key(|group| {
            let Row { task, elements, threads, beside, .. } = group[0];
            (place(task), *elements, *threads, *beside)
        });
        for group in &mut groups {
            group.sort_by(|a, b| a.seconds.unwrap_or(0.0).total_cmp(&b.seconds.unwrap_or(0.0)));
        }
        groups
    }

    /// A line for each peer.
    pub(crate) fn table(&self, ours: &str) -> String {
        let headings = ["task", "threads", "elements", "peer", "median", "rate", "× ours", "max abs error", "runs"];
        let mut lines = vec![headings.map(String::from)];
        for group in self.groups() {
            let reference = group.iter().find(|row| row.peer == ours).and_then(|row| row.seconds);
            for (n, row) in group.iter().enumerate() {
                let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
                lines.push([
                    if n == 0 { row.title() } else { String::new() },
                    if n == 0 { row.threads.to_string() } else { String::new() },
                    if n == 0 { row.elements.name().to_owned() } else { String::new() },
                    row.peer.clone(),
                    or_dash(row.seconds.map(time)),
                    or_dash(row.seconds.map(|seconds| row.work.rate(seconds))),
                    or_dash(row.seconds.zip(reference).map(|(mine, ours)| format!("{:.2}", mine / ours))),
                    format!("{:.1e}", row.max_abs_error),
                    row.runs.to_string(),
                ]);
            }
        }
        aligned(&lines, &[true, false, true, true, false, false, false, false, false])
    }

    /// A line for each task, in Markdown.
    pub(crate) fn markdown(&self, ours: &str) -> String {
        let mut text = format!(
            "| workload | threads | elements | {ours} | fastest peer | × | the others |\n|---|---|---|---|---|---|---|\n"
        );
        for group in self.groups() {
            let timed: Vec<_> =
                group.iter().filter_map(|row| Some((row.peer.as_str(), row.seconds?, row.work))).collect();
            let Some(&(_, mine, work)) = timed.iter().find(|row| row.0 == ours) else { continue };
            // Other ways of using ours are among the others.
            let peers: Vec<_> = timed.iter().filter(|row| row.0 != ours).collect();
            let first = peers.iter().position(|row| !row.0.starts_with(ours));
            let rest = peers.iter().enumerate().filter(|(n, _)| Some(*n) != first);
            let others: Vec<_> = rest.map(|(_, (peer, seconds, _))| format!("{peer} {}", time(*seconds))).collect();
            let (fastest, times) = first.map_or_else(Default::default, |n| {
                let (peer, seconds, _) = peers[n];
                (format!("{peer} {}", time(*seconds)), format!("{:.2}", seconds / mine))
            });
            let Row { threads, elements, .. } = group[0];
            let _ = writeln!(
                text,
                "| {} | {threads} | {} | {} ({}) | {fastest} | {times} | {} |",
                group[0].title(),
                elements.name(),
                time(mine),
                work.rate(mine),
                others.join(", ")
            );
        }
        text
    }

    /// What did not take part, and why; each reason once.
    pub(crate) fn notes(&self) -> String {
        let mut notes: Vec<(&str, &str, Vec<String>)> = Vec::new();
        for LeftOut { task, elements, peer, why, .. } in &self.left_out {
            // A type that is not said is f32.
            let task = match elements {
                None | Some(Elements::F32) => task.clone(),
                Some(elements) => format!("{task} in {}", elements.name()),
            };
            match notes.iter_mut().find(|(who, known, _)| who == peer && known == why) {
                Some((.., tasks)) if tasks.contains(&task) => {}
                Some((.., tasks)) => tasks.push(task),
                None => notes.push((peer, why, vec![task])),
            }
        }
        // Peers that are left out of the same tasks for the same reason share a line.
        let mut lines: Vec<(Vec<&str>, &str, Vec<String>)> = Vec::new();
        for (peer, why, tasks) in notes {
            match lines.iter_mut().find(|(_, known, same)| *known == why && *same == tasks) {
                Some((peers, ..)) => peers.push(peer),
                None => lines.push((vec![peer], why, tasks)),
            }
        }
        let line = |(peers, why, tasks): &(Vec<&str>, &str, Vec<String>)| {
            format!("Left out: {}: {why} ({})\n", peers.join(", "), tasks.join(", "))
        };
        lines.iter().map(line).collect()
    }

    /// Versions, and how each peer goes about its tasks; each way once.
    pub(crate) fn ways(&self) -> String {
        let mut ways: Vec<String> = Vec::new();
        for Row { peer, version, how, .. } in &self.rows {
            let way = format!("{peer} {version}: {how}\n");
            if !ways.contains(&way) {
                ways.push(way);
            }
        }
        ways.sort();
        ways.concat()
    }
}

/// Columns under each other, to the left where so said.
pub(crate) fn aligned<const N: usize>(lines: &[[String; N]], left: &[bool; N]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for line in lines {
        let cells = line
            .iter()
            .zip(widths)
            .zip(left)
            .map(|((cell, width), left)| if *left { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(task: &str, threads: usize, peer: &str, seconds: Option<f64>) -> Row {
        Row {
            task: task.to_owned(),
            threads,
            elements: Elements::F32,
            beside: Neighbour::Nothing,
            peer: peer.to_owned(),
            version: "1.0".to_owned(),
            how: "somehow".to_owned(),
            work: Work::Flops(1e9),
            seconds,
            least_seconds: seconds,
            runs: 3,
            max_abs_error: 1e-7,
            errors: vec![1e-7],
            rows_checked: [1, 1],
        }
    }

    #[test]
    fn lines_are_grouped_and_sorted() {
        let rows = vec![
            row("b", 1, "sdpa", Some(0.01)),
            row("b", 1, "x", Some(0.03)),
            row("b", 1, "y", Some(0.02)),
            row("a", 1, "sdpa", None),
            row("b", 2, "sdpa", Some(5e-4)),
        ];
        let mut report = Report { machine: String::new(), rows, left_out: Vec::new() };
        let table = report.table("sdpa");
        let words: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[1][..6], ["b", "1", "f32", "sdpa", "10.00", "ms"]);
        assert_eq!(words[2][0], "y");
        assert_eq!(words[3][0], "x");
        assert_eq!(words[4][..6], ["b", "2", "f32", "sdpa", "500.0", "µs"]);
        assert_eq!(words[5][..5], ["a", "1", "f32", "sdpa", "-"]);
        let markdown = report.markdown("sdpa");
        assert!(
            markdown.contains("| b | 1 | f32 | 10.00 ms (100.0 GFLOP/s) | y 20.00 ms | 2.00 | x 30.00 ms |"),
            "{markdown}"
        );
        assert!(markdown.contains("| b | 2 | f32 | 500.0 µs (2000.0 GFLOP/s) |  |  |  |"), "{markdown}");
        // What is measured beside something is a separate group.
        report.rows.push(Row { beside: Neighbour::Memory, ..row("b", 1, "sdpa", Some(0.02)) });
        let markdown = report.markdown("sdpa");
        assert!(markdown.contains("| b beside memory | 1 | f32 | 20.00 ms (50.0 GFLOP/s) |  |  |  |"), "{markdown}");
    }
}
