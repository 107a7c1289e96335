//! One task at a time: everyone gets ready, answers, is held against the truth, and then runs in turns.

use crate::args::{Args, Part};
use crate::elements::Elements;
use crate::failure::Result;
use crate::peer::{Entry, Environment, Home};
use crate::table::{LeftOut, Report, Row, Work};
use crate::timing::{self, Timed};
use crate::worker::{Prepared, Started, Worker};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A task as everyone gets it, and what is known about it.
#[derive(Debug)]
pub(crate) struct Task<T> {
    pub(crate) name: String,
    pub(crate) threads: usize,
    pub(crate) elements: Elements,
    pub(crate) body: T,
    pub(crate) work: Work,
    pub(crate) rows_checked: [usize; 2],
    /// What an answer may be off by before it counts as wrong.
    pub(crate) wrong: f64,
}

/// Where a result belongs: a task, on so many threads, in elements of a type.
#[derive(Debug, Clone, Copy)]
struct Place<'a> {
    task: &'a str,
    threads: usize,
    elements: Elements,
}

impl<T> Task<T> {
    fn place(&self) -> Place<'_> {
        Place { task: &self.name, threads: self.threads, elements: self.elements }
    }
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
        for &entry in entries {
            let mut command = match entry.home {
                Home::Rust { .. } => Command::new(&this),
                Home::Python(environment) => {
                    let python = interpreter(environment, args);
                    if !python.exists() {
                        let why = format!("there is no {}; python/setup.py installs it", python.display());
                        report.skip(threads, entry.name, why, Outcome::Absent);
                        continue;
                    }
                    let mut command = Command::new(python);
                    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/python/worker.py"));
                    command
                }
            };
            command.args([part.word(), entry.name]);
            match Worker::start(command, threads) {
                Ok(Started::Worker(worker)) => workers.push((entry, worker)),
                Ok(Started::Unsupported(why)) => report.skip(threads, entry.name, why, Outcome::Absent),
                Err(e) => report.skip(threads, entry.name, format!("failed: {e}"), Outcome::Failed),
            }
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
        let (place, mut contenders) = (task.place(), Vec::new());
        for (entry, worker) in &mut self.0 {
            eprint!("{}, {} thread(s): {:60}\r", place.task, place.threads, entry.name);
            if !entry.elements.contains(&place.elements) {
                // What another way of using this crate computes is no lack.
                if !entry.is_ours() {
                    report.leave_out(place, entry.name, format!("no {}", place.elements.name()));
                }
                continue;
            }
            let wrong = task.wrong * entry.sums.allowance(place.elements);
            match enter(worker, (&task.body, wrong), &errors, seconds, folder) {
                Ok(Entered::In { how, errors, timed }) => contenders.push((*entry, worker, how, errors, timed)),
                Ok(Entered::Unsupported(why)) => report.leave_out(place, entry.name, why),
                Ok(Entered::Wrong(error)) => {
                    report.leave_out_failed(place, entry.name, format!("wrong, by {error:.1e}"))
                }
                Err(e) => report.fail(place, entry.name, &*e),
            }
        }
        let what = if seconds > 0.0 { "timed in turns" } else { "checked" };
        let Place { task: name, threads, elements } = place;
        eprintln!("{name}, {threads} thread(s), {}: {} {what}{:40}", elements.name(), contenders.len(), "");
        let names: Vec<_> = contenders.iter().map(|contender| contender.0.name).collect();
        let turns = contenders.iter_mut().map(|(_, worker, _, _, timed)| (&mut **worker, timed));
        timing::time(turns, |index, e| report.fail(place, names[index], &*e));
        for (entry, worker, how, errors, timed) in contenders {
            report.rows.push(Row {
                task: name.to_owned(),
                threads,
                elements,
                peer: entry.name.to_owned(),
                version: worker.version.clone(),
                how,
                work: task.work,
                seconds: timed.median(),
                least_seconds: timed.least(),
                runs: timed.runs(),
                max_abs_error: errors.iter().copied().fold(0.0, f64::max),
                errors,
                rows_checked: task.rows_checked,
            });
        }
    }
}

/// The interpreter of an environment.
fn interpreter(environment: Environment, args: &Args) -> PathBuf {
    match environment {
        Environment::Common => args.python.clone(),
        Environment::Zentorch => concat!(env!("CARGO_MANIFEST_DIR"), "/target/zentorch/bin/python").into(),
    }
}

/// What came of a worker's first runs of a task.
enum Entered {
    In {
        how: String,
        errors: Vec<f64>,
        timed: Timed,
    },
    Unsupported(String),
    /// By how much.
    Wrong(f64),
}

/// Lets a worker get ready for a task, run, and be held against the truth; more than `wrong` off is wrong.
fn enter<T: Serialize>(
    worker: &mut Worker,
    (body, wrong): (&T, f64),
    errors: impl Fn(&[f32]) -> Result<Vec<f64>>,
    seconds: f64,
    folder: &Folder,
) -> Result<Entered> {
    let how = match worker.prepare(body)? {
        Prepared::How(how) => how,
        Prepared::Unsupported(why) => return Ok(Entered::Unsupported(why)),
    };
    let timed = Timed::start(worker, seconds)?;
    let errors = errors(&worker.output(&folder.path("output"))?)?;
    Ok(match errors.iter().find(|error| error.is_nan() || **error > wrong) {
        Some(&error) => Entered::Wrong(error),
        None => Entered::In { how, errors, timed },
    })
}

impl Report {
    fn leave_out(&mut self, place: Place<'_>, peer: &str, why: String) {
        let (task, peer, elements) = (place.task.to_owned(), peer.to_owned(), Some(place.elements));
        self.left_out.push(LeftOut { task, threads: place.threads, elements, peer, why, failed: false });
    }

    fn leave_out_failed(&mut self, place: Place<'_>, peer: &str, why: String) {
        eprintln!("peers: {peer}, {}, {} thread(s), {}: {why}", place.task, place.threads, place.elements.name());
        self.leave_out(place, peer, why);
        if let Some(last) = self.left_out.last_mut() {
            last.failed = true;
        }
    }

    fn fail(&mut self, place: Place<'_>, peer: &str, error: &dyn std::error::Error) {
        self.leave_out_failed(place, peer, format!("failed: {error}"));
    }

    /// Leaves a peer out of everything.
    fn skip(&mut self, threads: usize, peer: &str, why: String, outcome: Outcome) {
        eprintln!("peers: without {peer}: {why}");
        let (task, failed) = ("everything".to_owned(), outcome == Outcome::Failed);
        self.left_out.push(LeftOut { task, threads, elements: None, peer: peer.to_owned(), why, failed });
    }
}

/// Whether a peer that does not start should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Absent,
    Failed,
}

/// A folder of its own for tensors on their way, gone afterwards.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Result<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("sdpa-peers-{}-{made}", std::process::id()));
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
