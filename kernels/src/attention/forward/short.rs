//! Tasks of a few rows and at most one panel of keys, such as texts of a few tokens: computed in registers, without the
//! loop over key blocks: its preparations would take several times longer than the arithmetic.
//!
//! The sums are those of the loop, in the same order, so a row has the same bits. Whatever the loop does besides (options,
//! hidden keys, other element types, non-finite values) is left to it.

use crate::attention::blocks::task::{AttentionTask, BoundCall, Next, Row};
use crate::attention::call::options::Options;
use crate::attention::products::multiply::Arithmetic;
use crate::attention::scratch::Scratch;
use crate::attention::steps::short::{self, ShortRows};
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::simd::{LANES, Simd};
use crate::tensor::any::{Tensor, TensorMut};
use crate::tensor::rows::Rows;
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;

/// Tensors of a call with short tasks that are computed in registers: contiguous rows of floats, and no option but sinks.
#[derive(Clone, Copy)]
pub(crate) struct ShortCall<'t> {
    q: View<'t>,
    k: View<'t>,
    v: View<'t>,
    out: &'t ViewMut<'t>,
    /// True if every task of the call is short.
    pub(crate) all_short: bool,
}

impl<'t> ShortCall<'t> {
    /// Returns the tensors, if the call is such a one.
    pub(crate) fn of<S: Simd>(bound: BoundCall<'t, S>) -> Option<Self> {
        let (call, outputs, given) = (bound.checked.call(), bound.checked.outputs(), bound.mods.given());
        let Options {
            softcap: None,
            bias: None,
            alibi: None,
            mask: None,
            dropout: None,
            dropout_from: _,
            // Sinks are added here, too. What the others mean the task's sequence says.
            sinks: _,
            kv_lens: _,
            ragged: _,
            sources: _,
            row_positions: _,
            key_positions: _,
            period: _,
            selected: None,
            together: _,
        } = call.options
        else {
            return None;
        };
        let functions = given.score || given.mask || given.weight;
        let floats = bound.products.values == Arithmetic::Floats;
        if !floats || functions || call.visible.hides_keys() || outputs.wants_all_keys() || outputs.state.is_some() {
            return None;
        }
        let ([Tensor::F32(k), Tensor::F32(v)], Tensor::F32(q)) = (call.kv.tensors()?, call.q) else { return None };
        let Some(TensorMut::F32(out)) = &outputs.out else { return None };
        let contiguous = [q.strides(), k.strides(), v.strides(), out.strides()].iter().all(|strides| strides[3] == 1);
        let (rows, keys) = call.longest();
        let all_short = rows.saturating_mul(call.group_size()) <= MEMORY_BOUND_ROWS && keys <= LANES;
        (contiguous && v.shape()[3].is_multiple_of(LANES)).then_some(Self { q, k, v, out, all_short })
    }

    /// Computes the task's rows and writes them, if they are few and see at most a panel of keys. Returns false if that is
    /// for [`AttentionTask::run`] to do: nothing is written then, or what it will write anew.
    pub(crate) fn run<S: Simd>(&self, task: &AttentionTask<'_, S>, scratch: &mut Scratch) -> bool {
        let (n, keys) = (task.set.rows.len(), task.seq.kv_len);
        if !(1..=MEMORY_BOUND_ROWS).contains(&n) || !(1..=LANES).contains(&keys) {
            return false;
        }
        if let Next::Rows(next) = &task.next {
            self.prefetch(&task.peek(next));
        }
        let ([b, h, first], regions) = (task.index_of_key(0), &mut scratch.regions(task.tiling));
        let none = Row { n: 0, head: 0, i: 0, q_batch: 0, at: 0 };
        let (mut rows, mut queries, mut out) = (
            [none; MEMORY_BOUND_ROWS],
            [core::ptr::null(); MEMORY_BOUND_ROWS],
            [core::ptr::null_mut(); MEMORY_BOUND_ROWS],
        );
        let [q_step, out_step] = [self.q.strides()[2], self.out.strides()[2]];
        for (row, len) in task.stretches_inlined(0..n) {
            let ([b, h, l], at) = (row.index(), row.n..row.n + len);
            // SAFETY: the task's rows are inside q and the output, and rows have elements.
            let (query, to) = unsafe { (self.q.row(b, h, l).0, self.out.row(b, h, l).0) };
            let places = queries[at.clone()].iter_mut().zip(&mut out[at.clone()]).zip(&mut rows[at]);
            for (k, ((q, out), place)) in places.enumerate() {
                let [q_at, out_at] = [q_step, out_step].map(|step| k as isize * step);
                (*q, *out, *place) = (query.wrapping_offset(q_at), to.wrapping_offset(out_at), row.after(k));
            }
        }
        // SAFETY: the sequence has these keys and values, in tensors, and their rows have elements.
        let [k, v] = [self.k, self.v].map(|x| Rows::strided(unsafe { x.row(b, h, first).0 }, x.strides()[2], 1));
        let [head_dim, value_dim] = [task.tiling.head_dim, task.tiling.value_dim];
        // SAFETY: rows of the sizes given, as above; the output's are this worker's alone.
        unsafe {
            let mut short = ShortRows {
                queries: &queries[..n],
                rows: k,
                packed: regions.keys,
                keys,
                head_dim,
                scale: task.call.scale,
                values: v,
                value_dim,
                out: &out[..n],
            };
            task.s.vectorize(
                #[inline(always)]
                || {
                    short::attend(
                        task.s,
                        &mut short,
                        #[inline(always)]
                        |row, max, sum| task.end_row(rows[row], max, sum),
                    )
                },
            )
        }
    }

    /// Prefetches what the task reads and writes, if it is short.
    fn prefetch<S: Simd>(&self, task: &AttentionTask<'_, S>) {
        let (n, keys, [b, h, key]) = (task.set.rows.len(), task.seq.kv_len, task.index_of_key(0));
        if !(1..=MEMORY_BOUND_ROWS).contains(&n) || !(1..=LANES).contains(&keys) {
            return;
        }
        let fetch = |row: *const f32, dim: usize| {
            for line in (0..dim).step_by(LANES) {
                task.s.prefetch(row.wrapping_add(line));
            }
        };
        for row in task.rows(0..n) {
            // SAFETY: the task's rows are inside q and the output, and rows have elements. Addresses alone.
            let (q, out) =
                unsafe { (self.q.row(row.q_batch, row.head, row.at).0, self.out.row(row.q_batch, row.head, row.at).0) };
            fetch(q, task.tiling.head_dim);
            fetch(out, task.tiling.value_dim);
        }
        for key in key..key + keys {
            // SAFETY: the sequence has these keys and values, and their rows have elements. Addresses alone.
            let (k, v) = unsafe { (self.k.row(b, h, key).0, self.v.row(b, h, key).0) };
            fetch(k, task.tiling.head_dim);
            fetch(v, task.tiling.value_dim);
        }
    }
}
