//! The fused loop: one pass over the keys, one block at a time, for the rows of one task.
//!
//! ```text
//! (max, sum, out) ← (−∞, 0, 0) for every row
//! for each block of 256 keys:
//!     for each group of up to 96 rows:
//!         S ← the group's final scores                 prepare.rs: QKᵀ, options, −∞ where hidden
//!         P ← exp(S − rowmax S)                        softmax; also takes (rowmax S, Σ P) into (max, sum)
//!         out ← keep · out + join · P V                values
//! out ← out / sum;  lse ← max + ln sum                 finish, or values with the last block
//! ```
//! (Dao, Fu, Ermon, Rudra and Ré 2022, arXiv:2205.14135.) Nothing grows with the number of keys.

use crate::ahead::Ahead;
use crate::block::{KEY_BLOCK, Span};
use crate::finish::{EndedGroups, GroupEnds};
use crate::geometry::{Geometry, Regions};
use crate::launch::{Call, Sequence, Task};
use crate::options::{MaskMod, Mods, Position, ProbMod, ScoreMod};
use crate::outputs::{Point, Shared};
use crate::passes::Group;
use crate::poison::{Care, Seen};
use crate::prepare::Spans;
use crate::queries::Queries;
use crate::rows::Table;
use crate::simd::LANES;
use crate::softmax;
use crate::source::{BlockValues, Keys};
use crate::steps::Steps;
use crate::weigh::Manner;
use core::ops::Range;

/// Where the rows of a block's keys and values lie, if they lie scattered.
#[inline(always)]
pub(crate) fn tables() -> [Table; 2] {
    [Table::new(), Table::new()]
}

/// One task, and all it needs to know.
pub(crate) struct Fused<'t, 'a, S, M> {
    pub(crate) s: S,
    pub(crate) mods: &'t M,
    pub(crate) call: &'t Call<'a>,
    pub(crate) outputs: &'t Shared<'a>,
    pub(crate) geometry: &'t Geometry,
    pub(crate) task: Task,
    pub(crate) seq: Sequence,
    /// Query heads that share a key/value head.
    sharing: usize,
    /// What will probably be computed after it.
    pub(crate) next: Next,
}

/// What comes after a task.
pub(crate) enum Next {
    /// Nothing, or nobody knows.
    Nothing,
    /// Whatever it is, it need not be asked for, and neither need what this task still has to read: all is near.
    Near,
    /// Probably this.
    Task(Task),
    /// This is a unit: where what it gathers goes, and its bytes; and the next of its run, if any, its task and first key.
    Unit { gathered: (*const u8, usize), next: Option<(Task, usize)> },
}

/// The key block at hand.
pub(crate) struct Block {
    /// Its first key, counted in the sequence, and how many there are.
    pub(crate) first: usize,
    pub(crate) len: usize,
    pub(crate) keys: Keys,
    pub(crate) values: BlockValues,
    /// Which packed run is in the scratch, if any: keys by first key, values by first column.
    pub(crate) packed_keys: Option<usize>,
    pub(crate) packed_values: Option<(usize, Care)>,
    /// Whether it is the first that the group at hand gathers, and all tiles see some of it: outputs are written, not read.
    pub(crate) fresh: bool,
    /// What comes after it.
    pub(crate) ahead: Ahead,
}

/// Which way a state goes.
#[derive(Clone, Copy)]
pub(crate) enum Exchange {
    Load,
    Save,
}

/// A query row: its number in the group, its head, its row in the sequence.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) n: usize,
    pub(crate) head: usize,
    pub(crate) i: usize,
}

