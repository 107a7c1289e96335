//! Launch of choices: lists of rows, which workers take from a queue.

use crate::attention::call::selection::top_k::TopK;
use crate::attention::steps::choose::{Chooser, choose, keep_larger};
use crate::simd::Simd;
use crate::simd::isa::Isa;
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;
use crate::work_queue::Queue;
use core::ops::Range;

/// Scores `[batch, heads, rows, keys]`, and memory for the lists that groups of rows choose: for each list a row of numbers and,
/// last, their count.
pub struct ChoiceLaunch<'a> {
    scores: View<'a>,
    top_k: TopK,
    lists: Range<usize>,
    chosen: ViewMut<'a, u32>,
    queue: Queue,
}

impl<'a> ChoiceLaunch<'a> {
    /// Chooses the keys of some lists, in the order `[batch][head][group of rows]`, into `chosen`: `[1, 1, lists, width]`.
    ///
    /// # Panics
    /// If there are fewer lists, or if `chosen` has not a row for each.
    pub fn new(scores: View<'a>, top_k: TopK, lists: Range<usize>, chosen: ViewMut<'a, u32>) -> Self {
        let [batch, heads, rows, keys] = scores.shape();
        let [.., width] = chosen.shape();
        assert!(
            lists.end <= batch * heads * rows.div_ceil(top_k.rows) && u32::try_from(keys).is_ok(),
            "lists of scores"
        );
        assert!(
            chosen.shape() == [1, 1, lists.len(), width] && width == Self::width(keys, &top_k),
            "rows for the lists"
        );
        let queue = Queue::new(lists.len());
        Self { scores, top_k, lists, chosen, queue }
    }

    /// Returns the numbers that a list of some of `keys` keys takes.
    pub fn width(keys: usize, top_k: &TopK) -> usize {
        top_k.k.min(keys) + 1
    }

    /// Returns the number of scores that a worker copies.
    pub fn copied(&self) -> usize {
        if self.top_k.rows > 1 || self.scores.strides()[3] != 1 { self.scores.shape()[3] } else { 0 }
    }

    /// Takes lists and chooses their keys until none is left. Any number of workers may call this at once, each with memory of its
    /// own.
    pub fn work(&self, isa: Isa, memory: &mut Chooser) {
        let [_, heads, rows, keys] = self.scores.shape();
        let (groups, width) = (rows.div_ceil(self.top_k.rows), Self::width(keys, &self.top_k));
        assert!(memory.try_reserve(width - 1, self.copied()), "no memory for a worker's choices");
        while let Some(number) = self.queue.take() {
            let list = self.lists.start + number;
            let first = list % groups * self.top_k.rows;
            let rows = first..rows.min(first.saturating_add(self.top_k.rows));
            let head = [list / groups / heads, list / groups % heads];
            // SAFETY: the view has a row for each list, of `width` elements side by side, one at least; every number is taken once,
            // so the row is this worker's alone.
            let chosen = unsafe {
                let (first, element) = self.chosen.row(0, 0, number);
                assert!(element == 1 || width == 1, "numbers side by side");
                core::slice::from_raw_parts_mut(first, width)
            };
            let (count, chosen) = chosen.split_last_mut().expect("one at least");
            *count = dispatch!(isa, |s| self.choose(s, head, rows, memory, chosen)) as u32;
        }
    }

    /// Writes the numbers that some rows of a head choose together, and returns how many they are.
    fn choose<S: Simd>(
        &self,
        s: S,
        [b, h]: [usize; 2],
        rows: Range<usize>,
        memory: &mut Chooser,
        chosen: &mut [u32],
    ) -> usize {
        if let (1, Some(row)) = (rows.len(), self.scores.contiguous_row([b, h, rows.start])) {
            return choose(s, row, &self.top_k, memory, chosen);
        }
        let mut all = core::mem::take(&mut memory.scores);
        let largest = &mut all[..self.scores.shape()[3]];
        largest.fill(f32::NEG_INFINITY);
        for l in rows {
            for (j, to) in largest.iter_mut().enumerate() {
                keep_larger(to, self.scores.get([b, h, l, j]).copied().unwrap_or(f32::NEG_INFINITY));
            }
        }
        let count = choose(s, largest, &self.top_k, memory, chosen);
        memory.scores = all;
        count
    }
}

impl core::fmt::Debug for ChoiceLaunch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ChoiceLaunch").field("top_k", &self.top_k).field("lists", &self.lists).finish_non_exhaustive()
    }
}
