//! What a careful user writes on a linear algebra crate: per head sgemm, softmax, sgemm.
//!
//! Row blocks, so that scores stay in cache and a causal block multiplies only the keys that some of its rows see; for one
//! row against many keys the query heads that share a key/value head make one small matrix. The softmax is rten-vecmath's,
//! which is vectorised and picks its instruction set at run time. Tasks are rayon's, one multiplication runs on one
//! thread.

use crate::case::Case;
use crate::failure::Result;
use crate::peer::Peer;
use crate::rounded::Qkv;
use rayon::prelude::*;
use rten_simd::{SimdOp, SimdUnaryOp};
use rten_vecmath::{Softmax, Tanh};
use std::cell::RefCell;
use std::ops::Range;

/// Rows of a block. Of 64, 128, 256 and 512, this was the fastest or within noise of it on every workload.
const BLOCK: usize = 128;

thread_local! {
    /// The scores of a block.
    static SCORES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// A matrix `[rows, columns]` with the distances between its rows and between its columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strided<'a> {
    data: &'a [f32],
    strides: (usize, usize),
}

/// c ← alpha · a b, with a `[m, k]` and c `[m, n]` dense.
pub(super) trait Sgemm: Sync {
    const NAME: &'static str;

    fn sgemm(&self, shape: [usize; 3], alpha: f32, a: &[f32], b: Strided<'_>, c: &mut [f32]);
}

/// A multiplication, and what is prepared for it.
#[derive(Debug)]
pub(super) struct ByHand<G> {
    gemm: G,
    ready: Option<(Case, Qkv, Vec<f32>)>,
}

impl<G> ByHand<G> {
    pub(super) fn new(gemm: G) -> Self {
        Self { gemm, ready: None }
    }
}

/// Some rows of one head, and where their output goes.
struct Task<'a> {
    head: usize,
    rows: Range<usize>,
    out: &'a mut [f32],
}

impl<G: Sgemm> ByHand<G> {
    fn task(&self, case: &Case, qkv: &Qkv, task: Task<'_>, scores: &mut Vec<f32>) {
        let Case { kv_len, head_dim, value_dim, .. } = *case;
        let [heads, rows] = heads_and_rows(case);
        let kv = task.head / (heads / case.kv_heads);
        // The keys that some row of the block sees.
        let (first, last) = (case.keys(task.rows.start), case.keys(task.rows.end - 1));
        let keys = first.start..last.end;
        let (m, n) = (task.rows.len(), keys.len());
        let q = &qkv.q[(task.head * rows + task.rows.start) * head_dim..][..m * head_dim];
        let k = &qkv.k[(kv * kv_len + keys.start) * head_dim..][..n * head_dim];
        let v = &qkv.v[(kv * kv_len + keys.start) * value_dim..][..n * value_dim];
        if scores.len() < m * n {
            scores.resize(m * n, 0.0);
        }
        let scores = &mut scores[..m * n];
        let scale = case.scale() / case.softcap.unwrap_or(1.0);
        self.gemm.sgemm([m, head_dim, n], scale, q, Strided { data: k, strides: (1, head_dim) }, scores);
        for (row, i) in scores.chunks_exact_mut(n).zip(task.rows) {
            if let Some(cap) = case.softcap {
                Tanh {}.map_mut(row);
                row.iter_mut().for_each(|x| *x *= cap);
            }
            let seen = case.keys(i);
            row[..seen.start - keys.start].fill(f32::NEG_INFINITY);
            row[seen.end - keys.start..].fill(f32::NEG_INFINITY);
            Softmax::new_mut(row).dispatch();
        }
        self.gemm.sgemm([m, n, value_dim], 1.0, scores, Strided { data: v, strides: (value_dim, 1) }, task.out);
    }
}

