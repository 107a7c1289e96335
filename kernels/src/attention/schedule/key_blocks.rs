//! Accumulation of units: a key block is read once for all the sequences that have it in common.
//!
//! The rows of those sequences are computed together, as one set, with what they have accumulated before where blocks are
//! taken in order. No bit of a row depends on the rows beside it, so none shows who shares. Where rows are more than their
//! scores, because a mask, a bias, ALiBi, dropout or a function of the caller's treats each by its position, sequences meet
//! the block one after the other, while it is in cache.

use crate::attention::blocks::key_block::BlockMemory;
use crate::attention::blocks::task::{AttentionTask, BoundCall, Next};
use crate::attention::call::options::Options;
use crate::attention::call::row_mods::Given;
use crate::attention::call::{Call, RowSet};
use crate::attention::schedule::partials::Parts;
use crate::attention::schedule::query_slots::{QuerySlots, Slot};
use crate::attention::schedule::units::Unit;
use crate::attention::scratch::{Regions, Scratch};
use crate::simd::Simd;
use crate::tensor::rows::KEY_BLOCK;
use crate::work_queue::Stop;
use core::ops::Range;

/// Worker that accumulates units into their parts, and the queries that it keeps from one to the next.
pub(crate) struct BlockWorker<'w, S> {
    bound: BoundCall<'w, S>,
    parts: &'w Parts<'w>,
    slots: QuerySlots,
    /// Maximum number of rows of several sequences that are computed together: 0 if each is treated by its position.
    most_together: usize,
}

/// Unit, and the one after it in its run, if any.
#[derive(Clone, Copy)]
struct Step {
    unit: Unit,
    next: Option<Unit>,
}

impl<'w, S: Simd> BlockWorker<'w, S> {
    /// Creates a worker that accumulates units of a call.
    ///
    /// # Safety
    /// The parts were made for this call.
    pub(crate) unsafe fn new(bound: BoundCall<'w, S>, parts: &'w Parts<'w>) -> Self {
        let alike = are_alike(bound.checked.call(), bound.mods.given());
        let most_together = if alike { bound.tiling.shared_rows() } else { 0 };
        Self { bound, parts, slots: QuerySlots::NONE, most_together }
    }

    /// Accumulates a run of units, and counts it as done, unless the work is stopped: then nothing will be merged.
    ///
    /// # Safety
    /// The run is this worker's alone.
    pub(crate) unsafe fn run(&mut self, run: Range<usize>, stop: &Stop<'_>, scratch: &mut Scratch) {
        let (regions, memory) = (&mut scratch.regions(self.bound.tiling), &mut BlockMemory::new());
        let mut units = run.map(|number| self.parts.units.at(number)).peekable();
        while let Some(unit) = units.next() {
            if stop.leaves() {
                return;
            }
            // SAFETY: the unit belongs to this run, so its parts are this worker's; a part of several blocks because all
            // of their units belong to the run.
            unsafe { self.accumulate(Step { unit, next: units.peek().copied() }, memory, regions) }
        }
        self.parts.accumulated.add_one();
    }

    /// Accumulates a unit, for each sequence that shares its block, as far as any of its keys is visible to the sequence.
    ///
    /// # Safety
    /// The parts of the unit, and of the same block and head of the entries that share it, are this worker's alone.
    unsafe fn accumulate(&mut self, step: Step, memory: &mut BlockMemory, regions: &mut Regions<'_>) {
        let (call, parts, unit) = (self.bound.checked.call(), self.parts, step.unit);
        let mut entries = parts.units.sharers(unit);
        // A block that a cache has evicted is evicted for all that share it. Lists of keys are as long as they are.
        let (sequence, first) = (parts.units.entry(unit.entry).sequence, parts.units.first_key(unit));
        let seq = call.sequence(sequence);
        let held = match call.key_list(sequence, unit.head, &(0..1), &seq) {
            Some(list) => first < list.len(),
            None => call.kv.holds(seq.source, first),
        };
        let in_order = parts.units.entry(unit.entry).in_order;
        if if in_order { unit.block == 0 } else { !held } {
            for entry in entries.clone() {
                // SAFETY: the entry shares the unit's block, so the caller guarantees that its part is this worker's.
                unsafe { parts.clear(Unit { entry, ..unit }) }
            }
        }
        if !held {
            return;
        }
        while !entries.is_empty() {
            let unit = Unit { entry: entries.start, ..unit };
            let end = entries.start + self.together(unit, entries.end);
            // SAFETY: the entries share the unit's block, so the caller guarantees that their parts are this worker's.
            unsafe { self.accumulate_rows(Step { unit, ..step }, entries.start..end, memory, regions.reborrow()) }
            entries.start = end;
        }
    }

    /// Returns how many entries from the unit's on, before entry `end`, are computed together: one, or more if all their rows see
    /// the whole block.
    fn together(&self, unit: Unit, end: usize) -> usize {
        let (call, units, first) = (self.bound.checked.call(), &self.parts.units, self.parts.units.first_key(unit));
        let mut rows = 0;
        let fit = (unit.entry..end).take_while(|&entry| {
            rows += units.entry(entry).rows;
            rows <= self.most_together && call.sees_all(units.entry(entry).sequence, first..first + KEY_BLOCK)
        });
        fit.count().max(1)
    }

