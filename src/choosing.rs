//! Rows that choose their keys: scores of an indexer, and lists of the keys with the largest.

pub(crate) mod e4m3;

use crate::attention::Attention;
use crate::error::{Error, at_most};
use crate::inputs::Inputs;
use crate::plan::call_time;
use crate::threads::exec::Exec;
use crate::threads::workers::{reserved, work_through};
use crate::threads::workspace::{ChoiceMemory, Workspace};
use core::ops::Range;
use sdpa_kernels::{
    Call, ChoiceLaunch, Chooser, IndexCall, IndexLaunch, Scratch, SelectedKeys, SelectionShape, TopK, View, ViewMut,
    first_list,
};
use std::sync::Mutex;

/// Number of scores of rows, for each worker, that are held while their keys are chosen: 4 MiB.
const SCORES: usize = 1 << 20;
/// Time of choosing by a score, about, in floating-point operations.
const CHOICE_FLOPS: f64 = 12.0;

/// Indexer: an inexpensive attention that scores the keys of each row, so that the row attends to a few of them.
///
/// The score of a key is f · Σ w · max(s, 0) over the query heads that share the key's head, added in order (the lightning indexer
/// of DeepSeek V3.2, arXiv:2512.02556). s is a score as attention has it, scale · (q · k), with softcap, bias and ALiBi if the call
/// has them; w is the weight of a query row and head, f a [factor](Self::key_factors) of the key. A key that a rule hides has
/// score −∞; so has one whose s is −∞. NaN stays NaN. Bits do not depend on threads, batch, number of rows, layout or source of
/// keys.
///
/// Keys come from anything that [`Inputs`] take; values are not read: give the keys in their place. [`Precision`] says how
/// products are computed. Dropout and sinks have no effect.
///
/// ```
/// use sdpa::{Alignment, Attention, Exec, Indexer, Inputs, SelectedKeys, TopK, View, Workspace};
/// // One row of two heads, three keys with one head.
/// let (q, k, weights) = ([1.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 1.0, 2.0, 2.0], [1.0, 0.5]);
/// let (q, k) = (View::bhld(&q, [1, 2, 1, 2])?, View::bhld(&k, [1, 1, 3, 2])?);
/// let attention = Attention::new().scale(1.0).causal().align(Alignment::BottomRight);
/// let indexer = attention.indexer(Inputs::new(q, k, k), View::bhl(&weights, [1, 2, 1])?)?;
/// let mut selected = SelectedKeys::new();
/// indexer.select(&TopK::new(2), Exec::default(), &mut Workspace::new(), &mut selected)?;
/// assert_eq!(selected.numbers(0, 0, 0).unwrap().collect::<Vec<_>>(), [0, 2]); // scores 3, ½ and 3
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// [`Precision`]: crate::Precision
#[derive(Debug)]
pub struct Indexer<'a>(IndexCall<'a>);

impl Attention {
    /// Binds the inputs of an [`Indexer`] and its weights `[batch, heads, q_len, 1]`, one for each query row and head, and checks
    /// them. Of ragged sequences they are `[1, heads, all rows, 1]`.
    ///
    /// Weights that lie as a projection leaves them, `[batch, q_len, heads]`, are `View::blhd(&weights, [batch, q_len, heads, 1])`. If
    /// they include 1/√`head_dim` already, set the scale to 1: a factor changes no order, but it changes [`TopK::share`].
    ///
    /// # Errors
    /// Any [`Error`] of [`Self::problem`] that concerns inputs; [`Error::Mismatch`] or [`Error::Size`] of weights;
    /// [`Error::Needs`] if rows select keys already.
    pub fn indexer<'a>(&self, inputs: Inputs<'a>, weights: View<'a>) -> Result<Indexer<'a>, Error> {
        Ok(Indexer(IndexCall::new(self.call_alone(&inputs)?, weights)?))
    }
}

