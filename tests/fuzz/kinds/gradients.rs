//! Gradients: against the plain passes in `f64` where numbers are tame, and then the same bits in other ways.

mod errors;
mod kept;

use crate::fuzzer::array::{Array, Layout};
use crate::fuzzer::bits::{Recorder, settle, sizes};
use crate::fuzzer::case::Case;
use crate::fuzzer::compare::Written;
use crate::fuzzer::draw::{DTYPES, Home, draw_at, draw_of, is_tame, numbers, own_positions, tame_one};
use crate::fuzzer::functions::{Bound, Fuse, PARAMETERS, Part, Thrown};
use crate::fuzzer::kinds::attention::pool;
use crate::fuzzer::memory::{Flush, Memory};
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::place::{AnyPlaced, Placed};
use crate::fuzzer::poison;
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::Stage;
use sdpa::{
    BackwardPlan, CurrentPool, Dtype, Error, Exec, Executor, Gradients, Isa, Mods, Precision, Run, Saved, TensorMut,
    Workspace, naive,
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub(super) const NAMES: [&str; 8] = ["dq", "dk", "dv", "dbias", "dsinks", "dslopes", "dscale", "dparameters"];

/// A call, and the gradients of a loss in what it gives.
#[derive(Debug, Clone)]
pub(super) struct Back {
    pub(super) case: Case,
    pub(super) d_out: (Array, Dtype),
    pub(super) d_lse: Option<Array>,
    /// Which gradients are asked for, of those that the call has, and the types of the first three.
    pub(super) which: [bool; 8],
    pub(super) dtypes: [Dtype; 3],
}

/// What a backward call wrote; `None` for what was not asked for.
pub(super) type All = [Option<Written>; 8];

/// Memory for one gradient.
#[derive(Debug)]
enum Slot {
    Tensor(AnyPlaced, Dtype),
    List(Memory<f32>),
}

/// How to run a backward call.
struct How<'a> {
    exec: Exec<'a>,
    fuse: Option<&'a Fuse>,
    executor: &'a (dyn Executor + Sync),
    workspace: &'a mut Workspace,
    /// A plan, of this call or another; by default one is made.
    plan: Option<BackwardPlan>,
}

impl<'a> How<'a> {
    fn new(exec: Exec<'a>, workspace: &'a mut Workspace) -> Self {
        Self { exec, fuse: None, executor: &CurrentPool, workspace, plan: None }
    }
}

/// Gradients of one random call.
pub(crate) fn check(rng: &mut Rng) {
    let mut case = draw_at(rng, Home::Tensors);
    if rng.one_in(4) {
        own_positions(rng, &mut case);
    }
    check_case(rng, case);
}

/// All gradients of a call, or some.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let sizes = sizes(rng);
    let mut case = draw_of(rng, Home::Tensors, sizes);
    settle(rng, &mut case);
    let back = Back::draw(rng, case);
    recorder.describe(&back.case, Home::Tensors);
    let names = NAMES.into_iter().zip(back.which).filter(|(_, asked)| *asked).map(|(name, _)| name);
    recorder.say(names.collect::<Vec<_>>().join(" "));
    if back.d_lse.is_some() {
        recorder.say("from lse too");
    }
    // Those in parameters are not asked for.
    recorder.each(rng, |rng, exec| back.gradients(rng, "bits", exec).into_iter().take(7));
}

/// Gradients of a call.
pub(crate) fn check_case(rng: &mut Rng, case: Case) {
    let back = Back::draw(rng, case).or_in_parameters(rng);
    back.describing(|| back.check(rng));
}

/// Gradients of a call on other threads: those of the calling one.
pub(crate) fn check_on(rng: &mut Rng, case: Case, executor: &(dyn Executor + Sync)) {
    let back = Back::draw(rng, case).or_in_parameters(rng);
    back.describing(|| {
        let mut workspace = Workspace::new();
        let expected = back.run(rng, "one thread", How::new(Exec::serial(), &mut workspace));
        for _ in 0..2 {
            let how = How { executor, ..How::new(Exec::on(executor), &mut workspace) };
            same("an executor", &back.run(rng, "an executor", how), &expected);
        }
    });
}

