//! The ways to compute attention.

use crate::args::{Args, Only};
use crate::data::{available_memory, gib};
use crate::failure::{Refused, Result};
use crate::strips::{Cut, Strip};
use sdpa::{Exec, Isa, Outputs, SelectedKeys, Shape, ViewMut};
use std::num::NonZeroUsize;

/// A way to compute attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// Scores, softmax and weighted sum, as most would write them: scalar f32.
    Naive,
    /// Two tuned matrix products with a softmax between them.
    Unfused,
    /// What this crate is about.
    Fused(Isa),
}

/// A method on a number of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) method: Method,
    pub(crate) threads: usize,
}

impl Method {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Unfused => "unfused",
            Self::Fused(_) => "fused",
        }
    }

    /// The instruction set, if it is ours to choose.
    pub(crate) fn isa(self) -> Option<Isa> {
        match self {
            Self::Fused(isa) => Some(isa),
            _ => None,
        }
    }
}

impl Path {
    /// Where the library is told to run.
    pub(crate) fn exec(self) -> Exec<'static> {
        let exec = Exec::serial().threads(self.threads);
        self.method.isa().map_or(exec, |isa| exec.isa(isa))
    }
}

/// The paths that the arguments ask for.
#[derive(Debug)]
pub(crate) struct Paths {
    /// Slowest first.
    pub(crate) all: Vec<Path>,
    /// The path that gives the answer to write: the instruction set forced, otherwise the widest, on most threads.
    pub(crate) answer: Path,
    /// Why a path that was asked for is not there.
    pub(crate) left_out: Option<Refused>,
}

impl Paths {
    /// The most threads that any path takes.
    pub(crate) fn most_threads(&self) -> usize {
        self.all.iter().chain([&self.answer]).map(|path| path.threads).max().unwrap_or(1)
    }
}

/// What of a call is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    /// Forward, then backward.
    Both,
}

/// Chooses the paths.
///
/// # Errors
/// If nothing but the unfused path is wanted, and it does not carry the options or memory cannot hold its scores.
pub(crate) fn paths(args: &Args, cut: &Cut<'_>, pass: Pass) -> Result<Paths> {
    let threads = thread_counts(args.threads);
    let wanted = |only| args.only.is_none_or(|it| it == only);
    let mut all = Vec::new();
    let mut left_out = None;
    let mut add = |method, threads: &[usize]| all.extend(threads.iter().map(|&threads| Path { method, threads }));
    if wanted(Only::Naive) {
        add(Method::Naive, &[1]);
    }
    if wanted(Only::Unfused) {
        let possible = unfused_carries(cut).and_then(|()| scores_fit(&cut.shape, threads[threads.len() - 1], pass));
        match possible {
            Ok(()) => add(Method::Unfused, &threads),
            Err(refused) if args.only.is_some() => return Err(refused),
            Err(refused) => left_out = Some(refused),
        }
    }
    let widest = args.isa.unwrap_or_else(Isa::detect);
    if wanted(Only::Fused) {
        let isas = Isa::available().filter(|&isa| args.isa.is_none_or(|forced| forced == isa));
        isas.for_each(|isa| add(Method::Fused(isa), &threads));
    }
    let answer = Path { method: Method::Fused(widest), threads: threads[threads.len() - 1] };
    Ok(Paths { all, answer, left_out })
}

/// The number of threads asked for, or else one and all.
pub(crate) fn thread_counts(asked: Option<NonZeroUsize>) -> Vec<usize> {
    let all = if cfg!(feature = "rayon") { rayon::current_num_threads() } else { 1 };
    match asked {
        Some(n) => vec![n.get()],
        None if all == 1 => vec![1],
        None => vec![1, all],
    }
}

/// Asks the unfused path whether it takes these options, by a call without rows.
fn unfused_carries(cut: &Cut<'_>) -> Result<()> {
    if cut.shape.batch == 0 || cut.shape.heads == 0 {
        return Ok(());
    }
    let mut lists = SelectedKeys::new();
    let (attention, inputs) = cut.call(&Strip { batch: 0, head: 0, first: 0, len: 0 }, &mut lists)?;
    let out = ViewMut::<f32>::bhld(&mut [], [1, 1, 0, cut.shape.value_dim])?;
    sdpa_unfused::attention(&attention, inputs, Outputs::new(out), Exec::serial())
        .map_err(|e| Refused::new(format_args!("no unfused path: {e}")))
}

