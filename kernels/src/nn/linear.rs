//! Linear layer f(x·Wᵀ + b) with weights packed once: the scores' register tiles, for many rows and for few, with rows of x
//! for queries and rows of W for keys.
//!
//! ```text
//! for each task: up to 96 rows of x, a run of panels
//!     for each 64 columns:           their panels stay in second-level cache while the rows pass by
//!         for each 6 rows: out = tile + b
//!         out = f(out)               while it is in cache
//! ```
//!
//! Weights that are packed in parts, too, are multiplied by a matrix unit: `linear_tiles.rs`.

use crate::matmul::dot_tile::{self, FAR, Later, Tile};
use crate::matmul::float_tile::Chains;
use crate::matmul::pack;
use crate::matmul::prefetch::MEMORY_BOUND_ROWS;
use crate::matmul::tile_rows::TileRows;
use crate::matmul::tile_shape::{MAX_TILE_ROWS, MAX_TILE_VECS};
use crate::nn::activation::{self, Activation};
use crate::nn::linear_tiles::{self, MAX_ROWS, PartedTask, PartedWeights};
use crate::simd::aligned::AlignedBuf;
use crate::simd::isa::Isa;
use crate::simd::terms::Columns;
use crate::simd::tiles::BLOCK;
use crate::simd::width::LINE_BYTES;
use crate::simd::{LANES, SECOND, Simd};
use crate::tensor::any::Typed;
use crate::tensor::element::Precision;
use crate::tensor::rows::Rows;
use crate::work_queue::Queue;
use core::marker::PhantomData;

/// Least number of panels of a task of many rows in parts: each task parts its rows, which takes the time of about five panels
/// (counted in instructions, not measured).
const PARTED_PANELS: usize = 16;

/// Matrix of weights, packed to be multiplied by rows: `[panel of 16 outputs][inputs][16]`, and a bias.
pub struct Packed {
    panels: AlignedBuf,
    /// Bias, one float per output, filled up with zeros to whole panels.
    bias: AlignedBuf,
    inputs: usize,
    outputs: usize,
    activation: Activation,
    /// The weights once more, as a matrix unit multiplies them.
    parts: Option<PartedWeights>,
}

impl Packed {
    /// Packs `outputs × inputs` weights, element `[o, i]` at `weights[o·strides.0 + i·strides.1]`, and a bias, which is
    /// 0 if there is none.
    ///
    /// # Panics
    /// If a slice is too short, `inputs` is 0, or the sizes do not fit the address space.
    pub fn new(weights: &[f32], [outputs, inputs]: [usize; 2], strides: (usize, usize), bias: Option<&[f32]>) -> Self {
        let last = |n: usize, stride: usize| n.saturating_sub(1).checked_mul(stride);
        let reach = last(outputs, strides.0).zip(last(inputs, strides.1)).and_then(|(a, b)| a.checked_add(b));
        let fits = outputs == 0 || reach.is_some_and(|reach| reach < weights.len());
        assert!(
            inputs > 0 && fits && strides.0.max(strides.1) <= isize::MAX as usize,
            "weights do not fit their shape"
        );
        let padded = outputs.checked_next_multiple_of(LANES).expect("a size that fits the address space");
        let size = padded.checked_mul(inputs).expect("a size that fits the address space");
        let zeros = |floats| AlignedBuf::try_new(floats).expect("memory for the weights");
        let (mut panels, mut offsets) = (zeros(size), zeros(padded));
        if let Some(bias) = bias {
            offsets.floats_mut()[..outputs].copy_from_slice(&bias[..outputs]);
        }
        let rows = Rows::strided(weights.as_ptr(), strides.0 as isize, strides.1 as isize);
        // SAFETY: `rows` has `outputs` rows of `inputs` elements, as was asserted.
        dispatch!(Isa::detect(), |s| unsafe {
            pack::pack_keys(s, Typed::F32(rows), [outputs; 2], inputs, panels.floats_mut());
        });
        Self { panels, bias: offsets, inputs, outputs, activation: Activation::Identity, parts: None }
    }

    /// Returns the weights with an activation function of the results.
    #[must_use]
    pub fn then(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// Returns the weights with a precision of their products. [`Precision::Accurate`] packs them once more, in parts, if this machine
    /// has a matrix unit: 6 bytes a weight besides the 4 that other instruction sets read. Other precisions are all exact.
    ///
    /// # Panics
    /// If there is no memory for the parts.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        let by_unit = precision == Precision::Accurate && Isa::detect().matrix_unit().is_ok();
        let sizes = [self.panels(), self.inputs];
        let parts = by_unit.then(|| PartedWeights::of_panels(self.panels.floats(), sizes));
        Self { parts, ..self }
    }

    /// Returns the activation function of the results.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// Returns the length of an input row.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Returns the length of an output row.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Returns the number of bytes held.
    pub fn bytes(&self) -> usize {
        self.panels.bytes() + self.bias.bytes() + self.parts.as_ref().map_or(0, PartedWeights::bytes)
    }

