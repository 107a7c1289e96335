//! Starting this program again, as the ranks of a test.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// First argument of a rank.
const ROLE: &str = "--rank-of";
/// What a rank prints when all is as it should be.
pub(crate) const FINE: &str = "rank is fine";

/// Ranks to be started, and what they must do.
#[derive(Debug)]
pub(crate) struct Launch {
    ranks: usize,
    arguments: Vec<String>,
    /// Number of ranks that must say that they are fine.
    fine: usize,
    /// Whether some rank dies, so that mpirun must not end the others, and ends with an error itself.
    dies: bool,
    /// Time in which all must have ended.
    limit: Duration,
}

/// How a launch ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) problem: Option<String>,
    pub(crate) seconds: f64,
}

impl Launch {
    pub(crate) fn of(test: &str, ranks: usize) -> Self {
        let arguments = vec![ROLE.to_owned(), test.to_owned()];
        Self { ranks, arguments, fine: ranks, dies: false, limit: Duration::from_secs(1200) }
    }

    pub(crate) fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }

    /// One rank dies, and the others must be fine all the same.
    pub(crate) fn one_dies(self) -> Self {
        Self { fine: self.ranks - 1, dies: true, ..self }
    }

    pub(crate) fn within(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Starts the ranks, and waits for them.
    pub(crate) fn run(&self) -> Outcome {
        let begin = Instant::now();
        let mut command = Command::new("mpirun");
        // Root, more ranks than cores, and ranks that wait: what Open MPI has against each of them.
        command.args(["--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]);
        if self.dies {
            command.args(["--mca", "orte_enable_recovery", "1", "--mca", "orte_abort_on_non_zero_status", "0"]);
        }
        command.args(["-n", &self.ranks.to_string()]).arg(std::env::current_exe().expect("this program"));
        command.args(&self.arguments).env("RAYON_NUM_THREADS", "1");
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("mpirun starts");
        let mut stdout = child.stdout.take().expect("it is piped");
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stdout.read_to_string(&mut text);
            text
        });
        let status = loop {
            if let Some(status) = child.try_wait().expect("mpirun runs") {
                break Some(status);
            }
            if begin.elapsed() > self.limit {
                let _ = Command::new("kill").arg(child.id().to_string()).status();
                let _ = child.wait();
                break None;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let seconds = begin.elapsed().as_secs_f64();
        let text = reader.join().expect("a reader");
        let fine = text.lines().filter(|line| line.contains(FINE)).count();
        let problem = match status {
            None => Some(format!("not done after {:?}:\n{text}", self.limit)),
            Some(status) if !self.dies && !status.success() => Some(format!("{status}:\n{text}")),
            Some(_) if fine != self.fine => Some(format!("{fine} of {} ranks are fine:\n{text}", self.fine)),
            Some(_) => None,
        };
        Outcome { problem, seconds }
    }
}

/// Returns the test that this process is a rank of, and the rest of its arguments.
pub(crate) fn role(arguments: &[String]) -> Option<(String, Vec<String>)> {
    match arguments {
        [role, test, rest @ ..] if role == ROLE => Some((test.clone(), rest.to_vec())),
        _ => None,
    }
}

/// Returns the number that follows a name.
pub(crate) fn number(arguments: &[String], name: &str) -> u64 {
    let at = arguments.iter().position(|argument| argument == name).expect("the argument");
    arguments[at + 1].parse().expect("a number")
}

pub(crate) fn has_mpirun() -> bool {
    let mut command = Command::new("mpirun");
    command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