/// The unfused path holds all scores of a head for every thread; backward, their gradients too.
fn scores_fit(shape: &Shape, threads: usize, pass: Pass) -> Result<()> {
    let matrices = if pass == Pass::Both { 2 } else { 1 };
    let heads = shape.batch.saturating_mul(shape.heads).min(threads).saturating_mul(matrices);
    let sizes = [shape.q_len, shape.kv_len, heads, size_of::<f32>()];
    let needed = sizes.iter().fold(1, |bytes: u128, &n| bytes.saturating_mul(n as u128));
    let there = available_memory() / 2;
    if needed <= there {
        return Ok(());
    }
    let (q_len, kv_len) = (shape.q_len, shape.kv_len);
    Err(Refused::new(format_args!(
        "no unfused path: {heads} × {q_len} × {kv_len} scores take {}, but half the memory is {}",
        gib(needed),
        gib(there)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Command, parse};
    use crate::data::{Tensor, Tensors};
    use crate::lists::Lists;

    fn tensors() -> Tensors {
        crate::data::load(&crate::args::Source::Random(SHAPE)).unwrap()
    }

    /// The paths for these tensors, as if they had this shape.
    fn chosen(line: &str, tensors: &Tensors, shape: &Shape) -> Result<Paths> {
        let Ok(Command::Compare(args)) = parse(line.split_whitespace().map(Into::into)) else { panic!("{line}") };
        paths(&args, &Cut::new(tensors, args.settings, *shape), Pass::Forward)
    }

    fn names(line: &str) -> Vec<String> {
        let isa = |path: &Path| path.method.isa().map_or(String::new(), |isa| format!(" {isa}"));
        let name = |path: &Path| format!("{}{} {}", path.method.name(), isa(path), path.threads);
        chosen(line, &tensors(), &SHAPE).unwrap().all.iter().map(name).collect()
    }

    const SHAPE: Shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 5, kv_len: 7, head_dim: 3, value_dim: 4 };

    #[test]
    fn paths_are_as_asked_for() {
        let mut expected = vec!["naive 1".to_owned(), "unfused 1".to_owned()];
        expected.extend(Isa::available().map(|isa| format!("fused {isa} 1")));
        assert_eq!(names("--threads 1"), expected);
        assert_eq!(names("--only naive"), ["naive 1"]);
        assert_eq!(names("--isa portable --threads 1"), ["naive 1", "unfused 1", "fused portable 1"]);
        if cfg!(feature = "rayon") {
            assert_eq!(names("--isa portable --only fused --threads 3"), ["fused portable 3"]);
        }
    }

    #[test]
    fn scores_beyond_memory_are_refused() {
        let long = Shape { q_len: 1 << 30, kv_len: 1 << 30, ..SHAPE };
        let message = chosen("--only unfused --threads 1", &tensors(), &long).unwrap_err().to_string();
        assert!(message.starts_with("no unfused path: 1 × 1073741824 × 1073741824 scores take "), "{message}");
        let paths = chosen("--threads 1", &tensors(), &long).unwrap();
        assert!(paths.left_out.is_some() && paths.all.iter().all(|path| path.method != Method::Unfused));
        assert!(paths.all.len() > 1);
    }

    #[test]
    fn options_beyond_the_unfused_path_are_named() {
        let refusal = |line: &str, tensors: &Tensors| {
            let refused = chosen(&format!("{line} --only unfused"), tensors, &SHAPE).unwrap_err();
            let paths = chosen(line, tensors, &SHAPE).unwrap();
            assert!(paths.all.iter().all(|path| path.method != Method::Unfused) && paths.all.len() > 1);
            assert_eq!(paths.left_out, Some(refused.clone()));
            refused.to_string()
        };
        let why = "needs the fused path; the unfused baseline has no such option";
        assert_eq!(refusal("--softcap 2", &tensors()), format!("no unfused path: softcap: {why}"));
        let sinks = Tensors { sinks: Some(vec![0.0; 2]), ..tensors() };
        assert_eq!(refusal("", &sinks), format!("no unfused path: sinks: {why}"));
        let (numbers, keys) = (Tensor { shape: [1, 1, 5, 1], data: vec![6; 5] }, SelectedKeys::new());
        let mut lists = Tensors { selected: Some(Lists { numbers, lens: None, keys }), ..tensors() };
        lists.select(None).unwrap();
        assert_eq!(refusal("", &lists), format!("no unfused path: selected keys: {why}"));
        let lens = Tensors { kv_lens: Some(vec![3]), ..tensors() };
        assert_eq!(refusal("", &lens), format!("no unfused path: kv_lens: {why}"));
        assert!(chosen("--causal --align top-left --window 3,-", &tensors(), &SHAPE).unwrap().left_out.is_none());
    }
}
