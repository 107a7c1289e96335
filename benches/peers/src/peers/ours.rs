//! This crate: the fused path, and its unfused baseline on matrixmultiply.

use crate::case::Case;
use crate::elements::{Data, Elements};
use crate::failure::Result;
use crate::peer::{ACCURATE, IN_F32, NATIVE, OURS, Peer, on_fast_bf16, on_matrix_unit};
use crate::rounded::Qkv;
use crate::support;
use crate::workloads::Values;
use sdpa::{Attention, Dtype, Exec, Inputs, KeyScales, KvCache, KvShape, Outputs, Plan, Precision, Shape, Workspace};
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
    fn cached(mut self, case: &Case) -> Result<Self> {
        if case.q_len == 1 || case.elements == Elements::Int8 {
            self.cache = Some(self.fill(case)?);
        }
        Ok(self)
    }

    /// A cache with all keys and values; a latent one if keys hold the values.
    fn fill(&self, case: &Case) -> Result<KvCache> {
        let Shape { batch, kv_heads, kv_len, head_dim, value_dim, .. } = self.shape;
        let cache = KvCache::new(batch, KvShape { kv_heads, head_dim, value_dim })?;
        let cache = match case.elements {
            Elements::F32 => cache,
            Elements::Bf16 => cache.dtype(Dtype::Bf16)?,
            Elements::F16 => cache.dtype(Dtype::F16)?,
            Elements::Int8 => cache.int8(KeyScales::PerToken)?,
        };
        let [_, k, v] = &self.tensors;
        let k = k.view([batch, kv_heads, kv_len, head_dim])?;
        let (mut cache, v) = match case.values {
            Values::Separate => (cache, v.view([batch, kv_heads, kv_len, value_dim])?),
            Values::InKeys => (cache.latent()?, k.columns_in(0..value_dim).ok_or("values longer than keys")?),
        };
        cache.append(k, v)?;
        Ok(cache)
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

/// Way of calling the fused path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Elements of the case, [`Precision::Exact`].
    Exact,
    /// Elements of the case, [`Precision::Native`].
    Native,
    /// Elements of the case, [`Precision::Accurate`].
    Accurate,
    /// f32, from which the elements of the case are made.
    InF32,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Exact => OURS,
            Self::Native => NATIVE,
            Self::Accurate => ACCURATE,
            Self::InF32 => IN_F32,
        }
    }

    fn precision(self) -> Precision {
        match self {
            Self::Native => Precision::Native,
            Self::Accurate => Precision::Accurate,
            Self::Exact | Self::InF32 => Precision::Exact,
        }
    }

    /// The case as it is computed.
    fn of(self, case: &Case) -> Case {
        let elements = match self {
            Self::InF32 => Elements::F32,
            Self::Exact | Self::Native | Self::Accurate => case.elements,
        };
        Case { elements, ..case.clone() }
    }
}

/// Checked anew each run, planned once, workspace kept.
#[derive(Debug)]
pub(super) struct Fused {
    way: Way,
    ready: Option<(Ready, Plan)>,
    workspace: Workspace,
}

impl Fused {
    pub(super) fn new(way: Way) -> Self {
        Self { way, ready: None, workspace: Workspace::new() }
    }
}

impl Peer<Case> for Fused {
    fn name(&self) -> &'static str {
        self.way.name()
    }

    fn supports(&self, _: &Case) -> std::result::Result<(), String> {
        match self.way {
            Way::Native => on_fast_bf16(),
            Way::Accurate => on_matrix_unit(),
            Way::Exact | Way::InF32 => Ok(()),
        }
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        let case = &self.way.of(case);
        let mut ready = Ready::new(case)?.cached(case)?;
        ready.attention = ready.attention.precision(self.way.precision());
        let (attention, exec) = (ready.attention, ready.exec);
        let (inputs, outputs) = ready.bind()?;
        let plan = Plan::new(&attention.problem(inputs, outputs)?, exec);
        let cached = match &ready.cache {
            Some(cache) if cache.is_latent() => ", from a latent KvCache",
            Some(_) => ", from a KvCache",
            None => "",
        };
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
