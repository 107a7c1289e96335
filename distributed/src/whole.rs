//! Tensors of whole sequences, put together from the bytes of stretches that come from all ranks.

use crate::error::Error;
use crate::memory::zeros;
use core::ops::Range;
use sdpa::{Bf16, Dtype, F16, Outputs, Tensor, TensorMut, View, ViewMut};

/// Elements that travel as bytes, least significant first.
pub(crate) trait Bytes: Copy {
    const LEN: usize;
    fn put(self, to: &mut [u8]);
    fn get(bytes: &[u8]) -> Self;
}

impl Bytes for u8 {
    const LEN: usize = 1;

    fn put(self, to: &mut [u8]) {
        to[0] = self;
    }

    fn get(bytes: &[u8]) -> Self {
        bytes[0]
    }
}

impl Bytes for f32 {
    const LEN: usize = 4;

    fn put(self, to: &mut [u8]) {
        to.copy_from_slice(&self.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> Self {
        Self::from_le_bytes(bytes.try_into().expect("four bytes"))
    }
}

impl Bytes for Bf16 {
    const LEN: usize = 2;

    fn put(self, to: &mut [u8]) {
        to.copy_from_slice(&self.0.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> Self {
        Self(u16::from_le_bytes(bytes.try_into().expect("two bytes")))
    }
}

impl Bytes for F16 {
    const LEN: usize = 2;

    fn put(self, to: &mut [u8]) {
        to.copy_from_slice(&self.0.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> Self {
        Self(u16::from_le_bytes(bytes.try_into().expect("two bytes")))
    }
}

/// Elements of one type.
#[derive(Debug)]
enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<Bf16>),
    F16(Vec<F16>),
}

/// Evaluates the same expression for any type of elements.
macro_rules! any {
    ($elements:expr, |$x:ident| $e:expr) => {
        match $elements {
            Elements::F32($x) => $e,
            Elements::Bf16($x) => $e,
            Elements::F16($x) => $e,
        }
    };
}

/// Dense tensor `[batch, heads, rows, dim]`.
#[derive(Debug)]
pub(crate) struct Whole {
    shape: [usize; 4],
    elements: Elements,
}

impl Whole {
    pub(crate) fn new(shape: [usize; 4], dtype: Dtype) -> Result<Self, Error> {
        let len = len(shape)?;
        let elements = match dtype {
            Dtype::Bf16 => Elements::Bf16(zeros(len)?),
            Dtype::F16 => Elements::F16(zeros(len)?),
            _ => Elements::F32(zeros(len)?),
        };
        Ok(Self { shape, elements })
    }

    /// Returns memory for a tensor of this shape.
    pub(crate) fn room(shape: [usize; 4]) -> Result<Vec<f32>, sdpa::Error> {
        let memory = |error| match error {
            Error::Call(error) => error,
            _ => sdpa::Error::TooLarge { what: "heads of a rank", sizes: shape },
        };
        zeros(len(shape)?).map_err(memory)
    }

    /// Returns memory for a tensor of bytes of this shape.
    pub(crate) fn bytes_of(shape: [usize; 4]) -> Result<Vec<u8>, Error> {
        zeros(len(shape)?)
    }

    /// Takes elements that have the shape.
    pub(crate) fn of(shape: [usize; 4], floats: Vec<f32>) -> Self {
        Self { shape, elements: Elements::F32(floats) }
    }

    /// Returns some of the rows of one sequence of the batch, or of all, to be written, of elements that are `f32`.
    pub(crate) fn rows_mut(
        &mut self,
        batch: Option<usize>,
        rows: Range<usize>,
    ) -> Result<ViewMut<'_>, sdpa::LayoutError> {
        let columns = 0..self.shape[3];
        self.part_mut(batch, rows, columns)
    }

    /// Returns some columns of some rows, as [`Self::rows_mut`] does.
    pub(crate) fn part_mut(
        &mut self,
        batch: Option<usize>,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Result<ViewMut<'_>, sdpa::LayoutError> {
        let [all_batch, heads, all, dim] = self.shape;
        let (first, batch) = batch.map_or((0, all_batch), |sequence| (sequence, 1));
        let strides = [heads * all * dim, all * dim, dim, 1].map(|stride| stride as isize);
        let begin = first * heads * all * dim + rows.start * dim + columns.start;
        let offset = if rows.is_empty() || columns.is_empty() { 0 } else { begin };
        let floats = if let Elements::F32(floats) = &mut self.elements { &mut floats[..] } else { &mut [] };
        ViewMut::from_strides(floats, offset, [batch, heads, rows.len(), columns.len()], strides)
    }

    /// Returns the elements, if they are `f32`; none otherwise.
    pub(crate) fn floats(&self) -> &[f32] {
        if let Elements::F32(floats) = &self.elements { floats } else { &[] }
    }

    pub(crate) fn shape(&self) -> [usize; 4] {
        self.shape
    }

    pub(crate) fn tensor(&self) -> Result<Tensor<'_>, sdpa::LayoutError> {
        Ok(any!(&self.elements, |x| View::bhld(x, self.shape)?.into()))
    }

    /// Returns a view of some heads.
    pub(crate) fn heads(&self, heads: Range<usize>) -> Result<Tensor<'_>, sdpa::LayoutError> {
        let ((offset, shape, strides), Self { elements, .. }) = (of_heads(self.shape, heads), self);
        Ok(any!(elements, |x| View::from_strides(x, offset, shape, strides)?.into()))
    }

    pub(crate) fn bytes(&self) -> usize {
        any!(&self.elements, |x| size_of_val(&x[..]))
    }

    /// Places rows of all heads, and returns the bytes that are left.
    pub(crate) fn place<'b>(&mut self, rows: Range<usize>, bytes: &'b [u8]) -> &'b [u8] {
        let heads = 0..self.shape[1];
        any!(&mut self.elements, |x| place(x, self.shape, [heads, rows], bytes))
    }

    /// Places some rows of all heads, of `batch` sequences, each where `at` says, and returns the bytes that are left.
    pub(crate) fn place_rows<'b>(
        &mut self,
        batch: usize,
        rows: Range<usize>,
        at: impl Fn(usize, usize) -> [usize; 2],
        bytes: &'b [u8],
    ) -> &'b [u8] {
        any!(&mut self.elements, |x| place_rows(x, self.shape, batch, rows, at, bytes))
    }

    /// Places all rows of some heads, and returns the bytes that are left.
    pub(crate) fn place_heads<'b>(&mut self, heads: Range<usize>, bytes: &'b [u8]) -> &'b [u8] {
        let rows = 0..self.shape[2];
        any!(&mut self.elements, |x| place(x, self.shape, [heads, rows], bytes))
    }
}

