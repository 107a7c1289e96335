//! Random calls with random options: what they are, how they are run, and what the oracle says of them.
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "every test binary compiles this module and uses its part"
)]

mod compare;
mod derive;
pub mod elements;
pub mod mods;
mod random;

pub use compare::{check_against_oracle, larger, options_of, same_rows};

use crate::support::{Tensor, UNWRITTEN};
use elements::Rounded;
use mods::{Functions, Place, with_mods};
use sdpa::{
    Alignment, Attention, Exec, Inputs, Isa, Mask, Outputs, Plan, Point, Precision, Run, SelectedKeys, View, ViewMut,
    Window, Workspace, naive,
};
use std::sync::Mutex;

pub const POINTS: [Point; 4] = [Point::Raw, Point::Softcapped, Point::Masked, Point::Weights];

/// A boolean mask of bytes or bools.
#[derive(Debug, Clone)]
pub struct MaskData {
    pub keep: bool,
    pub bools: Option<Vec<bool>>,
    pub bytes: Vec<u8>,
    /// The same bytes as numbers; what lies between them is NaN.
    pub tensor: Tensor,
}

impl MaskData {
    pub fn new(keep: bool, bools: bool, tensor: Tensor) -> Self {
        let bytes: Vec<u8> = tensor.data.iter().map(|&x| if x.is_nan() { 0xa5 } else { x as u8 }).collect();
        Self { keep, bools: bools.then(|| bytes.iter().map(|&x| x != 0).collect()), bytes, tensor }
    }

    /// The same kind of mask over other bytes.
    pub fn over(&self, tensor: Tensor) -> Self {
        Self::new(self.keep, self.bools.is_some(), tensor)
    }

    pub fn mask(&self) -> Mask<'_> {
        let Tensor { offset, shape, strides, .. } = self.tensor;
        let fits = "a mask fits its memory";
        match &self.bools {
            Some(bools) => {
                let view = View::from_strides(bools, offset, shape, strides).expect(fits);
                if self.keep { Mask::keep(view) } else { Mask::drop(view) }
            }
            None => {
                let view = View::from_strides(&self.bytes, offset, shape, strides).expect(fits);
                if self.keep { Mask::keep(view) } else { Mask::drop(view) }
            }
        }
    }
}

/// A call with its tensors and settings.
#[derive(Debug, Clone)]
pub struct Case {
    pub scale: Option<f32>,
    pub softcap: Option<f32>,
    pub causal: bool,
    pub window: Option<Window>,
    pub alignment: Option<Alignment>,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub bias: Option<Rounded>,
    pub mask: Option<MaskData>,
    /// True if the columns of bias and mask are those of the last keys.
    pub suffix: bool,
    /// Sequences after which bias and mask repeat.
    pub period: Option<usize>,
    pub alibi: Option<Vec<f32>>,
    pub sinks: Option<Vec<f32>>,
    pub kv_lens: Option<Vec<usize>>,
    pub ragged: Option<[Vec<usize>; 2]>,
    pub functions: Functions,
    pub place: Place,
    pub precision: Precision,
    /// Positions of the rows and of the keys of each sequence. They are never freed, since inputs borrow lists of lists.
    pub positions: [Option<&'static [&'static [i32]]>; 2],
    /// Keys that rows select.
    pub selected: Option<SelectedKeys>,
}

/// Lists of positions that are never freed, and are reached from here: leaks are looked for too.
pub fn kept(lists: Vec<Vec<i32>>) -> &'static [&'static [i32]] {
    static ALL: Mutex<Vec<&'static [&'static [i32]]>> = Mutex::new(Vec::new());
    let lists: Vec<&'static [i32]> = lists.into_iter().map(|list| &*list.leak()).collect();
    let lists = lists.leak();
    ALL.lock().expect("nothing panics meanwhile").push(lists);
    lists
}

/// Which outputs to ask for besides `out` and `lse`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub points: [bool; 4],
    pub mass: bool,
}

impl Wanted {
    pub const LEAST: Self = Self { points: [false; 4], mass: false };
    pub const MASS: Self = Self { mass: true, ..Self::LEAST };
    pub const ALL: Self = Self { points: [true; 4], mass: true };
}

/// Everything a call wrote.
#[derive(Debug, Clone)]
pub struct Full {
    pub out: Tensor,
    pub lse: Tensor,
    pub points: [Option<Tensor>; 4],
    pub mass: Option<Tensor>,
}

