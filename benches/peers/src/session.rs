//! One task at a time: all peers get ready, answer, are compared with the truth, and then run alternately.

use crate::args::{Args, Part};
use crate::elements::{Elements, Limits};
use crate::failure::Result;
use crate::folder::Folder;
use crate::neighbour::Neighbour;
use crate::peer::{Entry, Environment, Home};
use crate::record::{Conditions, Measured, Record, Spot};
use crate::support;
use crate::table::{LeftOut, Report, Row, Work};
use crate::timing::{self, Timed};
use crate::worker::{Prepared, Started, Worker};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A run of the program: what it was asked for, where tensors travel, and what came of it so far.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    args: &'a Args,
    part: Part,
    folder: Folder,
    record: Record,
    report: Report,
}

impl<'a> Session<'a> {
    /// Begins one, or goes on with that of the record that the arguments name.
    pub(crate) fn new(args: &'a Args, part: Part) -> Result<Self> {
        support::held_isa()?;
        let machine = support::machine();
        let record = match &args.record {
            Some(path) => Record::open(path, &Conditions::now(part.word(), &machine, args.seconds)?)?,
            None => Record::default(),
        };
        let report = Report { machine, rows: Vec::new(), left_out: Vec::new() };
        Ok(Self { args, part, folder: Folder::new()?, record, report })
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.as_ref()
    }

    pub(crate) fn report(self) -> Report {
        self.report
    }

    /// Leaves a peer out of everything.
    fn skip(&mut self, threads: usize, peer: &str, why: String, outcome: Outcome) {
        eprintln!("peers: without {peer}: {why}");
        let (task, failed) = ("everything".to_owned(), outcome == Outcome::Failed);
        self.report.left_out.push(LeftOut { task, threads, elements: None, peer: peer.to_owned(), why, failed });
    }

    /// Says what was measured, and writes it down.
    fn add(&mut self, measured: Measured) -> Result<()> {
        for row in &measured.rows {
            eprintln!("{}", row.line());
        }
        self.record.add(&measured)?;
        self.report.take(measured.rows, measured.left_out);
        Ok(())
    }
}

/// Whether a peer that does not start should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Absent,
    Failed,
}

impl Report {
    /// Takes in what is known of a task; the same reason may have been given before, beside another neighbour.
    fn take(&mut self, rows: Vec<Row>, left_out: Vec<LeftOut>) {
        self.rows.extend(rows);
        for left_out in left_out {
            if !self.left_out.contains(&left_out) {
                self.left_out.push(left_out);
            }
        }
    }
}

/// A task that is still to be measured: on `threads` threads, in elements of a type, beside these neighbours.
#[derive(Debug)]
pub(crate) struct Due {
    name: String,
    threads: usize,
    elements: Elements,
    beside: Vec<Neighbour>,
}

impl Due {
    fn spot(&self, beside: Neighbour) -> Spot {
        Spot { task: self.name.clone(), threads: self.threads, elements: self.elements, beside }
    }

    fn left_out(&self, peer: &str, why: String) -> LeftOut {
        let (task, peer, elements) = (self.name.clone(), peer.to_owned(), Some(self.elements));
        LeftOut { task, threads: self.threads, elements, peer, why, failed: false }
    }

    /// Leaves out whoever should have taken part, and says so at once.
    fn failed(&self, peer: &str, why: String) -> LeftOut {
        eprintln!("peers: {peer}, {self}: {why}");
        LeftOut { failed: true, ..self.left_out(peer, why) }
    }
}

impl std::fmt::Display for Due {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {} thread(s), {}", self.name, self.threads, self.elements.name())
    }
}

/// A task as everyone gets it, and what is known about it.
#[derive(Debug)]
pub(crate) struct Task<T> {
    pub(crate) due: Due,
    pub(crate) body: T,
    pub(crate) work: Work,
    pub(crate) rows_checked: [usize; 2],
    pub(crate) limits: Limits,
}

