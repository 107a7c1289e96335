//! The subgraphs of ONNX FlexAttention, in ONNX's textual form, evaluated at one score position at a time.
//!
//! ```text
//! name (float[B,H,L,S] x) => (float[B,H,L,S] y)
//!    <float c = {20}, int64[2] shape = {-1,1}>
//! {
//!    scaled = Div (x, c)
//!    y = Tanh (scaled)
//! }
//! ```
//! Whatever is not elementwise here only builds index tensors: `Shape`, `Gather`, `Range` and `Reshape` of a range so
//! that it lies along one axis; at one position that is a number again.

use sdpa::Position;
use std::collections::HashMap;

/// What a name stands for at one position.
#[derive(Debug, Clone, PartialEq)]
enum Value {
    Float(f64),
    Int(i64),
    Bool(bool),
    /// A one-dimensional tensor of integers: a shape.
    List(Vec<i64>),
    /// A range, not yet laid along an axis: first value and step.
    Range(i64, i64),
}
use Value::{Bool, Float, Int, List, Range};

#[derive(Debug)]
struct Step {
    to: String,
    op: String,
    attributes: HashMap<String, i64>,
    from: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct Subgraph {
    input: String,
    output: String,
    constants: HashMap<String, Value>,
    steps: Vec<Step>,
    /// Of the scores: batch, heads, rows, keys.
    shape: [usize; 4],
}

impl Subgraph {
    /// Reads a graph and evaluates it once, so that what is unknown or ill-typed is found here.
    pub(crate) fn parse(text: &str, shape: [usize; 4]) -> Result<Self, String> {
        let (head, rest) = text.split_once("=>").ok_or("no '=>'")?;
        let (_, input) = head.split_once('(').ok_or("no input")?;
        // The body's braces stand on lines of their own, constants' do not.
        let (declarations, body) = rest.split_once("\n{").ok_or("no body")?;
        let body = body.trim_end().strip_suffix('}').ok_or("the body does not end")?;
        let (output, constants) = declarations.split_once(')').ok_or("no output")?;
        let mut graph = Self {
            input: parameter(input.trim().strip_suffix(')').ok_or("more after the input")?)?,
            output: parameter(output.trim().strip_prefix('(').ok_or("no output")?)?,
            constants: HashMap::new(),
            steps: body.lines().map(str::trim).filter(|line| !line.is_empty()).map(step).collect::<Result<_, _>>()?,
            shape,
        };
        let constants = constants.trim();
        if !constants.is_empty() {
            let list = constants.strip_prefix('<').and_then(|c| c.strip_suffix('>')).ok_or("constants without <>")?;
            for item in list.split_inclusive('}') {
                let (name, value) = constant(item.trim_start_matches([',', ' ']))?;
                graph.constants.insert(name, value);
            }
        }
        graph.evaluate(1.0, Position { batch: 0, head: 0, row: 0, key: 0, position: 0, distance: 0 })?;
        Ok(graph)
    }

    /// The new score or weight.
    pub(crate) fn apply(&self, x: f32, at: Position) -> f32 {
        self.evaluate(x.into(), at).expect("it was evaluated when it was read") as f32
    }

