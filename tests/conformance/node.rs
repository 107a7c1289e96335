//! One ONNX node with its tensors: attributes, inputs by position, expected outputs by position.
#![allow(dead_code, reason = "compiled into the conformance tests of two packages; one uses not all of it")]

use crate::cases::{Case, Tensor, Tolerance, rounded};
use serde_json::{Map, Value};

#[derive(Debug)]
pub(crate) struct Node<'a> {
    pub(crate) op: String,
    attributes: &'a Map<String, Value>,
    inputs: Vec<Option<&'a Tensor>>,
    outputs: Vec<Option<&'a Tensor>>,
    tolerance: Tolerance,
}

impl<'a> Node<'a> {
    pub(crate) fn new(case: &'a Case) -> Result<Self, String> {
        let json = |key: &str| case.metadata.get(key).ok_or_else(|| format!("no '{key}' in the case"));
        let number = |key: &str| json(key)?.as_f64().ok_or_else(|| format!("'{key}' is no number"));
        // An empty name is an input left out, or an output not asked for.
        let list = |key: &str, prefix: &str| -> Result<Vec<Option<&'a Tensor>>, String> {
            let names = json(key)?.as_array().ok_or_else(|| format!("'{key}' is no list"))?;
            let tensor = |(i, name): (usize, &Value)| {
                let name = name.as_str().ok_or_else(|| format!("'{key}' holds {name}"))?;
                (!name.is_empty()).then(|| case.tensor(&format!("{prefix}.{i}"))).transpose()
            };
            names.iter().enumerate().map(tensor).collect()
        };
        let (inputs, outputs) = (list("inputs", "input")?, list("outputs", "output")?);
        let named = inputs.iter().chain(&outputs).flatten().count();
        if named != case.tensors.len() {
            return Err(format!("{named} tensors named, {} in the file", case.tensors.len()));
        }
        Ok(Self {
            op: json("op")?.as_str().ok_or("'op' is no string")?.to_owned(),
            attributes: json("attributes")?.as_object().ok_or("'attributes' is no object")?,
            inputs,
            outputs,
            tolerance: Tolerance { rtol: number("rtol")?, atol: number("atol")? },
        })
    }

    /// Fails on an attribute that is not among these, and on more inputs or outputs than these.
    pub(crate) fn knows(&self, attributes: &[&str], inputs: usize, outputs: usize) -> Result<(), String> {
        if let Some(name) = self.attributes.keys().find(|name| !attributes.contains(&name.as_str())) {
            return Err(format!("unknown attribute '{name}'"));
        }
        if self.inputs.len() > inputs || self.outputs.len() > outputs {
            return Err(format!("unknown inputs or outputs: {} and {} given", self.inputs.len(), self.outputs.len()));
        }
        Ok(())
    }

    pub(crate) fn attribute(&self, name: &str) -> Option<&'a Value> {
        self.attributes.get(name)
    }

    pub(crate) fn int(&self, name: &str) -> Result<Option<i64>, String> {
        self.attribute(name).map(|v| v.as_i64().ok_or_else(|| format!("{name} is {v}, no integer"))).transpose()
    }

    pub(crate) fn float(&self, name: &str) -> Result<Option<f32>, String> {
        let float = |v: &Value| v.as_f64().map(|x| x as f32).ok_or_else(|| format!("{name} is {v}, no number"));
        self.attribute(name).map(float).transpose()
    }

    /// Fails unless the attribute names a float type of ONNX that a softmax may work in. Ours always works in `f32`,
    /// which is within the tolerance of any of them.
    pub(crate) fn check_softmax_precision(&self) -> Result<(), String> {
        match self.int("softmax_precision")? {
            None | Some(1 | 10 | 11 | 16) => Ok(()),
            Some(other) => Err(format!("softmax_precision {other}")),
        }
    }

    pub(crate) fn input(&self, i: usize) -> Option<&'a Tensor> {
        self.inputs.get(i).copied().flatten()
    }

    pub(crate) fn needed(&self, i: usize) -> Result<&'a Tensor, String> {
        self.input(i).ok_or_else(|| format!("input {i} is missing"))
    }

    pub(crate) fn output(&self, i: usize) -> Option<&'a Tensor> {
        self.outputs.get(i).copied().flatten()
    }

    /// Compares an output, rounded to the dtype it is expected in; passes if it was not asked for.
    pub(crate) fn check(&self, i: usize, what: &str, got: &[f32], shape: &[usize]) -> Result<f64, String> {
        let Some(expected) = self.output(i) else { return Ok(0.0) };
        expected.expect_shape(shape).map_err(|e| format!("{what}: {e}"))?;
        self.tolerance.check(what, &rounded(got, expected.dtype), expected)
    }
}
