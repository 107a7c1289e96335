//! This crate: the fused passes, and the unfused ones on matrixmultiply.

use super::{Step, WIDE};
use crate::case;
use crate::elements::{Data, Elements};
use crate::failure::Result;
use crate::peer::{ACCURATE, NATIVE, OURS, Peer, on_fast_bf16, on_matrix_unit};
use crate::rounded::Qkv;
use crate::support;
use sdpa::{Attention, BackwardPlan, Exec, Gradients, Inputs, Outputs, Plan, Precision};
use sdpa::{Saved, Shape, View, ViewMut, Workspace};
use std::hint::black_box;

/// Which passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Fused, [`Precision::Exact`].
    Exact,
    /// Fused, [`Precision::Native`].
    Native,
    /// Fused, [`Precision::Accurate`].
    Accurate,
    /// Fused, [`Precision::Exact`], with output and gradients in f32 whatever the inputs are.
    Wide,
    Unfused,
}

impl Way {
    fn precision(self) -> Precision {
        match self {
            Self::Native => Precision::Native,
            Self::Accurate => Precision::Accurate,
            Self::Exact | Self::Wide | Self::Unfused => Precision::Exact,
        }
    }
}

/// Forward and backward; checked and planned anew each run, workspaces kept.
#[derive(Debug)]
pub(super) struct Ours {
    way: Way,
    ready: Option<Ready>,
    workspace: Workspace,
}

/// Tensors, and room for results and gradients.
#[derive(Debug)]
struct Ready {
    attention: Attention,
    /// Shapes of q, k, v and the output.
    shapes: [[usize; 4]; 4],
    /// q, k, v and the gradient in the output.
    tensors: [Data; 4],
    out: Data,
    lse: Vec<f32>,
    gradients: [Data; 3],
    exec: Exec<'static>,
}

impl Ours {
    pub(super) fn new(way: Way) -> Self {
        Self { way, ready: None, workspace: Workspace::new() }
    }
}

impl Ready {
    fn new(step: &Step, results: Elements) -> Result<Self> {
        let workload = step.case.workload();
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = workload.shape;
        let shapes = [
            [batch, heads, q_len, head_dim],
            [batch, kv_heads, kv_len, head_dim],
            [batch, kv_heads, kv_len, value_dim],
            [batch, heads, q_len, value_dim],
        ];
        let Qkv { q, k, v } = step.case.read()?;
        let zeros = |shape: [usize; 4]| Data::new(results, vec![0.0; shape.iter().product()]);
        let [of_q, of_k, of_v, of_out] = shapes;
        Ok(Self {
            attention: workload.attention(),
            shapes,
            tensors: [q, k, v, case::read(&step.d_out)?].map(|data| Data::new(step.case.elements, data)),
            out: zeros(of_out),
            lse: vec![0.0; batch * heads * q_len],
            gradients: [of_q, of_k, of_v].map(zeros),
            exec: support::exec(step.case.threads),
        })
    }
}

const UNPREPARED: &str = "not prepared";

impl Peer<Step> for Ours {
    fn name(&self) -> &'static str {
        match self.way {
            Way::Exact => OURS,
            Way::Native => NATIVE,
            Way::Accurate => ACCURATE,
            Way::Wide => WIDE,
            Way::Unfused => "unfused",
        }
    }

    fn supports(&self, step: &Step) -> std::result::Result<(), String> {
        match self.way {
            Way::Unfused if step.case.softcap.is_some() => Err("no softcap".to_owned()),
            Way::Native => on_fast_bf16(),
            Way::Accurate => on_matrix_unit(),
            _ => Ok(()),
        }
    }

    fn prepare(&mut self, step: &Step) -> Result<String> {
        let results = if self.way == Way::Wide { Elements::F32 } else { step.case.elements };
        let mut ready = Ready::new(step, results)?;
        ready.attention = ready.attention.precision(self.way.precision());
        self.ready = Some(ready);
        Ok(match self.way {
            Way::Exact => "Problem::run and BackwardProblem::run, workspaces kept",
            Way::Native => "as sdpa, with Precision::Native",
            Way::Accurate => "as sdpa, with Precision::Accurate",
            Way::Wide => "as sdpa, output and gradients in f32",
            Way::Unfused => "benches/unfused: matrixmultiply's sgemm per head",
        }
        .to_owned())
    }

    fn run(&mut self) -> Result<()> {
        let Ready { attention, shapes, tensors, out, lse, gradients, exec } = self.ready.as_mut().ok_or(UNPREPARED)?;
        let [of_q, of_k, of_v, of_out] = *shapes;
        let [batch, heads, rows, _] = of_out;
        let [q, k, v, d_out] = black_box(tensors);
        let inputs = Inputs::new(q.view(of_q)?, k.view(of_k)?, v.view(of_v)?);
        let outputs = Outputs::new(out.view_mut(of_out)?).lse(ViewMut::bhl(lse, [batch, heads, rows])?);
        match self.way {
            Way::Unfused => sdpa_unfused::attention(attention, inputs, outputs, *exec)?,
            _ => {
                let problem = attention.problem(inputs, outputs)?;
                let plan = Plan::new(&problem, *exec);
                problem.run(&plan, &mut self.workspace);
            }
        }
        let saved = Saved::new(out.view(of_out)?, View::bhld(lse, [batch, heads, rows, 1])?, d_out.view(of_out)?);
        let [dq, dk, dv] = gradients;
        let gradients = Gradients::new().q(dq.view_mut(of_q)?).k(dk.view_mut(of_k)?).v(dv.view_mut(of_v)?);
        match self.way {
            Way::Unfused => sdpa_unfused::attention_backward(attention, inputs, saved, gradients, *exec)?,
            _ => {
                let problem = attention.backward(inputs, saved, gradients)?;
                let plan = BackwardPlan::new(&problem, *exec);
                problem.run(&plan, &mut self.workspace)?;
            }
        }
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.ready.as_ref().ok_or(UNPREPARED)?.gradients.iter().flat_map(Data::widened).collect())
    }
}
