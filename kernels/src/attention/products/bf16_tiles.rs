//! Products of bfloat16 pairs by a matrix unit (`simd/tiles.rs`): blocks of 32 rows by 32 keys, or by 32 columns of values.
//!
//! Operands lie as those of `pairs.rs`, filled up to whole steps of the unit: sixteen pairs of elements of a key, or of keys. A sum
//! depends on the order of its steps alone, which are counted from the block's first key: not on rows, tiles or where keys lie.

use crate::attention::products::multiply::{Arithmetic, Multiply};
use crate::attention::products::operands::{
    KeySource, KeysToPack, LaterKeys, QueryRow, QueryRows, RunKeys, ValuesToPack,
};
use crate::attention::products::pairs::{pack_key_pairs, pack_value_pairs, store_query_pairs};
use crate::attention::products::pv::ValueSums;
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::score_passes::ScoreBlock;
use crate::attention::steps::softmax::SoftmaxState;
use crate::attention::steps::span::Span;
use crate::kv::key_block::{BlockValues, ColumnValues, Columns, Keys};
use crate::matmul::bf16_pairs;
use crate::matmul::dot_tile::Later;
use crate::matmul::operands::Bf16Pairs;
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::simd::tiles::{BLOCK, MatrixUnit, Start, TILE, TileBlock, Tiles, Unit};
use crate::simd::{Bf16x2, LANES, Simd};
use crate::tensor::panels::panel_bits;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Products of bfloat16 pairs by a matrix unit.
pub(crate) struct Bf16Tiles;

/// Number of pairs of keys of a panel.
const PANEL_PAIRS: usize = LANES / 2;

impl Multiply for Bf16Tiles {
    const ROUNDS_IN_SOFTMAX: bool = true;
    const VALUE_GROUP: usize = 2;
    // Scores of a row block stay in the first-level cache: 34 of 48 KiB.
    const ROW_BLOCK: usize = BLOCK;

    fn tile_rows<S: Simd>() -> usize {
        TILE
    }

    fn query_floats(head_dim: usize) -> usize {
        pairs(head_dim)
    }

    unsafe fn store_query<S: Simd>(s: S, query: QueryRow<'_>, room: &mut [f32], to: &mut [f32]) {
        // SAFETY: same contract.
        unsafe { store_query_pairs(s, query, room, to) }
    }

    fn reads_keys(keys: &Keys, _: usize, head_dim: usize) -> bool {
        matches!(keys, Keys::Pairs(_)) && pairs(head_dim) == head_dim.div_ceil(2)
    }

    fn panel_floats(_: KeySource<'_>, head_dim: usize) -> usize {
        LANES * pairs(head_dim)
    }

    fn depth(head_dim: usize) -> usize {
        pairs(head_dim)
    }

    unsafe fn pack_keys<S: Simd>(s: S, to_pack: KeysToPack<'_>, out: &mut [f32]) -> Keys {
        let pairs = pairs(to_pack.head_dim);
        // SAFETY: same contract.
        unsafe { pack_key_pairs(s, to_pack, pairs, out) }
    }

    unsafe fn scores<S: Simd>(s: S, run: &mut ScoreRun<'_>, queries: QueryRows<'_>, keys: RunKeys) {
        let Keys::Pairs(panels) = keys.keys else { unreachable!("keys are packed as pairs") };
        let operands = ScoreOperands { queries, depth: pairs(queries.head_dim), panels, later: keys.later };
        assert!(queries.rows.len() == run.rows && run.spans.len() == run.rows.div_ceil(TILE));
        assert!(run.out.len() >= run.rows * SCORE_STRIDE && run.panels.end * LANES <= SCORE_STRIDE);
        s.vectorize(
            #[inline(always)]
            // SAFETY: same contract, and what was asserted.
            || unsafe { scores_of(s, run, operands) },
        );
    }

    fn softmax<S: Simd>(s: S, row_block: ScoreBlock<'_>, state: SoftmaxState<'_>) {
        #[cfg(not(matrix_unit_model))]
        Bf16Pairs::softmax(s, row_block, state);
        #[cfg(matrix_unit_model)]
        crate::attention::steps::softmax::softmax::<S, model::Rounded>(s, row_block, state);
    }