/// Who runs, on some number of threads.
#[derive(Debug)]
pub(crate) struct Workers {
    threads: usize,
    members: Vec<(Entry, Worker)>,
}

impl Workers {
    /// Starts them.
    pub(crate) fn start(entries: &[Entry], threads: usize, session: &mut Session<'_>) -> Result<Self> {
        let this = std::env::current_exe()?;
        let mut members = Vec::new();
        for &entry in entries {
            let mut command = match entry.home {
                Home::Rust { .. } => Command::new(&this),
                Home::Python(environment) => {
                    let python = interpreter(environment, session.args);
                    if !python.exists() {
                        let why = format!("there is no {}; python/setup.py installs it", python.display());
                        session.skip(threads, entry.name, why, Outcome::Absent);
                        continue;
                    }
                    let mut command = Command::new(python);
                    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/python/worker.py"));
                    command
                }
            };
            command.args([session.part.word(), entry.name]);
            match Worker::start(command, threads) {
                Ok(Started::Worker(worker)) => members.push((entry, worker)),
                Ok(Started::Unsupported(why)) => session.skip(threads, entry.name, why, Outcome::Absent),
                Err(e) => session.skip(threads, entry.name, format!("failed: {e}"), Outcome::Failed),
            }
        }
        Ok(Self { threads, members })
    }

    fn names(&self) -> Vec<&'static str> {
        self.members.iter().map(|(entry, _)| entry.name).collect()
    }

    /// What of a task is still to be measured; what is known of it is taken over.
    pub(crate) fn due(&self, session: &mut Session<'_>, task: &str, elements: Elements) -> Option<Due> {
        let (peers, threads) = (self.names(), self.threads);
        let mut due = Due { name: task.to_owned(), threads, elements, beside: Vec::new() };
        for &beside in &session.args.beside {
            if !beside.has_room(threads) {
                let why = format!("{threads} thread(s) leave no core that could read {}", beside.name());
                session.report.take(Vec::new(), vec![due.left_out("everyone", why)]);
            } else if let Some(known) = session.record.known(&due.spot(beside), &peers) {
                eprintln!("{due}, beside {}: already measured", beside.name());
                let wanted = |name: &String| peers.contains(&name.as_str());
                let rows = known.rows.iter().filter(|row| wanted(&row.peer)).cloned();
                let left_out = known.left_out.iter().filter(|left_out| wanted(&left_out.peer)).cloned();
                session.report.take(rows.collect(), left_out.collect());
            } else {
                due.beside.push(beside);
            }
        }
        (!due.beside.is_empty()).then_some(due)
    }

    /// The answer of the first that has one.
    pub(crate) fn answer<T: Serialize>(&mut self, body: &T, folder: &Path) -> Option<Vec<f32>> {
        self.members.iter_mut().find_map(|(_, worker)| match worker.prepare(body).ok()? {
            Prepared::How(_) => worker.burst(1).and_then(|_| worker.output(&folder.join("output"))).ok(),
            Prepared::Unsupported(_) => None,
        })
    }

    /// Lets everyone compute a task. `errors` says how far the parts of an output are from the truth.
    pub(crate) fn run<T: Serialize>(
        &mut self,
        session: &mut Session<'_>,
        task: &Task<T>,
        errors: impl Fn(&[f32]) -> Result<Vec<f64>>,
    ) -> Result<()> {
        let (threads, peers) = (self.threads, self.names());
        let (mut contenders, left_out) = self.enter(session, task, errors);
        let what = if session.args.seconds > 0.0 { "to be timed alternately" } else { "checked" };
        eprintln!("{}: {} {what}{:40}", task.due, contenders.len(), "");
        for &beside in &task.due.beside {
            let mut left_out = left_out.clone();
            let mut timed: Vec<_> = contenders.iter().map(|contender| contender.timed.clone()).collect();
            let names: Vec<_> = contenders.iter().map(|contender| contender.entry.name).collect();
            let turns = contenders.iter_mut().map(|contender| &mut *contender.worker).zip(&mut timed);
            let failed = |index: usize, e| left_out.push(task.due.failed(names[index], format!("failed: {e}")));
            beside.during(threads, || timing::time(turns, failed));
            session.add(Measured {
                spot: task.due.spot(beside),
                peers: peers.iter().map(|&peer| peer.to_owned()).collect(),
                rows: contenders
                    .iter()
                    .zip(&timed)
                    .map(|(contender, timed)| contender.row(task, beside, timed))
                    .collect(),
                left_out,
            })?;
        }
        Ok(())
    }

    /// Those that can compute a task and have shown that they do, and the others.
    fn enter<T: Serialize>(
        &mut self,
        session: &Session<'_>,
        task: &Task<T>,
        errors: impl Fn(&[f32]) -> Result<Vec<f64>>,
    ) -> (Vec<Contender<'_>>, Vec<LeftOut>) {
        let (due, mut contenders, mut left_out) = (&task.due, Vec::new(), Vec::new());
        for (entry, worker) in &mut self.members {
            eprint!("{}, {} thread(s): {:60}\r", due.name, due.threads, entry.name);
            if !entry.elements.contains(&due.elements) {
                // What another way of using this crate computes is no lack.
                if !entry.is_ours() {
                    left_out.push(due.left_out(entry.name, format!("no {}", due.elements.name())));
                }
                continue;
            }
            let wrong = entry.rounding.limit(due.elements, task.limits);
            match enter(worker, (&task.body, wrong), &errors, session) {
                Ok(Entered::In { how, errors, timed }) => {
                    contenders.push(Contender { entry: *entry, worker, how, errors, timed });
                }
                Ok(Entered::Unsupported(why)) => left_out.push(due.left_out(entry.name, why)),
                Ok(Entered::Wrong(error)) => {
                    left_out.push(due.failed(entry.name, format!("wrong, by {error:.1e}")));
                }
                Err(e) => left_out.push(due.failed(entry.name, format!("failed: {e}"))),
            }
        }
        (contenders, left_out)
    }
}

