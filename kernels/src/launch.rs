//! A call bound to its outputs, handed out task by task.

use crate::element::{Dtype, Precision};
use crate::geometry::{Geometry, Scratch};
use crate::isa::{Isa, Visitor};
use crate::options::{MaskMod, Mods, Options, ProbMod, ScoreMod};
use crate::outputs::{Outputs, POINTS, Point, Shared};
use crate::queue::Queue;
use crate::source::KeyValues;
use crate::split::{self, Partials, Split};
use crate::steps::Steps;
use crate::tensor::Tensor;
use crate::tile::{self, Next};
use crate::visible::{Alignment, Visible};
use core::ops::Range;

/// The inputs and options of one attention call: shapes q `[B, H, Lq, D]`, k `[B, Hkv, Lk, D]`, v `[B, Hkv, Lk, Dv]`;
/// with ragged sequences `B` is 1.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// Queries.
    pub q: Tensor<'a>,
    /// Keys and values.
    pub kv: KeyValues<'a>,
    /// Factor of the dot products.
    pub scale: f32,
    /// Rules that come as ranges of keys.
    pub visible: Visible,
    /// Where the rows stand among the keys.
    pub alignment: Alignment,
    /// What else happens to scores.
    pub options: Options<'a>,
    /// What may be done to numbers on the way.
    pub precision: Precision,
}

/// One sequence: where it lies and how long it is.
#[derive(Debug, Clone, Copy)]
pub struct Sequence {
    /// Batch index of its tensors.
    pub(crate) batch: usize,
    /// First query row and first key in the tensors.
    pub(crate) first_row: usize,
    pub(crate) first_key: usize,
    /// Query rows.
    pub q_len: usize,
    /// Keys.
    pub kv_len: usize,
    /// Position of row 0 among the keys.
    pub offset: isize,
}

impl Call<'_> {
    /// Query heads that share one key/value head.
    #[inline]
    pub fn sharing(&self) -> usize {
        self.q.shape()[1] / self.kv.kv_heads().max(1)
    }

    /// Whether keys, and whether values, are multiplied in pairs, by the machine's own instruction if it `has` that.
    #[inline]
    pub fn native(&self, has: impl FnOnce() -> bool) -> [bool; 2] {
        let native = self.precision == Precision::Native && has();
        self.kv.dtypes().map(|dtype| native && dtype == Some(Dtype::Bf16))
    }

    /// Sequences in the call.
    pub fn sequences(&self) -> usize {
        match self.options.ragged {
            Some(ragged) => ragged.q.len().saturating_sub(1),
            None => self.q.shape()[0],
        }
    }

    /// Lengths of the longest sequence: what bias, masks and score outputs are as large as.
    pub fn longest(&self) -> (usize, usize) {
        match self.options.ragged {
            Some(ragged) => {
                let longest = |ends: &[usize]| ends.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
                (longest(ragged.q), longest(ragged.k))
            }
            None => (self.q.shape()[2], self.kv.k_shape()[2]),
        }
    }

    /// The rows of k and v that belong to sequence `index`, whether its length makes use of them or not.
    #[inline]
    pub(crate) fn keys_of(&self, index: usize) -> Range<usize> {
        self.options.ragged.map_or(0..self.kv.k_shape()[2], |ragged| ragged.k[index]..ragged.k[index + 1])
    }

    /// The lengths of sequence `index`.
    #[inline]
    pub fn sequence(&self, index: usize) -> Sequence {
        let (batch, rows) = match self.options.ragged {
            Some(ragged) => (0, ragged.q[index]..ragged.q[index + 1]),
            None => (index, 0..self.q.shape()[2]),
        };
        // Where lengths are given nobody looks for the longest: this is asked for every task.
        let kv_len = match self.options.kv_lens.or_else(|| self.kv.lens()) {
            Some(lens) => lens[index],
            None => self.keys_of(index).len(),
        };
        let first_key = self.options.ragged.map_or(0, |ragged| ragged.k[index]);
        let offset = self.alignment.offset(rows.len(), kv_len);
        Sequence { batch, first_row: rows.start, first_key, q_len: rows.len(), kv_len, offset }
    }

    /// The one place that says which shapes fit together. Everything unsafe below relies on it.
    fn assert_consistent(&self, out: &Outputs<'_>) {
        let [b, h, lq, d] = self.q.shape();
        let ([kb, hkv, lk, kd], [vb, vh, lv, dv]) = (self.kv.k_shape(), self.kv.v_shape());
        assert!(d > 0 && dv > 0, "queries and values need a length");
        assert!((kb, kd) == (b, d) && (vb, vh, lv) == (b, hkv, lk), "q, k and v do not fit together");
        assert!(if hkv == 0 { h == 0 } else { h % hkv == 0 }, "query heads are no multiple of key/value heads");
        match &out.out {
            Some(out) => assert!(out.shape() == [b, h, lq, dv], "the output does not fit q and v"),
            None => {
                let alone = out.points.iter().all(Option::is_none) && out.key_mass.is_none() && out.lse.is_none();
                assert!(out.state.is_some() && alone, "without an output there can be a state and nothing else");
            }
        }
        assert!(out.lse.as_ref().is_none_or(|lse| lse.shape() == [b, h, lq, 1]), "the LSE does not fit q");
        if let Some(ragged) = self.options.ragged {
            let cumulative = |ends: &[usize], total: usize| {
                ends.first() == Some(&0) && ends.last() == Some(&total) && ends.is_sorted()
            };
            assert!(self.kv.tensors().is_some(), "ragged keys are two tensors");
            assert!(b == 1 && ragged.q.len() == ragged.k.len(), "ragged sequences do not fit a batch");
            assert!(cumulative(ragged.q, lq) && cumulative(ragged.k, lk), "cumulative lengths do not fit q and k");
        }
        let (n, (rows, keys)) = (self.sequences(), self.longest());
        assert!(self.kv.lens().is_none() || self.options.kv_lens.is_none(), "key lengths twice");
        if let Some(lens) = self.options.kv_lens {
            assert!(lens.len() == n, "key lengths do not fit the batch");
            assert!(
                lens.iter().enumerate().all(|(i, &len)| len <= self.keys_of(i).len()),
                "a key length is beyond its tensor"
            );
        }
        for shape in
            [self.options.bias.map(|v| v.shape()), self.options.mask.map(|m| m.view().shape())].into_iter().flatten()
        {
            assert!(shape[..3] == [n, h, rows], "a bias or mask does not fit");
        }
        for per_head in [self.options.alibi, self.options.sinks].into_iter().flatten() {
            assert!(per_head.len() == h, "slopes or sinks do not fit the heads");
        }
        for view in out.points.iter().flatten() {
            assert!(view.shape() == [n, h, rows, keys], "a score output does not fit");
        }
        if let Some(state) = &out.state {
            let shapes = [state.max.shape(), state.sum.shape(), state.out.shape()];
            assert!(shapes == [[b, h, lq, 1], [b, h, lq, 1], [b, h, lq, dv]], "a state does not fit q and v");
        }
        if let Some(mass) = &out.key_mass {
            assert!(mass.shape() == [b, hkv, lk, 1], "the key mass does not fit k");
        }
    }
}

