//! Pairs of bfloat16, for machines that multiply two at a time: `vdpbf16ps` adds both products of a pair to an `f32`.
//!
//! Keys are packed with elements 2i and 2i + 1 side by side, `[panel][pair][16]`; queries likewise, rounded if they are
//! longer. Values are paired by key, key 2i beside key 2i + 1; the weights of the two are rounded to bfloat16. The
//! accumulator, maximum and sum of a row stay `f32`. Caches and pools of bfloat16 hold their keys and values so.

use crate::matmul::pack::{NonFinite, PanelRows, copy_row, fill_panels};
use crate::simd::{Bf16x2, LANES, Simd};
use crate::tensor::any::{AnyRows, Typed};
use crate::tensor::element::{Bf16, Element};
use crate::tensor::rows::Rows;

/// Packs the first `n` of `all` keys of `d` elements in `pairs` pairs; keys and the last panel are filled up with zeros.
///
/// # Safety
/// `keys` has `all` readable rows of `d` elements, at least `n`.
pub(crate) unsafe fn pack<S: Simd>(
    s: S,
    keys: Rows<Bf16>,
    [n, all]: [usize; 2],
    [d, pairs]: [usize; 2],
    out: &mut [Bf16x2],
) {
    assert!(pairs >= d.div_ceil(2));
    s.vectorize(
        #[inline(always)]
        move || {
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
                    let element = |i: usize| match i < d {
                        // SAFETY: row `r < n`, an element below `d`, as the caller guarantees.
                        true => unsafe { *keys.at(r).offset(i as isize * keys.element) }.0,
                        false => 0,
                    };
                    Bf16x2::new(element(2 * i), element(2 * i + 1))
                },
            );
        },
    )
}

/// Widens whole panels of pairs, of `d` elements, to `[panel][d][16]`.
///
/// # Safety
/// There is a panel for each that `out` has room for.
pub(crate) unsafe fn widen_panels<S: Simd>(s: S, panels: Rows<Bf16x2>, d: usize, out: &mut [f32]) {
    s.vectorize(
        #[inline(always)]
        move || {
            for (n, out) in out.chunks_exact_mut(d * LANES).enumerate() {
                for (i, out) in out.chunks_exact_mut(LANES).enumerate() {
                    // SAFETY: element `i < d` of panel `n`, which the caller guarantees; `out` is sixteen floats.
                    unsafe { s.store(out.as_mut_ptr(), s.load_of_pairs(panels.at(n).add(i / 2 * LANES), i % 2)) }
                }
            }
        },
    )
}

/// Widens values of pairs of keys, of whole vectors of columns, to a row of `width` floats for each key.
///
/// # Safety
/// There are values for each key that `out` has room for.
pub(crate) unsafe fn widen_values<S: Simd>(s: S, values: Rows<Bf16x2>, width: usize, out: &mut [f32]) {
    s.vectorize(
        #[inline(always)]
        move || {
            for (key, out) in out.chunks_exact_mut(width).enumerate() {
                for (vec, out) in out.chunks_exact_mut(LANES).enumerate() {
                    // SAFETY: sixteen columns of the key, which the caller guarantees; `out` is sixteen floats.
                    unsafe { s.store(out.as_mut_ptr(), s.load_of_pairs(values.at(key / 2).add(vec * LANES), key % 2)) }
                }
            }
        },
    )
}

/// Copies values of `n` keys that are pairs, of `width` columns; a last one of an odd number is beside zeros.
///
/// # Safety
/// There are values for these keys.
pub(crate) unsafe fn copy_values<S: Simd>(
    s: S,
    values: Rows<Bf16x2>,
    [n, width]: [usize; 2],
    nonfinite: NonFinite,
    out: &mut [Bf16x2],
) {
    s.vectorize(
        #[inline(always)]
        move || {
            for (pair, out) in out[..n.div_ceil(2) * width].chunks_exact_mut(width).enumerate() {
                // SAFETY: a pair of keys, which the caller guarantees.
                out.copy_from_slice(unsafe { core::slice::from_raw_parts(values.at(pair), width) });
                let alone = 2 * pair + 1 == n;
                for out in out.iter_mut().filter(|_| alone || nonfinite == NonFinite::Handled) {
                    let [first, second] = out.elements();
                    let mut two = [Bf16(first), Bf16(if alone { 0 } else { second })];
                    nonfinite.treat(&mut two);
                    *out = Bf16x2::new(two[0].0, two[1].0);
                }
            }
        },
    )
}

/// Packs `n` values of `cols` columns as pairs of keys, `[pair of keys][columns]`, filled up with zeros to whole vectors of
/// columns; a last one of an odd number is beside zeros.
///
/// # Safety
/// `values` has `n` readable rows of `cols` elements.
pub(crate) unsafe fn pack_values<S: Simd>(
    s: S,
    values: AnyRows,
    size: [usize; 2],
    nonfinite: NonFinite,
    out: &mut [Bf16x2],
) {
    s.vectorize(
        #[inline(always)]
        // SAFETY: same contract.
        move || by_type!(Typed, values, |values| unsafe { pack_values_of(s, values, size, nonfinite, out) }),
    )
}

/// Packs values of one type, as [`pack_values`] does.
///
/// # Safety
/// Same contract as [`pack_values`].
#[inline(always)]
unsafe fn pack_values_of<S: Simd, T: Element>(
    s: S,
    values: Rows<T>,
    [n, cols]: [usize; 2],
    nonfinite: NonFinite,
    out: &mut [Bf16x2],
) {
    let width = cols.next_multiple_of(LANES);
    for (pair, out) in out[..n.div_ceil(2) * width].chunks_exact_mut(width).enumerate() {
        for (vec, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let (first, mut two) = (vec * LANES, [[Bf16::default(); LANES]; 2]);
            for (row, to) in (2 * pair..n).zip(&mut two) {
                let here = LANES.min(cols - first);
                // SAFETY: row `row < n`, columns below `cols`, as the caller guarantees; `to` is sixteen elements.
                unsafe {
                    let from = values.at(row).offset(first as isize * values.element);
                    match here {
                        LANES if values.element == 1 => Bf16::store(s, to.as_mut_ptr(), T::load(s, from)),
                        _ => copy_row(s, from, values.element, &mut to[..here]),
                    }
                }
                nonfinite.treat(to);
            }
            for lane in 0..LANES {
                out[lane] = Bf16x2::new(two[0][lane].0, two[1][lane].0);
            }
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
        unsafe { pack(s, rows, [n, n], [d, d.div_ceil(2)], &mut out) };
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
            for isa in Isa::available() {
                let mut wide = vec![f32::NAN; n.next_multiple_of(LANES) * d];
                let panels = Rows::strided(expected.as_ptr(), (pairs * LANES) as isize, 1);
                // SAFETY: `expected` holds this many whole panels.
                dispatch!(isa, |s| unsafe { widen_panels(s, panels, d, &mut wide) });
                for (place, x) in wide.iter().enumerate() {
                    let (j, i) = (place / LANES / d * LANES + place % LANES, place / LANES % d);
                    assert_eq!(x.to_bits(), at(j, i).widen().to_bits(), "key {j} of {n}, element {i}, {isa}");
                }
            }
        }
    }

    #[test]
    fn weights_are_found_where_they_were_put() {
        let weights = [f32::from_bits(u32::from(Bf16::from_f32(0.5).0) | u32::from(Bf16::from_f32(0.25).0) << 16)];
        assert_eq!([rounded(&weights, 0), rounded(&weights, 1)], [0.5, 0.25]);
    }
}
