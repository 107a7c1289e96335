//! Writing tokens to blocks and pages.

use super::layout::{Format, Int8, KeyOrder, Parts, Sizes, part_mut};
use crate::matmul::int4::{self, Int4};
use crate::matmul::int8;
use crate::matmul::pack::{self, NonFinite};
use crate::simd::aligned::elements_mut;
use crate::simd::isa::Isa;
use crate::simd::{LANES, Simd};
use crate::tensor::any::{AnyRows, Tensor};
use crate::tensor::element::{Bf16, Dtype, Element, F16};
use core::ops::Range;

/// Rows of keys and values, and their place in a block.
pub(super) struct NewRows<'a> {
    pub(super) sizes: Sizes,
    /// First row in the block.
    pub(super) row: usize,
    pub(super) kv: [Tensor<'a>; 2],
    /// Batch and rows in the tensors.
    pub(super) b: usize,
    pub(super) rows: Range<usize>,
}

impl NewRows<'_> {
    /// Writes the rows to a block. `int8` is given if the format is int8.
    ///
    /// # Panics
    /// If the tensors do not have the rows, or the block has no room for them.
    pub(super) fn write(self, isa: Isa, block: &mut [f32], int8: Option<&mut Int8>) {
        let Sizes { rows, kv_heads, head_dim, value_dim, .. } = self.sizes;
        let ([kb, kh, kn, kd], [vb, vh, vn, vd]) = (self.kv[0].shape(), self.kv[1].shape());
        assert!(self.b < kb.min(vb) && self.rows.end <= kn.min(vn), "rows outside the tensors");
        assert!([kh, vh, kd, vd] == [kv_heads, kv_heads, head_dim, value_dim], "keys and values do not fit the block");
        assert!(self.row + self.rows.len() <= rows, "more rows than a block has");
        match (self.sizes.format, int8) {
            (Format::Elements(Dtype::F32), _) => Write(self, block).write(isa),
            (Format::Elements(Dtype::Bf16), _) => Write(self, elements_mut::<Bf16>(block)).write(isa),
            (Format::Elements(Dtype::F16), _) => Write(self, elements_mut::<F16>(block)).write(isa),
            (Format::Int8 { .. }, Some(int8)) => WriteBytes { rows: self, int8, block }.write(isa),
            (Format::Int4(kind), _) => WriteInt4 { rows: self, kind, block }.write(isa),
            (Format::Int8 { .. }, None) => unreachable!("bytes have what writing them takes"),
        }
    }
}

/// Writes rows to a block's elements.
struct Write<'a, T>(NewRows<'a>, &'a mut [T]);

impl<T: Element> Write<'_, T> {
    fn write(self, isa: Isa) {
        dispatch!(isa, |s| self.run(s))
    }

    fn run<S: Simd>(self, s: S) {
        let Self(NewRows { sizes, row, kv: [k, v], b, rows }, elements) = self;
        for h in 0..sizes.kv_heads {
            // SAFETY: the head and the rows are inside both tensors, as `NewRows::write` asserted.
            let (k, v) = unsafe { (k.rows(b, h, rows.start), v.rows(b, h, rows.start)) };
            let Parts { keys, values, .. } = sizes.parts(h);
            let [keys, values] = [keys, values].map(|at| at.start / size_of::<T>()..at.end / size_of::<T>());
            // SAFETY: the rows, of `head_dim` and `value_dim` columns, are inside both tensors, as `NewRows::write` asserted; a
            // run starts below `row_dim`, the length of the rows that are written.
            unsafe {
                let v = match sizes.key_order {
                    KeyOrder::Packed => {
                        write_keys(s, k, sizes, row..row + rows.len(), &mut elements[keys]);
                        v
                    }
                    KeyOrder::Latent => k,
                };
                for run in sizes.value_layout().panels() {
                    let v = v.columns_from(run.start);
                    let cols = sizes.row_dim().min(run.end) - run.start;
                    let places = &mut elements[values.clone()][sizes.value(row, run.start)..];
                    if let Some(floats) = as_floats(places) {
                        pack::pack_rows(s, v, [rows.len(), cols], NonFinite::Ignored, floats);
                        continue;
                    }
                    for (j, place) in places.chunks_exact_mut(run.len()).take(rows.len()).enumerate() {
                        for (d, x) in place[..cols].iter_mut().enumerate() {
                            *x = T::narrow(v.get(j, d));
                        }
                    }
                }
            }
        }
    }
}

/// Packs rows of keys into their places among a head's keys.
///
/// # Safety
/// `keys` has as many rows as `places`, of `head_dim` elements.
unsafe fn write_keys<S: Simd, T: Element>(s: S, keys: AnyRows, sizes: Sizes, places: Range<usize>, to: &mut [T]) {
    let d = sizes.head_dim;
    let mut j = places.start;
    while j < places.end {
        let left = places.end - j;
        if j.is_multiple_of(LANES)
            && left >= LANES
            && let Some(floats) = as_floats(&mut to[sizes.key(j, 0)..])
        {
            // Whole panels are transposed in registers, the last one filled up.
            // SAFETY: the caller guarantees a row for each place, of `head_dim` elements.
            unsafe { pack::pack_keys(s, keys.rows_from(j - places.start), [left; 2], d, floats) };
            return;
        }
        for i in 0..d {
            // SAFETY: the caller guarantees a row for each place, of `head_dim` elements.
            to[sizes.key(j, i)] = T::narrow(unsafe { keys.get(j - places.start, i) });
        }
        j += 1;
    }
}

