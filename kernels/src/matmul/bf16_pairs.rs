//! Pairs of bfloat16, for machines that multiply two at a time: `vdpbf16ps` adds both products of a pair to an `f32`.
//!
//! Keys are packed with elements 2i and 2i + 1 side by side, `[panel][pair][16]`; queries likewise, rounded if they are
//! longer. Values are paired as they are stored, key 2i beside key 2i + 1; the weights of the two are rounded to
//! bfloat16. The accumulator, maximum and sum of a row stay `f32`.

use crate::matmul::pack::{PanelRows, fill_panels};
use crate::simd::{Bf16x2, LANES, Simd};
use crate::tensor::element::Bf16;
use crate::tensor::rows::Rows;

/// Packs the first `n` of `all` keys of `d` elements in pairs; a last odd element is paired with 0, and the last panel
/// is filled up with zeros.
///
/// # Safety
/// `keys` has `all` readable rows of `d` elements, at least `n`.
pub(crate) unsafe fn pack<S: Simd>(s: S, keys: Rows<Bf16>, [n, all]: [usize; 2], d: usize, out: &mut [Bf16x2]) {
    s.vectorize(
        #[inline(always)]
        move || {
            let pairs = d.div_ceil(2);
            let columns = if keys.element == 1 { d / 2 } else { 0 };
            fill_panels(
                n,
                [pairs, columns],
                out,
                #[inline(always)]
                // SAFETY: rows below `n` and `all`, whole squares of pairs, and room for them. A square of pairs has the size
                // of a square of floats, and is transposed as one.
                |first, columns, to| unsafe {
                    let (panel, to) = (PanelRows::new(keys, first, [n, all]), to.cast::<f32>());
                    if let Some(even) = panel.even {
                        return even.columns_from(2 * columns.start).transpose(s, columns.len(), to);
                    }
                    for (square, i) in columns.step_by(LANES).enumerate() {
                        let mut rows = [[Bf16::default(); 2 * LANES]; LANES];
                        panel.for_each_row(
                            s,
                            2 * i,
                            #[inline(always)]
                            |r, row| rows[r] = row.cast::<[Bf16; 2 * LANES]>().read(),
                        );
                        let step = size_of_val(&rows[0]) as isize;
                        s.transpose(rows.as_ptr().cast(), step, to.add(square * LANES * LANES));
                    }
                },
                #[inline(always)]
                |r, i| {
                    // SAFETY: row `r < n`, elements below `d`, as the caller guarantees.
                    let element = |i: usize| unsafe { *keys.at(r).offset(i as isize * keys.element) }.0;
                    Bf16x2::new(element(2 * i), if 2 * i + 1 < d { element(2 * i + 1) } else { 0 })
                },
            );
        },
    )
}

/// Packs whole panels `[panel][d][16]` in pairs.
///
/// # Safety
/// The caller guarantees `n` readable panels.
#[inline(always)]
pub(crate) unsafe fn pair_up(panels: *const Bf16, n: usize, d: usize, out: &mut [Bf16x2]) {
    let pairs = d.div_ceil(2);
    for (panel, out) in out[..n * LANES * pairs].chunks_exact_mut(LANES * pairs).enumerate() {
        for (i, out) in out.iter_mut().enumerate() {
            let (pair, lane) = (i / LANES, i % LANES);
            // SAFETY: an element of a panel that the caller guarantees: `e < d`.
            let element = |e: usize| unsafe { *panels.add((panel * d + e) * LANES + lane) }.0;
            let second = if 2 * pair + 1 < d { element(2 * pair + 1) } else { 0 };
            *out = Bf16x2::new(element(2 * pair), second);
        }
    }
}

/// Returns the weight of key `j` in a row of rounded weights.
pub(crate) fn rounded(weights: &[f32], j: usize) -> f32 {
    let pair = weights[j / 2].to_bits();
    f32::from_bits(if j.is_multiple_of(2) { pair << 16 } else { pair & 0xFFFF_0000 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;

    /// Packs rows of `d` elements, `element` apart.
    fn packed<S: Simd>(s: S, rows: &[Bf16], element: usize, d: usize) -> Vec<Bf16x2> {
        let n = rows.len() / (element * d);
        let mut out = vec![Bf16x2(u32::MAX); n.next_multiple_of(LANES) * d.div_ceil(2)];
        let rows = Rows::strided(rows.as_ptr(), (element * d) as isize, element as isize);
        // SAFETY: `rows` holds `n` rows of `d` elements.
        unsafe { pack(s, rows, [n, n], d, &mut out) };
        out
    }

    #[test]
    fn pairs_are_where_they_should_be() {
        for (n, d, element) in [(1, 1, 1), (17, 2, 1), (16, 33, 1), (20, 64, 1), (5, 67, 2), (48, 96, 1)] {
            let rows: Vec<_> = (0..n * d * element).map(|i| Bf16(i as u16)).collect();
            let at = |j: usize, i: usize| if j < n && i < d { rows[(j * d + i) * element] } else { Bf16(0) };
            let pairs = d.div_ceil(2);
            let expected: Vec<_> = (0..n.next_multiple_of(LANES) * pairs)
                .map(|place| {
                    let (panel, i, lane) = (place / LANES / pairs, place / LANES % pairs, place % LANES);
                    let j = panel * LANES + lane;
                    Bf16x2::new(at(j, 2 * i).0, at(j, 2 * i + 1).0)
                })
                .collect();
            for isa in Isa::available() {
                assert_eq!(dispatch!(isa, |s| packed(s, &rows, element, d)), expected, "{n} rows of {d}, {isa}");
            }
            let panels: Vec<_> = (0..n.next_multiple_of(LANES) * d)
                .map(|place| at(place / LANES / d * LANES + place % LANES, place / LANES % d))
                .collect();
            let mut out = vec![Bf16x2(u32::MAX); expected.len()];
            // SAFETY: `panels` holds this many whole panels.
            unsafe { pair_up(panels.as_ptr(), n.div_ceil(LANES), d, &mut out) };
            assert_eq!(out, expected, "panels of {n} keys of {d}");
        }
    }

    #[test]
    fn weights_are_found_where_they_were_put() {
        let weights = [f32::from_bits(u32::from(Bf16::from_f32(0.5).0) | u32::from(Bf16::from_f32(0.25).0) << 16)];
        assert_eq!([rounded(&weights, 0), rounded(&weights, 1)], [0.5, 0.25]);
    }
}
