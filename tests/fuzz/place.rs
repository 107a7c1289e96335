//! Tensors in guarded memory, of any element type.

use super::array::{Array, At, Layout, indices};
use super::memory::{Flush, Memory, Plain};
use super::rng::Rng;
use half::{bf16, f16};
use sdpa::{Bf16, Dtype, F16, Tensor, TensorMut, View, ViewMut};

/// What tensors of the fuzzer are made of.
pub(crate) trait Element: Plain {
    /// The element of this value; rounded to nearest even.
    fn of(x: f32) -> Self;
    fn value(self) -> f32;
    fn bits(self) -> u32;
}

impl Element for f32 {
    fn of(x: f32) -> Self {
        x
    }
    fn value(self) -> f32 {
        self
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Element for Bf16 {
    fn of(x: f32) -> Self {
        Self(bf16::from_f32(x).to_bits())
    }
    fn value(self) -> f32 {
        bf16::from_bits(self.0).to_f32()
    }
    fn bits(self) -> u32 {
        self.0.into()
    }
}

impl Element for F16 {
    fn of(x: f32) -> Self {
        Self(f16::from_f32(x).to_bits())
    }
    fn value(self) -> f32 {
        f16::from_bits(self.0).to_f32()
    }
    fn bits(self) -> u32 {
        self.0.into()
    }
}

impl Element for u8 {
    fn of(x: f32) -> Self {
        x as Self
    }
    fn value(self) -> f32 {
        self.into()
    }
    fn bits(self) -> u32 {
        self.into()
    }
}

impl Element for bool {
    fn of(x: f32) -> Self {
        x != 0.0
    }
    fn value(self) -> f32 {
        self.into()
    }
    fn bits(self) -> u32 {
        self.into()
    }
}

/// A number as an element of this type has it.
pub(crate) fn rounded(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => Bf16::of(x).value(),
        Dtype::F16 => F16::of(x).value(),
        dtype => panic!("a new type: {dtype}"),
    }
}

/// A tensor in guarded memory. Around its elements every byte is as if it had never been written.
#[derive(Debug)]
pub(crate) struct Placed<T: Element> {
    memory: Memory<T>,
    layout: Layout,
}

impl<T: Element> Placed<T> {
    /// Unwritten.
    pub(crate) fn blank(rng: &mut Rng, layout: Layout) -> Self {
        // Against the page that its own elements reach; either, if they reach both.
        let empty = layout.shape.contains(&0);
        let (low, high) = if empty { (true, true) } else { reach(&layout) };
        let low = low && (!high || rng.one_in(2));
        let memory = Memory::new(layout.len, if low { Flush::Low } else { Flush::High });
        Self { memory, layout }
    }

    pub(crate) fn of(rng: &mut Rng, x: &Array) -> Self {
        let layout = Layout::draw_input(rng, x);
        Self::laid_out(rng, x, layout)
    }

    /// With memory of its own for every element, so that it can be written.
    pub(crate) fn of_its_own(rng: &mut Rng, x: &Array) -> Self {
        let layout = Layout::draw(rng, x.shape);
        Self::laid_out(rng, x, layout)
    }

    fn laid_out(rng: &mut Rng, x: &Array, layout: Layout) -> Self {
        let mut placed = Self::blank(rng, layout);
        let elements = placed.memory.slice_mut();
        indices(x.shape).for_each(|at| elements[layout.index(at)] = T::of(x.get(at)));
        placed
    }

    pub(crate) fn view(&self) -> View<'_, T> {
        let Layout { shape, strides, offset, .. } = self.layout;
        View::from_strides(self.memory.slice(), offset, shape, strides).expect("it fits its memory")
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_, T> {
        let Layout { shape, strides, offset, .. } = self.layout;
        ViewMut::from_strides(self.memory.slice_mut(), offset, shape, strides).expect("it fits its memory")
    }

