//! This crate: the fused path, and its unfused baseline on matrixmultiply.

use crate::case::Case;
use crate::elements::{Data, Elements};
use crate::failure::Result;
use crate::peer::{NATIVE, OURS, Peer};
use crate::rounded::Qkv;
use crate::support;
use sdpa::{
    Attention, Dtype, Exec, Inputs, Isa, KeyScales, KvCache, KvShape, Outputs, Plan, Precision, Shape, Workspace,
};
use std::hint::black_box;

/// Tensors, and room for the output.
#[derive(Debug)]
struct Ready {
    attention: Attention,
    shape: Shape,
    /// q, k and v.
    tensors: [Data; 3],
    /// Keys and values of a step, as a user keeps them from one to the next, or of 8 bits.
    cache: Option<KvCache>,
    out: Data,
    exec: Exec<'static>,
}

impl Ready {
    fn new(case: &Case) -> Result<Self> {
        let workload = case.workload();
        let len = case.batch * case.heads * case.q_len * case.value_dim;
        let Qkv { q, k, v } = case.read()?;
        // Queries and output in f16 would be rounded, which nobody asks for who only keeps less memory.
        let rows = if case.elements == Elements::Bf16 { Elements::Bf16 } else { Elements::F32 };
        Ok(Self {
            attention: workload.attention(),
            shape: workload.shape,
            tensors: [Data::new(rows, q), Data::new(case.elements, k), Data::new(case.elements, v)],
            cache: None,
            out: Data::new(rows, vec![0.0; len]),
            exec: support::exec(case.threads),
        })
    }

    /// Keys and values in a cache, if this is a step, one row a sequence, or if they are to be of 8 bits.
    fn cached(mut self, elements: Elements) -> Result<Self> {
        let Shape { batch, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = self.shape;
        if q_len == 1 || elements == Elements::Int8 {
            let cache = KvCache::new(batch, KvShape { kv_heads, head_dim, value_dim })?;
            let mut cache = match elements {
                Elements::F32 => cache,
                Elements::Bf16 => cache.dtype(Dtype::Bf16)?,
                Elements::F16 => cache.dtype(Dtype::F16)?,
                Elements::Int8 => cache.int8(KeyScales::PerToken)?,
            };
            let [_, k, v] = &self.tensors;
            cache
                .append(k.view([batch, kv_heads, kv_len, head_dim])?, v.view([batch, kv_heads, kv_len, value_dim])?)?;
            self.cache = Some(cache);
        }
        Ok(self)
    }

    fn bind(&mut self) -> Result<(Inputs<'_>, Outputs<'_>)> {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let [q, k, v] = &self.tensors;
        let q = q.view([batch, heads, q_len, head_dim])?;
        let inputs = match &self.cache {
            Some(cache) => Inputs::cached(q, cache),
            None => Inputs::new(
                q,
                k.view([batch, kv_heads, kv_len, head_dim])?,
                v.view([batch, kv_heads, kv_len, value_dim])?,
            ),
        };
        Ok((inputs, Outputs::new(self.out.view_mut([batch, heads, q_len, value_dim])?)))
    }
}

const UNPREPARED: &str = "not prepared";

/// Checked anew each run, planned once, workspace kept.
#[derive(Debug)]
pub(super) struct Fused {
    precision: Precision,
    ready: Option<(Ready, Plan)>,
    workspace: Workspace,
}

impl Fused {
    /// Products of f32, whatever the elements.
    pub(super) fn exact() -> Self {
        Self { precision: Precision::Exact, ready: None, workspace: Workspace::new() }
    }

    /// Products of bf16 by the machine's own instruction.
    pub(super) fn native() -> Self {
        Self { precision: Precision::Native, ..Self::exact() }
    }
}

impl Peer<Case> for Fused {
    fn name(&self) -> &'static str {
        match self.precision {
            Precision::Native => NATIVE,
            _ => OURS,
        }
    }

    fn supports(&self, _: &Case) -> std::result::Result<(), String> {
        let lacking = self.precision == Precision::Native && !Isa::detect().has_native_bf16();
        if lacking {
            Err("Native has no effect: no fast bf16 dot product (AVX512_BF16 of AMD, FEAT_BF16)".to_owned())
        } else {
            Ok(())
        }
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        let mut ready = Ready::new(case)?.cached(case.elements)?;
        ready.attention = ready.attention.precision(self.precision);
        let (attention, exec) = (ready.attention, ready.exec);
        let (inputs, outputs) = ready.bind()?;
        let plan = Plan::new(&attention.problem(inputs, outputs)?, exec);
        let cached = if ready.cache.is_some() { ", from a KvCache" } else { "" };
        let kept = match case.elements {
            Elements::F32 => String::new(),
            Elements::Bf16 => ", all tensors in bf16".to_owned(),
            kept => format!(", keys and values in {}", kept.name()),
        };
        let how = format!("{}, {} thread(s) of {}{cached}{kept}", plan.isa(), plan.workers(), case.threads);
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
        Ok(self.ready.as_ref().ok_or(UNPREPARED)?.0.out.widened())
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
        Ok("benches/unfused: matrixmultiply's sgemm per head, softmax of this crate".to_owned())
    }

    fn run(&mut self) -> Result<()> {
        let ready = self.ready.as_mut().ok_or(UNPREPARED)?;
        let (attention, exec) = (ready.attention, ready.exec);
        let (inputs, outputs) = ready.bind()?;
        Ok(sdpa_unfused::attention(&attention, black_box(inputs), outputs, exec)?)
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.ready.as_ref().ok_or(UNPREPARED)?.out.widened())
    }
}
