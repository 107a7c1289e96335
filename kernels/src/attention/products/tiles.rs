//! Loops of a matrix unit (`simd/tiles.rs`): scores of 32 rows by 32 keys, sums of 32 rows by 32 columns of values.
//!
//! Operands are groups of elements that the unit multiplies together, pairs of bfloat16 or fours of bytes, sixteen groups in a step.
//! The steps of a sum are counted from the block's first key, so they do not depend on rows, tiles or where keys lie.

use crate::attention::products::operands::LaterKeys;
use crate::attention::products::pv::ValueSums;
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::{MAX_ROW_BLOCK, SCORE_STRIDE};
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::span::{MAX_SPAN_ROWS, Span};
use crate::matmul::dot_tile::Later;
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::simd::tiles::{BLOCK, PartPair, Product, Start, TILE, TileBlock, Tiles};
use crate::simd::unit::{self, UnitTiles};
use crate::simd::{LANES, Simd};
use crate::tensor::panels::panel_bits;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Bytes of a group.
const GROUP_BYTES: usize = 4;

// A span describes a tile's rows, and row blocks of two tiles do not share a vector of row states.
const _: () = assert!(TILE <= MAX_SPAN_ROWS && BLOCK <= MAX_ROW_BLOCK && BLOCK.is_multiple_of(LANES));

/// One or two tiles of rows, which the unit multiplies together, and the panels that they need.
struct RowPair {
    rows: Range<usize>,
    panels: Range<usize>,
    /// A bit for each panel with a key that a row may see.
    seen: u16,
}

impl RowPair {
    /// Returns the groups of keys that whole steps have, `of_panel` in a panel.
    fn steps(&self, of_panel: usize) -> Range<usize> {
        self.panels.start * of_panel / TILE * TILE..(self.panels.end * of_panel).next_multiple_of(TILE)
    }
}

/// Returns the tiles of a row block, two by two, without those that need no key.
fn row_pairs(spans: &[Span], rows: usize) -> impl Iterator<Item = RowPair> {
    let mut tile = 0;
    core::iter::from_fn(move || {
        while spans.get(tile)?.is_empty() {
            tile += 1;
        }
        let (first, one) = (tile, &spans[tile]);
        tile += 1;
        let (mut panels, mut seen) = (one.first_panel()..one.end_panel(), one.panels);
        if let Some(two) = spans.get(tile).filter(|two| !two.is_empty()) {
            panels = panels.start.min(two.first_panel())..panels.end.max(two.end_panel());
            seen |= two.panels;
            tile += 1;
        }
        Some(RowPair { rows: first * TILE..rows.min(tile * TILE), panels, seen })
    })
}

/// Operands of scores.
#[derive(Clone, Copy)]
pub(crate) struct ScoreOperands<'a> {
    pub(crate) product: Product,
    /// Pairs of parts of queries and of keys.
    pub(crate) pairs: &'a [PartPair],
    /// Queries, one after the other, and the bytes from one to the next.
    pub(crate) queries: &'a [*const f32],
    pub(crate) query_bytes: usize,
    /// Number of groups of a query or key, whole steps.
    pub(crate) depth: usize,
    /// What few rows prefetch.
    pub(crate) later: Option<LaterKeys>,
}

/// Computes the sums of scores of a row block, two panels at a time; `finish(sums, rows, panels)` makes scores of them.
///
/// # Safety
/// Queries are readable, and at the address of each panel of the run sixteen keys.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd>(
    s: S,
    run: &mut ScoreRun<'_>,
    operands: ScoreOperands<'_>,
    panel_at: impl Fn(usize) -> *const u8,
    finish: impl Fn(*mut f32, Range<usize>, Range<usize>),
) {
    assert!(operands.queries.len() == run.rows && run.spans.len() == run.rows.div_ceil(TILE));
    assert!(run.out.len() >= run.rows * SCORE_STRIDE && run.panels.end * LANES <= SCORE_STRIDE);
    let mut tiles = unit::tiles(s);
    for RowPair { rows, panels, seen } in row_pairs(run.spans, run.rows) {
        let (mut panel, end) = (panels.start.max(run.panels.start), panels.end.min(run.panels.end));
        while panel < end {
            let here = panel..end.min(panel + 2);
            panel = here.end;
            if seen & panel_bits(here.clone()) == 0 {
                for row in rows.clone() {
                    run.out[row * SCORE_STRIDE..][here.start * LANES..here.end * LANES].fill(0.0);
                }
                continue;
            }
            let at = [0, 1].map(|n| (n < here.len()).then(|| panel_at(here.start - run.panels.start + n)));
            operands.prefetch(s, run.rows, here.start - run.panels.start, at);
            let out = run.out[rows.start * SCORE_STRIDE + here.start * LANES..].as_mut_ptr();
            let block = TileBlock {
                rows: rows.len(),
                pairs: operands.pairs,
                a: operands.queries[rows.start].cast(),
                a_stride: operands.query_bytes,
                b: at,
                b_stride: LANES * GROUP_BYTES,
                steps: operands.depth / TILE,
                start: Start::Zero,
                c: out.cast(),
                c_stride: SCORE_STRIDE * size_of::<f32>(),
            };
            // SAFETY: the caller guarantees queries and panels; the scores of these rows and panels are inside `run.out`.
            unsafe { tiles.multiply(s, operands.product, block) }
            finish(out, rows.clone(), here.clone());
            run.prefetch_bias(s, rows.clone(), here);
            run.prefetch.fetch(s);
        }
    }
}