impl<'t, 'a, S: Steps, A: ScoreMod, B: MaskMod, C: ProbMod> Fused<'t, 'a, S, Mods<A, B, C>> {
    // Here, and where a step's operands change type: inlined, or all of it is copied. A few per cent of a tiny call.
    #[inline(always)]
    pub(crate) fn new(
        s: S,
        mods: &'t Mods<A, B, C>,
        call: &'t Call<'a>,
        outputs: &'t Shared<'a>,
        task: Task,
        geometry: &'t Geometry,
    ) -> Self {
        let (seq, sharing) = (call.sequence(task.index), call.sharing());
        Self { s, mods, call, outputs, geometry, task, seq, sharing, next: Next::Nothing }
    }

    /// With a guess at what comes next: its memory is asked for while this one is computed.
    #[inline(always)]
    pub(crate) fn followed_by(self, next: Next) -> Self {
        Self { next, ..self }
    }

    /// Computes the task's rows and writes them.
    ///
    /// # Safety
    /// The call is consistent with its outputs, the task lies inside it, `regions` were cut for the geometry, and nobody
    /// else writes the task's rows.
    pub(crate) unsafe fn run(&self, mut regions: Regions<'_>) {
        if self.task.rows.start == 0 {
            // SAFETY: passed on; every sequence and head has one task that starts at row 0.
            unsafe { self.fill_rows_beyond() };
        }
        if self.task.rows.is_empty() {
            return;
        }
        // SAFETY: passed on.
        unsafe {
            let queries = self.queries(&mut regions);
            // Hidden values have weight 0, and 0 times a finite number is nothing. Assume they are finite; if they
            // were not, or something visible was not, it shows in the result, and everything is done again with care.
            for care in [Care::Fast, Care::Careful] {
                let ended = self.gather(queries, (care, self.blocks().next_back()), self.blocks(), &mut regions);
                if C::ACTIVE {
                    self.gather_modified(queries, care, &mut regions);
                }
                if self.finish(care, ended, &mut regions) {
                    break;
                }
            }
            self.finish_scores(&mut regions);
        }
    }

    /// The groups of the task, as ranges of its rows.
    pub(crate) fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<S, A, B, C> {
        let (rows, step) = (self.task.rows.len(), self.geometry.group_rows);
        (0..rows).step_by(step).map(move |first| first..rows.min(first + step))
    }

    /// The rows of a group.
    pub(crate) fn rows(&self, group: Range<usize>) -> impl Iterator<Item = Row> + use<S, A, B, C> {
        self.stretches(group)
            .flat_map(|(Row { n, head, i }, len)| (0..len).map(move |k| Row { n: n + k, head, i: i + k }))
    }

    /// The same by heads: the first row of each, and how many there are of it.
    pub(crate) fn stretches(&self, group: Range<usize>) -> impl Iterator<Item = (Row, usize)> + use<S, A, B, C> {
        // A division only if the first row is none of the first head's.
        let first = self.task.rows.start + group.start;
        let q_len = self.seq.q_len;
        let (skipped, i) = if first < q_len { (0, first) } else { (first / q_len, first % q_len) };
        let mut next = Row { n: 0, head: self.task.kv_head * self.sharing + skipped, i };
        core::iter::from_fn(move || {
            let row = next;
            let len = (q_len - row.i).min(group.len() - row.n);
            next = Row { n: row.n + len, head: row.head + 1, i: 0 };
            (len > 0).then_some((row, len))
        })
    }

    pub(crate) fn position(&self, row: Row, key: usize) -> Position {
        let position = self.seq.offset.saturating_add_unsigned(row.i);
        Position { batch: self.task.index, head: row.head, row: row.i, key, position }
    }

    /// Where key `first` of the sequence is in its source: batch index, head, key.
    pub(crate) fn place(&self, first: usize) -> [usize; 3] {
        [self.seq.batch, self.task.kv_head, self.seq.first_key + first]
    }

