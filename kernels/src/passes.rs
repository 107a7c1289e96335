//! What happens to a block of scores on its way to the softmax: softcap, bias, ALiBi, masks. Each is a pass over the
//! block, in second-level cache, so that no option multiplies another; a pass is made only when asked for.

use crate::block::{SCORE_STRIDE, Span};
use crate::exp::exp_m1;
use crate::options::Mask;
use crate::simd::{LANES, Simd};

/// A row of a bias or mask, from a block's first key on.
#[derive(Clone, Copy)]
pub(crate) struct Columns<T> {
    pub(crate) first: *const T,
    pub(crate) element: isize,
    /// Columns there are; keys beyond them are hidden.
    pub(crate) len: usize,
}

impl<T: Copy> Columns<T> {
    pub(crate) const NONE: Self = Self { first: core::ptr::null(), element: 0, len: 0 };

    /// # Safety
    /// The row is readable and `j < len`.
    #[inline(always)]
    unsafe fn get(&self, j: usize) -> T {
        // SAFETY: the caller's promise.
        unsafe { *self.first.offset(j as isize * self.element) }
    }

    /// Sixteen columns from `first` on as the backend loads them: from where they lie, or filled up with `fill`.
    ///
    /// # Safety
    /// The row is readable.
    #[inline(always)]
    unsafe fn panel<R>(&self, first: usize, fill: T, load: impl Fn(*const T) -> R) -> R {
        if self.element == 1 && first + LANES <= self.len {
            // SAFETY: sixteen contiguous columns of the row.
            return load(unsafe { self.first.add(first) });
        }
        let mut lanes = [fill; LANES];
        for (i, lane) in lanes.iter_mut().enumerate().take(self.len.saturating_sub(first)) {
            // SAFETY: `first + i < len`.
            *lane = unsafe { self.get(first + i) };
        }
        load(lanes.as_ptr())
    }
}

/// A group's scores against one block.
pub(crate) struct Group<'a> {
    /// `[row][SCORE_STRIDE]`.
    pub(crate) scores: &'a mut [f32],
    pub(crate) spans: &'a [Span],
    pub(crate) rows: usize,
}

impl Group<'_> {
    /// Calls `f(row, panels, scores of the row)` for each row.
    #[inline(always)]
    fn for_each_row<S: Simd>(&mut self, _: S, mut f: impl FnMut(usize, core::ops::Range<usize>, *mut f32)) {
        assert!(self.spans.len() == self.rows.div_ceil(S::TILE_ROWS));
        assert!(self.scores.len() >= self.rows * SCORE_STRIDE);
        for row in 0..self.rows {
            let span = self.spans[row / S::TILE_ROWS];
            // SAFETY: `row < rows`.
            let scores = unsafe { self.scores.as_mut_ptr().add(row * SCORE_STRIDE) };
            f(row, span.first_panel()..span.end_panel(), scores);
        }
    }

    /// Calls `f(row, first column, scores of the panel)` for each panel of each row.
    #[inline(always)]
    fn for_each_panel<S: Simd>(&mut self, s: S, mut f: impl FnMut(usize, usize, *mut f32)) {
        self.for_each_row(s, |row, panels, scores| {
            for panel in panels {
                // SAFETY: spans end inside a block, and a row of scores holds one.
                f(row, panel * LANES, unsafe { scores.add(panel * LANES) });
            }
        });
    }
}

/// Up to here, tanh is an odd polynomial; beyond, (1 − e)/(1 + e) with e = exp(−2|x|).
const TANH_SMALL: f32 = 0.625;
/// Coefficients of x³, x⁵ … x¹¹ of tanh on ±0.625 (Moshier's Cephes, `tanhf`; error below 1 ULP).
const TANH: [f32; 5] = [-0.333_332_8, 0.133_314_42, -0.053_739_715, 0.020_639_09, -0.005_704_988_7];

