//! bfloat16 in pairs, for machines that multiply two at a time: `vdpbf16ps` adds both products of a pair to an `f32`.
//!
//! Keys are packed with elements 2i and 2i + 1 side by side, `[panel][pair][16]`; queries likewise, rounded if they are
//! longer. Values meet as they lie, key 2i beside key 2i + 1; the weights of the two are rounded to bfloat16. What a row
//! gathers, its maximum and its sum stay `f32`.

use crate::dots::Apart;
use crate::element::Bf16;
use crate::pack::Rows;
use crate::passes::Group;
use crate::scores::{Scores, scores};
use crate::simd::{LANES, Pair, Pairs, PairsWork, Simd};
use crate::values::{RowPairs, Values, values};

/// Packed keys.
#[derive(Clone, Copy)]
pub(crate) enum PairPanels {
    /// `[panel][pair][16]`.
    Packed(*const Pair),
    /// `[panel][head_dim][16]` elements, an even number of dimensions.
    Apart(*const Apart),
}

/// Packs the first `n` of `all` keys of `d` elements in pairs; an odd element has 0 beside it, and the last panel is filled
/// up with zeros.
///
/// # Safety
/// `keys` has `all` readable rows of `d` elements, at least `n`.
#[inline(always)]
pub(crate) unsafe fn pack<S: Simd>(s: S, keys: Rows<Bf16>, [n, all]: [usize; 2], d: usize, out: &mut [Pair]) {
    let pairs = d.div_ceil(2);
    assert!(out.len() >= n.next_multiple_of(LANES) * pairs);
    for first in (0..n).step_by(LANES) {
        let here = LANES.min(n - first);
        let panel = &mut out[first * pairs..][..LANES * pairs];
        // A square of pairs is a square of floats to who moves it.
        let squares = if keys.element == 1 { d / 2 / LANES * LANES } else { 0 };
        for i in (0..squares).step_by(LANES) {
            // SAFETY: rows below `all` have elements `2i .. 2i + 32`; the panel has room for a square.
            unsafe {
                let row = |r: usize| keys.at(first + r).add(2 * i).cast::<f32>();
                if first + LANES < all {
                    for r in 0..LANES {
                        s.prefetch_far(keys.at((first + LANES + r).min(all - 1)).wrapping_add(2 * i).cast());
                    }
                }
                let rows = core::array::from_fn(|r| row(r.min(here - 1)));
                s.transpose(rows, panel.as_mut_ptr().add(i * LANES).cast());
            }
        }
        for r in 0..here {
            // SAFETY: row `first + r < n`, elements below `d`.
            let element = |i: usize| unsafe { *keys.at(first + r).offset(i as isize * keys.element) };
            for i in squares..pairs {
                let second = if 2 * i + 1 < d { element(2 * i + 1) } else { Bf16::default() };
                panel[i * LANES + r] = Pair::new(element(2 * i), second);
            }
        }
        if here < LANES {
            for lanes in panel.chunks_exact_mut(LANES) {
                lanes[here..].fill(Pair::default());
            }
        }
    }
}

/// The same of panels `[panel][d][16]`, whole ones.
///
/// # Safety
/// So many panels are readable.
#[inline(always)]
pub(crate) unsafe fn pair_up(panels: *const Bf16, n: usize, d: usize, out: &mut [Pair]) {
    let pairs = d.div_ceil(2);
    for (panel, out) in out.chunks_exact_mut(LANES * pairs).take(n).enumerate() {
        for (i, out) in out.iter_mut().enumerate() {
            let (pair, lane) = (i / LANES, i % LANES);
            // SAFETY: an element of the panel: `e < d`.
            let element = |e: usize| unsafe { *panels.add((panel * d + e) * LANES + lane) };
            let second = if 2 * pair + 1 < d { element(2 * pair + 1) } else { Bf16::default() };
            *out = Pair::new(element(2 * pair), second);
        }
    }
}

impl PairsWork for Scores<'_, PairPanels> {
    type Output = ();
    #[inline(always)]
    fn run<S: Pairs>(self, s: S) {
        // SAFETY: who made this vouches for queries and keys.
        unsafe {
            match self.keys {
                PairPanels::Packed(keys) => scores(s, self.of(keys)),
                PairPanels::Apart(keys) => scores(s, self.of(keys)),
            }
        }
    }
}

impl PairsWork for Values<'_, RowPairs> {
    type Output = ();
    #[inline(always)]
    fn run<S: Pairs>(self, s: S) {
        // SAFETY: who made this vouches for the values.
        unsafe { values(s, self) }
    }
}

/// Scratch for pairs: as many as floats.
pub(crate) fn as_pairs(scratch: &mut [f32]) -> &mut [Pair] {
    const { assert!(size_of::<Pair>() == size_of::<f32>() && align_of::<Pair>() <= align_of::<f32>()) }
    // SAFETY: as large, aligned alike; every pattern is a pair, and a float.
    unsafe { core::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast(), scratch.len()) }
}

/// Scratch for words of sixteen bits.
pub(crate) fn as_words(scratch: &mut [f32]) -> &mut [u16] {
    // SAFETY: as many bytes, more than aligned; every pattern is a number, and so it is of floats.
    unsafe { core::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast(), 2 * scratch.len()) }
}

/// Weights to be rounded where they are: the pair of keys 2i and 2i + 1 goes where the weight of key i was.
pub(crate) struct Round<'a>(pub(crate) Group<'a>);

impl PairsWork for Round<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Pairs>(self, s: S) {
        let mut group = self.0;
        group.for_each_row(
            s,
            #[inline(always)]
            |_, panels, weights| {
                for panel in panels {
                    // SAFETY: a panel of the row; what is written lies where weights have been read before.
                    unsafe {
                        let v = s.load(weights.add(panel * LANES));
                        s.store_pairs(weights.add(panel * LANES / 2).cast(), v);
                    }
                }
            },
        );
    }
}

/// The weight of key `j` in a row of rounded ones.
pub(crate) fn rounded(weights: &[f32], j: usize) -> f32 {
    let pair = weights[j / 2].to_bits();
    f32::from_bits(if j.is_multiple_of(2) { pair << 16 } else { pair & 0xFFFF_0000 })
}