/// Returns the number of elements of a shape.
fn len(shape: [usize; 4]) -> Result<usize, sdpa::Error> {
    let too_large = sdpa::Error::TooLarge { what: "heads of a rank", sizes: shape };
    shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size)).ok_or(too_large)
}

/// Returns offset, shape and strides of some heads of a dense tensor.
pub(crate) fn of_heads([batch, all, rows, dim]: [usize; 4], heads: Range<usize>) -> (usize, [usize; 4], [isize; 4]) {
    let strides = [all * rows * dim, rows * dim, dim, 1].map(|stride| stride as isize);
    (heads.start * rows * dim, [batch, heads.len(), rows, dim], strides)
}

/// Places some rows of some heads, and returns the bytes that are left.
fn place<'b, T: Bytes>(
    to: &mut [T],
    [batch, all_heads, all_rows, dim]: [usize; 4],
    [heads, rows]: [Range<usize>; 2],
    mut bytes: &'b [u8],
) -> &'b [u8] {
    for (b, h) in (0..batch).flat_map(|b| heads.clone().map(move |h| (b, h))) {
        let first = (b * all_heads + h) * all_rows;
        let to = &mut to[(first + rows.start) * dim..(first + rows.end) * dim];
        let (here, rest) = bytes.split_at(to.len() * T::LEN);
        to.iter_mut().zip(here.chunks_exact(T::LEN)).for_each(|(to, bytes)| *to = T::get(bytes));
        bytes = rest;
    }
    bytes
}

