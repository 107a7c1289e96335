//! Backward calls of random cases: every gradient that a case has.

use crate::options::Case;
use crate::options::elements::{Elements, Rounded};
use crate::options::mods::{PARAMETERS, with_mods};
use crate::support::{Rng, Tensor, UNWRITTEN, assert_same_bits};
use sdpa::{
    Attention, BackwardPlan, Dropout, Dtype, Error, Exec, Gradients, MaskMod, Mods, Outputs, Run, Saved, ScoreMod,
    ViewMut, WeightMod, Workspace, naive,
};

/// A case without a weight function, with gradients of its output and log-sum-exp.
#[derive(Debug, Clone)]
pub(super) struct Back {
    pub(super) case: Case,
    pub(super) d_out: Tensor,
    pub(super) d_lse: Option<Tensor>,
    pub(super) dropout: Option<Dropout>,
}

/// Every gradient of a call.
#[derive(Debug, Clone)]
pub(super) struct Full {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) bias: Tensor,
    pub(super) sinks: Tensor,
    pub(super) slopes: Tensor,
    pub(super) scale: Tensor,
    pub(super) parameters: Tensor,
}

impl Full {
    pub(super) fn named(&self) -> [(&'static str, &Tensor); 8] {
        let Self { q, k, v, bias, sinks, slopes, scale, parameters } = self;
        let [a, b] = [("scale", scale), ("parameters", parameters)];
        [("q", q), ("k", k), ("v", v), ("bias", bias), ("sinks", sinks), ("slopes", slopes), a, b]
    }

    #[track_caller]
    pub(super) fn same(&self, what: &str, other: &Self) {
        for ((name, x), (_, y)) in self.named().into_iter().zip(other.named()) {
            assert_same_bits(&format!("{what}: gradient in {name}"), x, y);
        }
    }
}

impl Back {
    /// A random case of at most `most` products, with any options that have derivatives.
    pub(super) fn random(rng: &mut Rng, most: usize) -> Self {
        let case = Case::random(rng, most);
        let dropout = (rng.below(4) == 0).then(|| Dropout { p: rng.pick(&[0.1, 0.5]), seed: rng.bits(), offset: 3 });
        Self { dropout, ..Self::of(rng, case) }
    }

    pub(super) fn attention(&self) -> Attention {
        let attention = self.case.attention();
        self.dropout.map_or(attention, |Dropout { p, seed, offset }| attention.dropout(p, seed, offset))
    }

    /// The case without its weight function, if it has one.
    pub(super) fn of(rng: &mut Rng, case: Case) -> Self {
        let case = Case { functions: case.functions.with_derivatives(), ..case };
        let ([b, h, l, _], [.., dv]) = (case.q.shape, case.v.shape);
        let d_out = Tensor::normal([b, h, l, dv], rng);
        let d_lse = (rng.below(3) == 0).then(|| Tensor::normal([b, h, l, 1], rng));
        Self { case, d_out, d_lse, dropout: None }
    }

    fn blank(shape: [usize; 4]) -> Tensor {
        Tensor::filled(shape, f32::from_bits(UNWRITTEN))
    }

    /// Memory for every gradient, not yet written.
    pub(super) fn unwritten(&self) -> Full {
        let Self { case, .. } = self;
        let list = |list: &Option<Vec<f32>>| Self::blank([1, 1, 1, list.as_ref().map_or(0, Vec::len)]);
        Full {
            q: Self::blank(case.q.shape),
            k: Self::blank(case.k.shape),
            v: Self::blank(case.v.shape),
            bias: Self::blank(case.bias.as_ref().map_or([0; 4], |bias| bias.wide.shape)),
            sinks: list(&case.sinks),
            slopes: list(&case.alibi),
            scale: Self::blank([1; 4]),
            parameters: Self::blank([1, 1, 1, case.functions.score.map_or(0, |_| PARAMETERS)]),
        }
    }

    /// Output and log-sum-exp.
    pub(super) fn forward(&self, exec: Exec) -> [Tensor; 2] {
        self.forward_columns(exec, 1)
    }

    /// Output and log-sum-exp, of one column, or of two with its rounding error.
    pub(super) fn forward_columns(&self, exec: Exec, columns: usize) -> [Tensor; 2] {
        let ([b, h, l, _], [.., dv]) = (self.case.q.shape, self.case.v.shape);
        let (mut out, mut lse) = (Self::blank([b, h, l, dv]), Self::blank([b, h, l, columns]));
        let outputs = Outputs::new(ViewMut::bhld(&mut out.data, out.shape).unwrap());
        let outputs = outputs.lse(ViewMut::bhld(&mut lse.data, lse.shape).unwrap());
        let problem = self.attention().problem(self.case.inputs(), outputs).expect("a good call");
        with_mods!(self.case, |mods| problem.run_once_with(exec, Run::new().mods(&mods))).expect("functions that fit");
        [out, lse]
    }

    pub(super) fn run(&self, exec: Exec) -> Full {
        self.run_in(exec, &mut Workspace::new())
    }