/// Matrices to multiply with one key/value head each. Where every head has one row, those that share keys make a matrix.
fn heads_and_rows(case: &Case) -> [usize; 2] {
    if case.q_len == 1 { [case.kv_heads, case.group()] } else { [case.heads, case.q_len] }
}

impl<G: Sgemm> Peer<Case> for ByHand<G> {
    fn name(&self) -> &'static str {
        G::NAME
    }

    fn supports(&self, _: &Case) -> std::result::Result<(), String> {
        Ok(())
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        let out = vec![0.0; case.batch * case.heads * case.q_len * case.value_dim];
        // Heads count through the batch from here on.
        let flat =
            Case { batch: 1, heads: case.batch * case.heads, kv_heads: case.batch * case.kv_heads, ..case.clone() };
        self.ready = Some((flat, case.read()?, out));
        Ok(format!("by hand: sgemm of {}, softmax of rten-vecmath, sgemm", G::NAME))
    }

    fn run(&mut self) -> Result<()> {
        let (case, qkv, mut out) = self.ready.take().ok_or("not prepared")?;
        let [_, rows] = heads_and_rows(&case);
        let heads = out.chunks_mut(rows * case.value_dim).enumerate();
        let tasks = heads.flat_map(|(head, out)| {
            let blocks = out.chunks_mut(BLOCK * case.value_dim).enumerate();
            blocks.map(move |(n, out)| Task { head, rows: n * BLOCK..rows.min((n + 1) * BLOCK), out })
        });
        let run = |task| SCORES.with_borrow_mut(|scores| self.task(&case, &qkv, task, scores));
        if case.threads == 1 {
            tasks.for_each(run);
        } else {
            tasks.collect::<Vec<_>>().into_par_iter().with_max_len(1).for_each(run);
        }
        self.ready = Some((case, qkv, out));
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.ready.as_ref().ok_or("not prepared")?.2.clone())
    }
}

/// The crate gemm, on which candle and burn are built too.
#[cfg(feature = "gemm")]
#[derive(Debug)]
pub(super) struct Gemm;

#[cfg(feature = "gemm")]
impl Sgemm for Gemm {
    const NAME: &'static str = "gemm";

    fn sgemm(&self, [m, k, n]: [usize; 3], alpha: f32, a: &[f32], b: Strided<'_>, c: &mut [f32]) {
        assert!(a.len() >= m * k && c.len() >= m * n);
        assert!(k == 0 || n == 0 || b.data.len() > (k - 1) * b.strides.0 + (n - 1) * b.strides.1);
        let [k_stride, n_stride, b_rows, b_columns] = [k, n, b.strides.0, b.strides.1].map(|x| x as isize);
        // SAFETY: every element of the three matrices lies in its slice, as asserted; c is borrowed mutably, so it
        // overlaps with neither of the others. It is not read: `read_dst` is false.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                c.as_mut_ptr(),
                1,
                n_stride,
                false,
                a.as_ptr(),
                1,
                k_stride,
                b.data.as_ptr(),
                b_columns,
                b_rows,
                0.0,
                alpha,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

/// The crate faer.
#[cfg(feature = "faer")]
#[derive(Debug)]
pub(super) struct Faer;

#[cfg(feature = "faer")]
impl Sgemm for Faer {
    const NAME: &'static str = "faer";

    fn sgemm(&self, [m, k, n]: [usize; 3], alpha: f32, a: &[f32], b: Strided<'_>, c: &mut [f32]) {
        use faer::{Accum, MatMut, MatRef, Par, linalg::matmul::matmul};
        let b = match b.strides {
            (rows, 1) => MatRef::from_row_major_slice_with_stride(b.data, k, n, rows),
            (_, columns) => MatRef::from_column_major_slice_with_stride(b.data, k, n, columns),
        };
        let a = MatRef::from_row_major_slice(a, m, k);
        matmul(MatMut::from_row_major_slice_mut(c, m, n), Accum::Replace, a, b, alpha, Par::Seq);
    }
}
