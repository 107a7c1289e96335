//! Linear layers on a matrix unit: rows of x and weights in bfloat16 parts (`matmul/bf16_parts.rs`), as queries and keys are.
//!
//! ```text
//! for each 128 inputs: part the rows of x
//!     for each 32 columns:                 their weights are read once a task
//!         for each 32 rows: out = out + block
//! out = f(out + b)
//! ```
//!
//! A sum takes the steps of the unit in order of the inputs, so its bits depend on nothing else.

use crate::matmul::bf16_parts::{self, KeyRows, MAX_PARTS, PartPairs};
use crate::nn::activation::{self, Activation};
use crate::simd::aligned::AlignedBuf;
use crate::simd::isa::Isa;
use crate::simd::tiles::{BLOCK, Product, Start, TILE, TileBlock, Tiles};
use crate::simd::unit::{self, UnitTiles};
use crate::simd::width::LINE_BYTES;
use crate::simd::{Bf16x2, LANES, Simd};
use crate::tensor::any::Typed;
use crate::tensor::element::Bf16;
use crate::tensor::rows::Rows;
use core::ops::Range;

/// Largest number of rows of a task. 96 rows of 768 floats are 295 KB: with 64 columns of weights, 196 KB, inside the
/// second-level cache. The weights are read once a task, so with fewer rows the time of reading memory would show.
pub(crate) const MAX_ROWS: usize = 96;
/// Number of inputs that are parted at once. Parts of 32 rows, 25 KB, fit the first-level cache; those of all rows take 74 KB of the
/// stack.
const DEPTH: usize = 128;

const _: () = assert!(DEPTH.is_multiple_of(2 * TILE), "pieces of rows are whole steps");

/// Weights in three parts: `[panel of 16 outputs][part][pair of inputs][16]`, whole steps of the unit.
pub(crate) struct PartedWeights {
    parts: AlignedBuf,
    panels: usize,
    inputs: usize,
}

impl PartedWeights {
    /// Parts the weights of some panels, `[panel][inputs][16]`.
    ///
    /// # Panics
    /// If there are fewer panels, or the parts do not fit in memory.
    pub(crate) fn of_panels(weights: &[f32], [panels, inputs]: [usize; 2]) -> Self {
        assert!(weights.len() / LANES / inputs >= panels, "weights do not fit their shape");
        let floats = panels.checked_mul(LANES * bf16_parts::floats(inputs, MAX_PARTS));
        let floats = floats.expect("a size that fits the address space");
        let mut parts = AlignedBuf::try_new(floats).expect("memory for the weights");
        let rows = Typed::F32(Rows::strided(weights.as_ptr(), (inputs * LANES) as isize, 1));
        let keys = KeyRows::Panels { panels: rows, n: panels * LANES };
        // SAFETY: `weights` has `panels` panels of `inputs` vectors, as was asserted.
        dispatch!(Isa::detect(), |s| unsafe {
            bf16_parts::pack_keys(s, keys, inputs, MAX_PARTS, parts.elements_mut::<Bf16x2>());
        });
        Self { parts, panels, inputs }
    }

    /// Returns the number of bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.bytes()
    }

    /// Returns the number of pairs from each part of a panel to the next, and from each panel to the next.
    fn apart(&self) -> [usize; 2] {
        let part = LANES * bf16_parts::pairs(self.inputs);
        [part, MAX_PARTS * part]
    }
}

/// Operands of one task: some rows, at most [`MAX_ROWS`], and a run of panels.
pub(crate) struct PartedTask<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weights: &'a PartedWeights,
    /// Bias of all panels.
    pub(crate) bias: &'a [f32],
    pub(crate) activation: Activation,
    /// Range of panels to multiply by.
    pub(crate) range: Range<usize>,
    /// Results of the first row, `outputs` floats apart from the next row's.
    pub(crate) out: *mut f32,
    pub(crate) outputs: usize,
}

/// Parts of rows of x, which begin at a cache line.
#[repr(C, align(64))]
struct PartedRows([[Bf16; MAX_PARTS * DEPTH]; MAX_ROWS]);

/// Sums of the last panel if it is not whole.
type LastPanel = [[f32; LANES]; MAX_ROWS];

