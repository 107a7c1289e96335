//! What a call wrote, held against the oracle's answer or against what another wrote.

use super::array::{Array, indices};
use super::oracle::{Answer, Num};
use super::place::value;
use sdpa::Dtype;

/// An output: the bits of its elements.
#[derive(Debug, Clone)]
pub(crate) struct Written {
    pub(crate) bits: Array<u32>,
    pub(crate) dtype: Dtype,
}

/// Everything that a call wrote.
#[derive(Debug, Clone)]
pub(crate) struct Results {
    pub(crate) out: Written,
    pub(crate) lse: Option<Written>,
    pub(crate) points: [Option<Written>; 4],
    pub(crate) mass: Option<Written>,
}

pub(crate) const POINTS: [&str; 4] = ["raw scores", "softcapped scores", "masked scores", "weights"];

impl Written {
    /// The bits of the one NaN.
    fn nan(&self) -> u32 {
        match self.dtype {
            Dtype::F32 => 0x7fc0_0000,
            Dtype::Bf16 => 0x7fc0,
            Dtype::F16 => 0x7e00,
            dtype => panic!("a new type: {dtype}"),
        }
    }

    /// By how much rounding to elements of this type adds to an error.
    fn rounding(&self, x: f64) -> f64 {
        match self.dtype {
            Dtype::F32 => 0.0,
            Dtype::Bf16 => x.abs() / 255.0 + 1e-40,
            Dtype::F16 => x.abs() / 2047.0 + 3.0e-8,
            dtype => panic!("a new type: {dtype}"),
        }
    }

    /// The largest number that does not become infinite.
    fn most(&self) -> f64 {
        match self.dtype {
            Dtype::F32 => f32::MAX.into(),
            Dtype::Bf16 => 3.39e38,
            Dtype::F16 => 65_519.0,
            dtype => panic!("a new type: {dtype}"),
        }
    }

    /// Panics unless every number is as close to the oracle's as it says.
    fn check(&self, what: &str, name: &str, expected: &Array<Num>) {
        assert_eq!(self.bits.shape, expected.shape, "{what}: the shape of {name}");
        for (at, (&bits, &num)) in indices(expected.shape).zip(self.bits.data.iter().zip(&expected.data)) {
            let (got, Num { x, e }) = (value(bits, self.dtype), num);
            let good = if got.is_nan() {
                // Results have one NaN, wherever it came from.
                bits == self.nan() && (x.is_nan() || e == f64::INFINITY)
            } else if x.is_infinite() || e == f64::INFINITY {
                e == f64::INFINITY || f64::from(got) == x
            } else if got.is_infinite() {
                e + if got > 0.0 { x } else { -x } >= self.most()
            } else {
                (f64::from(got) - x).abs() <= e + self.rounding(x.abs() + e)
            };
            assert!(good, "{what}: {name} {at:?} is {got:e} ({bits:#x}), expected {x:e}, at most {e:e} off");
        }
    }

    /// The bits of a row.
    fn row(&self, [b, h, l]: [usize; 3], columns: usize) -> &[u32] {
        &self.bits.row(b, h, l)[..columns]
    }
}

impl Results {
    pub(crate) fn check(&self, what: &str, answer: &Answer) {
        self.out.check(what, "out", &answer.out);
        if self.out.dtype == Dtype::F32 {
            assert!(self.out.bits.data.iter().all(|&bits| bits != 0x8000_0000), "{what}: out has a zero with a sign");
        }
        let points = POINTS.into_iter().zip(&self.points).zip(&answer.points);
        let others = [("lse", &self.lse, &answer.lse), ("key mass", &self.mass, &answer.mass)];
        for (name, got, expected) in points.map(|((name, got), expected)| (name, got, expected)).chain(others) {
            got.iter().for_each(|got| got.check(what, name, expected));
        }
    }

    /// Every output there might have been, in one order.
    pub(crate) fn all(self) -> Vec<Option<Written>> {
        [Some(self.out), self.lse, self.mass].into_iter().chain(self.points).collect()
    }

    /// Every output that both have, with its name.
    fn both<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'static str, &'a Written, &'a Written)> {
        let mine = [Some(&self.out), self.lse.as_ref(), self.mass.as_ref()];
        let others = [Some(&other.out), other.lse.as_ref(), other.mass.as_ref()];
        let some = ["out", "lse", "key mass"].into_iter().zip(mine.into_iter().zip(others));
        let points = self.points.iter().map(Option::as_ref).zip(other.points.iter().map(Option::as_ref));
        some.chain(POINTS.into_iter().zip(points)).filter_map(|(name, (a, b))| Some((name, a?, b?)))
    }

    /// Panics unless all that both have is the same, to the bit.
    pub(crate) fn same(&self, what: &str, other: &Self) {
        for (name, got, expected) in self.both(other) {
            assert_eq!((got.bits.shape, got.dtype), (expected.bits.shape, expected.dtype), "{what}: {name}");
            let pairs = got.bits.data.iter().zip(&expected.bits.data);
            if let Some((at, (got, expected))) = indices(got.bits.shape).zip(pairs).find(|(_, (a, b))| a != b) {
                panic!("{what}: {name} {at:?} is {got:#x}, expected {expected:#x}");
            }
        }
    }

    /// Panics unless a row is the same as one of another call, as far as both have keys. Places are those of the row in the
    /// outputs, and of its scores.
    pub(crate) fn same_row(&self, what: &str, mine: Place, other: &Self, others: Place) {
        for (name, got, expected) in self.both(other).filter(|(name, ..)| *name != "key mass") {
            let scores = POINTS.contains(&name);
            let (at, place) = if scores { (mine.scores, others.scores) } else { (mine.row, others.row) };
            let columns = if scores { mine.keys.min(others.keys) } else { got.bits.shape[3] };
            let (got, expected) = (got.row(at, columns), expected.row(place, columns));
            assert!(got == expected, "{what}: {name} of row {at:?} is {got:x?}, expected {expected:x?}");
        }
    }

    /// Without the scores before masks hide keys: those of hidden keys are whatever the keys are.
    pub(crate) fn without_raw(mut self) -> Self {
        (self.points[0], self.points[1]) = (None, None);
        self
    }
}

/// Where a row is, where its scores are, and of how many keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) row: [usize; 3],
    pub(crate) scores: [usize; 3],
    pub(crate) keys: usize,
}
