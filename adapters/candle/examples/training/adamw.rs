//! AdamW with moments that can be saved: those of candle-nn's are private, and a checkpoint needs them.

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, Var};
use std::collections::{BTreeMap, HashMap};

/// AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) after clipping by the norm of all gradients.
pub(crate) struct AdamW {
    parameters: BTreeMap<String, Parameter>,
}

struct Parameter {
    var: Var,
    first: Vec<f32>,
    second: Vec<f32>,
}

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.98;
const EPS: f32 = 1e-9;
/// Weight decay of matrices; gains of norms do not decay.
const DECAY: f64 = 0.01;
/// Largest norm of all gradients together.
const CLIP: f64 = 1.0;

impl AdamW {
    pub(crate) fn new(vars: BTreeMap<String, Var>) -> Self {
        let parameter = |(name, var): (String, Var)| {
            let zeros = vec![0.0; var.elem_count()];
            (name, Parameter { var, first: zeros.clone(), second: zeros })
        };
        Self { parameters: vars.into_iter().map(parameter).collect() }
    }

    /// Moves each variable by its gradient. `step` counts from 1.
    pub(crate) fn step(&mut self, gradients: &GradStore, step: usize, rate: f64) -> Result<()> {
        let mut found = Vec::with_capacity(self.parameters.len());
        for (name, parameter) in &self.parameters {
            let Some(gradient) = gradients.get(&parameter.var) else { candle_core::bail!("{name}: no gradient") };
            found.push(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
        let norm = found.iter().flatten().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
        let clip = (CLIP / norm).min(1.0) as f32;
        let unbiased = |beta: f64| 1.0 / (1.0 - beta.powi(step as i32));
        let (scale1, scale2) = ((rate * unbiased(BETA1)) as f32, unbiased(BETA2) as f32);
        for (parameter, gradient) in self.parameters.values_mut().zip(found) {
            let keep = if parameter.var.rank() > 1 { (1.0 - rate * DECAY) as f32 } else { 1.0 };
            let mut values = parameter.var.flatten_all()?.to_vec1::<f32>()?;
            let moments = parameter.first.iter_mut().zip(&mut parameter.second);
            for ((x, (first, second)), gradient) in values.iter_mut().zip(moments).zip(gradient) {
                let g = gradient * clip;
                *first += (1.0 - BETA1) as f32 * (g - *first);
                *second += (1.0 - BETA2) as f32 * (g * g - *second);
                *x = *x * keep - scale1 * *first / ((*second * scale2).sqrt() + EPS);
            }
            parameter.var.set(&Tensor::from_vec(values, parameter.var.shape(), parameter.var.device())?)?;
        }
        Ok(())
    }

    /// Variables and moments, by name.
    pub(crate) fn tensors(&self) -> Result<HashMap<String, Tensor>> {
        let mut tensors = HashMap::new();
        for (name, parameter) in &self.parameters {
            let moment = |values: &[f32]| Tensor::from_slice(values, parameter.var.shape(), parameter.var.device());
            tensors.insert(name.clone(), parameter.var.as_tensor().clone());
            tensors.insert(format!("adamw.first.{name}"), moment(&parameter.first)?);
            tensors.insert(format!("adamw.second.{name}"), moment(&parameter.second)?);
        }
        Ok(tensors)
    }

    /// Takes variables and moments, by name.
    pub(crate) fn restore(&mut self, tensors: &HashMap<String, Tensor>) -> Result<()> {
        for (name, parameter) in &mut self.parameters {
            let tensor = |name: String| match tensors.get(&name) {
                Some(tensor) if tensor.shape() == parameter.var.shape() => Ok(tensor),
                Some(tensor) => {
                    let (got, expected) = (tensor.shape(), parameter.var.shape());
                    candle_core::bail!("{name}: shape is {got:?}, but the model's is {expected:?}")
                }
                None => candle_core::bail!("{name}: no such tensor in the checkpoint"),
            };
            parameter.var.set(tensor(name.clone())?)?;
            parameter.first = tensor(format!("adamw.first.{name}"))?.flatten_all()?.to_vec1()?;
            parameter.second = tensor(format!("adamw.second.{name}"))?.flatten_all()?.to_vec1()?;
        }
        Ok(())
    }
}
