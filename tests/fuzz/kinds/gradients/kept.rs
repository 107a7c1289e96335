//! Plans of backward calls, kept for others.

use crate::fuzzer::draw::Home;
use crate::fuzzer::kinds::gradients::{Back, How, same};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::Stage;
use sdpa::{BackwardPlan, Exec, Gradients, Saved, View, Workspace};

impl Back {
    /// The plan of the call.
    pub(crate) fn plan(&self, rng: &mut Rng, exec: Exec) -> BackwardPlan {
        let (stage, [b, h, l, _], dv) =
            (Stage::new(rng, &self.case, Home::Tensors), self.case.q.shape, self.case.value_dim());
        let one = [0.0f32];
        let view = |dim| View::from_strides(&one, 0, [b, h, l, dim], [0; 4]).expect("one element for all");
        let saved = Saved::new(view(dv), view(1), view(dv));
        let problem = self.case.attention().backward(stage.inputs(), saved, Gradients::new()).expect("a good call");
        BackwardPlan::new(&problem, exec)
    }

    /// By a plan that may be another call's, in a workspace that others have used: the same gradients.
    pub(crate) fn by(&self, rng: &mut Rng, what: &str, plan: BackwardPlan, workspace: &mut Workspace) {
        let exec = Exec::serial().isa(plan.isa());
        let expected = self.run(rng, what, How::new(exec, &mut Workspace::new()));
        let how = How { plan: Some(plan), ..How::new(exec, workspace) };
        same(what, &self.run(rng, what, how), &expected);
    }
}