/// `c·tanh(score / c)`.
#[inline(always)]
pub(crate) fn softcap<S: Simd>(s: S, mut group: Group<'_>, cap: f32) {
    let (c, over) = (s.splat(cap), s.splat(1.0 / cap));
    let zero = s.splat(0.0);
    let small = s.splat(TANH_SMALL);
    let polynomial = |x: S::V| {
        let z = s.mul(x, x);
        let mut p = s.splat(TANH[4]);
        for k in [TANH[3], TANH[2], TANH[1], TANH[0]] {
            p = s.fma(p, z, s.splat(k));
        }
        s.fma(s.mul(p, z), x, x)
    };
    let size = |x: S::V| s.max(x, s.sub(zero, x));
    group.for_each_row(s, |_, panels, scores| {
        // SAFETY: panels lie inside the row.
        let at = |panel: usize| unsafe { scores.add(panel * LANES) };
        // Scores are usually far below the cap: ask once a row whether the long form is needed. Where it is, each lane
        // still takes the form that its own size calls for, so the bits do not depend on the answer.
        let mut widest = zero;
        for panel in panels.clone() {
            // SAFETY: a panel of the row.
            widest = s.max(size(s.mul(unsafe { s.load(at(panel)) }, over)), widest);
        }
        let long = s.reduce_max(widest) > TANH_SMALL;
        for panel in panels {
            // SAFETY: a panel of the row.
            let x = s.mul(unsafe { s.load(at(panel)) }, over);
            let mut y = polynomial(x);
            if long {
                let e = exp_m1(s, s.mul(size(x), s.splat(-2.0)));
                let tanh = s.div(s.sub(zero, e), s.add(e, s.splat(2.0)));
                let signed = s.select_eq(x, size(x), tanh, s.sub(zero, tanh));
                y = s.select_eq(s.max(size(x), small), small, y, signed);
            }
            // SAFETY: a panel of the row.
            unsafe { s.store(at(panel), s.mul(y, c)) };
        }
    });
}

/// Adds a bias; −∞ hides whatever the score was.
///
/// # Safety
/// Every row's columns are readable.
#[inline(always)]
pub(crate) unsafe fn bias<S: Simd>(s: S, mut group: Group<'_>, rows: &[Columns<f32>]) {
    assert!(rows.len() >= group.rows);
    let hidden = s.splat(f32::NEG_INFINITY);
    group.for_each_panel(s, |row, first, at| {
        // SAFETY: the caller vouches for the columns; the lambda is given sixteen floats.
        let bias = unsafe { rows[row].panel(first, f32::NEG_INFINITY, |p| s.load(p)) };
        // SAFETY: a panel of the group's scores.
        unsafe { s.store(at, s.select_eq(bias, hidden, hidden, s.add(s.load(at), bias))) };
    });
}

/// Adds −slope·|p − j|: per row the slope, and the row's position counted from the block's first key.
#[inline(always)]
pub(crate) fn alibi<S: Simd>(s: S, mut group: Group<'_>, rows: &[(f32, f32)]) {
    const LANE: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    assert!(rows.len() >= group.rows);
    // SAFETY: sixteen floats.
    let lane = unsafe { s.load(LANE.as_ptr()) };
    group.for_each_panel(s, |row, first, at| {
        let (slope, position) = rows[row];
        let ahead = s.sub(s.splat(position - first as f32), lane);
        let distance = s.max(ahead, s.sub(s.splat(0.0), ahead));
        // SAFETY: a panel of the group's scores.
        unsafe { s.store(at, s.fma(distance, s.splat(-slope), s.load(at))) };
    });
}

/// Hides the keys that a boolean mask hides.
///
/// # Safety
/// Every row's columns are readable.
#[inline(always)]
pub(crate) unsafe fn mask<S: Simd>(s: S, mut group: Group<'_>, rows: &[Columns<u8>], polarity: Mask<'_>) {
    assert!(rows.len() >= group.rows);
    let (zero, hidden) = (s.splat(0.0), s.splat(f32::NEG_INFINITY));
    let keep = matches!(polarity, Mask::Keep(_));
    let fill = u8::from(!keep);
    group.for_each_panel(s, |row, first, at| {
        // SAFETY: the caller vouches for the columns; the lambda is given sixteen bytes.
        let bytes = unsafe { rows[row].panel(first, fill, |p| s.load_u8(p)) };
        // SAFETY: a panel of the group's scores.
        unsafe {
            let score = s.load(at);
            let (zeros, others) = if keep { (hidden, score) } else { (score, hidden) };
            s.store(at, s.select_eq(bytes, zero, zeros, others));
        }
    });
}

