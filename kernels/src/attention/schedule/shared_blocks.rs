//! A unit of split-KV, for all the sequences that have its key block in common: the block is read once.
//!
//! The query rows of those sequences are gathered and meet the block as rows of one task, with what they have accumulated
//! before where blocks are taken in order; what they accumulate is then handed back to each sequence. No bit of a row
//! depends on the rows beside it, so none shows who shares. Where rows are more than their scores, because a mask, a bias,
//! ALiBi, dropout or a function of the caller's treats each by its place, sequences meet the block one after the other,
//! while it is in cache.

use crate::attention::blocks::task::{AttentionTask, BoundCall};
use crate::attention::call::checked::CheckedCall;
use crate::attention::call::options::Options;
use crate::attention::call::row_mods::Given;
use crate::attention::call::tiling::{QueryMemory, Regions};
use crate::attention::call::visibility::Visible;
use crate::attention::call::{Call, Task};
use crate::attention::forward::mainloop::Pass;
use crate::attention::schedule::kept_queries::{KeptQueries, Slot};
use crate::attention::schedule::partials::Split;
use crate::attention::schedule::units::Unit;
use crate::matmul::pack::NonFinite;
use crate::simd::Simd;
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view::View;
use core::ops::Range;

/// Unit, the one after it in its run, if any, and the queries that the worker keeps.
pub(crate) struct Step<'a> {
    pub(crate) unit: Unit,
    pub(crate) next: Option<Unit>,
    pub(crate) kept: &'a mut KeptQueries,
}

impl Step<'_> {
    /// Returns this step for other places that share its block, from one on.
    fn from(&mut self, place: usize) -> Step<'_> {
        Step { unit: Unit { place, ..self.unit }, next: self.next, kept: self.kept }
    }
}

/// Accumulates a unit, for each sequence that shares its block, as far as any of its keys is visible to the sequence.
///
/// # Safety
/// The split was made for this call; the parts of the unit and of the same block and head of the places that share it
/// are this worker's alone.
pub(crate) unsafe fn accumulate<S: Simd>(
    split: &Split<'_>,
    bound: BoundCall<'_, S>,
    mut step: Step<'_>,
    regions: &mut Regions<'_>,
) {
    let (call, tiling) = (bound.checked.call(), bound.checked.tiling());
    let mut places = split.units.sharers(step.unit);
    if step.unit.block == 0 && split.units.in_order(step.unit.place) {
        for place in places.clone() {
            // SAFETY: the place shares the unit's block, so the caller guarantees that its part is this worker's.
            unsafe { split.clear(Unit { place, ..step.unit }) }
        }
    }
    // A block that a cache has evicted is evicted for all that share it.
    let source = call.sequence(split.units.sequence(step.unit.place)).source;
    if !call.kv.holds(source, split.units.first_key(step.unit)) {
        return;
    }
    let most = if places.len() > 1 && are_alike(call, bound.mods.given()) { tiling.gathered_rows() } else { 0 };
    while !places.is_empty() {
        let unit = Unit { place: places.start, ..step.unit };
        let (together, rows) = gatherable(split, call, unit, places.end, most);
        // SAFETY: the places share the unit's block, so the caller guarantees that their parts are this worker's.
        unsafe {
            let regions = regions.reborrow();
            if together > 1 {
                gather(split, bound, step.from(places.start), Gathered { places: together, rows }, regions);
            } else {
                accumulate_alone(split, bound, step.from(places.start), regions);
            }
        }
        places.start += together.max(1);
    }
}

/// Returns true if nothing but its scores tells a row from another that sees the same keys.
fn are_alike(call: &Call<'_>, given: Given) -> bool {
    let Options { bias, alibi, mask, dropout, .. } = &call.options;
    bias.is_none() && alibi.is_none() && mask.is_none() && dropout.is_none() && !given.score && !given.mask
}

/// Returns how many places from the unit's on, before place `end`, have at most `most` rows together, all of which see
/// the whole block; and how many rows these are.
fn gatherable(split: &Split<'_>, call: &Call<'_>, unit: Unit, end: usize, most: usize) -> (usize, usize) {
    let (mut places, mut rows) = (0, 0);
    let first = split.units.first_key(unit);
    for place in unit.place..end {
        let sequence = split.units.sequence(place);
        let more = rows + split.units.rows(place);
        if more > most || !call.sees_all(sequence, first..first + KEY_BLOCK) {
            break;
        }
        (places, rows) = (places + 1, more);
    }
    (places, rows)
}

/// Accumulates a unit, whose block is held, for one sequence.
///
/// # Safety
/// The split was made for this call; the unit's part is this worker's alone.
unsafe fn accumulate_alone<S: Simd>(
    split: &Split<'_>,
    bound: BoundCall<'_, S>,
    Step { unit, next, kept }: Step<'_>,
    mut regions: Regions<'_>,
) {
    let tiling = bound.checked.tiling();
    let (first, task) = (split.units.first_key(unit), split.task([unit.place, unit.head]));
    // SAFETY: the caller guarantees the unit.
    let next = unsafe { split.followed_by(unit, next) };
    let task = AttentionTask::reading(bound, task).followed_by(next);
    // SAFETY: the caller guarantees the unit, and that its part is this worker's alone.
    let [max, sum, out] = unsafe { split.part(unit, task.task.rows.clone()) };
    let floats = task.task.rows.len() * tiling.query_floats();
    let slot = Slot { heads: split.units.heads, floats, head: unit.head };
    kept.choose_slot(unit.place..unit.place + 1, slot, &mut regions);
    // Accumulate directly where the merge reads it.
    let regions = &mut Regions { max, sum, out, ..regions };
    match split.units.in_order(unit.place) {
        true => task.accumulate_next(first, regions),
        false => task.accumulate_block(first, regions),
    }
}

