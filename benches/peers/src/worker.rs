//! The program's end of the line to a worker.

use crate::failure::Result;
use crate::protocol::{Reply, Request};
use serde::Serialize;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// glibc's allocator keeps what is freed. Where results and scratch are allocated anew each call, up to half of the time
/// would be the system's, handing out the same pages again and again; whoever cares for speed avoids that.
const KEEP_MEMORY: [(&str, &str); 2] = [("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "1099511627776")];

/// A peer in its own process.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) version: String,
    child: Child,
    /// Gone when the worker is to end.
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

/// What came of starting.
#[derive(Debug)]
pub(crate) enum Started {
    Worker(Worker),
    /// It is not made for this machine, or is not here; why.
    Unsupported(String),
}

/// What came of preparing.
#[derive(Debug)]
pub(crate) enum Prepared {
    How(String),
    Unsupported(String),
}

impl Worker {
    /// Starts one; `threads` reaches those that read it from the environment.
    pub(crate) fn start(mut command: Command, threads: usize) -> Result<Started> {
        for variable in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"] {
            command.env(variable, threads.to_string());
        }
        for (variable, value) in KEEP_MEMORY {
            command.env(variable, value);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let from = BufReader::new(from.ok_or("no pipe")?);
        let mut worker = Self { version: String::new(), child, to, from };
        match worker.reply()? {
            Reply::Ready { version } => worker.version = version,
            Reply::Unsupported { why } => return Ok(Started::Unsupported(why)),
            other => return Err(unexpected(other)),
        }
        Ok(Started::Worker(worker))
    }

    pub(crate) fn prepare<T: Serialize>(&mut self, task: T) -> Result<Prepared> {
        match self.ask(&Request::Prepare(task))? {
            Reply::Prepared { how } => Ok(Prepared::How(how)),
            Reply::Unsupported { why } => Ok(Prepared::Unsupported(why)),
            other => Err(unexpected(other)),
        }
    }

    /// Seconds of each run.
    pub(crate) fn burst(&mut self, runs: usize) -> Result<Vec<f64>> {
        match self.ask(&Request::<()>::Burst { runs })? {
            Reply::Seconds(seconds) if seconds.len() == runs => Ok(seconds),
            other => Err(unexpected(other)),
        }
    }

    /// The last result.
    pub(crate) fn output(&mut self, file: &Path) -> Result<Vec<f32>> {
        match self.ask(&Request::<()>::Output { file: file.to_owned() })? {
            Reply::Written => crate::case::read(file),
            other => Err(unexpected(other)),
        }
    }

    fn ask<T: Serialize>(&mut self, request: &Request<T>) -> Result<Reply> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        // A worker that has ended is found out when it does not answer.
        let _ = self.to.as_mut().ok_or("no pipe")?.write_all(line.as_bytes());
        self.reply()
    }

    fn reply(&mut self) -> Result<Reply> {
        let mut line = String::new();
        if self.from.read_line(&mut line)? == 0 {
            return Err(format!("ended early: {}", self.child.wait()?).into());
        }
        Ok(serde_json::from_str(&line).map_err(|e| format!("{e} in {}", line.trim()))?)
    }
}

fn unexpected(reply: Reply) -> Box<dyn std::error::Error + Send + Sync> {
    match reply {
        Reply::Failed { why } => why.into(),
        other => format!("unexpected answer: {other:?}").into(),
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Its input ends, and so does it.
        self.to = None;
        let _ = self.child.wait();
    }
}
