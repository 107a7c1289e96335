//! States of the forward pass over rows and keys in pieces, with every option that they take: the bits of one call.

use crate::fuzzer::case::Case;
use crate::fuzzer::compare::{Place, Results};
use crate::fuzzer::draw::{Home, SHARED};
use crate::fuzzer::kinds::attention::pool;
use crate::fuzzer::oracle::Oracle;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::pieces::{PieceMods, any_dtype, any_isa, draw, stretches, whole_blocks};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::selection::Selection;
use crate::fuzzer::stage::Stage;
use core::ops::Range;
use sdpa::{AttnState, Error, Exec, Run, View, Workspace};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub(super) fn check(rng: &mut Rng) {
    let (mut case, isa) = (draw(rng), any_isa(rng));
    if rng.one_in(5) {
        case.selected = Some(Selection::draw(rng, &case));
    }
    let threads = if case.products() >= SHARED || rng.one_in(50) { 2 } else { 1 };
    let exec = Exec::serial().isa(isa).threads(threads);
    let all = AssertUnwindSafe(|| pool().install(|| Pieces { case: &case, exec }.check(rng)));
    if let Err(panic) = catch_unwind(all) {
        eprintln!("{exec:?}: {}", case.describe());
        resume_unwind(panic);
    }
}

/// A case and how its states run.
#[derive(Debug, Clone, Copy)]
struct Pieces<'a> {
    case: &'a Case,
    exec: Exec<'a>,
}