/// The interpreter of an environment.
fn interpreter(environment: Environment, args: &Args) -> PathBuf {
    match environment {
        Environment::Common => args.python.clone(),
        Environment::Zentorch => concat!(env!("CARGO_MANIFEST_DIR"), "/target/zentorch/bin/python").into(),
    }
}

/// A peer with a right answer to a task.
struct Contender<'a> {
    entry: Entry,
    worker: &'a mut Worker,
    how: String,
    errors: Vec<f64>,
    timed: Timed,
}

impl Contender<'_> {
    fn row<T>(&self, task: &Task<T>, beside: Neighbour, timed: &Timed) -> Row {
        Row {
            task: task.due.name.clone(),
            threads: task.due.threads,
            elements: task.due.elements,
            beside,
            peer: self.entry.name.to_owned(),
            version: self.worker.version.clone(),
            how: self.how.clone(),
            work: task.work,
            seconds: timed.median(),
            least_seconds: timed.least(),
            runs: timed.runs(),
            max_abs_error: self.errors.iter().copied().fold(0.0, f64::max),
            errors: self.errors.clone(),
            rows_checked: task.rows_checked,
        }
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
    session: &Session<'_>,
) -> Result<Entered> {
    let how = match worker.prepare(body)? {
        Prepared::How(how) => how,
        Prepared::Unsupported(why) => return Ok(Entered::Unsupported(why)),
    };
    let timed = Timed::start(worker, session.args.seconds)?;
    let errors = errors(&worker.output(&session.folder.path("output"))?)?;
    Ok(match errors.iter().find(|error| error.is_nan() || **error > wrong) {
        Some(&error) => Entered::Wrong(error),
        None => Entered::In { how, errors, timed },
    })
}
