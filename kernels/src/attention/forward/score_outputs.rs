//! Score outputs: scores and weights written to the caller's memory.

use crate::attention::blocks::task::AttentionTask;
use crate::attention::call::outputs::{POINTS, Point};
use crate::attention::scratch::Regions;
use crate::attention::steps::score_passes::{self, ScoreBlock};
use crate::attention::steps::span::{Span, Spans};
use crate::simd::{Simd, quiet};
use crate::tensor::rows::KEY_BLOCK;
use crate::tensor::view_mut::ViewMut;

/// Fills the rows of score outputs beyond the length of a ragged sequence.
///
/// # Panics
/// If the task does not start at row 0.
pub(crate) fn fill_rows_beyond<S: Simd>(task: &AttentionTask<'_, S>) {
    assert!(task.set.rows.start == 0, "those rows belong to another task");
    let group_size = task.call.group_size();
    for (view, point) in task.outputs.points.iter().zip(POINTS) {
        let Some(view) = view.as_ref().filter(|view| view.shape()[3] > 0) else { continue };
        let rows = view.shape()[2];
        for head in task.set.kv_head * group_size..(task.set.kv_head + 1) * group_size {
            for i in task.seq.q_len..rows {
                // SAFETY: the row is inside the view; it belongs to the task that starts at row 0.
                unsafe { fill_row(view, [task.set.sequence, head, i], point) }
            }
        }
    }
}

/// Fills a row of a score output as if all its keys were beyond the sequence.
///
/// # Safety
/// The row is inside the view, which has columns, and is this worker's alone.
unsafe fn fill_row(view: &ViewMut<'_>, [b, h, l]: [usize; 3], point: Point) {
    // SAFETY: same contract.
    unsafe {
        let (first, element) = view.row(b, h, l);
        for j in 0..view.shape()[3] {
            *first.offset(j as isize * element) = point.beyond();
        }
    }
}

/// Fills the rows of a task that selects keys: those that are not selected are written like keys beyond the sequence.
pub(crate) fn fill_unselected<S: Simd>(task: &AttentionTask<'_, S>) {
    if task.list.is_none() {
        return;
    }
    for (view, point) in task.outputs.points.iter().zip(POINTS) {
        let Some(view) = view.as_ref().filter(|view| view.shape()[3] > 0) else { continue };
        for row in task.rows(0..task.set.rows.len()) {
            // SAFETY: the task's rows are inside the view, and are this worker's alone.
            unsafe { fill_row(view, [task.set.sequence, row.head, row.i], point) }
        }
    }
}

/// Turns the scores written for [`Point::Weights`] into weights, and fills the keys beyond the sequence. The maxima
/// and sums are those of all keys.
pub(crate) fn finish_scores<S: Simd>(task: &AttentionTask<'_, S>, regions: &mut Regions<'_>) {
    for (view, point) in task.outputs.points.iter().zip(POINTS) {
        let Some(view) = view.as_ref().filter(|view| view.shape()[3] > 0) else { continue };
        for row_block in task.row_blocks() {
            let references = task.references(row_block.clone(), regions.max, regions.sum);
            for row in task.rows(row_block) {
                // SAFETY: the task's rows are inside the view. An address alone: nothing is accessed yet.
                let (first, element) = unsafe { view.row(task.set.sequence, row.head, row.i) };
                for j in task.seq.kv_len..view.shape()[3] {
                    // SAFETY: column `j` is inside the row, which is this worker's alone.
                    unsafe { *first.offset(j as isize * element) = point.beyond() };
                }
                if point == Point::Weights {
                    // SAFETY: the row has a column for every key of the sequence, and is this worker's alone.
                    unsafe { finish_weights(task, (first, element), references[row.n], regions.scores) };
                }
            }
        }
    }
}

/// Turns one row of scores, in the caller's memory, into weights.
///
/// # Safety
/// `first` has `kv_len` elements, `element` apart, all of them this worker's alone.
unsafe fn finish_weights<S: Simd>(
    task: &AttentionTask<'_, S>,
    (first, element): (*mut f32, isize),
    reference: (f32, f32),
    scratch: &mut [f32],
) {
    let column = |key: usize| task.list.map_or(key, |list| list.key(key)) as isize;
    for block in (0..task.key_count()).step_by(KEY_BLOCK) {
        let len = KEY_BLOCK.min(task.key_count() - block);
        for (j, x) in scratch[..len].iter_mut().enumerate() {
            // SAFETY: the key is one of the sequence.
            *x = unsafe { *first.offset(column(block + j) * element) };
        }
        let spans = Spans::of(&[Span::new(0, len, false)], S::TILE_ROWS);
        score_passes::weights(task.s, ScoreBlock { scores: scratch, spans: &spans, rows: 1 }, &[reference]);
        for (j, &x) in scratch[..len].iter().enumerate() {
            // SAFETY: the key is one of the sequence.
            unsafe { *first.offset(column(block + j) * element) = quiet(x) };
        }
    }
}