impl ScoreOperands<'_> {
    /// Prefetches, for few rows, what they read after panels at some addresses, from the run's panel `first` on.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, rows: usize, first: usize, at: [Option<*const u8>; 2]) {
        let level = Later::level(s, rows);
        for (n, at) in at.into_iter().flatten().enumerate() {
            match self.later {
                Some(LaterKeys::Panels { far }) => {
                    s.prefetch_far(level, at.wrapping_add(far).cast(), self.depth * LANES * GROUP_BYTES);
                }
                Some(LaterKeys::Rows { at, bytes }) => {
                    let bytes = self.depth * bytes;
                    s.prefetch_far(level, at.wrapping_add((first + n) * bytes).cast(), bytes);
                }
                None => {}
            }
        }
    }
}

/// Sets the weights to 0 that the unit's steps read beside those of a row's span. A panel has `of_panel` groups of weights, a float
/// each, from `first` on.
pub(crate) fn clear_beside_spans(row_block: &mut ScoreBlock<'_>, of_panel: usize, first: usize) {
    let ScoreBlock { scores, spans, rows } = row_block;
    for pair in row_pairs(spans, *rows) {
        let steps = pair.steps(of_panel);
        for row in pair.rows {
            let (span, weights) = (spans.of_row(row), &mut scores[row * SCORE_STRIDE + first..]);
            weights[steps.start..span.first_panel() * of_panel].fill(0.0);
            weights[span.end_panel() * of_panel..steps.end].fill(0.0);
        }
    }
}

/// Sums of a pair of tiles of rows and two vectors of columns.
pub(crate) type Part = [[f32; BLOCK]; BLOCK];

/// Computes weighted sums by `part(steps, vectors, sums)`, for two tiles of rows and two vectors of columns at a time, and adds them
/// to the running outputs. A panel has `of_panel` groups of values.
///
/// # Safety
/// Running outputs are those of the rows; `T` has the size of a group.
#[inline(always)]
pub(crate) unsafe fn sums<S: Simd, T: Copy + Default>(
    s: S,
    sums: &mut ValueSums<'_>,
    values: Rows<T>,
    of_panel: usize,
    mut part: impl FnMut(&mut UnitTiles, ValueSteps<'_, T>, Range<usize>, &mut Part),
) {
    const { assert!(size_of::<T>() == GROUP_BYTES) }
    assert!(sums.ends.is_none(), "rows end with floats");
    sums.check::<S>(TILE, SCORE_STRIDE);
    let (mut tiles, mut sum) = (unit::tiles(s), [[0.0; BLOCK]; BLOCK]);
    for pair in row_pairs(sums.spans, sums.rows) {
        let spans = &sums.spans[pair.rows.start / TILE..pair.rows.end.div_ceil(TILE)];
        let end = spans.iter().map(|span| span.keys().end.div_ceil(LANES / of_panel)).max().unwrap_or(0);
        let (weights, rows) = (&sums.weights[pair.rows.start * SCORE_STRIDE..], pair.rows.len());
        let steps = ValueSteps { weights, rows, first: pair.steps(of_panel).start, end, values };
        for vec in (0..sums.vecs()).step_by(2) {
            let vecs = vec..sums.vecs().min(vec + 2);
            if sums.rows <= MEMORY_BOUND_ROWS {
                steps.prefetch(s, vecs.clone());
            }
            part(&mut tiles, steps, vecs.clone(), &mut sum);
            for (row, sum) in pair.rows.clone().zip(&sum) {
                // SAFETY: the caller guarantees the outputs of the row.
                unsafe {
                    let running = sums.running(row, vec);
                    let [first, second] = [s.load(sum.as_ptr()), s.load(sum[LANES..].as_ptr())];
                    if vecs.len() == 2 {
                        let mut sum = [[first, second]];
                        running.merge(s, &mut sum);
                        running.rows.store(s, &sum);
                    } else {
                        let mut sum = [[first]];
                        running.merge(s, &mut sum);
                        running.rows.store(s, &sum);
                    }
                }
            }
            sums.prefetch.fetch(s);
        }
    }
}

/// Weights of a pair of tiles of rows, and the groups of keys whose values they multiply.
#[derive(Clone, Copy)]
pub(crate) struct ValueSteps<'a, T> {
    /// Weights from the first row on, [`SCORE_STRIDE`] a row, and what lies behind them.
    pub(crate) weights: &'a [f32],
    pub(crate) rows: usize,
    /// First group, with which a step begins, and one past the last that is there.
    first: usize,
    end: usize,
    values: Rows<T>,
}