    /// Returns the cost of multiplying this many rows, in floating-point operations. Few rows wait for the weights: a
    /// float from memory takes as long as 16 operations (30 GB/s against 117 GFLOP/s a core).
    pub fn cost(&self, rows: usize) -> f64 {
        (2.0 * rows as f64).max(16.0) * self.inputs as f64 * self.outputs as f64
    }

    fn panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }
}

impl core::fmt::Debug for Packed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Packed").field("outputs", &self.outputs).field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

/// Product of rows with packed weights: a queue of tasks that workers empty together.
pub struct Product<'a> {
    x: &'a [f32],
    weights: &'a Packed,
    out: *mut f32,
    rows: usize,
    task_rows: usize,
    task_panels: usize,
    tasks: Queue,
    _out: PhantomData<&'a mut [f32]>,
}

// SAFETY: workers write through `out` to disjoint parts of a slice that this borrows exclusively: every task is taken
// once, and no two tasks share both a row and a column.
unsafe impl Sync for Product<'_> {}
// SAFETY: writes are disjoint as for `Sync`, and a pointer to floats may be sent to another thread.
unsafe impl Send for Product<'_> {}

impl<'a> Product<'a> {
    /// Prepares `out ← x·Wᵀ + b`: rows of [`Packed::inputs`] to rows of [`Packed::outputs`], split into tasks for this
    /// many workers.
    ///
    /// # Panics
    /// If the rows of `x` are not whole, or `out` does not have the same number of rows.
    pub fn new(x: &'a [f32], weights: &'a Packed, out: &'a mut [f32], workers: usize) -> Self {
        let rows = x.len() / weights.inputs;
        let fits = rows * weights.inputs == x.len() && rows.checked_mul(weights.outputs) == Some(out.len());
        assert!(fits, "rows do not fit the weights");
        // Four tasks a worker, so that the last to finish does not keep the others waiting long; columns are split only
        // where there are not rows enough.
        let wanted = if workers > 1 { workers.saturating_mul(4) } else { 1 };
        let by_rows = rows.div_ceil(MAX_ROWS).max(wanted.min(rows / MAX_ROWS)).max(1);
        // Whole tiles, whatever the backend: 12 is a multiple of 6 and of 2.
        let task_rows = rows.div_ceil(by_rows).max(1).next_multiple_of(12).min(MAX_ROWS);
        let by_columns = wanted.div_ceil(by_rows);
        let least = if weights.parts.is_some() && rows > BLOCK { PARTED_PANELS } else { 4 };
        let task_panels = weights.panels().div_ceil(by_columns).next_multiple_of(least).max(1);
        let tasks = rows.div_ceil(task_rows) * weights.panels().div_ceil(task_panels);
        let out = out.as_mut_ptr();
        Self { x, weights, out, rows, task_rows, task_panels, tasks: Queue::new(tasks), _out: PhantomData }
    }

    /// Takes tasks and runs them until none is left. Any number of workers may do this at once.
    pub fn work(&self, isa: Isa) {
        dispatch!(isa, |s| while let Some(task) = self.tasks.take() {
            self.task(s, task);
        });
    }

    fn task<S: Simd>(&self, s: S, number: usize) {
        let Self { x, weights, rows, task_rows, task_panels, .. } = *self;
        let blocks = rows.div_ceil(task_rows);
        let (first, panel) = (number % blocks * task_rows, number / blocks * task_panels);
        let here = task_rows.min(rows - first);
        let range = panel..weights.panels().min(panel + task_panels);
        // SAFETY: row `first` of `out`, which has `outputs` columns, exists.
        let out = unsafe { self.out.add(first * weights.outputs) };
        if let Some(parts) = weights.parts.as_ref().filter(|_| const { S::MAY_HAVE_UNIT } && s.has_matrix_unit()) {
            let &Packed { inputs, outputs, activation, ref bias, .. } = weights;
            let (x, bias) = (&x[first * inputs..][..here * inputs], bias.floats());
            // SAFETY: rows `first..` and the columns of these panels are this task's part of `out`.
            unsafe {
                linear_tiles::product(s, &PartedTask { x, weights: parts, bias, activation, range, out, outputs })
            }
            return;
        }
        let mut pointers = [core::ptr::null(); MAX_ROWS];
        for (row, pointer) in x.chunks_exact(weights.inputs).skip(first).zip(&mut pointers[..here]) {
            *pointer = row.as_ptr();
        }
        // SAFETY: the rows are `inputs` floats each; rows `first..` and the columns of these panels are this task's part of `out`.
        unsafe { product(s, ProductTile { rows: &pointers[..here], weights, range, out }) }
    }
}

impl core::fmt::Debug for Product<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Product")
            .field("rows", &self.rows)
            .field("weights", &self.weights)
            .field("tasks", &self.tasks.len())
            .finish_non_exhaustive()
    }
}

/// Operands of one task: a few rows against a run of panels.
pub(crate) struct ProductTile<'a> {
    rows: &'a [*const f32],
    weights: &'a Packed,
    /// Range of panels to multiply by.
    range: core::ops::Range<usize>,
    /// Results of the first row, `outputs` floats apart from the next row's.
    out: *mut f32,
}

