//! Passes that hide keys: those of a boolean mask, and padding after the last key. The keys that a mask leaves are known before
//! anything is computed.

use crate::attention::call::options::Mask;
use crate::attention::call::visibility::VisiblePositions;
use crate::attention::steps::score_passes::{Columns, ScoreBlock};
use crate::attention::steps::span::RowKeys;
use crate::simd::{LANES, Simd};
use crate::tensor::rows::KEY_BLOCK;

/// Hides the keys that a boolean mask hides.
///
/// # Safety
/// Every row's columns are readable.
pub(crate) unsafe fn mask<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, rows: &[Columns<u8>], polarity: Mask<'_>) {
    s.vectorize(
        #[inline(always)]
        move || {
            assert!(rows.len() >= row_block.rows);
            let hidden = s.splat(f32::NEG_INFINITY);
            let keep = matches!(polarity, Mask::Keep(_));
            row_block.for_each_row(
                #[inline(always)]
                |row, panels, scores| {
                    let hide = |panel: usize, bytes: *const u8| {
                        // SAFETY: a panel of the row's scores, and sixteen bytes.
                        unsafe {
                            let at = scores.add(panel * LANES);
                            let score = s.load(at);
                            let (zero, other) = if keep { (hidden, score) } else { (score, hidden) };
                            s.store(at, s.select_bytes(bytes, zero, other));
                        }
                    };
                    // SAFETY: the caller guarantees that every row's columns are readable.
                    unsafe { rows[row].for_each_panel(panels, u8::from(keep), u8::from(!keep), hide) };
                },
            );
        },
    )
}

/// Narrows the key range of each row to the keys that its row of the mask keeps.
///
/// # Safety
/// The rows' columns are readable.
pub(crate) unsafe fn narrow_by_mask<S: Simd>(s: S, rows: &[Columns<u8>], polarity: Mask<'_>, ranges: &mut [RowKeys]) {
    s.vectorize(
        #[inline(always)]
        move || {
            for (row, range) in rows.iter().zip(ranges) {
                let (from, to) = (range.from, range.to.min(row.len));
                if from >= to {
                    *range = RowKeys::EMPTY;
                    continue;
                }
                if row.before >= to {
                    continue;
                }
                let mut copy;
                let bytes = if row.are_contiguous() && row.before == 0 {
                    // SAFETY: contiguous columns of the row.
                    unsafe { core::slice::from_raw_parts(row.first, to) }
                } else {
                    copy = [u8::from(matches!(polarity, Mask::Keep(_))); KEY_BLOCK];
                    for (j, byte) in copy.iter_mut().enumerate().take(to).skip(from.max(row.before)) {
                        // SAFETY: `before <= j < row.len`.
                        *byte = unsafe { row.get(j) };
                    }
                    &copy[..to]
                };
                let kept = kept_keys(bytes, from, polarity);
                *range = RowKeys { all: range.all && kept.all, ..kept };
            }
        },
    )
}

/// Returns the keys of a block, at these positions, that are visible.
pub(crate) fn keys_at<S: Simd>(s: S, positions: &[i32], seen: VisiblePositions) -> RowKeys {
    s.vectorize(
        #[inline(always)]
        move || {
            let (mut panels, mut number) = (0, 0);
            for (n, panel) in positions.chunks(LANES).enumerate() {
                let kept: u32 = panel.iter().map(|&key| u32::from(seen.has(key))).sum();
                panels |= u16::from(kept > 0) << n;
                number += kept as usize;
            }
            let Some(from) = positions.iter().position(|&key| seen.has(key)) else { return RowKeys::EMPTY };
            let to = positions.iter().rposition(|&key| seen.has(key)).map_or(from, |last| last + 1);
            RowKeys { from, to, all: number == to - from, panels }
        },
    )
}

/// Hides the keys at positions that are not visible.
pub(crate) fn hide_at<S: Simd>(s: S, positions: &[i32], seen: VisiblePositions, scores: &mut [f32]) {
    s.vectorize(
        #[inline(always)]
        move || {
            for (score, &key) in scores.iter_mut().zip(positions) {
                *score = if seen.has(key) { *score } else { f32::NEG_INFINITY };
            }
        },
    );
}

/// Returns the keys from `from` on that the bytes of a mask keep, of a block's row.
#[inline(always)]
fn kept_keys(bytes: &[u8], from: usize, polarity: Mask<'_>) -> RowKeys {
    const HIGH: u64 = u64::from_ne_bytes([0x80; 8]);
    const WORDS: usize = KEY_BLOCK / 8;
    let nonzero_keeps = matches!(polarity, Mask::Keep(_));
    // The high bit of each kept byte; arithmetic within bytes, eight at a time. (A loop over bytes became one of single bytes
    // gathered into vectors, a quarter of a call's time.)
    let kept_of = |word: [u8; 8]| {
        let word = u64::from_le_bytes(word);
        let nonzero = (((word & !HIGH) + !HIGH) | word) & HIGH;
        if nonzero_keeps { nonzero } else { nonzero ^ HIGH }
    };
    let mut kept = [0u64; WORDS];
    let (words, rest) = bytes.as_chunks::<8>();
    for (kept, &word) in kept.iter_mut().zip(words) {
        *kept = kept_of(word);
    }
    if let Some(kept) = kept.get_mut(words.len()).filter(|_| !rest.is_empty()) {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        *kept = kept_of(last) & !(u64::MAX << (8 * rest.len()));
    }
    kept[..from / 8].fill(0);
    kept[from / 8] &= u64::MAX << (8 * (from % 8));
    let (mut panels, mut number) = (0, 0);
    for (panel, &[low, high]) in kept.as_chunks::<2>().0.iter().enumerate() {
        panels |= u16::from(low | high != 0) << panel;
        number += low.count_ones() + high.count_ones();
    }
    let Some(first) = kept.iter().position(|&kept| kept != 0) else { return RowKeys::EMPTY };
    let last = kept.iter().rposition(|&kept| kept != 0).unwrap_or(first);
    let from = first * 8 + kept[first].trailing_zeros() as usize / 8;
    let to = (last + 1) * 8 - kept[last].leading_zeros() as usize / 8;
    RowKeys { from, to, all: number as usize == to - from, panels }
}

/// Hides the padding between the last key of a tile's span and the end of its panel.
pub(crate) fn mask_padding<S: Simd>(s: S, mut row_block: ScoreBlock<'_>) {
    s.vectorize(
        #[inline(always)]
        move || {
            let (spans, hidden) = (row_block.spans, s.splat(f32::NEG_INFINITY));
            row_block.for_each_row(
                #[inline(always)]
                |row, panels, scores| {
                    let keys = spans.of_row(row).keys().end % LANES;
                    if keys > 0 {
                        // SAFETY: a span that ends inside a panel has that panel as its last.
                        unsafe {
                            let at = scores.add((panels.end - 1) * LANES);
                            s.store(at, s.select_bits(!(u16::MAX << keys), hidden, s.load(at)));
                        }
                    }
                },
            );
        },
    )
}
