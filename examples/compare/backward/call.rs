//! A backward call, and how it is run.

use super::nothing;
use crate::data::{Tensor, Tensors};
use crate::elements::Elements;
use crate::failure::Result;
use crate::output::Named;
use crate::paths::{Method, Path};
use crate::settings::Settings;
use sdpa::{
    Attention, BackwardPlan, Exec, Gradients, Inputs, Mods, Outputs, Plan, Saved, Shape, View, ViewMut, Workspace,
    naive,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Gradients in what a call reads; empty where it does not read that.
#[derive(Debug, Clone, Default)]
pub(super) struct Gradient<T = f32> {
    pub(super) q: Vec<T>,
    pub(super) k: Vec<T>,
    pub(super) v: Vec<T>,
    pub(super) bias: Vec<T>,
    pub(super) sinks: Vec<T>,
    pub(super) slopes: Vec<T>,
}

impl Gradient {
    /// The gradients as they are written, in the shapes of their tensors.
    pub(super) fn named<'a>(&'a self, tensors: &Tensors) -> Vec<Named<'a>> {
        let shape = |tensor: &Tensor| tensor.shape.to_vec();
        let mut all = vec![
            Named { name: "dq", shape: shape(&tensors.q), data: &self.q },
            Named { name: "dk", shape: shape(&tensors.k), data: &self.k },
            Named { name: "dv", shape: shape(&tensors.v), data: &self.v },
        ];
        all.extend(tensors.bias.as_ref().map(|bias| Named { name: "dbias", shape: shape(bias), data: &self.bias }));
        let list = |name, data: &'a Vec<f32>| Named { name, shape: vec![data.len()], data };
        all.extend(tensors.sinks.as_ref().map(|_| list("dsinks", &self.sinks)));
        all.extend(tensors.alibi_slopes.as_ref().map(|_| list("dalibi_slopes", &self.slopes)));
        all
    }
}

/// A call with memory for all that it writes.
#[derive(Debug)]
pub(super) struct Call<'a> {
    attention: Attention,
    /// In f32, and as fused paths read them.
    inputs: Inputs<'a>,
    fused: Inputs<'a>,
    /// Elements of q, k, v and d_out.
    tensors: [&'a [f32]; 4],
    d_out: View<'a>,
    d_lse: Option<View<'a>>,
    shape: Shape,
    out: Vec<f32>,
    lse: Vec<f32>,
    pub(super) gradient: Gradient,
    bias: [usize; 4],
    workspace: Workspace,
}

impl<'a> Call<'a> {
    pub(super) fn new(tensors: &'a Tensors, elements: &'a Elements, settings: Settings, shape: Shape) -> Result<Self> {
        let Shape { batch, heads, q_len, value_dim, .. } = shape;
        let rows = batch * heads * q_len;
        if rows == 0 {
            return Err(nothing(tensors.q.shape));
        }
        let zeros = |n: usize| vec![0.0; n];
        let of = |tensor: &Tensor| zeros(tensor.data.len());
        let gradient = Gradient {
            q: of(&tensors.q),
            k: of(&tensors.k),
            v: of(&tensors.v),
            bias: tensors.bias.as_ref().map_or_else(Vec::new, of),
            sinks: tensors.sinks.clone().unwrap_or_default(),
            slopes: tensors.alibi_slopes.clone().unwrap_or_default(),
        };
        let given = tensors.d_out.as_ref().expect("read or made up");
        let d_out = given.view()?;
        let call = Self {
            attention: settings.attention(),
            inputs: tensors.inputs()?,
            fused: elements.inputs(tensors)?,
            tensors: [&tensors.q, &tensors.k, &tensors.v, given].map(|tensor| tensor.data.as_slice()),
            d_out,
            d_lse: tensors.d_lse.as_ref().map(Tensor::view).transpose()?,
            shape,
            out: zeros(rows * value_dim),
            lse: zeros(rows),
            gradient,
            bias: tensors.bias.as_ref().map_or([0; 4], |bias| bias.shape),
            workspace: Workspace::new(),
        };
        // Says whether everything goes together, before anything takes time.
        let saved =
            Saved::new(View::bhld(&call.out, call.out_shape())?, View::bhld(&call.lse, call.lse_shape())?, d_out);
        let saved = call.d_lse.map_or(saved, |d_lse| saved.d_lse(d_lse));
        call.attention.backward(call.fused, saved, Gradients::new())?;
        Ok(call)
    }

    /// Elements of a key, and of a value.
    pub(super) fn dims(&self) -> [usize; 2] {
        [self.shape.head_dim, self.shape.value_dim]
    }

