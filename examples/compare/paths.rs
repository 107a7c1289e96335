//! The ways to compute attention, and how one of them is run and timed.

use crate::args::{Args, Only};
use crate::data::{Tensors, available_memory, gib, reserved};
use crate::elements::Elements;
use crate::failure::{Refused, Result};
use crate::output::Named;
use crate::settings::Settings;
use crate::strips::{Cut, Rows, Strip};
use sdpa::{Attention, Exec, Explanation, Inputs, Isa, Machine, Outputs, Plan, Point, Problem};
use sdpa::{Shape, ViewMut, Workspace};
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

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
    let (attention, inputs) = cut.call(&Strip { batch: 0, head: 0, first: 0, len: 0 })?;
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

/// Everything that runs of the paths share: inputs, outputs made beforehand, memory that is kept.
pub(crate) struct Runner<'a> {
    attention: Attention,
    /// In f32, and as fused paths read them.
    inputs: Inputs<'a>,
    fused: Inputs<'a>,
    cut: Cut<'a>,
    rows: &'a Rows,
    pub(crate) shape: Shape,
    pub(crate) out: Vec<f32>,
    pub(crate) lse: Vec<f32>,
    workspace: Workspace,
}

impl<'a> Runner<'a> {
    /// `elements` are those of the tensors.
    pub(crate) fn new(
        tensors: &'a Tensors,
        elements: &'a Elements,
        settings: Settings,
        rows: &'a Rows,
    ) -> Result<Self> {
        let inputs = tensors.inputs()?;
        let shape = inputs.shape()?;
        Ok(Self {
            attention: settings.attention(),
            inputs,
            fused: elements.inputs(tensors)?,
            cut: Cut::new(tensors, settings, shape),
            rows,
            shape,
            out: filled(rows.all * shape.value_dim)?,
            lse: filled(rows.all)?,
            workspace: Workspace::new(),
        })
    }