/// Computes one task. It is a call of its own: the parts are not on the stack of products that have none.
///
/// # Safety
/// `out` has a row of `outputs` floats for each row of `x`; the floats of the panels in `range` are this caller's to write.
#[inline(never)]
pub(crate) unsafe fn product<S: Simd>(s: S, a: &PartedTask<'_>) {
    let (inputs, panels) = (a.weights.inputs, a.weights.panels);
    assert!(a.x.len() / inputs <= MAX_ROWS && a.outputs.div_ceil(LANES) == panels && a.range.end <= panels);
    assert!(a.bias.len() >= panels * LANES);
    let (mut parted, mut last) = (PartedRows([[Bf16(0); MAX_PARTS * DEPTH]; MAX_ROWS]), [[0.0; LANES]; MAX_ROWS]);
    {
        let mut tiles = unit::tiles(s);
        for first in (0..inputs).step_by(DEPTH) {
            let here = first..inputs.min(first + DEPTH);
            for (row, parted) in a.x.chunks_exact(inputs).zip(&mut parted.0) {
                // Whole vectors.
                let mut piece = [0.0; DEPTH];
                piece[..here.len()].copy_from_slice(&row[here.clone()]);
                bf16_parts::store_query(s, &piece[..here.len().next_multiple_of(LANES)], MAX_PARTS, parted);
            }
            // SAFETY: the rows were parted; same contract.
            unsafe { add_products(s, &mut tiles, a, here, &parted, &mut last) }
        }
    }
    s.vectorize(
        #[inline(always)]
        // SAFETY: same contract; all sums have been written.
        || unsafe { finish(s, a, &mut last) },
    );
}

/// Adds the products of some inputs, a multiple of [`DEPTH`] from the first on, to the sums; the first ones begin them.
///
/// # Safety
/// Same contract as [`product`], after its assertions; the rows of `x` were parted.
unsafe fn add_products<S: Simd>(
    s: S,
    tiles: &mut UnitTiles,
    a: &PartedTask<'_>,
    inputs: Range<usize>,
    parted: &PartedRows,
    last: &mut LastPanel,
) {
    let (rows, whole, [part, panel_pairs]) = (a.x.len() / a.weights.inputs, a.outputs / LANES, a.weights.apart());
    let [of_rows, of_weights] = [DEPTH * size_of::<Bf16>(), part * size_of::<Bf16x2>()].map(bf16_parts::evenly);
    let pairs = PartPairs::of(&of_rows, &of_weights);
    let weights: &[Bf16x2] = a.weights.parts.elements();
    let mut panel = a.range.start;
    while panel < a.range.end {
        let columns = if panel + 2 <= a.range.end.min(whole) { 2 } else { 1 };
        let b = |n: usize| weights[(panel + n) * panel_pairs + inputs.start / 2 * LANES..].as_ptr().cast();
        for row in (0..rows).step_by(BLOCK) {
            let (c, stride) = if panel < whole {
                // SAFETY: row `row` of `out` exists, as the caller guarantees.
                (unsafe { a.out.add(row * a.outputs + panel * LANES) }, a.outputs)
            } else {
                (last[row..].as_flattened_mut().as_mut_ptr(), LANES)
            };
            let block = TileBlock {
                rows: BLOCK.min(rows - row),
                pairs: pairs.as_slice(),
                a: parted.0[row..].as_ptr().cast(),
                a_stride: size_of_val(&parted.0[row]),
                b: [Some(b(0)), (columns == 2).then(|| b(1))],
                b_stride: LINE_BYTES,
                steps: bf16_parts::pairs(inputs.len()) / TILE,
                start: if inputs.start == 0 { Start::Zero } else { Start::There },
                c: c.cast(),
                c_stride: stride * size_of::<f32>(),
            };
            // SAFETY: `tiles` are this thread's only ones. Rows and weights are filled up to whole steps. The sums are whole panels of
            // `out`, the caller's, or `last`; the calls for earlier inputs wrote them.
            unsafe { tiles.multiply(s, Product::Bf16, block) }
        }
        panel += columns;
    }
}

/// Makes results of the sums.
///
/// # Safety
/// Same contract as [`product`], after its assertions; the sums have been written.
#[inline(always)]
unsafe fn finish<S: Simd>(s: S, a: &PartedTask<'_>, last: &mut LastPanel) {
    let (rows, whole) = (a.x.len() / a.weights.inputs, a.outputs / LANES);
    let Range { start, end } = a.range;
    for (row, last) in last[..rows].iter_mut().enumerate() {
        // SAFETY: row `row` of `out`, panels of `range`, which are the caller's; a panel that is not whole is in `last`, and its
        // `outputs % LANES` columns in `out`. The bias has whole panels, as was asserted.
        unsafe {
            let out = a.out.add(row * a.outputs);
            for panel in start..end {
                let to = if panel < whole { out.add(panel * LANES) } else { last.as_mut_ptr() };
                s.store(to, s.add(s.load(to), s.load(a.bias.as_ptr().add(panel * LANES))));
            }
            if end > whole {
                out.add(whole * LANES).copy_from_nonoverlapping(last.as_ptr(), a.outputs % LANES);
            }
        }
    }
    // SAFETY: the columns just written, which are the caller's.
    unsafe {
        let (first, cols) = (a.out.add(start * LANES), a.outputs.min(end * LANES) - start * LANES);
        activation::activate(s, a.activation, activation::Matrix { first, stride: a.outputs, rows, cols });
    }
}
