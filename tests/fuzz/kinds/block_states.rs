//! States of a few rows over each block of keys, folded and merged into those over all: the bits of one call, and its numbers.

use crate::fuzzer::case::Case;
use crate::fuzzer::compare::Results;
use crate::fuzzer::draw::{DTYPES, Home};
use crate::fuzzer::functions::Functions;
use crate::fuzzer::kinds::attention::pool;
use crate::fuzzer::oracle::Oracle;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::pieces::{any_dtype, any_isa, draw_at, sizes, whole_blocks};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::Stage;
use core::ops::Range;
use sdpa::parts::{BlockStates, RowStates};
use sdpa::{CacheFormat, Error, Exec, Int4, Isa, Outputs, Precision, ViewMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub(super) fn check(rng: &mut Rng) {
    if rng.one_in(8) {
        return sizes_of_states(rng);
    }
    let home = home(rng);
    let mut sizes = sizes(rng);
    if !rng.one_in(8) {
        sizes[3] = sizes[3].min(rng.pick(&[1, 2, 4, 16, 17]));
    }
    let case = Case { functions: Functions::default(), ..draw_at(rng, home, sizes) };
    let exec = Exec::serial().isa(any_isa(rng)).threads(rng.pick(&[1, 1, 2]));
    let all = AssertUnwindSafe(|| pool().install(|| Blocks { case: &case, home, exec }.check(rng)));
    if let Err(panic) = catch_unwind(all) {
        eprintln!("{home:?}, {exec:?}: {}", case.describe());
        resume_unwind(panic);
    }
}

/// Where keys lie. Integers with scales by channel would have other scales in each part.
fn home(rng: &mut Rng) -> Home {
    let dtype = rng.pick(&DTYPES);
    let integers = [Home::Bytes { channels: None }, Home::Bits(Int4::Symmetric), Home::Bits(Int4::Centred)];
    let pools = [Home::Pool(dtype), Home::IntegerPool(CacheFormat::Int8PerToken)];
    match rng.below(8) {
        0..4 => Home::Tensors,
        4 => Home::Pages,
        5 => pools[0],
        6 => Home::Cache(dtype),
        _ => rng.pick(&integers),
    }
}

/// A case with its keys in parts.
struct Blocks<'a> {
    case: &'a Case,
    home: Home,
    exec: Exec<'a>,
}