impl Back {
    pub(super) fn draw(rng: &mut Rng, mut case: Case) -> Self {
        case.functions.prob = None;
        let tame = rng.below(4) > 0;
        // Parts lose what is next to infinite.
        if !tame {
            case.settings.precision = Precision::Exact;
        }
        if tame {
            case.make_tame();
        }
        let ([b, h, l, _], [.., dv]) = (case.q.shape, case.v.shape);
        let d_type = rng.pick(&[Dtype::F32, Dtype::F32, Dtype::Bf16, Dtype::F16]);
        let mut d_out = numbers(rng, [b, h, l, dv], d_type);
        let mut d_lse = rng.one_in(3).then(|| numbers(rng, [b, h, l, 1], Dtype::F32));
        if tame {
            let all = d_out.data.iter_mut().chain(d_lse.iter_mut().flat_map(|x| &mut x.data));
            all.for_each(tame_one);
        }
        let few = rng.one_in(3);
        let mut which = [false; 8];
        which[..7].fill_with(|| !few || rng.one_in(2));
        let dtypes = if rng.one_in(2) { [Dtype::F32; 3] } else { [(); 3].map(|()| rng.pick(&DTYPES)) };
        Self { case, d_out: (d_out, d_type), d_lse, which, dtypes }
    }

    /// The call with numbers that are not rounded to bfloat16.
    pub(super) fn unrounded(mut self) -> Self {
        if self.case.settings.precision == Precision::Native {
            self.case.settings.precision = Precision::Exact;
        }
        self
    }

    /// Asks for gradients in the score function's parameters too, or not. Calls with recorded bits do not.
    fn or_in_parameters(mut self, rng: &mut Rng) -> Self {
        self.which[7] = rng.one_in(2);
        self
    }

