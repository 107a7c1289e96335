//! Numbers by index, and where they may lie.

use super::rng::Rng;
use core::ops::Range;

/// `[batch, heads, rows, dim]`.
pub(crate) type At = [usize; 4];

/// Every index of a shape, the last dimension fastest.
pub(crate) fn indices([b, h, l, d]: At) -> impl Iterator<Item = At> {
    (0..b).flat_map(move |b| (0..h).flat_map(move |h| (0..l).flat_map(move |l| (0..d).map(move |d| [b, h, l, d]))))
}

/// Numbers, dense.
#[derive(Debug, Clone)]
pub(crate) struct Array<T = f32> {
    pub(crate) shape: At,
    pub(crate) data: Vec<T>,
}

impl<T: Copy> Array<T> {
    pub(crate) fn from_fn(shape: At, mut f: impl FnMut(At) -> T) -> Self {
        let mut data = Vec::with_capacity(shape.iter().product());
        // Not `collect`, which asks for one index after the other: most of the fuzzer's time would go there.
        indices(shape).for_each(|at| data.push(f(at)));
        Self { shape, data }
    }

    fn index(&self, [b, h, l, d]: At) -> usize {
        let [nb, nh, nl, nd] = self.shape;
        assert!(b < nb && h < nh && l < nl && d < nd, "{:?} of {:?}", [b, h, l, d], self.shape);
        ((b * nh + h) * nl + l) * nd + d
    }

    pub(crate) fn get(&self, at: At) -> T {
        self.data[self.index(at)]
    }

    pub(crate) fn set(&mut self, at: At, x: T) {
        let i = self.index(at);
        self.data[i] = x;
    }

    /// The elements of a row.
    pub(crate) fn row(&self, b: usize, h: usize, l: usize) -> &[T] {
        let d = self.shape[3];
        if d == 0 {
            return &[];
        }
        let first = self.index([b, h, l, 0]);
        &self.data[first..first + d]
    }

    pub(crate) fn row_mut(&mut self, b: usize, h: usize, l: usize) -> &mut [T] {
        let d = self.shape[3];
        if d == 0 {
            return &mut [];
        }
        let first = self.index([b, h, l, 0]);
        &mut self.data[first..first + d]
    }

    /// Some of the rows of one entry of the batch, all heads.
    pub(crate) fn part(&self, b: usize, rows: Range<usize>) -> Self {
        let [_, h, _, d] = self.shape;
        Self::from_fn([1, h, rows.len(), d], |[_, h, l, d]| self.get([b, h, rows.start + l, d]))
    }

    /// The element at an index of a larger shape: dimensions of 1 repeat.
    pub(crate) fn repeated(&self, at: At) -> T {
        let mut at = at;
        for (i, n) in at.iter_mut().zip(self.shape) {
            *i = if n == 1 { 0 } else { *i };
        }
        self.get(at)
    }
}

impl Array {
    /// True if nothing changes along a dimension.
    fn repeats(&self, dim: usize) -> bool {
        self.shape[dim] > 1
            && indices(self.shape).all(|at| {
                let mut first = at;
                first[dim] = 0;
                self.get(at).to_bits() == self.get(first).to_bits()
            })
    }
}

/// Where elements lie: `offset + Σ index·stride` of a slice of `len`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) shape: At,
    pub(crate) strides: [isize; 4],
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// No layout takes more elements than this, unless dense ones do.
const MOST: usize = 1 << 20;

impl Layout {
    pub(crate) fn dense(shape: At) -> Self {
        let [_, h, l, d] = shape.map(|n| n.max(1) as isize);
        Self { shape, strides: [h * l * d, l * d, d, 1], offset: 0, len: shape.iter().product() }
    }

    /// Any layout in which no element is held twice. The lowest element is the slice's first, or the highest its last.
    pub(crate) fn draw(rng: &mut Rng, shape: At) -> Self {
        if rng.one_in(5) {
            return Self::dense(shape);
        }
        if shape.contains(&0) {
            // Nothing is there, so anything goes.
            let strides = [(); 4].map(|()| rng.pick(&ODD));
            return Self { shape, strides, offset: rng.pick(&[0, 0, 7, usize::MAX]), len: rng.below(3) };
        }
        if let Some(layout) = Self::interleaved(rng, shape) {
            return layout;
        }
        let order = match rng.below(4) {
            0 => vec![3, 1, 2, 0],
            1 => rng.shuffled(4),
            _ => vec![3, 2, 1, 0],
        };
        let (mut strides, mut offset, mut span) = ([0isize; 4], 0, 1usize);
        for dim in order {
            let gap = if rng.one_in(3) { rng.pick(&[1, 1, 2, 3, 5, 16]) } else { 0 };
            let (n, step) = (shape[dim], span + gap);
            if n == 1 {
                strides[dim] = if rng.one_in(3) { rng.pick(&ODD) } else { step as isize };
                continue;
            }
            let backwards = rng.one_in(4);
            strides[dim] = if backwards { -(step as isize) } else { step as isize };
            offset += if backwards { (n - 1) * step } else { 0 };
            span += (n - 1) * step;
        }
        if span > MOST {
            return Self::dense(shape);
        }
        let (before, behind) = (rng.pick(&[0, 0, 1, 9]), rng.pick(&[0, 0, 1, 9]));
        let (before, behind) = if rng.one_in(2) { (0, behind) } else { (before, 0) };
        Self { shape, strides, offset: offset + before, len: before + span + behind }
    }

    /// Strides that go through each other, if there are few elements and none of them is held twice.
    fn interleaved(rng: &mut Rng, shape: At) -> Option<Self> {
        let elements: usize = shape.iter().product();
        if elements > 200 || !rng.one_in(4) {
            return None;
        }
        let strides = [(); 4].map(|()| rng.pick(&[1, 2, 3, 5, 7, 11, 13, 30, -1, -2, -3, -17]));
        let layout = Self { shape, strides, offset: 1 << 20, len: 0 };
        let mut all: Vec<usize> = indices(shape).map(|at| layout.index(at)).collect();
        all.sort_unstable();
        let (low, high) = (*all.first()?, *all.last()?);
        all.dedup();
        (all.len() == elements).then_some(Self { offset: layout.offset - low, len: high - low + 1, ..layout })
    }

    /// The same for what is only read: where numbers repeat, one of them may stand for all.
    pub(crate) fn draw_input(rng: &mut Rng, x: &Array) -> Self {
        let mut shape = x.shape;
        for (dim, n) in shape.iter_mut().enumerate() {
            if rng.one_in(2) && x.repeats(dim) {
                *n = 1;
            }
        }
        let mut layout = Self::draw(rng, shape);
        for (stride, (n, all)) in layout.strides.iter_mut().zip(shape.into_iter().zip(x.shape)) {
            *stride = if n == all { *stride } else { 0 };
        }
        Self { shape: x.shape, ..layout }
    }

    pub(crate) fn index(&self, at: At) -> usize {
        let steps = at.iter().zip(self.strides).map(|(&i, stride)| i as isize * stride);
        (self.offset as isize + steps.sum::<isize>()) as usize
    }
}

/// Strides of dimensions that nobody steps along.
const ODD: [isize; 8] = [0, 1, -1, 3, -64, 1 << (isize::BITS * 5 / 8), isize::MAX, isize::MIN];