/// A run of query rows of one sequence and key/value head. Row `r` is query row `r % q_len` of the head's
/// `r / q_len`-th query head.
#[derive(Debug, Clone)]
pub(crate) struct Task {
    pub(crate) index: usize,
    pub(crate) kv_head: usize,
    pub(crate) rows: Range<usize>,
}

/// A call, its outputs and a geometry: a queue of tasks that workers empty together.
pub struct Launch<'a> {
    call: Call<'a>,
    outputs: Shared<'a>,
    geometry: Geometry,
    rows: Queue,
    /// Sequences and key/value heads whose key mass is asked for.
    mass: Queue,
    /// If blocks of keys are shared out too.
    split: Option<Split<'a>>,
    /// Whether all memory is near.
    near: bool,
}

/// Bytes of queries, keys, values and outputs together that a second-level cache holds, so that a caller's own are there: they have
/// just been written. Asking for them ahead would take 8 % of the time; where they are not there after all, only hints are lost.
/// Under Miri none, so that short tests go through what asks.
const NEAR: usize = if cfg!(miri) { 0 } else { 256 << 10 };

/// Whether a call is so small. A cache, or pages, may have been written long ago.
fn is_near(call: &Call<'_>, outputs: &Outputs<'_>) -> bool {
    let Some([k, v]) = call.kv.tensors() else { return false };
    let size = |shape: [usize; 4], dtype: Dtype| shape.into_iter().fold(dtype.bytes(), usize::saturating_mul);
    let read = [call.q, k, v].map(|x| size(x.shape(), x.dtype()));
    let written = outputs.out.as_ref().map_or(0, |out| size(out.shape(), out.dtype()));
    read.into_iter().fold(written, usize::saturating_add) <= NEAR
}

impl<'a> Launch<'a> {
    /// Binds a call to its outputs.
    ///
    /// # Panics
    /// If shapes do not fit together. `sdpa` reports such calls as errors before they come here.
    pub fn new(call: Call<'a>, outputs: Outputs<'a>, geometry: Geometry) -> Self {
        call.assert_consistent(&outputs);
        let [_, kv_heads, _, dv] = call.kv.v_shape();
        let fits =
            (geometry.head_dim, geometry.value_dim) == (call.q.shape()[3], dv) && geometry.holds(call.longest().1);
        assert!(fits, "the geometry is for other sizes");
        let (sequences, per_head) = (call.sequences(), rows_per_head(&call, geometry.task_rows));
        let heads = if call.options.ragged.is_some() { kv_heads } else { sequences * kv_heads };
        let massive = outputs.key_mass.as_ref().is_some_and(|mass| !mass.shape().contains(&0));
        let massive = if massive { sequences * kv_heads } else { 0 };
        Self {
            near: is_near(&call, &outputs),
            call,
            outputs: outputs.into_shared(),
            geometry,
            rows: Queue::new(if heads == 0 { 0 } else { heads * per_head }),
            mass: Queue::new(massive),
            split: None,
        }
    }