impl Full {
    /// The outputs of a call that write here.
    pub fn outputs(&mut self) -> Outputs<'_> {
        fn view(x: &mut Tensor) -> ViewMut<'_> {
            ViewMut::bhld(&mut x.data, x.shape).expect("dense")
        }
        let mut outputs = Outputs::new(view(&mut self.out)).lse(view(&mut self.lse));
        for (point, tensor) in POINTS.into_iter().zip(&mut self.points) {
            if let Some(tensor) = tensor {
                outputs = outputs.scores(point, view(tensor));
            }
        }
        match &mut self.mass {
            Some(mass) => outputs.key_weight_sums(view(mass)),
            None => outputs,
        }
    }
}

impl Case {
    pub fn attention(&self) -> Attention {
        let mut attention = Attention::new().precision(self.precision);
        attention = self.scale.map_or(attention, |x| attention.scale(x));
        attention = self.softcap.map_or(attention, |x| attention.softcap(x));
        attention = self.window.map_or(attention, |x| attention.window(x));
        attention = self.alignment.map_or(attention, |x| attention.align(x));
        if self.causal { attention.causal() } else { attention }
    }

    pub fn inputs(&self) -> Inputs<'_> {
        let mut inputs = self.inputs_over(Inputs::new(self.q.view(), self.k.view(), self.v.view()));
        inputs = self.kv_lens.as_ref().map_or(inputs, |x| inputs.kv_lens(x));
        self.ragged.as_ref().map_or(inputs, |[q, k]| inputs.ragged(q, k))
    }

    /// The options over queries, keys and values from elsewhere.
    pub fn inputs_over<'a>(&'a self, source: Inputs<'a>) -> Inputs<'a> {
        let mut inputs = source;
        let keys = self.longest().1;
        // One column stands for all keys, fewer than all for the first ones.
        let covers_all = |x: &Tensor| x.shape[3] == 1 || x.shape[3] == keys;
        inputs = match &self.bias {
            Some(bias) if self.suffix => inputs.bias_suffix(bias.view()),
            Some(bias) if covers_all(&bias.wide) => inputs.bias(bias.view()),
            Some(bias) => inputs.bias_prefix(bias.view()),
            None => inputs,
        };
        inputs = match &self.mask {
            Some(mask) if self.suffix => inputs.mask_suffix(mask.mask()),
            Some(mask) if covers_all(&mask.tensor) => inputs.mask(mask.mask()),
            Some(mask) => inputs.mask_prefix(mask.mask()),
            None => inputs,
        };
        inputs = self.period.map_or(inputs, |period| inputs.batch_period(period));
        inputs = self.alibi.as_ref().map_or(inputs, |x| inputs.alibi(x));
        let [rows, keys] = self.positions;
        inputs = rows.map_or(inputs, |x| inputs.row_positions(x));
        inputs = keys.map_or(inputs, |x| inputs.key_positions(x));
        inputs = self.selected.as_ref().map_or(inputs, |x| inputs.selected(x));
        self.sinks.as_ref().map_or(inputs, |x| inputs.sinks(x))
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.ragged.as_ref().map_or(self.q.shape[0], |[q, _]| q.len() - 1)
    }

    pub fn heads(&self) -> usize {
        self.q.shape[1]
    }

    pub fn kv_heads(&self) -> usize {
        self.k.shape[1]
    }

    /// Rows of a sequence.
    pub fn rows(&self, b: usize) -> usize {
        self.ragged.as_ref().map_or(self.q.shape[2], |[q, _]| q[b + 1] - q[b])
    }

    /// Keys of a sequence, existing or not.
    pub fn keys(&self, b: usize) -> usize {
        self.ragged.as_ref().map_or(self.k.shape[2], |[_, k]| k[b + 1] - k[b])
    }

    /// Keys of a sequence that exist.
    pub fn kv_len(&self, b: usize) -> usize {
        self.kv_lens.as_ref().map_or(self.keys(b), |lens| lens[b])
    }

    /// Rows and keys of the longest sequence.
    pub fn longest(&self) -> (usize, usize) {
        let most = |f: &dyn Fn(usize) -> usize| (0..self.batch()).map(f).max();
        match self.ragged {
            Some(_) => (most(&|b| self.rows(b)).unwrap_or(0), most(&|b| self.keys(b)).unwrap_or(0)),
            None => (self.q.shape[2], self.k.shape[2]),
        }
    }

    /// Where row `i` of a sequence lies in q and the outputs.
    pub fn row_at(&self, b: usize, i: usize) -> (usize, usize) {
        self.ragged.as_ref().map_or((b, i), |[q, _]| (0, q[b] + i))
    }

    /// Where key `j` of a sequence lies in k, v and the key weight sums.
    pub fn key_at(&self, b: usize, j: usize) -> (usize, usize) {
        self.ragged.as_ref().map_or((b, j), |[_, k]| (0, k[b] + j))
    }

    /// Where row 0 of a sequence stands.
    pub fn offset(&self, b: usize) -> isize {
        self.alignment.map_or(0, |alignment| crate::support::offset_of(alignment, self.rows(b), self.kv_len(b)))
    }

    /// Sequence, head and row of every row there is.
    pub fn every_row(&self) -> Vec<[usize; 3]> {
        let heads = 0..self.heads();
        let rows = |b: usize| heads.clone().flat_map(move |h| (0..self.rows(b)).map(move |i| [b, h, i]));
        (0..self.batch()).flat_map(rows).collect()
    }

    /// Buffers for what is wanted, not yet written.
    pub fn unwritten(&self, wanted: Wanted) -> Full {
        let blank = |shape| Tensor::filled(shape, f32::from_bits(UNWRITTEN));
        let ([b, h, l, _], [_, hkv, lk, dv], (rows, keys)) = (self.q.shape, self.v.shape, self.longest());
        Full {
            out: blank([b, h, l, dv]),
            lse: blank([b, h, l, 1]),
            points: wanted.points.map(|wanted| wanted.then(|| blank([self.batch(), h, rows, keys]))),
            mass: wanted.mass.then(|| blank([b, hkv, lk, 1])),
        }
    }

    pub fn run(&self, exec: Exec, wanted: Wanted) -> Full {
        let mut full = self.unwritten(wanted);
        self.run_into(exec, &mut full, &mut Workspace::new());
        full
    }

    /// Runs on given memory; returns the plan.
    pub fn run_into(&self, exec: Exec, full: &mut Full, workspace: &mut Workspace) -> Plan {
        self.run_inputs_into(self.inputs(), exec, full, workspace)
    }

    /// Runs with keys and values from elsewhere.
    pub fn run_over(&self, source: Inputs<'_>, exec: Exec, wanted: Wanted) -> Full {
        let mut full = self.unwritten(wanted);
        self.run_over_into(source, exec, &mut full, &mut Workspace::new());
        full
    }

    /// The same on given memory; returns the plan.
    pub fn run_over_into(&self, source: Inputs<'_>, exec: Exec, full: &mut Full, workspace: &mut Workspace) -> Plan {
        self.run_inputs_into(self.inputs_over(source), exec, full, workspace)
    }

    fn run_inputs_into(&self, inputs: Inputs<'_>, exec: Exec, full: &mut Full, workspace: &mut Workspace) -> Plan {
        self.run_outputs(inputs, exec, full.outputs(), workspace)
    }

    /// Runs on whatever tensors, options included; returns the plan.
    pub fn run_outputs(&self, inputs: Inputs<'_>, exec: Exec, outputs: Outputs<'_>, workspace: &mut Workspace) -> Plan {
        let problem = self.attention().problem(inputs, outputs).expect("a good call");
        let plan = Plan::new(&problem, exec);
        with_mods!(self, |mods| problem.run_with(&plan, workspace, Run::new().mods(&mods)))
            .expect("functions that fit");
        plan
    }

    /// What the oracle says, in the numbers asked for.
    pub fn oracle<T: naive::Real>(&self) -> naive::Answer<T> {
        self.oracle_of(self.inputs())
    }

    /// What it says with keys and values from elsewhere.
    pub fn oracle_over<T: naive::Real>(&self, source: Inputs<'_>) -> naive::Answer<T> {
        self.oracle_of(self.inputs_over(source))
    }

    fn oracle_of<T: naive::Real>(&self, inputs: Inputs<'_>) -> naive::Answer<T> {
        with_mods!(self, |mods| naive::answer(&self.attention(), &inputs, &mods).expect("a good call"))
    }

    /// True if the oracle hides this key from this row.
    pub fn hides(&self, oracle: &naive::Answer<f64>, [b, h, i]: [usize; 3], j: usize) -> bool {
        let (rows, keys) = self.longest();
        oracle.points[2][((b * self.heads() + h) * rows + i) * keys + j] == f64::NEG_INFINITY
    }
}