/// Weights as one product of the unit reads them: groups from some float of each row on, and pairs of their parts and the values'.
#[derive(Clone, Copy)]
pub(crate) struct WeightPlane<'a> {
    pub(crate) product: Product,
    pub(crate) first: usize,
    pub(crate) pairs: &'a [PartPair],
}

impl<T: Copy + Default> ValueSteps<'_, T> {
    /// Returns the same groups in whole steps: values that are filled up with zeros.
    pub(crate) fn whole(self) -> Self {
        Self { end: self.end.next_multiple_of(TILE), ..self }
    }

    /// Computes the weighted sums of some vectors of columns. The last step, if it is not whole, reads a copy of values of one part,
    /// filled up with zeros.
    ///
    /// # Safety
    /// Rows have weights for all steps, and the values these vectors, evenly spaced.
    #[inline(always)]
    pub(crate) unsafe fn multiply<S: Simd>(
        self,
        s: S,
        tiles: &mut impl Tiles,
        WeightPlane { product, first: plane, pairs }: WeightPlane<'_>,
        vecs: Range<usize>,
        sums: &mut Part,
    ) {
        let Self { weights, rows, first, end, values } = self;
        let (whole, left) = ((end - first) / TILE, (end - first) % TILE);
        let columns = |row: *const T| [Some(row.cast()), (vecs.len() > 1).then(|| row.wrapping_add(LANES).cast())];
        // SAFETY: the caller guarantees weights, and values of groups before `end`; sums have room for a block.
        unsafe {
            let block = TileBlock {
                rows,
                pairs,
                a: weights.as_ptr().add(plane + first).cast(),
                a_stride: SCORE_STRIDE * size_of::<f32>(),
                b: columns(values.at(first).add(vecs.start * LANES)),
                b_stride: values.step() as usize * GROUP_BYTES,
                steps: whole,
                start: Start::Zero,
                c: sums.as_mut_ptr().cast(),
                c_stride: BLOCK * size_of::<f32>(),
            };
            if whole > 0 {
                tiles.multiply(s, product, block);
            }
            if left == 0 {
                return;
            }
            let (mut copy, done) = ([[T::default(); BLOCK]; TILE], first + whole * TILE);
            for (copy, group) in copy.iter_mut().zip(done..end) {
                let from = values.at(group).add(vecs.start * LANES);
                copy.as_mut_ptr().copy_from_nonoverlapping(from, vecs.len() * LANES);
            }
            let last = TileBlock {
                a: weights.as_ptr().add(plane + done).cast(),
                b: columns(copy.as_ptr().cast()),
                b_stride: BLOCK * GROUP_BYTES,
                steps: 1,
                start: if whole > 0 { Start::There } else { Start::Zero },
                ..block
            };
            tiles.multiply(s, product, last);
        }
    }

    /// Prefetches, for few rows, values that lie further on.
    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, vecs: Range<usize>) {
        let (level, far) = (Later::level(s, self.rows), Later::far(s, self.rows));
        for group in self.first..self.end {
            // SAFETY: the group is one of these values'.
            let row = unsafe { self.values.at(group) }.wrapping_add(vecs.start * LANES).wrapping_byte_add(far);
            for vec in 0..vecs.len() {
                s.prefetch_line(level, row.wrapping_add(vec * LANES).cast());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::steps::span::Spans;
    use crate::tensor::rows::KEY_BLOCK;

    #[test]
    fn what_steps_read_is_cleared_and_nothing_else() {
        let span = |keys: Range<usize>| Span::new(keys.start, keys.end, false);
        let (spans, rows) = ([span(16..40), span(96..112), Span::EMPTY, span(0..256), span(48..49)], 4 * TILE + 3);
        let pairs: Vec<_> = row_pairs(&spans, rows).map(|pair| (pair.rows.clone(), pair.steps(LANES / 2))).collect();
        assert_eq!(pairs, [(0..32, 0..64), (48..67, 0..128)]);
        for (of_panel, first) in [(LANES / 2, 0), (LANES / 4, KEY_BLOCK / 2)] {
            let (spans, mut scores) = (Spans::of(&spans, TILE), vec![1.0; 5 * TILE * SCORE_STRIDE]);
            clear_beside_spans(&mut ScoreBlock { scores: &mut scores, spans: &spans, rows }, of_panel, first);
            let kept = |row: usize| {
                let (span, steps) = (spans.of_row(row), row_pairs(&spans, rows).find(|pair| pair.rows.contains(&row)));
                let of_span = span.first_panel() * of_panel..span.end_panel() * of_panel;
                (steps.map_or(0..0, |pair| pair.steps(of_panel)), of_span)
            };
            for (place, &weight) in scores.iter().enumerate().take(rows * SCORE_STRIDE) {
                let (row, at) = (place / SCORE_STRIDE, (place % SCORE_STRIDE).wrapping_sub(first));
                let (steps, of_span) = kept(row);
                let cleared = steps.contains(&at) && !of_span.contains(&at);
                assert_eq!(weight == 0.0, cleared, "row {row}, group {at} of {of_panel} a panel");
            }
        }
    }
}
