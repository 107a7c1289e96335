//! A call bound to its outputs, handed out task by task.

use crate::geometry::{Geometry, Scratch};
use crate::isa::{Isa, Visitor};
use crate::steps::Steps;
use crate::tile;
use crate::view::{SharedMut, View, ViewMut};
use crate::visible::{Alignment, Visible};
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// The inputs and options of one attention call: shapes q `[B, H, Lq, D]`, k `[B, Hkv, Lk, D]`, v `[B, Hkv, Lk, Dv]`.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// Queries.
    pub q: View<'a>,
    /// Keys.
    pub k: View<'a>,
    /// Values.
    pub v: View<'a>,
    /// Factor of the dot products.
    pub scale: f32,
    /// Rules that come as ranges of keys.
    pub visible: Visible,
    /// Where the rows stand among the keys.
    pub alignment: Alignment,
}

/// Lengths of one sequence of the batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    /// Position of row 0 among the keys.
    pub(crate) offset: isize,
}

impl Call<'_> {
    /// Query heads that share one key/value head.
    pub(crate) fn sharing(&self) -> usize {
        self.q.shape()[1] / self.k.shape()[1].max(1)
    }

    pub(crate) fn sequence(&self, _batch: usize) -> Sequence {
        let (q_len, kv_len) = (self.q.shape()[2], self.k.shape()[2]);
        Sequence { q_len, kv_len, offset: self.alignment.offset(q_len, kv_len) }
    }

    /// The one place that says which shapes fit together. Everything unsafe below relies on it.
    fn assert_consistent(&self, out: [usize; 4], lse: Option<[usize; 4]>) {
        let ([b, h, lq, d], [kb, hkv, lk, kd], [vb, vh, lv, dv]) = (self.q.shape(), self.k.shape(), self.v.shape());
        assert!((kb, kd) == (b, d) && (vb, vh, lv) == (b, hkv, lk), "q, k and v do not fit together");
        assert!(if hkv == 0 { h == 0 } else { h % hkv == 0 }, "query heads are no multiple of key/value heads");
        assert!(out == [b, h, lq, dv], "the output does not fit q and v");
        assert!(lse.is_none_or(|shape| shape == [b, h, lq, 1]), "the LSE does not fit q");
    }
}

/// A run of query rows of one batch and key/value head. Row `r` is query row `r % q_len` of the head's `r / q_len`-th
/// query head.
#[derive(Debug, Clone)]
pub(crate) struct Task {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) rows: Range<usize>,
}

/// Where results go.
pub(crate) struct Outputs<'a> {
    pub(crate) out: SharedMut<'a, f32>,
    pub(crate) lse: Option<SharedMut<'a, f32>>,
}

/// A call, its outputs and a geometry: a queue of tasks that workers empty together.
pub struct Launch<'a> {
    call: Call<'a>,
    outputs: Outputs<'a>,
    geometry: Geometry,
    /// Tasks of one batch and key/value head.
    per_head: usize,
    tasks: usize,
    next: AtomicUsize,
}

impl<'a> Launch<'a> {
    /// Binds a call to its outputs: `[B, H, Lq, Dv]`, and `[B, H, Lq, 1]` for the log-sum-exp.
    ///
    /// # Panics
    /// If shapes do not fit together. `sdpa` reports such calls as errors before they come here.
    pub fn new(call: Call<'a>, out: ViewMut<'a>, lse: Option<ViewMut<'a>>, geometry: Geometry) -> Self {
        call.assert_consistent(out.shape(), lse.as_ref().map(ViewMut::shape));
        let [batch, _, q_len, d] = call.q.shape();
        let [_, kv_heads, _, dv] = call.v.shape();
        assert!((geometry.head_dim, geometry.value_dim) == (d, dv), "the geometry is for other dimensions");
        let per_head = (call.sharing() * q_len).div_ceil(geometry.task_rows);
        let outputs = Outputs { out: out.into_shared(), lse: lse.map(ViewMut::into_shared) };
        Self { call, outputs, geometry, per_head, tasks: batch * kv_heads * per_head, next: AtomicUsize::new(0) }
    }

    /// Tasks in all.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// Takes tasks and runs them until none is left. Any number of workers may do this at once, each with its own
    /// scratch.
    pub fn work(&self, isa: Isa, scratch: &mut Scratch) {
        struct Work<'a, 'b>(&'a Launch<'b>, &'a mut Scratch);
        impl Visitor for Work<'_, '_> {
            type Output = ();
            fn visit<S: Steps>(self, s: S) {
                let Work(launch, scratch) = self;
                while let Some(task) = launch.take() {
                    // SAFETY: the call is consistent, and no other worker is given these rows.
                    unsafe {
                        tile::run(
                            s,
                            &launch.call,
                            &launch.outputs,
                            task,
                            scratch.regions(&launch.geometry),
                            &launch.geometry,
                        )
                    }
                }
            }
        }
        isa.dispatch(Work(self, scratch));
    }

    /// The next task. Each is handed out once, and no two share a row: whoever has it owns its part of the outputs.
    fn take(&self) -> Option<Task> {
        // Relaxed: the counter orders nothing but itself; results are published by whatever joins the workers.
        let taken = self.next.fetch_add(1, Ordering::Relaxed);
        if taken >= self.tasks {
            // Step back, so that no number of calls can wrap the counter round.
            self.next.store(self.tasks, Ordering::Relaxed);
            return None;
        }
        // Last rows first: under a causal mask they see the most keys, and what is left for the end is short.
        let index = self.tasks - 1 - taken;
        let (head, part) = (index / self.per_head, index % self.per_head);
        let kv_heads = self.call.k.shape()[1];
        let rows = self.call.sharing() * self.call.q.shape()[2];
        let first = part * self.geometry.task_rows;
        Some(Task {
            batch: head / kv_heads,
            kv_head: head % kv_heads,
            rows: first..rows.min(first + self.geometry.task_rows),
        })
    }
}

impl core::fmt::Debug for Launch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Launch")
            .field("call", &self.call)
            .field("geometry", &self.geometry)
            .field("tasks", &self.tasks)
            .finish_non_exhaustive()
    }
}