impl Pieces<'_> {
    fn check(&self, rng: &mut Rng) {
        let wanted = Wanted { out: any_dtype(rng), lse: rng.one_in(2), ..Wanted::LEAST };
        let expected = self.whole(rng, self.case, wanted);
        match rng.below(4) {
            0 => self.merged(rng, wanted, &expected),
            1 => self.rows(rng, wanted, &expected),
            _ => {
                // What one state leaves in a workspace is nothing to the next.
                let workspace = self.one(rng, wanted, &expected, Workspace::new());
                if rng.one_in(3) {
                    self.one(rng, wanted, &expected, workspace);
                }
            }
        }
    }

    /// Results of one call over all keys of a case; if rows select keys, of a state that takes them at once.
    fn whole(&self, rng: &mut Rng, case: &Case, wanted: Wanted) -> Results {
        if case.selected.is_some() {
            return Pieces { case, ..*self }.at_once(rng, wanted);
        }
        let (stage, mut outs) = (Stage::new(rng, case, Home::Tensors), Outs::blank(rng, case, wanted));
        // A stage adds a weight function to two others. Weights are then normalised before they are multiplied: other bits.
        let Some(mods) = case.piece_mods() else { return stage.run("one call", &mut outs, self.exec) };
        let problem = case.attention().problem(stage.inputs(), outs.outputs()).expect("a good call");
        problem.run_once_with(self.exec, Run::new().mods(&mods)).expect("good functions");
        outs.take("one call")
    }

    /// A state that takes all keys at once.
    fn at_once(&self, rng: &mut Rng, wanted: Wanted) -> Results {
        let (stage, mods) = (Stage::new(rng, self.case, Home::Tensors), self.case.piece_mods());
        let mut state = self.state(&stage, mods.as_ref(), Workspace::new());
        let [k, v] = self.case.pushed(rng, 0..self.case.k.shape[2]);
        state.push(k.view(), v.view()).expect("they fit");
        let got = self.read(rng, &mut state, wanted);
        got.check("at once", &Oracle::of(self.case).answer());
        got
    }

    /// One state, read on the way. Keys are pushed, or passed over if no row sees them.
    fn one(&self, rng: &mut Rng, wanted: Wanted, expected: &Results, workspace: Workspace) -> Workspace {
        let (stage, mods) = (Stage::new(rng, self.case, Home::Tensors), self.case.piece_mods());
        let mut state = self.state(&stage, mods.as_ref(), workspace);
        for keys in rng.cuts(self.case.k.shape[2]) {
            self.take(rng, &mut state, keys.clone());
            if rng.one_in(6) {
                let so_far = self.case.some_keys(0..keys.end);
                let expected = self.whole(rng, &so_far, wanted);
                self.read(rng, &mut state, wanted).same(&format!("the first {} keys", keys.end), &expected);
            }
        }
        assert_eq!(state.len(), self.case.k.shape[2]);
        if rng.one_in(2) {
            self.read(rng, &mut state, wanted).same("all keys", expected);
        }
        let mut outs = Outs::blank(rng, self.case, wanted);
        state.check(&outs.outputs()).expect("good outputs");
        let workspace = state.finish(outs.outputs()).expect("good outputs");
        outs.take("a state").same("at the end", expected);
        workspace
    }

    /// States of some blocks each, merged in order: the bits of one call if each but the first has one block, otherwise its
    /// numbers up to rounding.
    fn merged(&self, rng: &mut Rng, wanted: Wanted, expected: &Results) {
        let (stage, mods) = (Stage::new(rng, self.case, Home::Tensors), self.case.piece_mods());
        let state = || self.state(&stage, mods.as_ref(), Workspace::new());
        let (mut all, parts) = (state(), whole_blocks(rng, self.case.k.shape[2]));
        for (n, keys) in parts.iter().enumerate() {
            if n == 0 && rng.one_in(2) {
                self.take(rng, &mut all, keys.clone());
                continue;
            }
            let mut later = state().starting_at(keys.start).expect("a whole block");
            for some in rng.cuts(keys.len()) {
                self.take(rng, &mut later, keys.start + some.start..keys.start + some.end);
            }
            all.merge(&later).expect("the next keys");
        }
        let got = self.read(rng, &mut all, wanted);
        if parts.iter().skip(1).all(|keys| keys.len() <= 256) && parts.first().is_none_or(|keys| keys.len() <= 256) {
            got.same("merged", expected);
        } else {
            got.check("merged", &Oracle::of(self.case).answer());
        }
    }

    /// A state for each stretch of rows.
    fn rows(&self, rng: &mut Rng, wanted: Wanted, expected: &Results) {
        let (keys, mut workspace) = (self.case.k.shape[2], Workspace::new());
        if self.is_far() {
            return;
        }
        for rows in stretches(rng, self.case.q.shape[2]).into_iter().take(4) {
            let some = self.case.stretch(rows.clone());
            let (stage, mods) = (Stage::new(rng, &some, Home::Tensors), self.case.piece_mods());
            let part = Pieces { case: &some, exec: self.exec };
            let state = part.state(&stage, mods.as_ref(), workspace);
            let mut state = state.rows_from(rows.start).expect("it has no keys");
            rng.cuts(keys).into_iter().for_each(|keys| part.take(rng, &mut state, keys));
            let mut outs = Outs::blank(rng, &some, wanted);
            workspace = state.finish(outs.outputs()).expect("good outputs");
            let got = outs.take("some rows");
            for [b, h, i] in some.every_row() {
                let place = |i| Place { row: [b, h, i], scores: [b, h, i], keys };
                got.same_row(&format!("rows {rows:?}"), place(i), expected, place(rows.start + i));
            }
        }
    }

    /// True if rows stand so far from the keys that a stretch of them has no position.
    fn is_far(&self) -> bool {
        (0..self.case.batch()).any(|b| self.case.offset(b).unsigned_abs() > usize::MAX / 4)
    }

    fn state<'s>(&self, stage: &'s Stage<'_>, mods: Option<&'s PieceMods>, workspace: Workspace) -> AttnState<'s>
    where
        Self: 's,
    {
        let state = AttnState::from_inputs_in(self.case.attention(), stage.inputs(), self.exec, workspace);
        let state = state.expect("a good state");
        match mods {
            Some(mods) => state.mods(mods).expect("good functions"),
            None => state,
        }
    }

    /// Pushes the next keys, or passes over them. `skip` refuses if and only if a row may see one.
    fn take(&self, rng: &mut Rng, state: &mut AttnState<'_>, keys: Range<usize>) {
        if rng.one_in(4) {
            let seen = self.case.may_be_seen(keys.clone());
            assert_eq!(state.sees(keys.clone()), seen, "keys {keys:?}");
            match state.skip(keys.len()) {
                Ok(()) if !seen => return,
                Err(Error::Needs { .. }) if seen => {}
                other => panic!("keys {keys:?}, seen {seen}: {other:?}"),
            }
        }
        if rng.one_in(8) {
            self.refused(rng, state);
        }
        let [k, v] = self.case.pushed(rng, keys);
        state.push(k.view(), v.view()).expect("they fit");
    }

    /// Keys and values that do not fit change nothing.
    fn refused(&self, rng: &mut Rng, state: &mut AttnState<'_>) {
        let ([b, g, _, d], dv, len) = (self.case.k.shape, self.case.value_dim(), state.len());
        let one = [f32::NAN];
        let view = |shape| View::from_strides(&one, 0, shape, [0; 4]).expect("one element for all");
        let n = rng.pick(&[1, 2, 256, 300]);
        let mut shapes = [[b, g, n, d], [b, g, n, dv]];
        shapes[rng.below(2)][rng.below(4)] += 1;
        let pushed = state.push(view(shapes[0]), view(shapes[1]));
        assert!(pushed.is_err(), "{shapes:?} do not fit");
        assert_eq!(state.len(), len, "after {shapes:?}");
    }

    fn read(&self, rng: &mut Rng, state: &mut AttnState<'_>, wanted: Wanted) -> Results {
        let mut outs = Outs::blank(rng, self.case, wanted);
        if rng.one_in(4) {
            let mut refused = Outs::blank(rng, self.case, Wanted { lse: true, points: [true; 4], ..wanted });
            assert!(
                matches!(state.check(&refused.outputs()), Err(Error::Needs { .. })),
                "scores need all keys at once"
            );
            assert!(matches!(state.read(refused.outputs()), Err(Error::Needs { .. })), "scores need all keys at once");
            assert!(refused.is_blank(), "a refused read wrote");
        }
        state.read(outs.outputs()).expect("good outputs");
        outs.take("a state")
    }
}
