//! Memory for what a call writes.

use super::array::{Array, Layout};
use super::case::Case;
use super::compare::{POINTS, Results, Written};
use super::draw::DTYPES;
use super::place::{AnyPlaced, Placed};
use super::rng::Rng;
use sdpa::{Dtype, Outputs, Point};

/// Which outputs to ask for besides `out`, and the type of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) out: Dtype,
    pub(crate) lse: bool,
    pub(crate) points: [bool; 4],
    pub(crate) mass: bool,
}

impl Wanted {
    pub(crate) const LEAST: Self = Self { out: Dtype::F32, lse: true, points: [false; 4], mass: false };
    pub(crate) const ALL: Self = Self { out: Dtype::F32, lse: true, points: [true; 4], mass: true };

    pub(crate) fn draw(rng: &mut Rng) -> Self {
        match rng.below(4) {
            0 => Self::LEAST,
            1 => Self::ALL,
            2 => Self { out: rng.pick(&DTYPES), lse: rng.one_in(2), points: [false; 4], mass: rng.one_in(2) },
            _ => {
                let points = [(); 4].map(|()| rng.one_in(2));
                Self { out: rng.pick(&DTYPES), lse: rng.one_in(2), points, mass: rng.one_in(2) }
            }
        }
    }
}

impl core::fmt::Display for Wanted {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "out {}", self.out)?;
        let names = POINTS.into_iter().zip(self.points).chain([("lse", self.lse), ("key weight sums", self.mass)]);
        names.filter(|(_, wanted)| *wanted).try_for_each(|(name, _)| write!(f, ", {name}"))
    }
}

/// Outputs in guarded memory, each in a layout of its own.
#[derive(Debug)]
pub(crate) struct Outs {
    dtype: Dtype,
    out: AnyPlaced,
    lse: Option<Placed<f32>>,
    points: [Option<Placed<f32>>; 4],
    mass: Option<Placed<f32>>,
}

impl Outs {
    pub(crate) fn blank(rng: &mut Rng, case: &Case, wanted: Wanted) -> Self {
        let ([b, h, l, _], [kb, g, n, dv], (rows, keys)) = (case.q.shape, case.v.shape, case.longest());
        let layout = Layout::draw(rng, [b, h, l, dv]);
        let out = AnyPlaced::blank(rng, layout, wanted.out);
        let mut one = |wanted: bool, shape| {
            wanted.then(|| {
                let layout = Layout::draw(rng, shape);
                Placed::blank(rng, layout)
            })
        };
        let points = wanted.points.map(|wanted| one(wanted, [case.batch(), h, rows, keys]));
        let (lse, mass) = (one(wanted.lse, [b, h, l, 1]), one(wanted.mass, [kb, g, n, 1]));
        Self { dtype: wanted.out, out, lse, points, mass }
    }

    /// Asks for log-sum-exps with a second column, of their rounding errors.
    pub(crate) fn with_rests(self, rng: &mut Rng, case: &Case) -> Self {
        let [b, h, l, _] = case.q.shape;
        let layout = Layout::draw(rng, [b, h, l, 2]);
        Self { lse: Some(Placed::blank(rng, layout)), ..self }
    }

    pub(crate) fn outputs(&mut self) -> Outputs<'_> {
        let Self { out, lse, points, mass, .. } = self;
        let mut outputs = Outputs::new(out.view_mut());
        if let Some(lse) = lse {
            outputs = outputs.lse(lse.view_mut());
        }
        let kinds = [Point::Raw, Point::Softcapped, Point::Masked, Point::Weights];
        for (kind, point) in kinds.into_iter().zip(points) {
            if let Some(point) = point {
                outputs = outputs.scores(kind, point.view_mut());
            }
        }
        match mass {
            Some(mass) => outputs.key_weight_sums(mass.view_mut()),
            None => outputs,
        }
    }

    /// True if nothing was written.
    pub(crate) fn is_blank(&self) -> bool {
        let points = self.points.iter().flatten();
        self.out.is_blank() && points.chain(&self.lse).chain(&self.mass).all(Placed::is_blank)
    }

    /// Whatever was written, in part or whole; then nothing is. Panics if something beside the outputs was.
    pub(crate) fn clear(&mut self, what: &str) -> Results {
        let f32s = |bits: Array<u32>| Written { bits, dtype: Dtype::F32 };
        let out = Written { bits: self.out.take(&format!("{what}: out")), dtype: self.dtype };
        let one =
            |name: &str, x: &mut Option<Placed<f32>>| x.as_mut().map(|x| f32s(x.take(&format!("{what}: {name}"))));
        let [a, b, c, d] = &mut self.points;
        let points = [a, b, c, d].into_iter().zip(POINTS).map(|(x, name)| one(name, x)).collect::<Vec<_>>();
        let (lse, mass) = (one("lse", &mut self.lse), one("key mass", &mut self.mass));
        Results { out, lse, points: points.try_into().expect("four of four"), mass }
    }

    /// Everything that a call is to have written. Panics if any of it was not.
    pub(crate) fn take(&mut self, what: &str) -> Results {
        let results = self.clear(what);
        let points = results.points.iter().flatten();
        for written in points.chain(&results.lse).chain(&results.mass).chain([&results.out]) {
            let blank = if written.dtype == Dtype::F32 { u32::MAX } else { u32::from(u16::MAX) };
            let left = written.bits.data.iter().filter(|&&bits| bits == blank).count();
            assert!(left == 0, "{what}: {left} elements of shape {:?} were not written", written.bits.shape);
        }
        results
    }
}