/// Places whose rows are gathered, from a unit's on, and the number of their rows.
#[derive(Clone, Copy)]
struct Gathered {
    places: usize,
    rows: usize,
}

/// Accumulates a unit, whose block is held, for several sequences at once, all of whose rows see all of its keys.
///
/// # Safety
/// The split was made for this call; the places share the unit's block, and their parts are this worker's alone.
unsafe fn gather<S: Simd>(
    split: &Split<'_>,
    bound: BoundCall<'_, S>,
    Step { unit, next, kept }: Step<'_>,
    Gathered { places, rows }: Gathered,
    mut regions: Regions<'_>,
) {
    let (call, d) = (bound.checked.call(), bound.checked.tiling().head_dim);
    let first = split.units.first_key(unit);
    let places = unit.place..unit.place + places;
    let floats = rows * (d + bound.checked.tiling().query_floats());
    let slot = Slot { heads: split.units.heads, floats, head: unit.head };
    kept.choose_slot(places.clone(), slot, &mut regions);
    let (queries, rest) = core::mem::take(&mut regions.queries).split_at_mut(rows * d);
    regions.queries = rest;
    if regions.query_memory == QueryMemory::Free {
        for (place, at) in rows_of(split, places.clone()) {
            let task = AttentionTask::reading(bound, split.task([place, unit.head]));
            task.copy_queries(&mut queries[at.start * d..at.end * d]);
        }
    }
    // The gathered rows stand for all rows of every sequence and head; those of the unit's are computed.
    let shape = [call.sequences(), split.units.heads, rows, d];
    let q = View::from_strides(queries, 0, shape, [0, 0, d as isize, 1]).expect("as many rows as were gathered");
    let Options { softcap, kv_lens, sequences, .. } = call.options;
    let options = Options { softcap, kv_lens, sequences, ..Options::default() };
    let gathered = Call { q: q.into(), visible: Visible::default(), options, ..*call };
    let checked = CheckedCall::reading(gathered, bound.checked.tiling().with_rows(rows));
    let bound = BoundCall { checked: &checked, ..bound };
    let sequence = split.units.sequence(unit.place);
    // SAFETY: the caller guarantees the unit.
    let next = unsafe { split.followed_by(unit, next) };
    let task = AttentionTask::reading(bound, Task { sequence, kv_head: unit.head, rows: 0..rows }).followed_by(next);
    if split.units.in_order(unit.place) {
        task.clear_state(&mut regions);
        for (place, at) in rows_of(split, places.clone()) {
            // SAFETY: the caller guarantees the places and that their parts are this worker's.
            let [max, sum, out] = unsafe { split.part(Unit { place, ..unit }, 0..at.len()) };
            regions.max[at.clone()].copy_from_slice(&max[..at.len()]);
            regions.sum[at.clone()].copy_from_slice(&sum[..at.len()]);
            regions.out[at.start * split.width..at.end * split.width].copy_from_slice(out);
        }
        task.accumulate_next(first, &mut regions);
    } else {
        task.accumulate_block(first, &mut regions);
    }
    for (place, at) in rows_of(split, places) {
        // SAFETY: the caller guarantees the places and that their parts are this worker's.
        let [max, sum, out] = unsafe { split.part(Unit { place, ..unit }, 0..at.len()) };
        // Steps work on whole vectors of rows.
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        max[..at.len()].copy_from_slice(&regions.max[at.clone()]);
        sum[..at.len()].copy_from_slice(&regions.sum[at.clone()]);
        out.copy_from_slice(&regions.out[at.start * split.width..at.end * split.width]);
    }
}

/// Returns the rows of each place among those of all places.
fn rows_of(split: &Split<'_>, places: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut end = 0;
    places.map(move |place| {
        let start = end;
        end += split.units.rows(place);
        (place, start..end)
    })
}

impl<S: Simd> AttentionTask<'_, S> {
    /// Accumulates one of the task's key blocks into what the regions hold of earlier ones. What is not finite stays so: then
    /// the rows are computed again when they are finished.
    fn accumulate_next(&self, first: usize, regions: &mut Regions<'_>) {
        let pass = Pass { nonfinite: NonFinite::Ignored, last: None, fresh: false };
        self.accumulate_more(self.queries(regions), pass, core::iter::once(first), regions);
    }

    /// Accumulates one of the task's key blocks by itself into the regions' maxima, sums and outputs.
    fn accumulate_block(&self, first: usize, regions: &mut Regions<'_>) {
        let queries = self.queries(regions);
        // As in `run`: once more, with non-finite values handled, if anything is not finite.
        for nonfinite in [NonFinite::Ignored, NonFinite::Handled] {
            self.accumulate(queries, nonfinite, None, core::iter::once(first), regions);
            if self.accumulated_is_finite(regions) {
                break;
            }
        }
    }
}
