//! Attention of one layer's heads: its tensors, and the call.

use crate::model::Result;
use sdpa::{Attention, Exec, Inputs, Outputs, Plan, View, ViewMut, Workspace};

/// Queries, keys and values of a layer, and what its attention makes of them.
#[derive(Debug)]
pub(crate) struct Heads {
    heads: usize,
    tokens: usize,
    /// Queries, keys, values and output, `[tokens, heads, head_dim]`; weights, `[heads, tokens, tokens]`.
    tensors: [Vec<f32>; 5],
    plan: Option<Plan>,
    workspace: Workspace,
}

impl Heads {
    pub(crate) const fn new() -> Self {
        Self { heads: 0, tokens: 0, tensors: [const { Vec::new() }; 5], plan: None, workspace: Workspace::new() }
    }

    /// Takes queries, keys and values over.
    pub(crate) fn take(&mut self, [q, k, v]: [Vec<f32>; 3], heads: usize, tokens: usize) {
        let (out, weights) = (vec![0.0; q.len()], vec![0.0; heads * tokens * tokens]);
        (self.heads, self.tokens, self.tensors, self.plan) = (heads, tokens, [q, k, v, out, weights], None);
    }

    /// Queries, keys, values, output or weights, by their number.
    pub(crate) fn tensor(&self, number: usize) -> &[f32] {
        self.tensors.get(number).map_or(&[], Vec::as_slice)
    }

    /// Sizes of queries, keys, values and output.
    fn stored(&self) -> [usize; 4] {
        let [tokens, heads] = [self.tokens, self.heads];
        [1, tokens, heads, self.tensors[0].len() / (tokens * heads).max(1)]
    }

    /// Computes the output and the weights.
    pub(crate) fn weigh(&mut self) -> Result<()> {
        let (stored, shape) = (self.stored(), [1, self.heads, self.tokens, self.tokens]);
        let [q, k, v, out, weights] = &mut self.tensors;
        let inputs = Inputs::new(View::blhd(q, stored)?, View::blhd(k, stored)?, View::blhd(v, stored)?);
        let outputs = Outputs::new(ViewMut::blhd(out, stored)?).weights(ViewMut::bhld(weights, shape)?);
        Ok(sdpa::attention(&Attention::new(), inputs, outputs)?)
    }

    /// Computes the output alone, by the plan of the first such call.
    pub(crate) fn attend(&mut self) -> Result<()> {
        let stored = self.stored();
        let [q, k, v, out, _] = &mut self.tensors;
        let inputs = Inputs::new(View::blhd(q, stored)?, View::blhd(k, stored)?, View::blhd(v, stored)?);
        let problem = Attention::new().problem(inputs, Outputs::new(ViewMut::blhd(out, stored)?))?;
        let plan = *self.plan.get_or_insert_with(|| Plan::new(&problem, Exec::serial()));
        problem.run(&plan, &mut self.workspace);
        Ok(())
    }
}