    /// Accumulates a unit for all rows of some entries; its block is held.
    ///
    /// # Safety
    /// The entries share the unit's block (the first entry is the unit's), and their parts are this worker's alone.
    unsafe fn accumulate_rows(
        &mut self,
        Step { unit, next }: Step,
        entries: Range<usize>,
        memory: &mut BlockMemory,
        mut regions: Regions<'_>,
    ) {
        let (parts, tiling) = (self.parts, self.bound.tiling);
        let (first, in_order) = (parts.units.first_key(unit), parts.units.entry(unit.entry).in_order);
        let next = self.after(unit, next);
        let set = parts.units.rows_of(entries.clone(), unit.head);
        let floats = set.rows.len() * tiling.query_floats();
        let slot = Slot { heads: parts.units.heads, floats, head: unit.head };
        self.slots.choose_slot(entries.clone(), slot, &mut regions);
        let task = AttentionTask::reading(self.bound, set, next);
        if entries.len() == 1 {
            // Directly where the merge reads it.
            // SAFETY: the caller guarantees the unit, and that its part is this worker's alone.
            let [max, sum, out] = unsafe { parts.part(unit, task.set.rows.clone()) };
            return task.accumulate_block(first, in_order, memory, &mut Regions { max, sum, out, ..regions });
        }
        if in_order {
            regions.clear_state(task.set.rows.len());
            // SAFETY: the caller guarantees the entries, and that their parts are this worker's.
            unsafe { parts.load(unit, entries.clone(), &mut regions) }
        }
        task.accumulate_block(first, in_order, memory, &mut regions);
        // SAFETY: as above.
        unsafe { parts.save(unit, entries, &regions) }
    }

    /// Returns the work of a unit that another one follows in its run.
    fn after(&self, unit: Unit, next: Option<Unit>) -> Next<'w> {
        let units = &self.parts.units;
        let at = self.parts.address_of(unit).cast();
        // Without rows: its keys are prefetched, and it may have more rows than the task that prefetches them.
        let keys_of = |unit: Unit| RowSet { rows: 0..0, ..units.rows_of(unit.entry..unit.entry + 1, unit.head) };
        let next = next.map(|next| (keys_of(next), units.first_key(next)));
        Next::Block { accumulated: (at, self.parts.cold_bytes(unit)), next }
    }
}

/// Returns true if nothing but its scores tells a row from another that sees the same keys.
fn are_alike(call: &Call<'_>, given: Given) -> bool {
    // What rows see of their keys is asked elsewhere, and without ALiBi and functions nothing else depends on positions.
    let Options {
        bias,
        alibi,
        mask,
        dropout,
        dropout_from: _,
        softcap: _,
        sinks: _,
        kv_lens: _,
        ragged: _,
        sources: _,
        row_positions: _,
        key_positions: _,
        period: _,
        // Listed sequences share no blocks.
        selected: _,
        together: _,
    } = &call.options;
    bias.is_none() && alibi.is_none() && mask.is_none() && dropout.is_none() && !given.score && !given.mask
}

impl Parts<'_> {
    /// Returns the rows of each entry among those of all of them.
    fn rows_by_entry(&self, entries: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let mut end = 0;
        entries.map(move |entry| {
            let start = end;
            end += self.units.entry(entry).rows;
            (entry, start..end)
        })
    }

    /// Copies what some entries have accumulated for a unit's head to the regions, row after row.
    ///
    /// # Safety
    /// The entries share the unit's block; nobody else has a reference to their parts.
    unsafe fn load(&self, unit: Unit, entries: Range<usize>, regions: &mut Regions<'_>) {
        for (entry, rows) in self.rows_by_entry(entries) {
            // SAFETY: same contract.
            let [max, sum, out] = unsafe { self.part(Unit { entry, ..unit }, 0..rows.len()) };
            regions.max[rows.clone()].copy_from_slice(&max[..rows.len()]);
            regions.sum[rows.clone()].copy_from_slice(&sum[..rows.len()]);
            regions.out[rows.start * self.width..rows.end * self.width].copy_from_slice(out);
        }
    }

    /// Copies what the regions hold to the parts of some entries.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn save(&self, unit: Unit, entries: Range<usize>, regions: &Regions<'_>) {
        for (entry, rows) in self.rows_by_entry(entries) {
            // SAFETY: same contract.
            let [max, sum, out] = unsafe { self.part(Unit { entry, ..unit }, 0..rows.len()) };
            // Steps work on whole vectors of rows.
            max.fill(f32::NEG_INFINITY);
            sum.fill(0.0);
            max[..rows.len()].copy_from_slice(&regions.max[rows.clone()]);
            sum[..rows.len()].copy_from_slice(&regions.sum[rows.clone()]);
            out.copy_from_slice(&regions.out[rows.start * self.width..rows.end * self.width]);
        }
    }
}