    unsafe fn prepare_weights<S: Simd>(s: S, mut row_block: ScoreBlock<'_>, values: BlockValues, from: Arithmetic) {
        if from == Arithmetic::Floats {
            let row_block = ScoreBlock { scores: row_block.scores, ..row_block };
            #[cfg(not(matrix_unit_model))]
            // SAFETY: same contract.
            unsafe {
                Bf16Pairs::prepare_weights(s, row_block, values, from);
            }
            #[cfg(matrix_unit_model)]
            crate::attention::products::pairs::store_weights::<S, model::Rounded>(s, row_block);
        }
        clear_beside_spans(&mut row_block);
    }

    fn weight(weights: &[f32], key: usize) -> f32 {
        bf16_pairs::rounded(weights, key)
    }

    fn reads_values(columns: &Columns, _: usize) -> bool {
        matches!(columns.values, ColumnValues::Pairs(pairs) if !pairs.are_scattered())
    }

    unsafe fn pack_values<S: Simd>(s: S, values: ValuesToPack, out: &mut [f32]) -> ColumnValues {
        // SAFETY: same contract.
        unsafe { pack_value_pairs(s, values, out) }
    }

    unsafe fn sums<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: ColumnValues) {
        let ColumnValues::Pairs(values) = values else { unreachable!("values are packed as pairs") };
        assert!(sums.spans.len() == sums.rows.div_ceil(TILE) && sums.weights.len() >= sums.rows * SCORE_STRIDE);
        s.vectorize(
            #[inline(always)]
            // SAFETY: same contract, and what was asserted.
            || unsafe { sums_of(s, sums, values) },
        );
    }
}

/// Returns the number of pairs of a query or key, in whole steps.
fn pairs(head_dim: usize) -> usize {
    head_dim.div_ceil(2).next_multiple_of(TILE)
}

/// Returns the tiles of the unit.
///
/// # Panics
/// If there is none: a call is multiplied this way only where there is one.
#[inline(always)]
fn tiles<S: Simd>(s: S) -> <Unit as MatrixUnit>::Tiles {
    s.matrix_unit().expect("this arithmetic is that of a matrix unit").configure()
}

/// Rows that the unit multiplies together, one or two tiles, and the panels that they need.
struct Group {
    rows: Range<usize>,
    panels: Range<usize>,
    /// A bit for each panel with a key that a row may see.
    seen: u16,
}

impl Group {
    /// Returns the pairs of keys that the group's steps have.
    fn pairs(&self) -> Range<usize> {
        self.panels.start * PANEL_PAIRS / TILE * TILE..(self.panels.end * PANEL_PAIRS).next_multiple_of(TILE)
    }
}

/// Returns the groups of a row block; tiles of rows that need no key are in none.
fn groups(spans: &[Span], rows: usize) -> impl Iterator<Item = Group> {
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
        Some(Group { rows: first * TILE..rows.min(tile * TILE), panels, seen })
    })
}

/// Operands of scores.
#[derive(Clone, Copy)]
struct ScoreOperands<'a> {
    queries: QueryRows<'a>,
    /// Number of pairs of a query or key.
    depth: usize,
    panels: Rows<Bf16x2>,
    later: Option<LaterKeys>,
}

/// Computes the scores of a row block, two panels at a time.
///
/// # Safety
/// As [`Multiply::scores`], with queries and panels of `depth` pairs; spans and scores are those of the rows and panels.
#[inline(always)]
unsafe fn scores_of<S: Simd>(s: S, run: &mut ScoreRun<'_>, operands: ScoreOperands<'_>) {
    let (ScoreOperands { queries, depth, panels, .. }, mut tiles) = (operands, tiles(s));
    for Group { rows, panels: of_rows, seen } in groups(run.spans, run.rows) {
        let (mut panel, end) = (of_rows.start.max(run.panels.start), of_rows.end.min(run.panels.end));
        while panel < end {
            let here = panel..end.min(panel + 2);
            panel = here.end;
            if seen & panel_bits(here.clone()) == 0 {
                for row in rows.clone() {
                    run.out[row * SCORE_STRIDE..][here.start * LANES..here.end * LANES].fill(0.0);
                }
                continue;
            }
            let first = here.start - run.panels.start;
            // SAFETY: the caller guarantees the queries, one after the other, and the panels; the scores of these rows and panels
            // are inside `run.out`.
            unsafe {
                let out = run.out.as_mut_ptr().add(rows.start * SCORE_STRIDE + here.start * LANES);
                let block = TileBlock {
                    rows: rows.len(),
                    a: queries.rows[rows.start].cast(),
                    a_stride: depth * size_of::<Bf16x2>(),
                    b: [Some(panels.at(first).cast()), (here.len() > 1).then(|| panels.at(first + 1).cast())],
                    b_stride: LANES * size_of::<Bf16x2>(),
                    steps: depth / TILE,
                    start: Start::Zero,
                    c: out.cast(),
                    c_stride: SCORE_STRIDE * size_of::<f32>(),
                };
                operands.prefetch(s, run.rows, first..first + here.len());
                tiles.multiply_pairs(s, block);
                scale(s, out, [rows.len(), here.len()], queries.scale);
            }
            run.prefetch_bias(s, rows.clone(), here);
            run.prefetch.fetch(s);
        }
    }
}

