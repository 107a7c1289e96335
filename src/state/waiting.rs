//! Keys and values that wait until their block is full.

use crate::error::{Error, floats, zeros};
use core::ops::Range;
use sdpa_kernels::{Bf16, KEY_BLOCK, LayoutError, Precision, Tensor, View};

/// Rows of keys, or of values, that wait until their block is full: `[batch, heads, KEY_BLOCK, dim]`.
///
/// They are widened, which changes no bit of a result (but those of infinite queries and keys with [`Precision::Accurate`]), but for
/// one use: with another precision than [`Precision::Exact`] the machine
/// may multiply bfloat16 by its own instruction, so a block is also kept as bfloat16 if every row came as such.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waiting {
    shape: [usize; 4],
    wide: Vec<f32>,
    native: Option<Native>,
}

/// The same rows as bfloat16, if all are.
#[derive(Debug, Clone)]
struct Native {
    rows: Vec<Bf16>,
    all: bool,
}

impl Waiting {
    /// Makes room for rows of `[batch, heads, dim]`.
    pub(crate) fn new([batch, heads, dim]: [usize; 3], precision: Precision) -> Result<Self, Error> {
        let shape = [batch, heads, KEY_BLOCK, dim];
        let len = floats("state", shape)?;
        let native = match precision {
            Precision::Native | Precision::Accurate => {
                let mut rows = Vec::new();
                let refused = |_| Error::Memory { what: "state", bytes: len * size_of::<Bf16>() };
                rows.try_reserve_exact(len).map_err(refused)?;
                rows.resize(len, Bf16::default());
                Some(Native { rows, all: true })
            }
            _ => None,
        };
        Ok(Self { shape, wide: zeros("state", len)?, native })
    }

    /// Copies some rows of every head to the rows from `at` on.
    pub(crate) fn copy(&mut self, from: Tensor<'_>, rows: Range<usize>, at: usize) {
        match from {
            Tensor::F32(view) => copy_rows(view, rows.clone(), &mut self.wide, at, |&x| x),
            Tensor::Bf16(view) => copy_rows(view, rows.clone(), &mut self.wide, at, |x| x.to_f32()),
            Tensor::F16(view) => copy_rows(view, rows.clone(), &mut self.wide, at, |x| x.to_f32()),
            _ => unreachable!("a tensor of another type"),
        }
        if let Some(native) = &mut self.native {
            match from {
                Tensor::Bf16(view) => {
                    native.all |= at == 0;
                    copy_rows(view, rows, &mut native.rows, at, |&x| x);
                }
                _ => native.all = false,
            }
        }
    }

    /// Returns a view of the first `n` rows.
    pub(crate) fn first(&self, n: usize) -> Result<Tensor<'_>, LayoutError> {
        let tensor: Tensor<'_> = match &self.native {
            Some(native) if native.all => View::bhld(&native.rows, self.shape)?.into(),
            _ => View::bhld(&self.wide, self.shape)?.into(),
        };
        Ok(tensor.rows_in(0..n).unwrap_or(tensor))
    }
}

/// Copies some rows of every head to `[batch, heads, KEY_BLOCK, dim]`, from row `at` on.
fn copy_rows<T, U>(from: View<'_, T>, rows: Range<usize>, to: &mut [U], at: usize, convert: impl Fn(&T) -> U) {
    let [batch, heads, _, dim] = from.shape();
    for head in 0..batch * heads {
        for (n, row) in rows.clone().enumerate() {
            let to = &mut to[(head * KEY_BLOCK + at + n) * dim..][..dim];
            for (d, x) in to.iter_mut().enumerate() {
                if let Some(element) = from.get([head / heads, head % heads, row, d]) {
                    *x = convert(element);
                }
            }
        }
    }
}
