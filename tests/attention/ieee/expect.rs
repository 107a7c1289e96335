//! Cases with one special number, and what a row of their outputs is expected to be.

use crate::options::{Case, Full, Wanted, check_against_oracle, same_rows};
use crate::support::{Rng, Tensor, execs};
use sdpa::Alignment;

pub(super) const NAN: f32 = f32::NAN;
pub(super) const INF: f32 = f32::INFINITY;
/// One head, three rows; dims of no whole vector.
pub(super) const ROWS: usize = 3;
pub(super) const D: usize = 4;
pub(super) const DV: usize = 3;

/// Numbers of keys: less than a vector, more than a block.
pub(super) const KEYS: [usize; 2] = [5, 300];
/// The key that gets the special value: in the last, incomplete vector, and behind the first block if there is one.
pub(super) fn special(keys: usize) -> usize {
    keys - 2
}

/// Queries of ones, so that the sign of a key is the sign of its scores.
pub(super) fn plain(keys: usize) -> Case {
    let mut case = Case::plain(&mut Rng::new(keys as u64), [1, 1, 1, ROWS, keys, D, DV]);
    case.q = Tensor::filled(case.q.shape, 1.0);
    case
}

/// Scores of zero.
pub(super) fn flat(keys: usize) -> Case {
    let mut case = plain(keys);
    (0..ROWS).for_each(|i| case.q.fill_row(i, 0.0));
    case
}

/// A causal call in which row 0 does not see the special key and the others do.
pub(super) fn causal(keys: usize) -> Case {
    Case { causal: true, alignment: Some(Alignment::Offset(special(keys) as isize - 1)), ..plain(keys) }
}

/// A call in which nobody sees anything.
pub(super) fn hidden(keys: usize) -> Case {
    Case { causal: true, alignment: Some(Alignment::Offset(-100)), ..plain(keys) }
}

pub(super) fn set_key(case: &mut Case, j: usize, x: f32) {
    case.k.fill_row(j, x);
}

/// What a number is, where its value is not the point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Is {
    Nan,
    PlusInf,
    MinusInf,
    Finite,
    /// To the bit.
    This(f32),
}

impl Is {
    fn holds(self, x: f32) -> bool {
        match self {
            Self::Nan => x.is_nan(),
            Self::PlusInf => x == INF,
            Self::MinusInf => x == -INF,
            Self::Finite => x.is_finite(),
            Self::This(y) => x.to_bits() == y.to_bits(),
        }
    }
}

/// NaN, ±∞ or finite, of each output of the oracle and of the call; and the numbers, where they are finite.
pub(super) fn agree(what: &str, case: &Case, full: &Full) {
    check_against_oracle(what, case, full, &case.oracle::<f64>());
}

/// Runs on every instruction set, at both numbers of keys, holds row `row` against what it should be and, if the
/// arithmetic of `f64` decides as that of `f32` does, everything against the oracle.
#[track_caller]
pub(super) fn expect(make: impl Fn(usize) -> Case, row: usize, out: [Is; DV], lse: Is, oracle: bool) {
    for keys in KEYS {
        let case = make(keys);
        for (isa, exec) in execs() {
            let full = case.run(exec, Wanted::LEAST);
            for (c, is) in out.into_iter().enumerate() {
                let x = full.out.get([0, 0, row, c]);
                assert!(is.holds(x), "{isa}, {keys} keys: out[{c}] is {x:e}, expected {is:?}");
                // Results have one NaN, wherever it came from.
                assert!(is != Is::Nan || x.to_bits() == 0x7fc0_0000, "{isa}, {keys} keys: {:x}", x.to_bits());
            }
            let x = full.lse.get([0, 0, row, 0]);
            assert!(lse.holds(x), "{isa}, {keys} keys: LSE is {x:e}, expected {lse:?}");
            if oracle {
                agree(&format!("{isa}, {keys} keys"), &case, &full);
            }
        }
    }
}

/// Both cases give the same bits in this row, whatever else they give.
#[track_caller]
pub(super) fn same_row(row: usize, make: impl Fn(usize) -> Case, clean: impl Fn(usize) -> Case) {
    for keys in KEYS {
        let (a, b) = (make(keys), clean(keys));
        for (isa, exec) in execs() {
            let (got, expected) = (a.run(exec, Wanted::LEAST), b.run(exec, Wanted::LEAST));
            same_rows(&format!("{isa}, {keys} keys"), (&a, &got), (&b, &expected), |at| (at[2] == row).then_some(at));
        }
    }
}

/// One change to a case.
pub(super) fn with(make: fn(usize) -> Case, change: impl Fn(&mut Case, usize)) -> impl Fn(usize) -> Case {
    move |keys| {
        let mut case = make(keys);
        change(&mut case, keys);
        case
    }
}

pub(super) const NANS: [Is; DV] = [Is::Nan; DV];
pub(super) const FINITE: [Is; DV] = [Is::Finite; DV];
pub(super) const ZEROS: [Is; DV] = [Is::This(0.0); DV];
