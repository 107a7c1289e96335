//! What was measured so far, in a file, so that a run that was interrupted can be continued.

use crate::elements::Elements;
use crate::failure::Result;
use crate::neighbour::Neighbour;
use crate::table::{LeftOut, Row};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What must be the same for rows of two runs to stand in one table: the first line of the file.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Conditions {
    pub(crate) command: String,
    pub(crate) machine: String,
    /// The time to spend on each peer and task.
    pub(crate) seconds: f64,
    /// Of the program's own file: another build may be faster or slower.
    pub(crate) build: String,
}

impl Conditions {
    pub(crate) fn now(command: &str, machine: &str, seconds: f64) -> Result<Self> {
        let mut hasher = DefaultHasher::new();
        fs::read(std::env::current_exe()?)?.hash(&mut hasher);
        // The peak behind the semicolon is measured anew each time.
        let machine = machine.split(';').next().unwrap_or_default().to_owned();
        Ok(Self { command: command.to_owned(), machine, seconds, build: format!("{:016x}", hasher.finish()) })
    }

    /// What differs from another's, in words.
    fn differs(&self, other: &Self) -> Option<String> {
        let of = |this: &Self| {
            let Self { command, machine, seconds, build } = this;
            [
                ("command", command.clone()),
                ("machine", machine.clone()),
                ("--seconds", seconds.to_string()),
                ("build", build.clone()),
            ]
        };
        let mut pairs = of(self).into_iter().zip(of(other));
        pairs.find(|(a, b)| a != b).map(|((what, mine), (_, its))| format!("{what} was {its:?}, and is {mine:?}"))
    }
}

/// A task, on `threads` threads, in elements of a type, beside a neighbour.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spot {
    pub(crate) task: String,
    pub(crate) threads: usize,
    pub(crate) elements: Elements,
    pub(crate) beside: Neighbour,
}

/// Everything about one spot: a further line of the file. Peers are measured alternately, so a spot is measured as a
/// whole.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measured {
    #[serde(flatten)]
    pub(crate) spot: Spot,
    /// Whoever was there: each has a row, or is left out.
    pub(crate) peers: Vec<String>,
    pub(crate) rows: Vec<Row>,
    pub(crate) left_out: Vec<LeftOut>,
}

/// A file of lines of JSON that grows with every spot that is measured; or none.
#[derive(Debug, Default)]
pub(crate) struct Record {
    file: Option<(PathBuf, File)>,
    known: Vec<Measured>,
}

impl Record {
    /// Goes on with a file, or begins it.
    ///
    /// # Errors
    /// If it was measured under other conditions, or is not such a file.
    pub(crate) fn open(path: &Path, conditions: &Conditions) -> Result<Self> {
        let bad = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|e| bad(&e))?;
        let text = fs::read_to_string(path).map_err(|e| bad(&e))?;
        // A line that has no end was being written when the run was interrupted.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut lines = text[..whole].lines();
        let (mut record, first) = (Self { file: Some((path.to_owned(), file)), known: Vec::new() }, lines.next());
        if let Some(first) = first {
            let its: Conditions = serde_json::from_str(first).map_err(|e| bad(&e))?;
            if let Some(difference) = conditions.differs(&its) {
                return Err(bad(&format!("cannot be continued: {difference}; name another file")).into());
            }
        }
        for line in lines {
            record.known.push(serde_json::from_str(line).map_err(|e| bad(&e))?);
        }
        if let Some((_, file)) = &record.file {
            file.set_len(whole as u64).map_err(|e| bad(&e))?;
        }
        if first.is_none() {
            record.write(conditions)?;
        }
        Ok(record)
    }

    /// What is known of a spot, if all these peers were there and none failed: what failed is measured again.
    pub(crate) fn known(&self, spot: &Spot, peers: &[&str]) -> Option<&Measured> {
        let measured = self.known.iter().rfind(|measured| measured.spot == *spot)?;
        let there = peers.iter().all(|peer| measured.peers.iter().any(|name| name == peer));
        let failed = measured.left_out.iter().any(|left_out| left_out.failed);
        (there && !failed).then_some(measured)
    }

    /// Adds a line, if there is a file.
    pub(crate) fn add(&mut self, measured: &Measured) -> Result<()> {
        self.write(measured)
    }

    fn write(&mut self, what: &impl Serialize) -> Result<()> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let line = serde_json::to_string(what)? + "\n";
        Ok(file.write_all(line.as_bytes()).map_err(|e| format!("{}: {e}", path.display()))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(seconds: f64) -> Conditions {
        let [command, machine, build] = ["worker", "here", "1"].map(str::to_owned);
        Conditions { command, machine, seconds, build }
    }

    fn measured(task: &str, peers: &[&str]) -> Measured {
        let spot = Spot { task: task.to_owned(), threads: 1, elements: Elements::F32, beside: Neighbour::Memory };
        let peers = peers.iter().map(|&peer| peer.to_owned()).collect();
        Measured { spot, peers, rows: Vec::new(), left_out: Vec::new() }
    }

    #[test]
    fn an_interrupted_run_loses_only_the_line_that_was_being_written() {
        let path = std::env::temp_dir().join(format!("sdpa-peers-record-{}", std::process::id()));
        let mut record = Record::open(&path, &conditions(1.0)).unwrap();
        record.add(&measured("a", &["sdpa", "x"])).unwrap();
        record.add(&measured("b", &["sdpa"])).unwrap();
        drop(record);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 5]).unwrap();

        let mut record = Record::open(&path, &conditions(1.0)).unwrap();
        let [a, b] = ["a", "b"].map(|task| measured(task, &[]).spot);
        assert!(record.known(&a, &["sdpa"]).is_some());
        assert!(record.known(&a, &["sdpa", "x", "new"]).is_none(), "a peer is new");
        assert!(record.known(&b, &["sdpa"]).is_none());
        assert!(record.known(&Spot { beside: Neighbour::Nothing, ..a.clone() }, &["sdpa"]).is_none());
        let mut failed = measured("b", &["sdpa"]);
        let [task, peer, why] = ["b", "sdpa", "crashed"].map(str::to_owned);
        failed.left_out.push(LeftOut { task, threads: 1, elements: None, peer, why, failed: true });
        record.add(&failed).unwrap();
        drop(record);

        let record = Record::open(&path, &conditions(1.0)).unwrap();
        assert_eq!(record.known.len(), 2);
        assert!(record.known(&b, &["sdpa"]).is_none(), "what failed is measured again");
        let refusal = Record::open(&path, &conditions(2.0)).unwrap_err().to_string();
        assert!(refusal.contains("--seconds was \"1\", and is \"2\""), "{refusal}");
        fs::remove_file(&path).unwrap();
    }
}