/// Places some rows of all heads, of `batch` sequences, and returns the bytes that are left. `at` says for each sequence and row
/// where it goes.
pub(crate) fn place_rows<'b, T: Bytes>(
    to: &mut [T],
    [_, heads, all_rows, dim]: [usize; 4],
    batch: usize,
    rows: Range<usize>,
    at: impl Fn(usize, usize) -> [usize; 2],
    mut bytes: &'b [u8],
) -> &'b [u8] {
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for row in rows.clone() {
            let ([b, l], (here, rest)) = (at(b, row), bytes.split_at(dim * T::LEN));
            let to = &mut to[((b * heads + h) * all_rows + l) * dim..][..dim];
            to.iter_mut().zip(here.chunks_exact(T::LEN)).for_each(|(to, bytes)| *to = T::get(bytes));
            bytes = rest;
        }
    }
    bytes
}

/// Appends the bytes of some heads of a tensor.
///
/// # Errors
/// [`sdpa::Error::Memory`].
pub(crate) fn pack(to: &mut Vec<u8>, x: Tensor<'_>, heads: Range<usize>) -> Result<(), Error> {
    let [batch, _, rows, dim] = x.shape();
    let bytes = batch * heads.len() * rows * dim * x.dtype().bytes();
    let refused = |_| sdpa::Error::Memory { what: "a message to another rank", bytes };
    to.try_reserve_exact(bytes).map_err(refused)?;
    match x {
        Tensor::F32(x) => append(to, x, heads),
        Tensor::Bf16(x) => append(to, x, heads),
        Tensor::F16(x) => append(to, x, heads),
        _ => return Err(sdpa::Error::Needs { argument: "elements", needs: "a type that travels" }.into()),
    }
    Ok(())
}

/// Appends the elements of some heads of a view.
pub(crate) fn append<T: Bytes>(to: &mut Vec<u8>, x: View<'_, T>, heads: Range<usize>) {
    let [batch, _, rows, dim] = x.shape();
    let begin = to.len();
    to.resize(begin + batch * heads.len() * rows * dim * T::LEN, 0);
    let mut places = to[begin..].chunks_exact_mut(T::LEN);
    for (b, h) in (0..batch).flat_map(|b| heads.clone().map(move |h| (b, h))) {
        let dense = x.head(b, h).filter(|(_, (_, element))| *element == 1);
        for l in 0..rows {
            match dense {
                Some((elements, (row, _))) => {
                    elements[l * row..][..dim].iter().zip(&mut places).for_each(|(x, to)| x.put(to));
                }
                None => (0..dim).filter_map(|d| x.get([b, h, l, d])).zip(&mut places).for_each(|(x, to)| x.put(to)),
            }
        }
    }
}

/// Writes outputs and log-sum-exps, each where it is wanted.
pub(crate) fn write(outputs: Outputs<'_>, [out, lse]: [&Whole; 2]) {
    match outputs.out {
        Some(TensorMut::F32(view)) => fill(view, out, |x| x),
        Some(TensorMut::Bf16(view)) => fill(view, out, Bf16::from_f32),
        Some(TensorMut::F16(view)) => fill(view, out, F16::from_f32),
        _ => {}
    }
    if let Some(view) = outputs.lse {
        fill(view, lse, |x| x);
    }
}

fn fill<T>(view: ViewMut<'_, T>, from: &Whole, convert: impl Fn(f32) -> T) {
    let (Elements::F32(floats), [batch, heads, rows, dim]) = (&from.elements, from.shape) else { return };
    let mut view = match view.into_dense() {
        Ok(elements) => return elements.iter_mut().zip(floats).for_each(|(to, &x)| *to = convert(x)),
        Err(view) => view,
    };
    let mut next = floats.iter();
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for (l, d) in (0..rows).flat_map(|l| (0..dim).map(move |d| (l, d))) {
            if let (Some(to), Some(&x)) = (view.get_mut([b, h, l, d]), next.next()) {
                *to = convert(x);
            }
        }
    }
}