/// Computes one task: a few rows times a run of panels.
///
/// # Safety
/// Every row is readable for `inputs` floats; `out` has a row of `outputs` floats for each; the floats of the panels in `range`
/// are this caller's to write.
pub(crate) unsafe fn product<S: Simd>(s: S, a: ProductTile<'_>) {
    const { assert!(S::TILE_ROWS <= MAX_TILE_ROWS && S::TILE_VECS <= MAX_TILE_VECS) };
    assert!(a.range.end <= a.weights.panels());
    let mut panel = a.range.start;
    while panel < a.range.end {
        let vecs = S::TILE_VECS.min(a.range.end - panel);
        by_tile_vecs!(vecs, most S::TILE_VECS, |NV| s.vectorize(
            #[inline(always)]
            // SAFETY: panels `panel..panel + NV` are in `a.range`; the caller guarantees rows and outputs.
            || unsafe { columns::<S, NV>(s, &a, panel) }
        ));
        panel += vecs;
    }
}

/// Memory for the largest tile, which begins at a cache line.
#[repr(C, align(64))]
struct LargestTile([[f32; MAX_TILE_VECS * LANES]; MAX_TILE_ROWS]);

/// Computes the columns of `NV` panels from `panel` on.
///
/// # Safety
/// Same contract as [`product`], after its assertions; the panels are some of `a.range`.
#[inline(always)]
unsafe fn columns<S: Simd, const NV: usize>(s: S, a: &ProductTile<'_>, panel: usize) {
    let ProductTile { rows, weights: &Packed { outputs, activation, .. }, ref range, out } = *a;
    debug_assert!(range.start <= panel && panel + NV <= range.end, "panels outside the task");
    let (column, columns) = (panel * LANES, outputs.min((panel + NV) * LANES) - panel * LANES);
    let partial = columns < NV * LANES;
    // A tile that ends inside a vector is written here first.
    let mut whole = LargestTile([[0.0; MAX_TILE_VECS * LANES]; MAX_TILE_ROWS]);
    let kept = TileRows::over(&mut whole.0);
    for row in (0..rows.len()).step_by(S::TILE_ROWS) {
        let tile_rows = S::TILE_ROWS.min(rows.len() - row);
        // SAFETY: row `row` of `out` exists, as the caller guarantees.
        let there = unsafe { out.add(row * outputs + column) };
        let to = if partial { kept } else { TileRows { out: there, stride: outputs } };
        // SAFETY: the rows and panels are some of `a`'s; `to` has room for a tile, and in `out` its columns are the caller's.
        by_tile_rows!(tile_rows, most S::TILE_ROWS, |MR| unsafe {
            tile::<S, MR, NV>(s, a, [row, panel], kept, to)
        });
        if partial {
            for r in 0..tile_rows {
                // SAFETY: `columns` floats of a row of `out`, which are the caller's to write, and of the tile.
                unsafe { there.add(r * outputs).copy_from_nonoverlapping(kept.at::<S>(r, 0), columns) };
            }
        }
    }
    // SAFETY: the columns just written, which are the caller's.
    unsafe {
        let tile = activation::Matrix { first: out.add(column), stride: outputs, rows: rows.len(), cols: columns };
        activation::activate(s, activation, tile);
    }
}

/// Computes a tile of `MR` rows and `NV` panels: as scores of many rows are, or of few, which prefetch.
///
/// # Safety
/// Same contract as [`columns`], for these rows; `to` and `kept`, where sums are until the last, have `MR` rows of `NV` vectors of
/// writable floats.
#[inline(always)]
unsafe fn tile<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    a: &ProductTile<'_>,
    [row, panel]: [usize; 2],
    kept: TileRows,
    to: TileRows,
) {
    let inputs = a.weights.inputs;
    // SAFETY: the panels are some of the weights', which are packed with a bias in whole panels; the caller guarantees rows and `to`.
    unsafe {
        let (rows, bias) = (a.rows.as_ptr().add(row), a.weights.bias.floats().as_ptr().add(panel * LANES));
        let panels = a.weights.panels.floats().as_ptr().add(panel * inputs * LANES);
        if a.rows.len() > MEMORY_BOUND_ROWS {
            let columns = Columns { first: panels, step: LANES as isize, apart: inputs * LANES };
            let rows = rows.cast::<[*const f32; MR]>().read();
            let sums: [[S::V; NV]; MR] = Chains::new::<S>(inputs).dot_products(s, &rows, columns, kept, || ());
            to.store_as(
                s,
                &sums,
                #[inline(always)]
                |n, total| s.add(total, s.load(bias.add(n * LANES))),
            );
            return;
        }
        // Panels are read side by side.
        let at = panels.wrapping_byte_add(FAR / NV).cast();
        let later = Later { at, step: LINE_BYTES, panel: inputs * LINE_BYTES };
        let TileRows { out, stride } = to;
        dot_tile::tile::<S, f32, MR, NV, SECOND>(
            s,
            Tile { rows, panels, depth: inputs, out, stride, later: Some(later) },
            #[inline(always)]
            |n, total| s.add(total, s.load(bias.add(n * LANES))),
        );
    }
}