/// The keys that a row of a mask keeps: first, one past the last, and whether it keeps all between.
///
/// # Safety
/// The row's columns are readable.
#[inline(always)]
pub(crate) unsafe fn kept(row: Columns<u8>, polarity: Mask<'_>, keys: core::ops::Range<usize>) -> (usize, usize, bool) {
    let end = keys.end.min(row.len);
    if keys.start >= end {
        return (0, 0, true);
    }
    let mut copy = [0u8; crate::block::KEY_BLOCK];
    let bytes = if row.element == 1 {
        // SAFETY: contiguous columns of the row.
        unsafe { &core::slice::from_raw_parts(row.first, end)[keys.start..] }
    } else {
        for j in keys.start..end {
            // SAFETY: `j < row.len`.
            copy[j] = unsafe { row.get(j) };
        }
        &copy[keys.start..end]
    };
    // The polarity is settled here, so that the scan's inner loops are free of it.
    let (first, last, all) = match polarity {
        Mask::Keep(_) => extent(bytes, |byte| byte != 0),
        Mask::Drop(_) => extent(bytes, |byte| byte == 0),
    };
    if first < last { (keys.start + first, keys.start + last, all) } else { (0, 0, true) }
}

/// First, one past the last, and all between. Whole chunks are tested without early exits, which compiles to vector
/// instructions; single bytes only in the chunks at either end.
#[inline(always)]
fn extent(bytes: &[u8], keeps: impl Fn(u8) -> bool + Copy) -> (usize, usize, bool) {
    let any = |chunk: &[u8; LANES]| chunk.iter().fold(false, |any, &byte| any | keeps(byte));
    let all = |chunk: &[u8; LANES]| chunk.iter().fold(true, |all, &byte| all & keeps(byte));
    let (chunks, rest) = bytes.as_chunks::<LANES>();
    // The usual case: all of it.
    if chunks.iter().fold(true, |yes, chunk| yes & all(chunk)) && rest.iter().all(|&byte| keeps(byte)) {
        return (0, bytes.len(), true);
    }
    let from = chunks.iter().position(any).unwrap_or(chunks.len()) * LANES;
    let Some(first) = bytes[from..].iter().position(|&byte| keeps(byte)).map(|i| from + i) else { return (0, 0, true) };
    let last = match rest.iter().rposition(|&byte| keeps(byte)) {
        Some(i) => chunks.len() * LANES + i,
        None => {
            let end = (chunks.iter().rposition(any).unwrap_or(0) + 1) * LANES;
            bytes[..end.min(bytes.len())].iter().rposition(|&byte| keeps(byte)).unwrap_or(first)
        }
    };
    (first, last + 1, bytes[first..=last].iter().fold(true, |all, &byte| all & keeps(byte)))
}

/// Scores to finished weights: exp(score − reference) · factor, per row.
#[inline(always)]
pub(crate) fn weights<S: Simd>(s: S, mut group: Group<'_>, rows: &[(f32, f32)]) {
    assert!(rows.len() >= group.rows);
    group.for_each_panel(s, |row, _, at| {
        let (reference, factor) = rows[row];
        // SAFETY: a panel of the group's scores.
        unsafe { s.store(at, s.mul(crate::exp::exp(s, s.sub(s.load(at), s.splat(reference))), s.splat(factor))) };
    });
}

/// Adds the group's weights to the sum of each key, row after row.
#[inline(always)]
pub(crate) fn add_up<S: Simd>(s: S, mut group: Group<'_>, mass: &mut [f32]) {
    assert!(mass.len() >= crate::block::KEY_BLOCK);
    group.for_each_panel(s, |_, first, at| {
        // SAFETY: a panel of the group's scores; spans end inside a block, and so inside `mass`.
        unsafe {
            let sum = mass.as_mut_ptr().add(first);
            s.store(sum, s.add(s.load(sum), s.load(at)));
        }
    });
}