    fn evaluate(&self, x: f64, at: Position) -> Result<f64, String> {
        let mut values = self.constants.clone();
        values.insert(self.input.clone(), Float(x));
        for step in &self.steps {
            let get = |name: &String| values.get(name).ok_or_else(|| format!("'{name}' is not defined"));
            let value = match (step.op.as_str(), step.from.as_slice()) {
                ("Shape", [of]) if *of == self.input => List(self.shape.map(|n| n as i64).to_vec()),
                _ => {
                    let from = step.from.iter().map(get).collect::<Result<Vec<_>, _>>()?;
                    step.apply(&from, at).ok_or_else(|| format!("unknown: {step:?} of {from:?}"))?
                }
            };
            values.insert(step.to.clone(), value);
        }
        match values.get(&self.output) {
            Some(&Float(y)) => Ok(y),
            other => Err(format!("the output is {other:?}")),
        }
    }
}

impl Step {
    /// The result, or `None` if operator, attributes or types are not known here.
    fn apply(&self, from: &[&Value], at: Position) -> Option<Value> {
        let attribute = |name: &str| match (self.attributes.get(name), self.attributes.len()) {
            (Some(&n), 1) => Some(n),
            _ => None,
        };
        match (self.op.as_str(), from) {
            ("Gather", [List(list), Int(i)]) if attribute("axis") == Some(0) => {
                list.get(usize::try_from(*i).ok()?).copied().map(Int)
            }
            ("Cast", [value]) => cast(attribute("to")?, value),
            _ if !self.attributes.is_empty() => None,
            ("Range", [Int(first), Int(_), Int(step)]) => Some(Range(*first, *step)),
            ("Reshape", [Range(first, step), List(shape)]) => {
                let axis = 4usize.checked_sub(shape.len())? + shape.iter().position(|&n| n == -1)?;
                let index = [at.batch, at.head, at.row, at.key][axis];
                // All other sizes must be 1, or this would be no index along one axis.
                shape.iter().all(|n| [1, -1].contains(n)).then_some(Int(first + step * index as i64))
            }
            ("Where", [Bool(condition), Float(a), Float(b)]) => Some(Float(if *condition { *a } else { *b })),
            ("Where", [Bool(condition), Int(a), Int(b)]) => Some(Int(if *condition { *a } else { *b })),
            ("And", [Bool(a), Bool(b)]) => Some(Bool(*a && *b)),
            ("Or", [Bool(a), Bool(b)]) => Some(Bool(*a || *b)),
            ("Not", [Bool(a)]) => Some(Bool(!a)),
            (op, [Int(a)]) => integer(op, *a, 0, 1),
            (op, [Int(a), Int(b)]) => integer(op, *a, *b, 2),
            (op, [Float(a)]) => real(op, *a, 0.0, 1),
            (op, [Float(a), Float(b)]) => real(op, *a, *b, 2),
            _ => None,
        }
    }
}

fn compare<T: PartialOrd>(op: &str, a: T, b: T) -> Option<Value> {
    Some(Bool(match op {
        "Equal" => a == b,
        "Greater" => a > b,
        "GreaterOrEqual" => a >= b,
        "Less" => a < b,
        "LessOrEqual" => a <= b,
        _ => return None,
    }))
}

fn integer(op: &str, a: i64, b: i64, count: usize) -> Option<Value> {
    Some(Int(match (op, count) {
        ("Abs", 1) => a.abs(),
        ("Neg", 1) => -a,
        ("Add", 2) => a + b,
        ("Sub", 2) => a - b,
        ("Mul", 2) => a * b,
        ("Div", 2) => a.checked_div(b)?,
        ("Max", 2) => a.max(b),
        ("Min", 2) => a.min(b),
        (op, 2) => return compare(op, a, b),
        _ => return None,
    }))
}

fn real(op: &str, a: f64, b: f64, count: usize) -> Option<Value> {
    Some(Float(match (op, count) {
        ("Abs", 1) => a.abs(),
        ("Exp", 1) => a.exp(),
        ("Neg", 1) => -a,
        ("Tanh", 1) => a.tanh(),
        ("Add", 2) => a + b,
        ("Sub", 2) => a - b,
        ("Mul", 2) => a * b,
        ("Div", 2) => a / b,
        ("Max", 2) => a.max(b),
        ("Min", 2) => a.min(b),
        (op, 2) => return compare(op, a, b),
        _ => return None,
    }))
}

/// To one of ONNX's numbered types: 1, 10, 11 and 16 are floats, 6 and 7 integers, 9 is bool.
fn cast(to: i64, value: &Value) -> Option<Value> {
    Some(match (to, value) {
        (1 | 10 | 11 | 16, &Int(n)) => Float(n as f64),
        (1 | 10 | 11 | 16, &Float(x)) => Float(x),
        (1 | 10 | 11 | 16, &Bool(b)) => Float(f64::from(u8::from(b))),
        (6 | 7, &Int(n)) => Int(n),
        (6 | 7, &Float(x)) => Int(x as i64),
        (6 | 7, &Bool(b)) => Int(b.into()),
        (9, &Int(n)) => Bool(n != 0),
        (9, &Float(x)) => Bool(x != 0.0),
        (9, &Bool(b)) => Bool(b),
        _ => return None,
    })
}

/// The name in `float[B,H,L,S] name`.
fn parameter(text: &str) -> Result<String, String> {
    match text.rsplit_once(' ') {
        Some((_, name)) if text.matches('[').count() == 1 => Ok(name.to_owned()),
        _ => Err(format!("'{text}' is not one tensor")),
    }
}

/// `int64[2] name = {-1,1}`, or a number in place of the list.
fn constant(text: &str) -> Result<(String, Value), String> {
    let wrong = || format!("constant '{text}'");
    let (declaration, value) = text.split_once('=').ok_or_else(wrong)?;
    let (kind, name) = declaration.trim().split_once(' ').ok_or_else(wrong)?;
    let list = value.trim().strip_prefix('{').and_then(|v| v.strip_suffix('}')).ok_or_else(wrong)?.trim();
    let value = match kind {
        "float" | "double" | "float16" | "bfloat16" => Float(list.parse().map_err(|_| wrong())?),
        "int64" | "int32" => Int(list.parse().map_err(|_| wrong())?),
        "bool" => Bool(list.parse::<u8>().map_err(|_| wrong())? != 0),
        _ if kind.starts_with("int64[") => {
            List(list.split(',').map(|n| n.trim().parse()).collect::<Result<_, _>>().map_err(|_| wrong())?)
        }
        _ => return Err(wrong()),
    };
    Ok((name.trim().to_owned(), value))
}

/// `to = Op <name: int = 1> (from, from)`, the attributes optional.
fn step(line: &str) -> Result<Step, String> {
    let wrong = || format!("line '{line}'");
    let (to, call) = line.split_once('=').ok_or_else(wrong)?;
    let (head, from) = call.trim().strip_suffix(')').and_then(|c| c.rsplit_once('(')).ok_or_else(wrong)?;
    let (op, attributes) = head.split_once('<').unwrap_or((head, ""));
    let attribute = |text: &str| {
        let (name, value) = text.split_once(": int =")?;
        Some((name.trim().to_owned(), value.trim().parse().ok()?))
    };
    let attributes = attributes.trim().trim_end_matches('>').split(',').filter(|text| !text.is_empty());
    Ok(Step {
        to: to.trim().to_owned(),
        op: op.trim().to_owned(),
        attributes: attributes.map(attribute).collect::<Option<_>>().ok_or_else(wrong)?,
        from: from.split(',').map(|name| name.trim().to_owned()).collect(),
    })
}
