//! This crate: the fused path, and its unfused baseline on matrixmultiply.

use super::{OURS, Peer};
use crate::case::{Case, Qkv};
use crate::failure::Result;
use sdpa::{Attention, Exec, Inputs, KvCache, Outputs, Plan, Shape, View, ViewMut, Workspace, unfused};
use std::hint::black_box;

/// Tensors, and room for the output.
#[derive(Debug)]
struct Ready {
    attention: Attention,
    shape: Shape,
    qkv: Qkv,
    /// Keys and values of a step, as a user keeps them from one to the next.
    cache: Option<KvCache>,
    out: Vec<f32>,
    exec: Exec,
}

impl Ready {
    fn new(case: &Case) -> Result<Self> {
        let workload = case.workload();
        let len = case.batch * case.heads * case.q_len * case.value_dim;
        Ok(Self {
            attention: workload.attention(),
            shape: workload.shape,
            qkv: case.read()?,
            cache: None,
            out: vec![0.0; len],
            exec: Exec::default().threads(case.threads),
        })
    }

    /// Keys and values in a cache, if this is a step: one row a sequence.
    fn cached(mut self) -> Result<Self> {
        let Shape { batch, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = self.shape;
        if q_len == 1 {
            let mut cache = KvCache::new(batch, kv_heads, [head_dim, value_dim])?;
            let k = View::bhld(&self.qkv.k, [batch, kv_heads, kv_len, head_dim])?;
            cache.append(k, View::bhld(&self.qkv.v, [batch, kv_heads, kv_len, value_dim])?)?;
            self.cache = Some(cache);
        }
        Ok(self)
    }

    fn bind(&mut self) -> Result<(Inputs<'_>, Outputs<'_>)> {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let q = View::bhld(&self.qkv.q, [batch, heads, q_len, head_dim])?;
        let inputs = match &self.cache {
            Some(cache) => Inputs::cached(q, cache),
            None => Inputs::new(
                q,
                View::bhld(&self.qkv.k, [batch, kv_heads, kv_len, head_dim])?,
                View::bhld(&self.qkv.v, [batch, kv_heads, kv_len, value_dim])?,
            ),
        };
        Ok((inputs, Outputs::new(ViewMut::bhld(&mut self.out, [batch, heads, q_len, value_dim])?)))
    }
}

const UNPREPARED: &str = "not prepared";

/// Checked anew each run, planned once, workspace kept.
#[derive(Debug, Default)]
pub(super) struct Fused {
    ready: Option<(Ready, Plan)>,
    workspace: Workspace,
}

impl Peer<Case> for Fused {
    fn name(&self) -> &'static str {
        OURS
    }

    fn supports(&self, _: &Case) -> std::result::Result<(), String> {
        Ok(())
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        let mut ready = Ready::new(case)?.cached()?;
        let (attention, exec) = (ready.attention, ready.exec);
        let (inputs, outputs) = ready.bind()?;
        let plan = Plan::new(&attention.problem(inputs, outputs)?, exec);
        let cached = if ready.cache.is_some() { ", from a KvCache" } else { "" };
        let how = format!("{}, {} thread(s) of {}{cached}", plan.isa(), plan.workers(), case.threads);
        self.ready = Some((ready, plan));
        Ok(how)
    }

    fn run(&mut self) -> Result<()> {
        let (ready, plan) = self.ready.as_mut().ok_or(UNPREPARED)?;
        let attention = ready.attention;
        let (inputs, outputs) = ready.bind()?;
        attention.problem(black_box(inputs), outputs)?.run(plan, &mut self.workspace);
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.ready.as_ref().ok_or(UNPREPARED)?.0.out.clone())
    }
}

/// sgemm, softmax, sgemm.
#[derive(Debug, Default)]
pub(super) struct Unfused {
    ready: Option<Ready>,
}

impl Peer<Case> for Unfused {
    fn name(&self) -> &'static str {
        "unfused"
    }

    fn supports(&self, case: &Case) -> std::result::Result<(), String> {
        case.softcap.map_or(Ok(()), |_| Err("no softcap".to_owned()))
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        self.ready = Some(Ready::new(case)?);
        Ok("sdpa::unfused: matrixmultiply's sgemm per head, softmax of this crate".to_owned())
    }

    fn run(&mut self) -> Result<()> {
        let ready = self.ready.as_mut().ok_or(UNPREPARED)?;
        let (attention, exec) = (ready.attention, ready.exec);
        let (inputs, outputs) = ready.bind()?;
        Ok(unfused::attention(&attention, black_box(inputs), outputs, exec)?)
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.ready.as_ref().ok_or(UNPREPARED)?.out.clone())
    }
}