/// Multiplies scores of some rows and panels by a factor.
///
/// # Safety
/// There are such scores, rows [`SCORE_STRIDE`] apart.
#[inline(always)]
unsafe fn scale<S: Simd>(s: S, scores: *mut f32, [rows, panels]: [usize; 2], factor: f32) {
    let factor = s.splat(factor);
    for row in 0..rows {
        for panel in 0..panels {
            // SAFETY: the caller guarantees sixteen scores.
            unsafe {
                let scores = scores.add(row * SCORE_STRIDE + panel * LANES);
                s.store(scores, s.mul(s.load(scores), factor));
            }
        }
    }
}

impl ScoreOperands<'_> {
    /// Prefetches, for few rows, what they read next while they compute some panels of the run.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, rows: usize, of: Range<usize>) {
        let level = Later::level(s, rows);
        match self.later {
            Some(LaterKeys::Panels { far }) if !self.panels.are_scattered() => {
                for panel in of {
                    // SAFETY: the panel is one of the run's.
                    let at = unsafe { self.panels.at(panel) }.wrapping_byte_add(far);
                    s.prefetch_far(level, at.cast(), self.depth * LANES * size_of::<Bf16x2>());
                }
            }
            Some(LaterKeys::Rows { at, bytes }) => {
                let bytes = self.depth * bytes;
                s.prefetch_far(level, at.wrapping_add(of.start * bytes).cast(), of.len() * bytes);
            }
            _ => {}
        }
    }
}

/// Sets the weights to 0 that the unit's steps read beside those of a row's span.
fn clear_beside_spans(row_block: &mut ScoreBlock<'_>) {
    let ScoreBlock { scores, spans, rows } = row_block;
    for group in groups(spans, *rows) {
        let steps = group.pairs();
        for row in group.rows {
            let (span, weights) = (spans.of_row(row), &mut scores[row * SCORE_STRIDE..][..SCORE_STRIDE]);
            weights[steps.start..span.first_panel() * PANEL_PAIRS].fill(0.0);
            weights[span.end_panel() * PANEL_PAIRS..steps.end].fill(0.0);
        }
    }
}

/// Adds weighted sums of values to running outputs, two vectors of columns at a time.
///
/// # Safety
/// As [`Multiply::sums`]; weights that the steps of a [`Group`] read beside a row's span are 0.
#[inline(always)]
unsafe fn sums_of<S: Simd>(s: S, sums: &mut ValueSums<'_>, values: Rows<Bf16x2>) {
    let (mut tiles, mut part) = (tiles(s), [[0.0; BLOCK]; BLOCK]);
    let end = |spans: &[Span]| spans.iter().map(|span| span.keys().end.div_ceil(2)).max().unwrap_or(0);
    for group in groups(sums.spans, sums.rows) {
        let there = end(&sums.spans[group.rows.start / TILE..group.rows.end.div_ceil(TILE)]);
        let weights = sums.weights[group.rows.start * SCORE_STRIDE..].as_ptr();
        let (rows, first) = (group.rows.len(), group.pairs().start);
        let steps = ValueSteps { weights, rows, first, end: there, values };
        for vec in (0..sums.vecs()).step_by(2) {
            let vecs = (sums.vecs() - vec).min(2);
            // SAFETY: the caller guarantees weights of the group's rows, and values of its pairs, for these columns; `part` has
            // room for the sums.
            unsafe {
                if sums.rows <= MEMORY_BOUND_ROWS {
                    steps.prefetch(s, vec..vec + vecs);
                }
                steps.multiply(s, &mut tiles, vec..vec + vecs, part.as_mut_ptr());
                for (row, part) in group.rows.clone().zip(&part) {
                    let running = sums.running(row, vec);
                    let part = [s.load(part.as_ptr()), s.load(part[LANES..].as_ptr())];
                    if vecs == 2 {
                        let mut sum = [part];
                        running.merge(s, &mut sum);
                        running.rows.store(s, &sum);
                    } else {
                        let mut sum = [[part[0]]];
                        running.merge(s, &mut sum);
                        running.rows.store(s, &sum);
                    }
                }
            }
            sums.prefetch.fetch(s);
        }
    }
}