impl Blocks<'_> {
    fn check(&self, rng: &mut Rng) {
        let wanted = Wanted { out: any_dtype(rng), lse: rng.one_in(2), ..Wanted::LEAST };
        let (parts, mut blocks) = (whole_blocks(rng, self.case.longest().1), BlockStates::new());
        let mut states = self.states();
        // Rows that share a key/value head. Sixteen fit always, more than 128 never.
        let rows = if self.case.heads() > 0 { self.case.sharing() * self.case.longest().0 } else { 0 };
        let merges = !self.home.is_integers() && rng.one_in(3);
        for keys in &parts {
            self.refused(rng, &mut blocks, &mut states);
            let done = self.compute(rng, &mut blocks, keys);
            if rows > 16 && matches!(done, Err(Error::Range { .. })) {
                assert!(matches!(states.fold(&blocks), Err(Error::Needs { .. })), "there are no states");
                return;
            }
            done.expect("good inputs");
            assert!(rows <= 128, "{rows} rows");
            if merges {
                let mut later = self.states();
                later.fold(&blocks).expect("states of these rows");
                states.merge(&later, self.exec).expect("states of these rows");
            } else {
                states.fold(&blocks).expect("states of these rows");
            }
            if rng.one_in(2) {
                states = sent(&states);
            }
        }
        let got = self.write(rng, &states, wanted);
        if merges && parts.len() > 1 {
            return got.check("merged", &Oracle::of(self.case).answer());
        }
        let stage = Stage::new(rng, self.case, self.home);
        let expected = stage.run("one call", &mut Outs::blank(rng, self.case, wanted), self.exec);
        got.same("folded", &expected);
    }

    fn states(&self) -> RowStates {
        let ([b, h, l, _], dv) = (self.case.q.shape, self.case.value_dim());
        RowStates::new([b, h, l, dv]).expect("small")
    }

    /// States over some keys, on any instruction set that gives the same bits.
    fn compute(&self, rng: &mut Rng, blocks: &mut BlockStates, keys: &Range<usize>) -> Result<(), Error> {
        let some = self.case.some_keys(keys.clone());
        let (stage, mine) = (Stage::new(rng, &some, self.home), self.exec.instruction_set());
        let others: Vec<Isa> = Isa::available().filter(|isa| isa.has_fma() && mine.has_fma()).collect();
        let exact = self.case.settings.precision == Precision::Exact && !others.is_empty();
        let isa = if exact { rng.pick(&others) } else { mine };
        blocks.compute(&some.attention(), stage.inputs(), keys.start, self.exec.isa(isa))
    }

    /// What does not fit leaves states as they were, and blocks without any.
    fn refused(&self, rng: &mut Rng, blocks: &mut BlockStates, states: &mut RowStates) {
        if !rng.one_in(4) {
            return;
        }
        let before = bits(states);
        let some = self.case.some_keys(0..self.case.longest().1.min(5));
        let stage = Stage::new(rng, &some, self.home);
        let first = rng.pick(&[1, 255, 257, usize::MAX]);
        let refused = blocks.compute(&some.attention(), stage.inputs(), first, self.exec);
        assert!(matches!(refused, Err(Error::Multiple { .. })), "{first} keys before: {refused:?}");
        assert!(matches!(states.fold(blocks), Err(Error::Needs { .. })), "there are no states");
        let mut shape = states.shape();
        shape[rng.below(4)] += 1;
        let other = RowStates::new(shape).expect("small");
        assert!(matches!(states.merge(&other, self.exec), Err(Error::Mismatch { .. })), "{shape:?}");
        assert_eq!(bits(states), before, "after what was refused");
    }

    fn write(&self, rng: &mut Rng, states: &RowStates, wanted: Wanted) -> Results {
        let (mut outs, sinks) = (Outs::blank(rng, self.case, wanted), self.case.sinks.as_deref());
        let long = vec![0.0; self.case.heads() + 1];
        let mut refused = Outs::blank(rng, self.case, Wanted { points: [true; 4], ..wanted });
        for (sinks, outs) in [(sinks, &mut refused), (Some(&long[..]), &mut outs)] {
            let checked = states.check(sinks, &outs.outputs());
            assert_eq!(states.write(sinks, outs.outputs(), self.exec), checked);
            assert!(checked.is_err() && outs.is_blank(), "{checked:?}");
        }
        states.check(sinks, &outs.outputs()).expect("good outputs");
        states.write(sinks, outs.outputs(), self.exec).expect("good outputs");
        outs.take("row states")
    }
}

fn bits(states: &RowStates) -> Vec<u32> {
    states.as_slice().iter().map(|x| x.to_bits()).collect()
}

/// The states as another machine has them that was sent these.
fn sent(states: &RowStates) -> RowStates {
    let mut received = RowStates::new(states.shape()).expect("small");
    received.as_mut_slice().copy_from_slice(states.as_slice());
    received
}

/// States of any sizes are refused, or serve.
fn sizes_of_states(rng: &mut Rng) {
    let odd = [0, 1, 2, 15, 16, 17, 1 << 20, 1 << (usize::BITS * 5 / 8), isize::MAX as usize, usize::MAX];
    let shape: [usize; 4] = core::array::from_fn(|_| if rng.one_in(8) { rng.pick(&odd) } else { rng.below(4) });
    let [b, h, l, dv] = shape;
    // Floats and some more; far beyond memory, or few.
    let floats = [b, h, l, dv.max(1)].iter().fold(32u128, |all, &n| all.saturating_mul(n as u128));
    if (1 << 26..1 << 50).contains(&floats) {
        return;
    }
    let Ok(mut states) = RowStates::new(shape) else {
        let huge = shape.iter().any(|&n| n as u64 > 1 << 40);
        assert!(floats >= 1 << 50 || dv == 0 || huge, "{shape:?} is refused");
        return;
    };
    assert_eq!(states.as_slice().len(), b * h * l * (2 + dv.next_multiple_of(16)), "{shape:?}");
    let later = states.clone();
    states.merge(&later, Exec::serial()).expect("the same rows");
    let mut out = vec![f32::NAN; b * h * l * dv];
    // A view of nothing may have sizes that are too large all the same.
    let Ok(view) = ViewMut::bhld(&mut out, shape) else { return };
    if states.write(None, Outputs::new(view), Exec::serial()).is_ok() {
        assert!(out.iter().all(|&x| x == 0.0), "rows that see no key: {out:?}");
    }
}
