//! Views of any shape and strides; most are refused.

use crate::fuzzer::array::{At, indices};
use crate::fuzzer::memory::{Flush, Memory};
use crate::fuzzer::rng::Rng;
use sdpa::{View, ViewMut};
use std::collections::HashSet;

const STRIDES: [isize; 12] = [0, 1, 1, 2, 3, -1, -2, 5, 8, 1 << (isize::BITS - 2), isize::MAX, isize::MIN];

pub(super) fn check(rng: &mut Rng) {
    let len = rng.below(40);
    let shape: At = core::array::from_fn(|_| match rng.below(20) {
        0 => rng.pick(&[0, usize::MAX, 1 << (usize::BITS * 5 / 8), isize::MAX as usize]),
        _ => 1 + rng.below(4),
    });
    let strides: [isize; 4] = core::array::from_fn(|_| match rng.below(3) {
        0 => rng.pick(&STRIDES),
        _ => rng.pick(&STRIDES[..9]),
    });
    let offset = if rng.one_in(30) { usize::MAX } else { rng.below(len + 2) };
    let flush = if rng.one_in(2) { Flush::Low } else { Flush::High };
    let mut memory = Memory::<f32>::new(len, flush);
    memory.slice_mut().iter_mut().enumerate().for_each(|(i, x)| *x = i as f32);
    let fits = fits(len, offset, shape, strides);
    let what = format!("{len} elements, offset {offset}, {shape:?}, {strides:?}");
    let view = View::from_strides(memory.slice(), offset, shape, strides);
    assert_eq!(view.is_ok(), fits, "{what}");
    let Ok(view) = view else { return };
    if shape.iter().any(|&n| n > 10) {
        return;
    }
    let mut seen = HashSet::new();
    let mut twice = false;
    for at in indices(shape) {
        let steps = at.iter().zip(strides).map(|(&i, stride)| i as isize * stride);
        let index = offset as isize + steps.sum::<isize>();
        assert_eq!(view.get(at), Some(&(index as f32)), "{what}");
        twice |= !seen.insert(index);
    }
    let once = ViewMut::from_strides(memory.slice_mut(), offset, shape, strides).is_ok();
    assert_eq!(once, !twice, "{what}: each element held once");
}

/// True if every index is inside, and their number is one.
fn fits(len: usize, offset: usize, shape: At, strides: [isize; 4]) -> bool {
    let most = isize::MAX as usize;
    let all = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
    if shape.iter().any(|&n| n > most) || all.is_none() {
        return false;
    }
    if shape.contains(&0) {
        return true;
    }
    let (mut low, mut high) = (offset as i128, offset as i128);
    for (&n, &stride) in shape.iter().zip(&strides) {
        let span = (n as i128 - 1) * stride as i128;
        low += span.min(0);
        high += span.max(0);
    }
    low >= 0 && high < len as i128
}
