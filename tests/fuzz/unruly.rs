//! Functions that lie or panic: what they give is anything, but no memory beside the outputs is touched, and the next call
//! is right.

use super::case::Case;
use super::functions::{Functions, Fuse, Hint, Keep, Part, Prob, Score};
use super::kinds::attention::{Whole, pool};
use super::outs::{Outs, Wanted};
use super::rng::Rng;
use super::stage::{How, Stage};
use sdpa::Workspace;

pub(crate) fn check(rng: &mut Rng, whole: &Whole<'_>) {
    let Functions { score, mask, prob, origin } = whole.case.functions;
    let (keep, lies) = (mask.map_or(Keep::Holes(3), |(keep, _)| keep), Hint::Lies(rng.below(1000)));
    let part = rng.pick(&[Part::Score, Part::Keep, Part::Class, Part::Prob]);
    let mut case = Case { functions: Functions { score, mask, prob, origin }, ..whole.case.clone() };
    let functions = &mut case.functions;
    match part {
        Part::Score | Part::Derivative => functions.score = Some(score.unwrap_or(Score::Relative(0.1))),
        Part::Keep | Part::Class => functions.mask = Some((keep, Hint::Truth)),
        Part::Prob => functions.prob = Some(prob.unwrap_or(Prob::Tilted(5))),
    }
    let wanted = Wanted::draw(rng);
    let stage = Stage::new(rng, &case, whole.home);
    let expected = stage.run("before anything happened", &mut Outs::blank(rng, &case, wanted), whole.exec);
    let (mut outs, mut workspace) = (Outs::blank(rng, &case, wanted), Workspace::new());

    let most = rng.pick(&[1, 10, 300, 10_000]);
    let fuse = Fuse::new(part, rng.below(most));
    // On two threads, where the call is large enough for that.
    let how = How { fuse: Some(&fuse), ..whole.exec.threads(2).into() };
    if pool().install(|| stage.run_into(outs.outputs(), how, &mut workspace)).is_err() {
        outs.clear("after a panic");
    } else {
        outs.take("no panic").same("a function that might have panicked", &expected);
    }
    if rng.one_in(2) {
        let mut lying = case.clone();
        lying.functions.mask = Some((keep, lies));
        let stage = Stage::new(rng, &lying, whole.home);
        let done = stage.run_into(outs.outputs(), whole.exec.into(), &mut workspace);
        assert!(done.is_ok(), "nothing was to be thrown");
        outs.take("a function that lies");
    }
    let done = stage.run_into(outs.outputs(), whole.exec.into(), &mut workspace);
    assert!(done.is_ok(), "nothing was to be thrown");
    outs.take("the next call").same("the next call", &expected);
}