    /// Everything that the view may be of.
    #[cfg(test)]
    pub(crate) fn memory_mut(&mut self) -> &mut [T] {
        self.memory.slice_mut()
    }

    /// True if neither the elements nor anything around them was ever written.
    pub(crate) fn is_blank(&self) -> bool {
        self.memory.is_blank()
    }

    /// The bits of the elements, which are then as if they had never been written. Panics if anything else is otherwise.
    pub(crate) fn take(&mut self, what: &str) -> Array<u32> {
        let layout = self.layout;
        let elements = self.memory.slice();
        let bits = Array::from_fn(layout.shape, |at| elements[layout.index(at)].bits());
        indices(layout.shape).for_each(|at| self.memory.blank(layout.index(at)));
        assert!(self.memory.is_blank(), "{what}: memory beside the view was written: {layout:?}");
        bits
    }
}

/// Whether an element is the first of the slice, and whether one is the last.
fn reach(layout: &Layout) -> (bool, bool) {
    let corner = |high: bool| -> At {
        core::array::from_fn(|dim| if (layout.strides[dim] < 0) == high { 0 } else { layout.shape[dim] - 1 })
    };
    (layout.index(corner(false)) == 0, layout.index(corner(true)) + 1 == layout.len)
}

/// A placed tensor of any type.
#[derive(Debug)]
pub(crate) enum AnyPlaced {
    F32(Placed<f32>),
    Bf16(Placed<Bf16>),
    F16(Placed<F16>),
}

impl AnyPlaced {
    pub(crate) fn of(rng: &mut Rng, x: &Array, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(Placed::of(rng, x)),
            Dtype::Bf16 => Self::Bf16(Placed::of(rng, x)),
            Dtype::F16 => Self::F16(Placed::of(rng, x)),
            dtype => panic!("a new type: {dtype}"),
        }
    }

    pub(crate) fn blank(rng: &mut Rng, layout: Layout, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(Placed::blank(rng, layout)),
            Dtype::Bf16 => Self::Bf16(Placed::blank(rng, layout)),
            Dtype::F16 => Self::F16(Placed::blank(rng, layout)),
            dtype => panic!("a new type: {dtype}"),
        }
    }

    pub(crate) fn view(&self) -> Tensor<'_> {
        match self {
            Self::F32(x) => x.view().into(),
            Self::Bf16(x) => x.view().into(),
            Self::F16(x) => x.view().into(),
        }
    }

    /// Returns the first `n` columns.
    pub(crate) fn columns(&self, n: usize) -> Tensor<'_> {
        const WIDER: &str = "no wider than the whole";
        match self {
            Self::F32(x) => x.view().columns(0..n).expect(WIDER).into(),
            Self::Bf16(x) => x.view().columns(0..n).expect(WIDER).into(),
            Self::F16(x) => x.view().columns(0..n).expect(WIDER).into(),
        }
    }

    pub(crate) fn view_mut(&mut self) -> TensorMut<'_> {
        match self {
            Self::F32(x) => x.view_mut().into(),
            Self::Bf16(x) => x.view_mut().into(),
            Self::F16(x) => x.view_mut().into(),
        }
    }

    pub(crate) fn is_blank(&self) -> bool {
        match self {
            Self::F32(x) => x.is_blank(),
            Self::Bf16(x) => x.is_blank(),
            Self::F16(x) => x.is_blank(),
        }
    }

    pub(crate) fn take(&mut self, what: &str) -> Array<u32> {
        match self {
            Self::F32(x) => x.take(what),
            Self::Bf16(x) => x.take(what),
            Self::F16(x) => x.take(what),
        }
    }
}

/// The value of an element by its bits.
pub(crate) fn value(bits: u32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_bits(bits),
        Dtype::Bf16 => Bf16(bits as u16).value(),
        Dtype::F16 => F16(bits as u16).value(),
        dtype => panic!("a new type: {dtype}"),
    }
}
