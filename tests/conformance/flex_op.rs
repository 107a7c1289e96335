//! ONNX FlexAttention (preview domain, version 1) in terms of the public API: its subgraphs become closures.

use crate::node::Node;
use crate::subgraph::Subgraph;
use sdpa::{Attention, Exec, Inputs, Isa, MaskMod, Mods, Outputs, Plan, Position, Problem, Run, ScoreMod, WeightMod};
use sdpa::{View, ViewMut, Workspace};

/// Runs a node; the largest error found.
pub(crate) fn run(node: &Node<'_>) -> Result<f64, String> {
    node.knows(&["prob_mod", "scale", "score_mod", "softmax_precision"], 3, 1)?;
    node.check_softmax_precision()?;
    let [q, k, v] = [node.needed(0)?, node.needed(1)?, node.needed(2)?];
    let ([b, h, l, _], [.., keys, _], [.., d]) = (q.shape4()?, k.shape4()?, v.shape4()?);
    let graph = |name: &str| -> Result<Option<Subgraph>, String> {
        let Some(attribute) = node.attribute(name) else { return Ok(None) };
        let text = attribute.get("graph").and_then(|g| g.as_str()).ok_or(format!("{name} is no graph"))?;
        Subgraph::parse(text, [b, h, l, keys]).map(Some).map_err(|e| format!("{name}: {e}"))
    };
    let (score_mod, prob_mod) = (graph("score_mod")?, graph("prob_mod")?);
    let mut attention = Attention::new();
    if let Some(scale) = node.float("scale")? {
        attention = attention.scale(scale);
    }
    let mut worst = 0.0f64;
    let [q_data, k_data, v_data] = [q.f32s()?, k.f32s()?, v.f32s()?];
    for isa in Isa::available() {
        let view = |e: sdpa::LayoutError| e.to_string();
        let inputs = Inputs::new(
            View::bhld(&q_data, q.shape4()?).map_err(view)?,
            View::bhld(&k_data, k.shape4()?).map_err(view)?,
            View::bhld(&v_data, v.shape4()?).map_err(view)?,
        );
        let mut y = vec![f32::NAN; b * h * l * d];
        let outputs = Outputs::new(ViewMut::bhld(&mut y, [b, h, l, d]).map_err(view)?);
        let problem = attention.problem(inputs, outputs).map_err(|e| e.to_string())?;
        let exec = Exec::serial().isa(isa);
        let closure = |graph| move |x: f32, at: Position| Subgraph::apply(graph, x, at);
        match (&score_mod, &prob_mod) {
            (None, None) => problem.run_once(exec),
            (Some(score), None) => with(problem, exec, &Mods::new().score(closure(score))),
            (None, Some(prob)) => with(problem, exec, &Mods::new().weight(closure(prob))),
            (Some(score), Some(prob)) => {
                with(problem, exec, &Mods::new().score(closure(score)).weight(closure(prob)));
            }
        }
        worst = worst.max(node.check(0, &format!("{isa}: Y"), &y, &[b, h, l, d])?);
    }
    Ok(worst)
}

fn with<S: ScoreMod, M: MaskMod, P: WeightMod>(problem: Problem<'_>, exec: Exec, mods: &Mods<S, M, P>) {
    let plan = Plan::new(&problem, exec);
    problem.run_with(&plan, &mut Workspace::new(), Run::new().mods(mods)).expect("functions that fit");
}