impl<'a> Indexer<'a> {
    /// Sets factors by which the scores of keys are multiplied, `[batch, kv_heads, kv_len, 1]` as the keys lie: scales of
    /// quantised keys, such as those of [`widen_e4m3`](crate::widen_e4m3).
    ///
    /// ```
    /// use sdpa::{Attention, Bf16, Exec, Inputs, View, ViewMut, Workspace, widen_e4m3};
    /// let (codes, scales) = ([0x38, 0xb8, 0x40, 0x38], [0.5, 10.0]); // keys (1, −1) / 2 and (2, 1) · 10
    /// let mut keys = [Bf16::default(); 4];
    /// widen_e4m3(&codes, &mut keys)?;
    /// let (q, k) = (View::bhld(&[1.0f32, 0.0], [1, 1, 1, 2])?, View::bhld(&keys, [1, 1, 2, 2])?);
    /// let indexer = Attention::new().scale(1.0).indexer(Inputs::new(q, k, k), View::bhl(&[1.0], [1, 1, 1])?)?;
    /// let mut scores = [0.0; 2];
    /// indexer.key_factors(View::bhl(&scales, [1, 1, 2])?)?.scores(
    ///     ViewMut::bhld(&mut scores, [1, 1, 1, 2])?,
    ///     Exec::default(),
    ///     &mut Workspace::new(),
    /// )?;
    /// assert_eq!(scores, [0.5, 20.0]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Mismatch`] or [`Error::Size`] if the shape is not that of the keys.
    pub fn key_factors(self, factors: View<'a>) -> Result<Self, Error> {
        Ok(Self(self.0.factors(factors)?))
    }