    /// The block of keys that starts at `first`.
    ///
    /// # Safety
    /// As for [`Self::run`]; `first` is one of [`Self::blocks`], and the tables outlive the block.
    pub(crate) unsafe fn block(&self, first: usize, [keys, values]: &mut [Table; 2]) -> Block {
        let at = self.place(first);
        let len = KEY_BLOCK.min(self.seq.kv_len - first);
        // SAFETY: keys `first .. first + len` exist; the rest is passed on.
        unsafe {
            let (keys, values) = (self.call.kv.keys(at, len, keys), self.call.kv.values(at, len, values));
            let ahead = self.ahead([first, len], values);
            Block { first, len, keys, values, packed_keys: None, packed_values: None, fresh: false, ahead }
        }
    }

    /// Whether keys, and whether values, are multiplied in pairs.
    pub(crate) fn native(&self) -> [bool; 2] {
        self.call.native(|| self.s.multiplies_pairs())
    }

    /// Nothing gathered yet.
    pub(crate) fn clear(&self, regions: &mut Regions<'_>) {
        self.clear_state(regions);
        self.clear_outputs(0..self.task.rows.len(), regions);
    }

    /// Maxima and sums of nothing.
    fn clear_state(&self, regions: &mut Regions<'_>) {
        // Steps work on whole vectors of rows.
        let padded = self.task.rows.len().next_multiple_of(LANES);
        regions.max[..padded].fill(f32::NEG_INFINITY);
        regions.sum[..padded].fill(0.0);
    }

    /// Outputs of nothing, for some rows.
    pub(crate) fn clear_outputs(&self, rows: Range<usize>, regions: &mut Regions<'_>) {
        let width = self.geometry.width();
        regions.out[rows.start * width..rows.end * width].fill(0.0);
    }

    /// The one pass over the keys, or over some of their blocks. Rows for which nothing comes after block `last` are written
    /// with it, where tiles can do that: says which.
    ///
    /// # Safety
    /// As for [`Self::run`]; the blocks are some of [`Self::blocks`].
    pub(crate) unsafe fn gather(
        &self,
        queries: Queries<'_>,
        (care, last): (Care, Option<usize>),
        blocks: impl Iterator<Item = usize>,
        regions: &mut Regions<'_>,
    ) -> EndedGroups {
        // Whether no block has come yet. Groups whose outputs the first one writes whole do not clear them before.
        let mut fresh = self.outputs.state.is_none() && !C::ACTIVE;
        self.clear_state(regions);
        if !fresh {
            self.clear_outputs(0..self.task.rows.len(), regions);
        }
        // SAFETY: passed on.
        unsafe { self.exchange(regions, Exchange::Load) };
        let (mut ends, mut ended) = (GroupEnds::none(), EndedGroups::NONE);
        let (mut spans, mut tables) = (Spans::NONE, tables());
        for first in blocks {
            // SAFETY: passed on.
            unsafe {
                let mut block = self.block(first, &mut tables);
                for (number, group) in self.groups().enumerate() {
                    let visible = self.prepare(&mut block, queries, group.clone(), &mut spans, regions);
                    let by_all = visible && !spans.iter().any(|span| span.is_empty());
                    block.fresh = fresh && by_all;
                    if fresh && !by_all {
                        self.clear_outputs(group.clone(), regions);
                    }
                    if !visible {
                        continue;
                    }
                    let seen = self.softmax(&block, (group.clone(), care), &spans, regions);
                    // With a weight function the outputs are gathered in the second pass.
                    if C::ACTIVE {
                        continue;
                    }
                    let ending = S::ENDS_ROWS
                        && (care == Care::Fast && by_all && last == Some(first))
                        && block.values.are_floats()
                        && self.end_group(group.clone(), &mut ends, regions);
                    let manner = match care {
                        Care::Careful => Manner::Careful(seen.as_ref()),
                        Care::Fast if ending => Manner::Ending(&ends),
                        Care::Fast => Manner::Plain,
                    };
                    self.add_values(&mut block, manner, group, &spans, regions);
                    if let Manner::Ending(ends) = manner {
                        ended.add(number, ends);
                    }
                }
            }
            fresh = false;
        }
        if fresh {
            self.clear_outputs(0..self.task.rows.len(), regions);
        }
        ended
    }