    /// The call, checked.
    pub(crate) fn problem(&mut self) -> Result<Problem<'_>> {
        let outputs = outputs(&self.shape, &mut self.out, &mut self.lse)?;
        Ok(self.attention.problem(self.fused, outputs)?)
    }

    /// The plan by which the fused path runs.
    pub(crate) fn plan(&mut self, path: Path) -> Result<Plan> {
        Ok(Plan::new(&self.problem()?, path.exec()))
    }

    /// What that plan does, and why.
    pub(crate) fn explain(&mut self, path: Path, machine: Option<Machine>) -> Result<Explanation> {
        let problem = self.problem()?;
        Ok(Plan::new(&problem, path.exec()).explain(&problem, machine))
    }

    /// Computes the tensors to write and hands them over.
    pub(crate) fn answer<R>(
        &mut self,
        path: Path,
        points: &[Point],
        write: impl FnOnce(&[Named<'_>]) -> Result<R>,
    ) -> Result<R> {
        let Shape { batch, heads, q_len, kv_len, value_dim, .. } = self.shape;
        let shape = [batch, heads, q_len, kv_len];
        let mut scores = points.iter().map(|_| filled(shape.iter().product())).collect::<Result<Vec<_>>>()?;
        self.clear();
        let mut outputs = outputs(&self.shape, &mut self.out, &mut self.lse)?;
        for (&point, scores) in points.iter().zip(&mut scores) {
            outputs = outputs.scores(point, ViewMut::bhld(scores, shape)?);
        }
        self.attention.problem(self.fused, outputs)?.run_once(path.exec());
        let mut tensors = vec![
            Named { name: "out", shape: vec![batch, heads, q_len, value_dim], data: &self.out },
            Named { name: "lse", shape: vec![batch, heads, q_len], data: &self.lse },
        ];
        let named = |(&point, data)| Named { name: name_of(point), shape: shape.to_vec(), data };
        tensors.extend(points.iter().zip(scores.iter().map(Vec::as_slice)).map(named));
        write(&tensors)
    }

    /// Forgets what was computed: an element that the next run leaves out is then no number.
    pub(crate) fn clear(&mut self) {
        self.out.fill(f32::NAN);
        self.lse.fill(f32::NAN);
    }

    /// Runs a path once. Fused and unfused leave their answer in `out` and `lse`; naive, which runs on the rows that are
    /// checked, leaves nothing.
    pub(crate) fn run(&mut self, path: Path, plan: Option<&Plan>) -> Result<Duration> {
        let attention = self.attention;
        let start;
        match (path.method, plan) {
            (Method::Naive, _) => {
                start = Instant::now();
                for strip in &self.rows.strips {
                    black_box(self.cut.answer::<f32>(strip)?);
                }
            }
            (Method::Fused(_), Some(plan)) => {
                let outputs = outputs(&self.shape, &mut self.out, &mut self.lse)?;
                start = Instant::now();
                attention.problem(self.fused, outputs)?.run(plan, &mut self.workspace);
            }
            (Method::Fused(_), None) => {
                let plan = self.plan(path)?;
                return self.run(path, Some(&plan));
            }
            (Method::Unfused, _) => {
                let outputs = outputs(&self.shape, &mut self.out, &mut self.lse)?;
                start = Instant::now();
                sdpa_unfused::attention(&attention, self.inputs, outputs, path.exec())?;
            }
        }
        Ok(start.elapsed())
    }
}

/// So many NaNs.
fn filled(len: usize) -> Result<Vec<f32>> {
    let mut data = reserved(len)?;
    data.resize(len, f32::NAN);
    Ok(data)
}

/// Refuses early what memory could not hold at the end: each tensor of scores, its bytes, and the file made of them.
pub(crate) fn points_fit(shape: &Shape, points: &[Point]) -> Result<()> {
    let sizes = [shape.batch, shape.heads, shape.q_len, shape.kv_len, points.len(), 3 * size_of::<f32>()];
    let needed = sizes.iter().fold(1, |bytes: u128, &n| bytes.saturating_mul(n as u128));
    let (there, n) = (available_memory(), points.len());
    if needed <= there {
        return Ok(());
    }
    let (needed, there) = (gib(needed), gib(there));
    Err(Refused::new(format_args!("--output: {n} tensor(s) of scores take {needed}, but there are {there} of memory")))
}

/// The name under which scores are written.
fn name_of(point: Point) -> &'static str {
    match point {
        Point::Raw => "scores.raw",
        Point::Softcapped => "scores.softcap",
        Point::Masked => "scores.masked",
        Point::Weights => "weights",
        point => unreachable!("no setting asks for scores at {point:?}"),
    }
}

/// The views that a path writes through.
fn outputs<'a>(shape: &Shape, out: &'a mut [f32], lse: &'a mut [f32]) -> Result<Outputs<'a>> {
    let Shape { batch, heads, q_len, value_dim, .. } = *shape;
    let out = ViewMut::bhld(out, [batch, heads, q_len, value_dim])?;
    Ok(Outputs::new(out).lse(ViewMut::bhl(lse, [batch, heads, q_len])?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Command, parse};

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
        let lens = Tensors { kv_lens: Some(vec![3]), ..tensors() };
        assert_eq!(refusal("", &lens), format!("no unfused path: kv_lens: {why}"));
        assert!(chosen("--causal --align top-left --window 3,-", &tensors(), &SHAPE).unwrap().left_out.is_none());
    }

    #[test]
    fn scores_to_write_must_fit() {
        assert!(points_fit(&SHAPE, &[Point::Weights]).is_ok());
        let long = Shape { q_len: 1 << 30, kv_len: 1 << 30, ..SHAPE };
        assert!(points_fit(&long, &[]).is_ok());
        let message = points_fit(&long, &[Point::Raw, Point::Weights]).unwrap_err().to_string();
        assert!(message.starts_with("--output: 2 tensor(s) of scores take "), "{message}");
    }

    /// Whatever the path, nothing is left of what was there before.
    #[test]
    fn paths_write_every_element() {
        let tensors = tensors();
        let rows = Rows::choose(&SHAPE);
        let mut runner = Runner::new(&tensors, &Elements::F32, Settings::default(), &rows).unwrap();
        for method in Isa::available().map(Method::Fused).chain([Method::Unfused]) {
            runner.clear();
            runner.run(Path { method, threads: 1 }, None).unwrap();
            assert!(runner.out.iter().chain(&runner.lse).all(|x| x.is_finite()), "{method:?}");
        }
    }
}