    fn call(&self) -> &Call<'a> {
        self.0.call()
    }

    /// Number of workers that are worth waking.
    fn workers(&self, exec: Exec<'_>) -> usize {
        // Products with keys alone.
        call_time::workers(exec, 0.5, self.0.checked())
    }

    /// Writes the scores of all rows, `[batch, kv_heads, q_len, kv_len]`: −∞ where a key is hidden or beyond its sequence, and in
    /// rows beyond the end of a ragged sequence, which is padded to the longest.
    ///
    /// Complexity: heads · q_len · kv_len · head_dim over the visible pairs. A warm call allocates nothing.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the output has another shape, [`Error::Memory`]; it is then untouched.
    pub fn scores(&self, out: ViewMut<'_>, exec: Exec<'_>, workspace: &mut Workspace) -> Result<(), Error> {
        self.0.fits(&out)?;
        let Workspace { forward, choice: ChoiceMemory { q_lens, groups, .. }, .. } = workspace;
        self.group(1, q_lens, groups)?;
        let (isa, workers) = (exec.instruction_set(), self.workers(exec));
        let launch = IndexLaunch::of_rows(&self.0, isa, groups, workers, out);
        self.run(&launch, workers, exec, forward);
        Ok(())
    }

    /// Fills lists of the keys that rows choose by their scores: one list for each key/value head.
    ///
    /// Scores of some rows are held at a time: 4 MiB for each thread, or those of 16 rows or of the rows of a list if these take
    /// more. Complexity: that of [`Self::scores`], and a read of the scores. A warm call
    /// allocates nothing, and lists that have been as long before do not grow.
    ///
    /// # Errors
    /// [`Error::Empty`] or [`Error::Number`] of the rule, [`Error::Range`] if the keys have no numbers in units,
    /// [`Error::Selection`] of the lists, [`Error::Memory`]; the lists are then empty.
    pub fn select(
        &self,
        rule: &TopK,
        exec: Exec<'_>,
        workspace: &mut Workspace,
        selected: &mut SelectedKeys,
    ) -> Result<(), Error> {
        selected.clear();
        check(rule, self.call().longest().1)?;
        let ChoiceMemory { q_lens, groups, .. } = &mut workspace.choice;
        self.group(rule.rows, q_lens, groups)?;
        let shape = SelectionShape { q_lens, heads: groups.heads(), rows: rule.rows, unit: rule.unit };
        selected.begin(shape)?;
        let filled = self.fill(rule, exec, workspace, selected);
        filled.inspect_err(|_| selected.clear())
    }

    /// Takes the groups of rows that are computed together, for lists that `rows` rows share.
    fn group(&self, rows: usize, q_lens: &mut Vec<usize>, groups: &mut SelectedKeys) -> Result<(), Error> {
        let call = self.call();
        let all = held("lengths of sequences", q_lens, call.sequence_count())?;
        all.iter_mut().enumerate().for_each(|(sequence, len)| *len = call.sequence(sequence).q_len);
        let (heads, rows) = (call.kv.kv_heads(), self.0.group_rows(rows));
        Ok(groups.begin(SelectionShape { q_lens: all, heads, rows, unit: 1 })?)
    }

    /// Fills the lists, some groups of rows at a time.
    fn fill(
        &self,
        rule: &TopK,
        exec: Exec<'_>,
        workspace: &mut Workspace,
        selected: &mut SelectedKeys,
    ) -> Result<(), Error> {
        let Workspace { forward, choice: ChoiceMemory { groups, scores, chosen, workers: memory, .. }, .. } = workspace;
        let (isa, workers, keys) = (exec.instruction_set(), self.workers(exec), self.call().longest().1);
        let of_group = groups.rows().div_ceil(rule.rows);
        let together = (SCORES * workers / keys.max(1) / of_group).max(1);
        for first in (0..groups.lists()).step_by(together) {
            let range = first..groups.lists().min(first + together);
            let [start, end] = [range.start, range.end].map(|group| first_list(groups, selected, group));
            let shape = [1, 1, end - start, keys];
            let rows = held("scores of rows", scores, (end - start).saturating_mul(keys))?;
            let view = ViewMut::bhld(rows, shape)?;
            let launch = IndexLaunch::of_lists(&self.0, isa, (groups, range), workers, (selected, view));
            self.run(&launch, workers, exec, forward);
            let view = View::bhld(scores, shape)?;
            choose(view, &TopK { rows: 1, ..*rule }, 0..end - start, exec, (memory, chosen), selected)?;
        }
        Ok(())
    }

    fn run(&self, launch: &IndexLaunch<'_>, workers: usize, exec: Exec<'_>, memory: &mut Vec<Mutex<Scratch>>) {
        let (isa, tiling) = (exec.instruction_set(), self.0.tiling(exec.instruction_set()));
        let work = |scratch: &mut Scratch| launch.work(isa, scratch);
        work_on_all(memory, workers, exec, |scratch| scratch.try_reserve(&tiling), &work);
    }
}

