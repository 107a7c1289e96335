//! Runs a path, times it and explains it.

use crate::data::{Tensors, available_memory, gib, reserved};
use crate::elements::Elements;
use crate::failure::{Refused, Result};
use crate::output::Named;
use crate::paths::{Method, Path};
use crate::settings::Settings;
use crate::strips::{Cut, Rows};
use sdpa::{Attention, Explanation, Inputs, Machine, Outputs, Plan, Point, Problem, Shape, ViewMut, Workspace};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Everything that runs of the paths share: inputs, outputs made beforehand, memory that is kept.
pub(crate) struct Runner<'a> {
    attention: Attention,
    /// In f32, and as fused paths read them.
    inputs: Inputs<'a>,
    fused: Inputs<'a>,
    /// Without lists of selected keys, if there are any.
    dense: Option<Inputs<'a>>,
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
            dense: tensors.selected.as_ref().map(|_| elements.all_but_lists(tensors)).transpose()?,
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

    /// Explanation of that plan.
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
            (Method::Fused(_), Some(plan)) => return self.run_fused(self.fused, plan),
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

    /// The plan of a fused path for the call without lists; `None` if the call has none.
    pub(crate) fn dense_plan(&mut self, path: Path) -> Result<Option<Plan>> {
        let Some(dense) = self.dense.filter(|_| path.method.isa().is_some()) else { return Ok(None) };
        let outputs = outputs(&self.shape, &mut self.out, &mut self.lse)?;
        Ok(Some(Plan::new(&self.attention.problem(dense, outputs)?, path.exec())))
    }

    /// Runs the call without lists once; what it computes is not the call's answer.
    pub(crate) fn run_dense(&mut self, plan: &Plan) -> Result<Duration> {
        self.run_fused(self.dense.unwrap_or(self.fused), plan)
    }

    fn run_fused(&mut self, inputs: Inputs<'a>, plan: &Plan) -> Result<Duration> {
        let outputs = outputs(&self.shape, &mut self.out, &mut self.lse)?;
        let start = Instant::now();
        self.attention.problem(inputs, outputs)?.run(plan, &mut self.workspace);
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
    use crate::args::Source;
    use sdpa::Isa;

    const SHAPE: Shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 5, kv_len: 7, head_dim: 3, value_dim: 4 };

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
        let tensors = crate::data::load(&Source::Random(SHAPE)).unwrap();
        let rows = Rows::choose(&SHAPE);
        let mut runner = Runner::new(&tensors, &Elements::F32, Settings::default(), &rows).unwrap();
        for method in Isa::available().map(Method::Fused).chain([Method::Unfused]) {
            runner.clear();
            runner.run(Path { method, threads: 1 }, None).unwrap();
            assert!(runner.out.iter().chain(&runner.lse).all(|x| x.is_finite()), "{method:?}");
        }
    }
}