    /// Shares out blocks of keys, in about so many runs, where rows are few: `partials` is memory for what each gathers. If it
    /// cannot grow to that, rows are shared out as before.
    ///
    /// # Panics
    /// If the rows that share a head are more than a task's, sequences are ragged, or outputs need every row whole: scores or a
    /// state.
    #[must_use]
    pub fn split(self, partials: &'a mut Partials, runs: usize) -> Self {
        assert!(self.outputs.state.is_none() && !self.outputs.wants_all_keys(), "such outputs need every row whole");
        match Split::new(&self.call, &self.geometry, partials, runs) {
            Some(split) => Self { split: Some(split), rows: Queue::new(0), ..self },
            None => self,
        }
    }

    /// Takes tasks and runs them until none is left. Any number of workers may do this at once, each with its own
    /// scratch; when all have returned, all is done.
    pub fn work<A: ScoreMod, B: MaskMod, C: ProbMod>(&self, isa: Isa, scratch: &mut Scratch, mods: &Mods<A, B, C>) {
        assert!(self.split.is_none() || !C::ACTIVE, "a weight function needs every row whole");
        isa.dispatch(Work { launch: self, scratch, mods });
    }

    #[inline]
    fn task(&self, number: usize) -> Task {
        let per_head = rows_per_head(&self.call, self.geometry.task_rows);
        let kv_heads = self.call.kv.kv_heads();
        let (head, part) = (number / per_head, number % per_head);
        let (sharing, task_rows) = (self.call.sharing(), self.geometry.task_rows);
        let (index, kv_head, first) = match self.call.options.ragged {
            None => (head / kv_heads, head % kv_heads, part * task_rows),
            Some(ragged) => {
                // Sequence s owns parts s + ⌊rows before it / task_rows⌋ on: always enough of them, sometimes one more.
                let first_part = |s: usize| ragged.q[s] * sharing / task_rows + s;
                let (mut low, mut high) = (0, ragged.q.len() - 1);
                while high - low > 1 {
                    let middle = low.midpoint(high);
                    if first_part(middle) <= part { low = middle } else { high = middle }
                }
                (low, head, (part - first_part(low)) * task_rows)
            }
        };
        let rows = sharing * self.call.sequence(index).q_len;
        Task { index, kv_head, rows: first.min(rows)..rows.min(first + task_rows) }
    }
}

/// Tasks of one key/value head: of one sequence, or of all of them if they are ragged.
#[inline]
fn rows_per_head(call: &Call<'_>, task_rows: usize) -> usize {
    // Saturating: without batches or heads the rows may be any number.
    let rows = call.sharing().saturating_mul(call.q.shape()[2]);
    match call.options.ragged {
        None => rows.div_ceil(task_rows),
        Some(ragged) if ragged.q.len() > 1 => rows / task_rows + ragged.q.len() - 1,
        Some(_) => 0,
    }
}

struct Work<'w, 'a, A, B, C> {
    launch: &'w Launch<'a>,
    scratch: &'w mut Scratch,
    mods: &'w Mods<A, B, C>,
}

impl<A: ScoreMod, B: MaskMod, C: ProbMod> Visitor for Work<'_, '_, A, B, C> {
    type Output = ();

    fn visit<S: Steps>(self, s: S) {
        let Self { launch, scratch, mods } = self;
        let Launch { call, outputs, geometry, rows, mass, split, near } = launch;
        let fused = |task| tile::Fused::new(s, mods, call, outputs, task, geometry);
        if let Some(split) = split {
            // SAFETY: the call is consistent with its outputs, and the split is its own.
            unsafe {
                split::gather(split, call, fused, scratch);
                if split.is_gathered() {
                    split::fold(split, fused, scratch);
                }
            }
        }
        while let Some(number) = rows.take() {
            let next = if *near {
                Next::Near
            } else {
                rows.peek().map_or(Next::Nothing, |next| Next::Task(launch.task(next)))
            };
            let fused = fused(launch.task(number)).followed_by(next);
            // SAFETY: the call is consistent with its outputs; every number is taken once and no two tasks share a row,
            // so this worker owns the task's part of the outputs.
            unsafe { fused.run(scratch.regions(geometry)) }
        }
        let Some(key_mass) = &outputs.key_mass else { return };
        let kv_heads = call.kv.kv_heads();
        while let Some(number) = mass.take() {
            let (index, kv_head) = (number / kv_heads, number % kv_heads);
            let task = Task { index, kv_head, rows: 0..call.sharing() * call.sequence(index).q_len };
            let fused = tile::Fused::new(s, mods, call, &Shared::NOTHING, task, geometry);
            // SAFETY: as above, for the keys of one sequence and head, which no other number stands for.
            unsafe { fused.key_mass(key_mass, scratch.regions(geometry)) }
        }
    }
}

impl core::fmt::Debug for Launch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let written = POINTS.iter().filter(|&&point: &&Point| self.outputs.point(point).is_some());
        f.debug_struct("Launch")
            .field("call", &self.call)
            .field("geometry", &self.geometry)
            .field("tasks", &self.rows.len())
            .field("points", &written.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}
