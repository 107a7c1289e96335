//! One task at a time: everyone gets ready, answers, is held against the truth, and then runs in turns.

use crate::args::{Args, Part};
use crate::failure::Result;
use crate::peers::{Entry, Home};
use crate::table::{LeftOut, Report, Row, Work};
use crate::timing::{self, Timed};
use crate::worker::{Prepared, Worker};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What an answer in f32 may be off by before it counts as wrong. Every f32 peer is within 2e-6 on unit-normal data.
pub(crate) const WRONG: f64 = 1e-5;

/// A task as everyone gets it, and what is known about it.
#[derive(Debug)]
pub(crate) struct Task<T> {
    pub(crate) name: String,
    pub(crate) threads: usize,
    pub(crate) body: T,
    pub(crate) work: Work,
    pub(crate) rows_checked: [usize; 2],
    /// What an answer may be off by before it counts as wrong.
    pub(crate) wrong: f64,
}

/// Who runs, on some number of threads.
#[derive(Debug)]
pub(crate) struct Workers(Vec<(Entry, Worker)>);

impl Workers {
    /// Starts them.
    pub(crate) fn start(
        entries: &[Entry],
        part: Part,
        threads: usize,
        args: &Args,
        report: &mut Report,
    ) -> Result<Self> {
        let this = std::env::current_exe()?;
        let mut workers = Vec::new();
        let mut missing = Vec::new();
        for &entry in entries {
            let mut command = match entry.home {
                Home::Rust { .. } => Command::new(&this),
                Home::Python if !args.python.exists() => {
                    missing.push(entry.name);
                    continue;
                }
                Home::Python => {
                    let mut command = Command::new(&args.python);
                    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/python/worker.py"));
                    command
                }
            };
            command.args([part.word(), entry.name]);
            match Worker::start(command, threads) {
                Ok(worker) => workers.push((entry, worker)),
                Err(e) => report.fail("start", threads, entry.name, &*e),
            }
        }
        if !missing.is_empty() {
            let (names, python) = (missing.join(", "), args.python.display());
            eprintln!(
                "peers: without {names}: there is no {python}; python3 benches/peers/python/setup.py installs it"
            );
        }
        Ok(Self(workers))
    }

    /// The answer of the first that has one.
    pub(crate) fn answer<T: Serialize>(&mut self, body: &T, folder: &Folder) -> Option<Vec<f32>> {
        self.0.iter_mut().find_map(|(_, worker)| match worker.prepare(body).ok()? {
            Prepared::How(_) => worker.burst(1).and_then(|_| worker.output(&folder.path("output"))).ok(),
            Prepared::Unsupported(_) => None,
        })
    }

    /// Lets everyone compute a task. `errors` says how far the parts of an output are from the truth.
    pub(crate) fn run<T: Serialize>(
        &mut self,
        task: &Task<T>,
        errors: impl Fn(&[f32]) -> Result<Vec<f64>>,
        seconds: f64,
        folder: &Folder,
        report: &mut Report,
    ) {
        let Task { name, threads, body, work, rows_checked, wrong } = task;
        let mut contenders: Vec<(Entry, &mut Worker, String, Vec<f64>, Timed)> = Vec::new();
        for (entry, worker) in &mut self.0 {
            eprint!("{name}, {threads} thread(s): {:60}\r", entry.name);
            let mut start = || -> Result<Option<(String, Vec<f64>, Timed)>> {
                let how = match worker.prepare(body)? {
                    Prepared::How(how) => how,
                    Prepared::Unsupported(why) => {
                        report.leave_out(name, *threads, entry.name, why);
                        return Ok(None);
                    }
                };
                let timed = Timed::start(worker, seconds)?;
                let errors = errors(&worker.output(&folder.path("output"))?)?;
                if let Some(error) = errors.iter().find(|error| error.is_nan() || **error > *wrong) {
                    report.leave_out_failed(name, *threads, entry.name, format!("wrong, by {error:.1e}"));
                    return Ok(None);
                }
                Ok(Some((how, errors, timed)))
            };
            match start() {
                Ok(Some((how, errors, timed))) => contenders.push((*entry, worker, how, errors, timed)),
                Ok(None) => {}
                Err(e) => report.fail(name, *threads, entry.name, &*e),
            }
        }
        let what = if seconds > 0.0 { "timed in turns" } else { "checked" };
        eprintln!("{name}, {threads} thread(s): {} {what}{:40}", contenders.len(), "");
        let names: Vec<_> = contenders.iter().map(|contender| contender.0.name).collect();
        let turns = contenders.iter_mut().map(|(_, worker, _, _, timed)| (&mut **worker, timed));
        timing::time(turns, |index, e| report.fail(name, *threads, names[index], &*e));
        for (entry, worker, how, errors, timed) in contenders {
            report.rows.push(Row {
                task: name.clone(),
                threads: *threads,
                peer: entry.name.to_owned(),
                version: worker.version.clone(),
                how,
                work: *work,
                seconds: timed.median(),
                least_seconds: timed.least(),
                runs: timed.runs(),
                max_abs_error: errors.iter().copied().fold(0.0, f64::max),
                errors,
                rows_checked: *rows_checked,
            });
        }
    }
}

impl Report {
    pub(crate) fn leave_out(&mut self, task: &str, threads: usize, peer: &str, why: String) {
        let (task, peer) = (task.to_owned(), peer.to_owned());
        self.left_out.push(LeftOut { task, threads, peer, why, failed: false });
    }

    fn leave_out_failed(&mut self, task: &str, threads: usize, peer: &str, why: String) {
        eprintln!("peers: {peer}, {task}, {threads} thread(s): {why}");
        self.leave_out(task, threads, peer, why);
        if let Some(last) = self.left_out.last_mut() {
            last.failed = true;
        }
    }

    fn fail(&mut self, task: &str, threads: usize, peer: &str, error: &dyn std::error::Error) {
        self.leave_out_failed(task, threads, peer, format!("failed: {error}"));
    }
}

/// A folder for tensors on their way, gone afterwards.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("sdpa-peers-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl AsRef<Path> for Folder {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
