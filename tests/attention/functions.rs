//! Functions of the caller: by any pointer the same bits.

use crate::support::{Answer, Tensors, assert_same, execs, outputs, unwritten};
use sdpa::{Alignment, Attention, Exec, Inputs, MaskMod, Mods, Position, Run, ScoreMod, WeightMod};
use std::sync::Arc;

/// Runs a call with functions, with plan and memory of its own.
pub(crate) fn run_as<S: ScoreMod, M: MaskMod, P: WeightMod>(
    attention: &Attention,
    inputs: Inputs<'_>,
    exec: Exec,
    mods: &Mods<S, M, P>,
) -> Answer {
    let mut answer = unwritten(&inputs);
    attention
        .problem(inputs, outputs(&mut answer))
        .expect("a good call")
        .run_once_with(exec, Run::new().mods(mods))
        .expect("functions that fit");
    answer
}

fn run_mods<S: ScoreMod, M: MaskMod, P: WeightMod>(tensors: &Tensors, exec: Exec, mods: &Mods<S, M, P>) -> Answer {
    run_as(&Attention::new().causal().align(Alignment::BottomRight), tensors.inputs(), exec, mods)
}

#[test]
fn functions_chosen_at_run_time_have_the_same_bits() {
    let score = |score: f32, at: Position| score - 0.1 * (at.position - at.key as isize) as f32;
    let mask = |at: Position| !(at.key + at.head).is_multiple_of(5);
    let prob = |weight: f32, at: Position| if at.key.is_multiple_of(3) { 0.0 } else { weight };
    // A prompt, and few rows over many keys: key blocks are shared out unless there is a weight function.
    for sizes in [[1, 4, 2, 40, 70, 16, 24], [2, 4, 1, 2, 1500, 32, 32]] {
        let tensors = Tensors::normal(sizes, 1);
        for (isa, exec) in execs() {
            let what = |pointer| format!("{sizes:?}, {isa}, {pointer}");
            let (plain, none) = (run_mods(&tensors, exec, &Mods::new()), &());
            let nothing =
                Mods::new().score(none as &dyn ScoreMod).mask(none as &dyn MaskMod).weight(none as &dyn WeightMod);
            assert_same(&what("nothing"), &run_mods(&tensors, exec, &nothing), &plain);
            let expected = run_mods(&tensors, exec, &Mods::new().score(score).mask(mask));
            assert!(expected.out.data != plain.out.data);
            let mods = Mods::new().score(&score as &dyn ScoreMod).mask(&mask as &dyn MaskMod);
            assert_same(&what("two by reference"), &run_mods(&tensors, exec, &mods), &expected);
            let expected = run_mods(&tensors, exec, &Mods::new().score(score).mask(mask).weight(prob));
            let mods = mods.weight(&prob as &dyn WeightMod);
            assert_same(&what("references"), &run_mods(&tensors, exec, &mods), &expected);
            let (a, b): (Box<dyn ScoreMod>, Box<dyn MaskMod>) = (Box::new(score), Box::new(mask));
            let mods = Mods::new().score(a).mask(b).weight(Box::new(prob) as Box<dyn WeightMod>);
            assert_same(&what("boxes"), &run_mods(&tensors, exec, &mods), &expected);
            let (a, b): (Arc<dyn ScoreMod>, Arc<dyn MaskMod>) = (Arc::new(score), Arc::new(mask));
            let mods = Mods::new().score(a).mask(b).weight(Arc::new(prob) as Arc<dyn WeightMod>);
            assert_same(&what("shared pointers"), &run_mods(&tensors, exec, &mods), &expected);
        }
    }
}