    fn out_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.heads, self.shape.q_len, self.shape.value_dim]
    }

    fn lse_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.heads, self.shape.q_len, 1]
    }

    /// Operations of the forward pass for the pairs that range rules and lengths leave visible.
    pub(super) fn useful_flops(&mut self) -> Result<f64> {
        let shape = self.out_shape();
        let problem = self.attention.problem(self.fused, Outputs::new(ViewMut::bhld(&mut self.out, shape)?))?;
        Ok(Plan::new(&problem, Exec::serial()).explain(&problem, None).useful_flops)
    }

    /// Returns the largest size of the terms that each gradient is a sum of, in the order of [`Gradient`]: a gradient of a weight is
    /// as large as output gradients times values, over the square root of so many.
    pub(super) fn largest_terms(&self) -> [f64; 6] {
        let largest =
            |x: &[f32]| x.iter().filter(|x| x.is_finite()).fold(0.0f64, |most, x| most.max(f64::from(x.abs())));
        let [q, k, v, d_out] = self.tensors.map(largest);
        let scale = f64::from(self.attention.scale_for(self.shape.head_dim)).abs();
        let weight = d_out * v * (self.shape.value_dim as f64).sqrt();
        let rows = (self.shape.batch * self.shape.q_len) as f64;
        [scale * weight * k, scale * weight * q, d_out, weight, weight * rows.sqrt(), weight * self.shape.kv_len as f64]
    }

    /// Returns the gradients of the plain passes, in `f32` or `f64`.
    pub(super) fn naive<T: naive::Real>(&self) -> Result<Gradient<T>> {
        let gradient = naive::gradients(&self.attention, &self.inputs, self.d_out, self.d_lse, &Mods::new())?;
        let naive::Gradient { q, k, v, bias, mut sinks, mut slopes, .. } = gradient;
        sinks.truncate(self.gradient.sinks.len());
        slopes.truncate(self.gradient.slopes.len());
        Ok(Gradient { q, k, v, bias, sinks, slopes })
    }

    /// The gradients that a path computes.
    pub(super) fn gradient(&mut self, path: Path) -> Result<&Gradient> {
        self.run(path)?;
        Ok(&self.gradient)
    }

    /// Forgets what was computed: an element that the next run leaves out is then no number.
    pub(super) fn clear(&mut self) {
        let Gradient { q, k, v, bias, sinks, slopes } = &mut self.gradient;
        [q, k, v, bias, sinks, slopes].into_iter().for_each(|gradient| gradient.fill(f32::NAN));
    }

    /// Runs forward and backward; returns the time of each. The naive path computes forward within its backward pass, and
    /// leaves no gradients here.
    pub(super) fn run(&mut self, path: Path) -> Result<[Duration; 2]> {
        let start = Instant::now();
        if path.method == Method::Naive {
            black_box(self.naive::<f32>()?);
            return Ok([Duration::ZERO, start.elapsed()]);
        }
        self.forward(path)?;
        let forward = start.elapsed();
        self.backward(path)?;
        Ok([forward, start.elapsed() - forward])
    }

    fn forward(&mut self, path: Path) -> Result<()> {
        let (shape, lse_shape) = (self.out_shape(), self.lse_shape());
        let outputs = Outputs::new(ViewMut::bhld(&mut self.out, shape)?);
        let outputs = outputs.lse(ViewMut::bhld(&mut self.lse, lse_shape)?);
        if path.method == Method::Unfused {
            return Ok(sdpa_unfused::attention(&self.attention, self.inputs, outputs, path.exec())?);
        }
        let problem = self.attention.problem(self.fused, outputs)?;
        let plan = Plan::new(&problem, path.exec());
        problem.run(&plan, &mut self.workspace);
        Ok(())
    }

    fn backward(&mut self, path: Path) -> Result<()> {
        let [q_shape, k_shape, v_shape] = self.shapes()?;
        let (out, lse) = (View::bhld(&self.out, self.out_shape())?, View::bhld(&self.lse, self.lse_shape())?);
        let saved = Saved::new(out, lse, self.d_out);
        let saved = self.d_lse.map_or(saved, |d_lse| saved.d_lse(d_lse));
        let Gradient { q, k, v, bias, sinks, slopes } = &mut self.gradient;
        let mut gradients =
            Gradients::new().q(ViewMut::bhld(q, q_shape)?).k(ViewMut::bhld(k, k_shape)?).v(ViewMut::bhld(v, v_shape)?);
        if !bias.is_empty() {
            gradients = gradients.bias(ViewMut::bhld(bias, self.bias)?);
        }
        if !sinks.is_empty() {
            gradients = gradients.sinks(sinks);
        }
        if !slopes.is_empty() {
            gradients = gradients.alibi(slopes);
        }
        if path.method == Method::Unfused {
            return Ok(sdpa_unfused::attention_backward(&self.attention, self.inputs, saved, gradients, path.exec())?);
        }
        let problem = self.attention.backward(self.fused, saved, gradients)?;
        let plan = BackwardPlan::new(&problem, path.exec());
        Ok(problem.run(&plan, &mut self.workspace)?)
    }

    /// Shapes of q, k and v.
    fn shapes(&self) -> Result<[[usize; 4]; 3]> {
        let kv = self.inputs.key_values()?;
        Ok([self.inputs.queries().shape(), kv.k_shape(), kv.v_shape()])
    }
}