    /// Prints what the call is if it goes wrong.
    pub(super) fn describing(&self, check: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(check)) {
            let Self { case, d_lse, which, dtypes, .. } = self;
            eprintln!("d_lse {} {which:?} {dtypes:?}: {}", d_lse.is_some(), case.describe());
            resume_unwind(panic);
        }
    }

    /// True if `f32` can be held against `f64` element by element.
    pub(super) fn is_tame(&self) -> bool {
        let Case { q, k, v, settings, bias, sinks, .. } = &self.case;
        let all = [q, k, v, &self.d_out.0].into_iter().chain(&self.d_lse).flat_map(|x| &x.data);
        all.chain(sinks.iter().flatten()).all(|&x| is_tame(x))
            && bias.iter().flat_map(|(x, _)| &x.of.data).all(|&x| is_tame(x) || x == f32::NEG_INFINITY)
            && settings.softcap.is_none_or(is_tame)
            && settings
                .alignment
                .is_none_or(|_| (0..self.case.batch()).all(|b| self.case.offset(b).unsigned_abs() < 2000))
    }

    fn check(&self, rng: &mut Rng) {
        let (mut first, mut workspace): (Option<All>, _) = (None, Workspace::new());
        let precision = self.case.settings.precision;
        let good = self.is_tame() && precision != Precision::Native;
        let oracle = good.then(|| (self.oracle::<f64>(), self.oracle::<f32>()));
        for isa in Isa::available() {
            let what = format!("gradients, {isa}");
            let exec = Exec::serial().isa(isa);
            let all = self.run(rng, &what, How::new(exec, &mut workspace));
            if let Some((expected, plain)) = &oracle {
                self.close(&what, &all, expected, plain);
            }
            let exact = match precision {
                Precision::Native => !isa.has_native_bf16(),
                Precision::Accurate => isa.matrix_unit().is_err(),
                _ => true,
            };
            if isa.has_fma() && exact {
                same(&format!("{what}, beside another"), &all, first.get_or_insert_with(|| all.clone()));
            }
        }
        let isas: Vec<Isa> = Isa::available().collect();
        let exec = Exec::serial().isa(rng.pick(&isas));
        let expected = self.run(rng, "once more", How::new(exec, &mut workspace));
        match rng.below(4) {
            0 => {
                let how = How::new(exec.threads(2), &mut workspace);
                same("two threads", &pool().install(|| self.run(rng, "two threads", how)), &expected);
            }
            1 => {
                let rows = self.case.every_row();
                let (case, x) = poison::changed(rng, &self.case, Home::Tensors, &rows);
                let bad = Self { case, ..self.clone() };
                let how = How::new(exec, &mut workspace);
                let got = bad.run(rng, "changed", how);
                same(&format!("{x} behind masks"), &got, &expected);
            }
            2 => self.panics(rng, exec, &mut workspace, &expected),
            _ => {}
        }
    }

    /// A function that panics: nothing beside the gradients is written, and the next call is right.
    fn panics(&self, rng: &mut Rng, exec: Exec, workspace: &mut Workspace, expected: &All) {
        let part = rng.pick(&[Part::Score, Part::Derivative, Part::Keep, Part::Class]);
        let (most, threads) = (rng.pick(&[1, 10, 300, 10_000]), rng.pick(&[1, 2]));
        let fuse = Fuse::new(part, rng.below(most));
        let how = How { fuse: Some(&fuse), ..How::new(exec.threads(threads), workspace) };
        let run = AssertUnwindSafe(|| pool().install(|| self.run(rng, "a function that may panic", how)));
        match catch_unwind(run) {
            Ok(all) => same("a function that might have panicked", &all, expected),
            Err(thrown) if thrown.is::<Thrown>() => {}
            Err(other) => resume_unwind(other),
        }
        let how = How::new(exec, workspace);
        same("the next call", &self.run(rng, "the next call", how), expected);
    }

    /// Forward and backward.
    pub(super) fn gradients(&self, rng: &mut Rng, what: &str, exec: Exec) -> All {
        self.run(rng, what, How::new(exec, &mut Workspace::new()))
    }

    /// Forward and backward in guarded memory, each time in other layouts.
    fn run(&self, rng: &mut Rng, what: &str, how: How<'_>) -> All {
        let case = &self.case;
        let stage = Stage::new(rng, case, Home::Tensors);
        let forward = stage.run(what, &mut Outs::blank(rng, case, Wanted::LEAST), how.exec);
        let numbers = |x: &Written| Array {
            shape: x.bits.shape,
            data: x.bits.data.iter().map(|&bits| f32::from_bits(bits)).collect(),
        };
        let out = Placed::<f32>::of(rng, &numbers(&forward.out));
        let lse = Placed::<f32>::of(rng, &numbers(forward.lse.as_ref().expect("it was asked for")));
        let d_out = AnyPlaced::of(rng, &self.d_out.0, self.d_out.1);
        let d_lse = self.d_lse.as_ref().map(|x| Placed::<f32>::of(rng, x));
        let mut saved = Saved::new(out.view(), lse.view(), d_out.view());
        if let Some(d_lse) = &d_lse {
            saved = saved.d_lse(d_lse.view());
        }
        let mut slots = self.blank(rng);
        let run = || self.run_into(&stage, saved, &mut slots, how);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(result) => result.expect("a good call"),
            Err(panic) => {
                self.take(what, &mut slots);
                resume_unwind(panic);
            }
        }
        let all = self.take(what, &mut slots);
        for (name, written) in NAMES.iter().zip(&all) {
            let Some(Written { bits, dtype }) = written else { continue };
            let blank = if *dtype == Dtype::F32 { u32::MAX } else { u32::from(u16::MAX) };
            assert!(!bits.data.contains(&blank), "{what}: not all of {name} was written");
        }
        all
    }

    fn run_into(
        &self,
        stage: &Stage<'_>,
        saved: Saved<'_>,
        slots: &mut [Option<Slot>; 8],
        how: How<'_>,
    ) -> Result<(), Error> {
        let mut gradients = Gradients::new();
        for (n, slot) in slots.iter_mut().enumerate() {
            gradients = match (n, slot) {
                (0, Some(Slot::Tensor(x, _))) => gradients.q(x.view_mut()),
                (1, Some(Slot::Tensor(x, _))) => gradients.k(x.view_mut()),
                (2, Some(Slot::Tensor(x, _))) => gradients.v(x.view_mut()),
                (_, Some(Slot::Tensor(x, _))) => match x.view_mut() {
                    TensorMut::F32(x) => gradients.bias(x),
                    _ => unreachable!("it is f32"),
                },
                (4, Some(Slot::List(x))) => gradients.sinks(x.slice_mut()),
                (5, Some(Slot::List(x))) => gradients.alibi(x.slice_mut()),
                (6, Some(Slot::List(x))) => gradients.scale(&mut x.slice_mut()[0]),
                (_, Some(Slot::List(x))) => gradients.parameters(x.slice_mut()),
                (_, None) => gradients,
            };
        }
        let problem = self.case.attention().backward(stage.inputs(), saved, gradients)?;
        let plan = how.plan.unwrap_or_else(|| BackwardPlan::new(&problem, how.exec));
        let (functions, fuse, none) = (self.case.functions, how.fuse, Mods::new());
        let origin = functions.origin;
        let score = functions.score.map(|function| Bound { function, origin, fuse });
        let mask = functions.mask.map(|function| Bound { function, origin, fuse });
        match (score, mask) {
            (None, None) => problem.run_with(&plan, how.workspace, Run::new().mods(&none).executor(how.executor)),
            (Some(score), None) => {
                problem.run_with(&plan, how.workspace, Run::new().mods(&none.score(score)).executor(how.executor))
            }
            (None, Some(mask)) => {
                problem.run_with(&plan, how.workspace, Run::new().mods(&none.mask(mask)).executor(how.executor))
            }
            (Some(score), Some(mask)) => problem.run_with(
                &plan,
                how.workspace,
                Run::new().mods(&none.score(score).mask(mask)).executor(how.executor),
            ),
        }
    }

    /// Shapes of the gradients there are.
    pub(super) fn shapes(&self) -> [Option<[usize; 4]>; 8] {
        let Case { q, k, v, bias, sinks, alibi, .. } = &self.case;
        let list = |x: &Option<Vec<f32>>| x.as_ref().map(|x| [1, 1, 1, x.len()]);
        let bias = bias.as_ref().map(|(x, _)| x.of.shape);
        let [sinks, slopes, one] = [list(sinks), list(alibi), Some([1; 4])];
        let parameters = self.case.functions.score.map(|_| [1, 1, 1, PARAMETERS]);
        let all = [Some(q.shape), Some(k.shape), Some(v.shape), bias, sinks, slopes, one, parameters];
        core::array::from_fn(|n| all[n].filter(|_| self.which[n]))
    }

    fn blank(&self, rng: &mut Rng) -> [Option<Slot>; 8] {
        let mut slots = [const { None }; 8];
        for (n, (slot, shape)) in slots.iter_mut().zip(self.shapes()).enumerate() {
            let Some(shape) = shape else { continue };
            *slot = Some(if n < 4 {
                let dtype = self.dtypes.get(n).copied().unwrap_or(Dtype::F32);
                let layout = Layout::draw(rng, shape);
                Slot::Tensor(AnyPlaced::blank(rng, layout, dtype), dtype)
            } else {
                Slot::List(Memory::new(shape[3], if rng.one_in(2) { Flush::Low } else { Flush::High }))
            });
        }
        slots
    }

    /// Whatever was written. Panics if something beside the gradients was.
    fn take(&self, what: &str, slots: &mut [Option<Slot>; 8]) -> All {
        let mut all = [const { None }; 8];
        for ((written, slot), name) in all.iter_mut().zip(slots).zip(NAMES) {
            *written = slot.as_mut().map(|slot| match slot {
                Slot::Tensor(x, dtype) => Written { bits: x.take(&format!("{what}: {name}")), dtype: *dtype },
                Slot::List(x) => {
                    let data: Vec<u32> = x.slice().iter().map(|x| x.to_bits()).collect();
                    (0..data.len()).for_each(|i| x.blank(i));
                    assert!(x.is_blank(), "{what}: memory beside {name} was written");
                    Written { bits: Array { shape: [1, 1, 1, data.len()], data }, dtype: Dtype::F32 }
                }
            });
        }
        all
    }

    /// What the plain passes say.
    pub(super) fn oracle<T: naive::Real>(&self) -> [Vec<T>; 8] {
        let rng = &mut Rng::of_call(0, 0);
        let stage = Stage::new(rng, &self.case, Home::Tensors);
        let d_out = AnyPlaced::of(rng, &self.d_out.0, self.d_out.1);
        let d_lse = self.d_lse.as_ref().map(|x| Placed::<f32>::of(rng, x));
        let (attention, inputs, functions) = (self.case.attention(), stage.inputs(), self.case.functions);
        let (d_out, d_lse) = (d_out.view(), d_lse.as_ref().map(Placed::view));
        let (none, fuse, origin) = (Mods::new(), None, functions.origin);
        let score = functions.score.map(|function| Bound { function, origin, fuse });
        let mask = functions.mask.map(|function| Bound { function, origin, fuse });
        let gradient = match (score, mask) {
            (None, None) => naive::gradients(&attention, &inputs, d_out, d_lse, &none),
            (Some(score), None) => naive::gradients(&attention, &inputs, d_out, d_lse, &none.score(score)),
            (None, Some(mask)) => naive::gradients(&attention, &inputs, d_out, d_lse, &none.mask(mask)),
            (Some(score), Some(mask)) => {
                naive::gradients(&attention, &inputs, d_out, d_lse, &none.score(score).mask(mask))
            }
        };
        let naive::Gradient { q, k, v, bias, sinks, slopes, scale, parameters, .. } = gradient.expect("a good call");
        [q, k, v, bias, sinks, slopes, vec![scale], parameters]
    }
}

/// Panics unless two calls wrote the same, to the bit.
fn same(what: &str, all: &All, expected: &All) {
    for ((got, expected), name) in all.iter().zip(expected).zip(NAMES) {
        let (Some(got), Some(expected)) = (got, expected) else { continue };
        assert_eq!(got.bits.shape, expected.bits.shape, "{what}: {name}");
        let differ = got.bits.data.iter().zip(&expected.bits.data).position(|(a, b)| a != b);
        if let Some(i) = differ {
            let [got, expected] = [got, expected].map(|x| x.bits.data[i]);
            panic!("{what}: element {i} of {name} is {got:#x}, expected {expected:#x}");
        }
    }
}