/// Weights of a group of rows, and the pairs of keys whose values they multiply.
#[derive(Clone, Copy)]
struct ValueSteps {
    /// Weights of the first row; rows are [`SCORE_STRIDE`] apart.
    weights: *const f32,
    rows: usize,
    /// First pair, with which a step begins, and one past the last that is there.
    first: usize,
    end: usize,
    values: Rows<Bf16x2>,
}

impl ValueSteps {
    /// Computes the weighted sums of some vectors of columns. The last step, if it is not whole, reads a copy that is filled up with
    /// zeros.
    ///
    /// # Safety
    /// Rows have weights for all steps, and the values these vectors; `sums` has room for each row.
    #[inline(always)]
    unsafe fn multiply<S: Simd>(self, s: S, tiles: &mut impl Tiles, vecs: Range<usize>, sums: *mut [f32; BLOCK]) {
        let Self { weights, rows, first, end, values } = self;
        let (whole, left) = ((end - first) / TILE, (end - first) % TILE);
        let columns = |row: *const Bf16x2| [Some(row.cast()), (vecs.len() > 1).then(|| row.wrapping_add(LANES).cast())];
        // SAFETY: the caller guarantees weights, values of pairs before `end`, and room for sums.
        unsafe {
            let block = TileBlock {
                rows,
                a: weights.add(first).cast(),
                a_stride: SCORE_STRIDE * size_of::<f32>(),
                b: columns(values.at(first).add(vecs.start * LANES)),
                b_stride: values.step() as usize * size_of::<Bf16x2>(),
                steps: whole,
                start: Start::Zero,
                c: sums.cast(),
                c_stride: BLOCK * size_of::<f32>(),
            };
            if whole > 0 {
                tiles.multiply_pairs(s, block);
            }
            if left == 0 {
                return;
            }
            let (mut copy, done) = ([[Bf16x2(0); BLOCK]; TILE], first + whole * TILE);
            for (copy, pair) in copy.iter_mut().zip(done..end) {
                let from = values.at(pair).add(vecs.start * LANES);
                copy.as_mut_ptr().copy_from_nonoverlapping(from, vecs.len() * LANES);
            }
            let last = TileBlock {
                a: weights.add(done).cast(),
                b: columns(copy.as_ptr().cast()),
                b_stride: BLOCK * size_of::<Bf16x2>(),
                steps: 1,
                start: if whole > 0 { Start::There } else { Start::Zero },
                ..block
            };
            tiles.multiply_pairs(s, last);
        }
    }

    /// Prefetches, for few rows, values that lie further on.
    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, vecs: Range<usize>) {
        let (level, far) = (Later::level(s, self.rows), Later::far(s, self.rows));
        for pair in self.first..self.end {
            // SAFETY: the pair is one of these values'.
            let row = unsafe { self.values.at(pair) }.wrapping_add(vecs.start * LANES).wrapping_byte_add(far);
            for vec in 0..vecs.len() {
                s.prefetch_line(level, row.wrapping_add(vec * LANES).cast());
            }
        }
    }
}

/// Weights as the model of the unit reads them.
#[cfg(matrix_unit_model)]
mod model {
    use crate::attention::steps::softmax::WeightForm;
    use crate::simd::exp::ForBf16;
    use crate::simd::portable::tiles::flushed;
    use crate::simd::{LANES, Simd, lanes};
    use crate::tensor::element::{Bf16, Element};

    /// Weights as bfloat16, as AVX512_BF16 rounds them: the pair of keys 2i and 2i + 1 lies where the score of key i was.
    pub(super) struct Rounded;

    impl<S: Simd> WeightForm<S> for Rounded {
        const IN_PLACE: bool = false;
        type Accuracy = ForBf16;

        #[inline(always)]
        unsafe fn store(s: S, row: *mut f32, panel: usize, weights: S::V) -> S::V {
            let mut rounded = [0.0; LANES];
            lanes::store(s, &mut rounded, weights);
            for (i, x) in rounded.iter_mut().enumerate() {
                *x = flushed(Bf16::narrow(flushed(*x)).widen());
                // SAFETY: half of a float that ends before the panel does, so it lies in it or in those before it, which the
                // caller guarantees are writable and have been read.
                unsafe { *row.cast::<u16>().add(panel * LANES + i) = (x.to_bits() >> 16) as u16 };
            }
            lanes::load(s, &rounded)
        }
    }
}