/// Returns the same elements as floats, if `T` is `f32`.
fn as_floats<T: Element>(elements: &mut [T]) -> Option<&mut [f32]> {
    // SAFETY: `T` is `f32`: no other type has this `DTYPE`.
    (T::DTYPE == Dtype::F32).then(|| unsafe { &mut *(core::ptr::from_mut(elements) as *mut [f32]) })
}

/// Writes rows to an int8 block.
struct WriteBytes<'a> {
    rows: NewRows<'a>,
    int8: &'a mut Int8,
    block: &'a mut [f32],
}

impl WriteBytes<'_> {
    fn write(self, isa: Isa) {
        dispatch!(isa, |s| self.run(s))
    }

    fn run<S: Simd>(self, s: S) {
        let Self { rows: NewRows { sizes, row, kv, b, rows }, int8: Int8 { channels, row: wide, bytes }, block } = self;
        // The row that is stored as a value is the key in a latent cache, which has no other.
        let (d, e, latent) = (sizes.head_dim, sizes.row_dim(), sizes.key_order == KeyOrder::Latent);
        let (key, value) = bytes.split_at_mut(d);
        for h in 0..sizes.kv_heads {
            let Parts { keys, key_scales, values, value_scales } = sizes.parts(h);
            let channels = channels.as_ref().map(|scales| &scales[h * d..][..d]);
            for (i, j) in rows.clone().zip(row..) {
                // SAFETY: the head and the row are inside both tensors, as `NewRows::write` asserted.
                let [k, v] = kv.map(|x| unsafe { x.rows(b, h, i) });
                if !latent {
                    // SAFETY: the key has one row of `d` elements.
                    unsafe { pack::pack_rows(s, k, [1, d], NonFinite::Ignored, wide) };
                    match channels {
                        // Keys that are not finite were refused, or are the caller's responsibility.
                        Some(channels) => _ = int8::quantise_by_channel(s, &wide[..d], channels, key),
                        None => part_mut(block, key_scales.clone())[j] = int8::quantise(s, &wide[..d], key),
                    }
                    int8::place_key(key, j, part_mut(block, keys.clone()));
                }
                // SAFETY: the row has `e` elements: `row_dim`.
                unsafe { pack::pack_rows(s, if latent { k } else { v }, [1, e], NonFinite::Ignored, wide) };
                part_mut(block, value_scales.clone())[j] = int8::quantise(s, &wide[..e], value);
                let places = part_mut(block, values.clone());
                for run in sizes.value_layout().panels() {
                    let places = places[sizes.value(j, run.start)..].iter_mut().step_by(int8::QUAD);
                    for (place, &byte) in places.zip(&value[run]) {
                        *place = byte;
                    }
                }
            }
        }
    }
}

/// Writes rows to an int4 block.
struct WriteInt4<'a> {
    rows: NewRows<'a>,
    kind: Int4,
    block: &'a mut [f32],
}

impl WriteInt4<'_> {
    fn write(self, isa: Isa) {
        dispatch!(isa, |s| self.run(s))
    }

    fn run<S: Simd>(self, s: S) {
        let Self { rows: NewRows { sizes, row, kv: [k, v], b, rows }, kind, block } = self;
        let latent = sizes.key_order == KeyOrder::Latent;
        for h in 0..sizes.kv_heads {
            let Parts { keys, key_scales, values, value_scales } = sizes.parts(h);
            let (keys, values) = (Int4Parts(keys, key_scales), Int4Parts(values, value_scales));
            for (i, j) in rows.clone().zip(row..) {
                // SAFETY: the head and the row are inside both tensors, as `NewRows::write` asserted, and so long.
                unsafe {
                    let (k, v) = (Int4Row(k.rows(b, h, i), kind), Int4Row(v.rows(b, h, i), kind));
                    if !latent {
                        k.write(s, sizes.head_dim, &keys, block, |d| sizes.int4_key(kind, [j, d]));
                    }
                    let v = if latent { k } else { v };
                    v.write(s, sizes.row_dim(), &values, block, |c| sizes.int4_value(kind, [j, c]));
                }
            }
        }
    }
}

/// Byte ranges of a head's elements, and of the numbers of their blocks.
struct Int4Parts(Range<usize>, Range<usize>);

/// Row to be written as int4.
struct Int4Row(AnyRows, Int4);

impl Int4Row {
    /// Writes the row to a block, each element where `place` says.
    ///
    /// # Safety
    /// The row has `dim` elements.
    unsafe fn write<S: Simd>(
        &self,
        s: S,
        dim: usize,
        Int4Parts(elements, numbers): &Int4Parts,
        block: &mut [f32],
        place: impl Fn(usize) -> int4::Place,
    ) {
        let &Self(row, kind) = self;
        for first in (0..dim).step_by(int4::BLOCK) {
            let (mut xs, mut integers, n) = ([0.0; int4::BLOCK], [0; int4::BLOCK], (dim - first).min(int4::BLOCK));
            // SAFETY: the caller guarantees `n` elements from `first` on.
            unsafe { pack::pack_rows(s, row.columns_from(first), [1, n], NonFinite::Ignored, &mut xs) };
            let own = int4::quantise(s, &xs[..n], kind, &mut integers);
            let bytes = part_mut(block, elements.clone());
            for (i, &x) in integers[..n].iter().enumerate() {
                place(first + i).write(x, bytes);
            }
            place(first).write_numbers(kind, own, part_mut(block, numbers.clone()));
        }
    }
}
