//! Shapes and strides: where an element lies, and whether it lies inside.

use core::fmt;

/// Why a view could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// The shape and strides reach outside the slice.
    OutOfBounds {
        /// Shape asked for, `[batch, heads, rows, dim]`.
        shape: [usize; 4],
        /// Strides asked for, in elements.
        strides: [isize; 4],
        /// Lowest and highest element index the view would touch.
        reach: (i128, i128),
        /// Elements in the slice.
        len: usize,
    },
    /// A mutable view in which two indices share an element (or might: dimensions interleave).
    Overlap {
        /// Shape asked for.
        shape: [usize; 4],
        /// Strides asked for, in elements.
        strides: [isize; 4],
    },
    /// A packed QKV view whose head counts do not fit together.
    Heads {
        /// Query heads.
        heads: usize,
        /// Key/value heads.
        kv_heads: usize,
    },
    /// A dimension or the element count does not fit the address space.
    TooLarge {
        /// Shape asked for.
        shape: [usize; 4],
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfBounds { shape, strides, reach, len } => write!(
                f,
                "a view of shape {shape:?} with strides {strides:?} reaches elements {}..={}, but the slice has {len}",
                reach.0, reach.1
            ),
            Self::Overlap { shape, strides } => {
                write!(f, "a mutable view of shape {shape:?} with strides {strides:?} holds an element twice")
            }
            Self::Heads { heads, kv_heads } => {
                write!(f, "packed heads do not fit: {heads} query heads, {kv_heads} key/value heads")
            }
            Self::TooLarge { shape } => write!(f, "a view of shape {shape:?} is larger than the address space"),
        }
    }
}

impl core::error::Error for LayoutError {}

/// Where an element lies: `offset + Σ index·stride`. The part of a view that has no lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) offset: usize,
    pub(crate) shape: [usize; 4],
    pub(crate) strides: [isize; 4],
}

impl Layout {
    /// Checks that all of `shape` lies in `0..len`. A view without elements touches nothing and always fits.
    pub(crate) fn checked(
        len: usize,
        offset: usize,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<Self, LayoutError> {
        if shape.iter().any(|&n| n > isize::MAX as usize)
            || shape.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).is_none()
        {
            return Err(LayoutError::TooLarge { shape });
        }
        if !shape.contains(&0) {
            // i128 holds offset + 4 · (2⁶³ · 2⁶³) without overflow... barely: each product is below 2¹²⁶.
            let mut reach = (offset as i128, offset as i128);
            for (&n, &stride) in shape.iter().zip(&strides) {
                let span = (n as i128 - 1).saturating_mul(stride as i128);
                if span < 0 {
                    reach.0 = reach.0.saturating_add(span);
                } else {
                    reach.1 = reach.1.saturating_add(span);
                }
            }
            if reach.0 < 0 || reach.1 >= len as i128 {
                return Err(LayoutError::OutOfBounds { shape, strides, reach, len });
            }
        }
        Ok(Self { offset, shape, strides })
    }

    /// True if no element is held twice. Sufficient, and necessary for layouts whose dimensions nest: sorted by
    /// stride, every stride steps over the whole extent of the dimensions below it.
    pub(crate) fn is_injective(&self) -> bool {
        if self.shape.contains(&0) {
            return true;
        }
        let mut dims = [(0u128, 0u128); 4];
        for (dim, (&n, &stride)) in dims.iter_mut().zip(self.shape.iter().zip(&self.strides)) {
            *dim = if n > 1 { (stride.unsigned_abs() as u128, n as u128 - 1) } else { (0, 0) };
        }
        dims.sort_unstable();
        let mut extent = 0u128;
        for (stride, last) in dims {
            if last == 0 {
                continue;
            }
            if stride <= extent {
                return false;
            }
            extent += stride * last;
        }
        true
    }

    /// Element index of `[b, h, l, 0]`. In bounds for indices inside the shape of a view with elements.
    #[inline]
    pub(crate) fn row(&self, b: usize, h: usize, l: usize) -> usize {
        debug_assert!(b < self.shape[0] && h < self.shape[1] && l < self.shape[2]);
        let [sb, sh, sl, _] = self.strides;
        (self.offset as isize + b as isize * sb + h as isize * sh + l as isize * sl) as usize
    }
}

/// Strides of a dense array whose dimensions are stored in the order given, outermost first.
pub(crate) fn dense<const N: usize>(shape: [usize; N]) -> Result<[isize; N], ()> {
    let mut strides = [0isize; N];
    let mut step = 1isize;
    for i in (0..N).rev() {
        strides[i] = step;
        step = isize::try_from(shape[i]).ok().and_then(|n| step.checked_mul(n.max(1))).ok_or(())?;
    }
    Ok(strides)
}

/// Shape and strides, in `[batch, heads, rows, dim]` order, of an array stored batch, rows, heads, dim.
pub(crate) fn blhd_layout([b, l, h, d]: [usize; 4]) -> Result<([usize; 4], [isize; 4]), LayoutError> {
    let [sb, sl, sh, sd] = dense([b, l, h, d]).map_err(|()| LayoutError::TooLarge { shape: [b, h, l, d] })?;
    Ok(([b, h, l, d], [sb, sh, sl, sd]))
}