    /// Every gradient, in a workspace that others may have used.
    pub(super) fn run_in(&self, exec: Exec, workspace: &mut Workspace) -> Full {
        let [out, lse] = self.forward(exec);
        let mut full = self.unwritten();
        self.run_into(exec, [&out, &lse], &mut full, workspace);
        full
    }

    /// Runs on given memory and saved results.
    pub(super) fn run_into(&self, exec: Exec, [out, lse]: [&Tensor; 2], full: &mut Full, workspace: &mut Workspace) {
        with_mods!(self.case, |mods| self.run_as_mods(exec, [out, lse], full, workspace, &mods)).expect("memory");
    }

    /// Runs with functions that stand for those of the case.
    pub(super) fn run_as_mods<S: ScoreMod, M: MaskMod, P: WeightMod>(
        &self,
        exec: Exec,
        [out, lse]: [&Tensor; 2],
        full: &mut Full,
        workspace: &mut Workspace,
        mods: &Mods<S, M, P>,
    ) -> Result<(), Error> {
        let mut saved = Saved::new(out.view(), lse.view(), self.d_out.view());
        if let Some(d_lse) = &self.d_lse {
            saved = saved.d_lse(d_lse.view());
        }
        fn view(x: &mut Tensor) -> ViewMut<'_> {
            ViewMut::bhld(&mut x.data, x.shape).unwrap()
        }
        let Full { q, k, v, bias, sinks, slopes, scale, parameters } = full;
        let mut gradients = Gradients::new().q(view(q)).k(view(k)).v(view(v)).scale(&mut scale.data[0]);
        if self.case.bias.is_some() {
            gradients = gradients.bias(view(bias));
        }
        if self.case.sinks.is_some() {
            gradients = gradients.sinks(&mut sinks.data);
        }
        if self.case.alibi.is_some() {
            gradients = gradients.alibi(&mut slopes.data);
        }
        if mods.score.parameters() > 0 {
            gradients = gradients.parameters(&mut parameters.data);
        }
        let problem = self.attention().backward(self.case.inputs(), saved, gradients).expect("a good call");
        let plan = BackwardPlan::new(&problem, exec);
        problem.run_with(&plan, workspace, Run::new().mods(mods))
    }

    /// What the oracle says, in the numbers asked for.
    pub(super) fn oracle<T: naive::Real>(&self) -> [(&'static str, Vec<T>); 8] {
        let d_lse = self.d_lse.as_ref().map(Tensor::view);
        let (attention, inputs) = (self.attention(), self.case.inputs());
        let gradient =
            with_mods!(self.case, |mods| naive::gradients(&attention, &inputs, self.d_out.view(), d_lse, &mods));
        let naive::Gradient { q, k, v, bias, sinks, slopes, scale, parameters, .. } = gradient.expect("a good call");
        let sinks = if self.case.sinks.is_some() { sinks } else { Vec::new() };
        let slopes = if self.case.alibi.is_some() { slopes } else { Vec::new() };
        let [a, b] = [("scale", vec![scale]), ("parameters", parameters)];
        [("q", q), ("k", k), ("v", v), ("bias", bias), ("sinks", sinks), ("slopes", slopes), a, b]
    }

    /// Gradients in q, k and v, written as elements of a type, of tensors of that type; and of the same numbers as `f32`.
    pub(super) fn run_as(&self, dtype: Dtype, exec: Exec) -> [[Elements; 3]; 2] {
        let Self { case, d_out, .. } = self;
        let short = [&case.q, &case.k, &case.v, d_out].map(|x| Rounded::new(x, dtype));
        let [q, k, v, d_out] = short.each_ref().map(|x| x.wide.clone());
        let wide = Self { case: Case { q, k, v, ..case.clone() }, d_out, d_lse: None, dropout: None };
        let [out, lse] = wide.forward(exec);
        let as_f32 = [&wide.case.q, &wide.case.k, &wide.case.v, &wide.d_out].map(|x| Rounded::from(x.clone()));
        [&short, &as_f32].map(|tensors| {
            let [q, k, v, d_out] = tensors.each_ref().map(Rounded::view);
            let inputs = wide.case.inputs_over(sdpa::Inputs::new(q, k, v));
            let inputs = wide.case.kv_lens.as_ref().map_or(inputs, |lens| inputs.kv_lens(lens));
            let shapes = [&wide.case.q, &wide.case.k, &wide.case.v].map(|x| Tensor::filled(x.shape, 0.0));
            let mut written = shapes.each_ref().map(|x| Elements::of(&x.data, dtype));
            let [dq, dk, dv] = &mut written;
            let gradients = Gradients::new().q(dq.view_mut(&shapes[0])).k(dk.view_mut(&shapes[1]));
            let saved = Saved::new(out.view(), lse.view(), d_out);
            let problem = wide.case.attention().backward(inputs, saved, gradients.v(dv.view_mut(&shapes[2])));
            let problem = problem.expect("a good call");
            with_mods!(wide.case, |mods| problem.run_once_with(exec, Run::new().mods(&mods))).expect("memory");
            written
        })
    }
}