/// Fills lists of the keys with the largest of given scores, `[batch, heads, q_len, keys]`: a list for each sequence, head and
/// [`TopK::rows`] query rows. `heads` is 1, or the key/value heads or query heads of the attention call.
///
/// No rule is applied: a score of −∞ hides its key. Ties go to the lower key. Every sequence has `q_len` rows; for ragged ones use
/// [`Indexer::select`].
///
/// Complexity: a read of the scores if `k` is small against the keys (a sample tells which scores are large enough), otherwise
/// four. A warm call allocates nothing.
///
/// ```
/// use sdpa::{Exec, SelectedKeys, TopK, View, Workspace};
/// let scores = [0.5, 7.0, f32::NEG_INFINITY, 7.0, 1.0, 7.0];
/// let scores = View::bhld(&scores, [1, 1, 1, 6])?; // one row
/// let mut selected = SelectedKeys::new();
/// sdpa::top_k(scores, &TopK { first: 1, ..TopK::new(3) }, Exec::default(), &mut Workspace::new(), &mut selected)?;
/// assert_eq!(selected.numbers(0, 0, 0).unwrap().collect::<Vec<_>>(), [0, 1, 3]);
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// As [`Indexer::select`].
pub fn top_k(
    scores: View<'_>,
    rule: &TopK,
    exec: Exec<'_>,
    workspace: &mut Workspace,
    selected: &mut SelectedKeys,
) -> Result<(), Error> {
    selected.clear();
    let [batch, heads, rows, keys] = scores.shape();
    check(rule, keys)?;
    let ChoiceMemory { q_lens, chosen, workers, .. } = &mut workspace.choice;
    let q_lens = held("lengths of sequences", q_lens, batch)?;
    q_lens.fill(rows);
    selected.begin(SelectionShape { q_lens, heads, rows: rule.rows, unit: rule.unit })?;
    let (lists, together) = (selected.lists(), (SCORES / ChoiceLaunch::width(keys, rule)).max(exec.threads));
    let mut filled = (0..lists).step_by(together).map(|first| first..lists.min(first + together));
    let filled = filled.try_for_each(|range| choose(scores, rule, range, exec, (workers, chosen), selected));
    filled.inspect_err(|_| selected.clear())
}

/// Chooses the keys of some lists and adds these to a selection.
fn choose(
    scores: View<'_>,
    rule: &TopK,
    lists: Range<usize>,
    exec: Exec<'_>,
    (workers, chosen): (&mut Vec<Mutex<Chooser>>, &mut Vec<u32>),
    selected: &mut SelectedKeys,
) -> Result<(), Error> {
    let (keys, count) = (scores.shape()[3], lists.len());
    let width = ChoiceLaunch::width(keys, rule);
    let chosen = held("chosen keys", chosen, count.saturating_mul(width))?;
    let launch = ChoiceLaunch::new(scores, *rule, lists, ViewMut::bhld(chosen, [1, 1, count, width])?);
    let planned = exec.workers(CHOICE_FLOPS * count as f64 * keys as f64).min(count.max(1));
    let (isa, copied) = (exec.instruction_set(), launch.copied());
    let work = |memory: &mut Chooser| launch.work(isa, memory);
    work_on_all(workers, planned, exec, |memory| memory.try_reserve(width - 1, copied), &work);
    Ok(selected.append(chosen, width)?)
}

/// Refuses rules that choose nothing or a share outside its range, and keys that have no numbers.
fn check(rule: &TopK, keys: usize) -> Result<(), Error> {
    rule.check()?;
    if let Some(got) = rule.share.filter(|&share| !(share > 0.0 && share <= 1.0)) {
        return Err(Error::Number { argument: "share of top_k", got, expected: "above 0 and at most 1" });
    }
    at_most("scores", "number of keys", keys, i32::MAX as usize / rule.unit, "the largest number of units of a list")
}

/// Returns the first `len` elements of memory that grows to hold them, or [`Error::Memory`] for `what`.
fn held<'m, T: Clone + Default>(what: &'static str, memory: &'m mut Vec<T>, len: usize) -> Result<&'m mut [T], Error> {
    let more = len.saturating_sub(memory.len());
    let bytes = len.saturating_mul(size_of::<T>());
    memory.try_reserve(more).map_err(|_| Error::Memory { what, bytes })?;
    if more > 0 {
        memory.resize(len, T::default());
    }
    Ok(&mut memory[..len])
}

/// Calls `work` on each of up to `planned` workers whose memory can be reserved.
fn work_on_all<T: Default + Send>(
    memory: &mut Vec<Mutex<T>>,
    planned: usize,
    exec: Exec<'_>,
    reserve: impl Fn(&mut T) -> bool,
    work: &(dyn Fn(&mut T) + Sync),
) {
    let ready = reserved(memory, planned, exec.executor(), reserve).len();
    // Without memory for one, the work says what is missing.
    work_through(&mut memory[..ready.max(1)], exec.executor(), &|| (), work);
}