    /// Turns a group's scores into weights, taken into the running maxima and sums. Notes who sees what, as [`Self::seen`] does.
    ///
    /// # Safety
    /// As for [`Self::run`]; the scores are [prepared](Self::prepare).
    #[inline(always)]
    unsafe fn softmax(
        &self,
        block: &Block,
        (group, care): (Range<usize>, Care),
        spans: &[Span],
        regions: &mut Regions<'_>,
    ) -> Option<Seen> {
        // SAFETY: passed on.
        unsafe {
            self.emit(Point::Masked, block, group.clone(), regions.scores);
            self.emit(Point::Weights, block, group.clone(), regions.scores);
            let seen = self.seen(block, care, group.len(), spans, regions.scores);
            let state = softmax::Rows {
                max: &mut regions.max[group.start..],
                sum: &mut regions.sum[group.start..],
                keep: regions.keep,
                join: regions.join,
            };
            self.s.softmax(regions.scores, spans, group.len(), state);
            seen
        }
    }

    /// Fetches what earlier calls gathered for the task's rows, or puts it back.
    ///
    /// # Safety
    /// As for [`Self::run`].
    pub(crate) unsafe fn exchange(&self, regions: &mut Regions<'_>, way: Exchange) {
        let Some(state) = &self.outputs.state else { return };
        let swap = |there: *mut f32, here: &mut f32| {
            // SAFETY: an element of the state that is this task's alone.
            unsafe {
                match way {
                    Exchange::Load => *here = *there,
                    Exchange::Save => *there = *here,
                }
            }
        };
        let width = self.geometry.width();
        for row in self.rows(0..self.task.rows.len()) {
            let (b, h, i) = (self.seq.batch, row.head, self.seq.first_row + row.i);
            // SAFETY: the row is inside the state.
            unsafe {
                swap(state.max.row(b, h, i).0, &mut regions.max[row.n]);
                swap(state.sum.row(b, h, i).0, &mut regions.sum[row.n]);
                let (out, element) = state.out.row(b, h, i);
                for c in 0..self.geometry.value_dim {
                    swap(out.offset(c as isize * element), &mut regions.out[row.n * width + c]);
                }
            }
        }
    }

    /// The second pass, for a weight function: weights are finished one by one, so there is nothing to fold.
    ///
    /// # Safety
    /// As for [`Self::run`]; the first pass has been made.
    unsafe fn gather_modified(&self, queries: Queries<'_>, care: Care, regions: &mut Regions<'_>) {
        regions.keep.fill(1.0);
        regions.join.fill(1.0);
        let (mut spans, mut tables) = (Spans::NONE, tables());
        for first in self.blocks() {
            // SAFETY: passed on.
            unsafe {
                let mut block = self.block(first, &mut tables);
                for group in self.groups() {
                    if !self.prepare(&mut block, queries, group.clone(), &mut spans, regions) {
                        continue;
                    }
                    let visible = Seen::new(S::TILE_ROWS, &spans, group.len(), regions.scores);
                    let poisoned = self.seen(&block, care, group.len(), &spans, regions.scores);
                    let (scores, rows) = (&mut *regions.scores, group.len());
                    let ends = self.references(group.clone(), regions.max, regions.sum);
                    self.s.weights(Group { scores, spans: &spans, rows }, &ends);
                    for row in self.rows(group.clone()) {
                        for j in spans[row.n / S::TILE_ROWS].keys().filter(|&j| visible.sees(row.n, j)) {
                            let weight = &mut regions.scores[row.n * crate::block::SCORE_STRIDE + j];
                            *weight = self.mods.prob.weight(*weight, self.position(row, block.first + j));
                        }
                    }
                    let manner = match care {
                        Care::Careful => Manner::Careful(poisoned.as_ref()),
                        Care::Fast => Manner::Plain,
                    };
                    self.add_values(&mut block, manner, group, &spans, regions);
                }
            }
        }
    }
}
