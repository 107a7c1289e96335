//! Shapes and strides: the location of each element, and the check that it is inside the slice.

use core::fmt;

/// Reason why a view could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// The shape and strides reach outside the slice.
    OutOfBounds {
        /// Requested shape, `[batch, heads, rows, dim]`.
        shape: [usize; 4],
        /// Requested strides, in elements.
        strides: [isize; 4],
        /// Lowest and highest element index the view would touch.
        reach: (i128, i128),
        /// Number of elements in the slice.
        len: usize,
    },
    /// Two indices of a mutable view share an element.
    Overlap {
        /// Requested shape.
        shape: [usize; 4],
        /// Requested strides, in elements.
        strides: [isize; 4],
    },
    /// The dimensions of a mutable view interleave: it would take too long to check whether two indices share an
    /// element.
    Interleaved {
        /// Requested shape.
        shape: [usize; 4],
        /// Requested strides, in elements.
        strides: [isize; 4],
    },
    /// The head counts of a packed QKV view do not fit together.
    Heads {
        /// Number of query heads.
        heads: usize,
        /// Number of key/value heads.
        kv_heads: usize,
    },
    /// Rows cannot be divided into heads: they have heads already, or another number of elements.
    Columns {
        /// Number of heads of the view.
        heads: usize,
        /// Number of elements of its rows.
        columns: usize,
        /// Number of heads that rows were to be divided into.
        into: usize,
    },
    /// An array does not have four dimensions, nor three.
    Dimensions {
        /// Number of dimensions.
        got: usize,
    },
    /// A dimension or the element count does not fit the address space.
    TooLarge {
        /// Requested shape.
        shape: [usize; 4],
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfBounds { shape, strides, reach: (low, high), len } => {
                write!(f, "a view of shape {shape:?} with strides {strides:?} ")?;
                if *low == 0 {
                    return write!(f, "takes {} elements, but the slice has {len}", high.saturating_add(1));
                }
                let cause = if *low < 0 { "; negative strides need an offset that leaves room before it" } else { "" };
                write!(f, "reaches elements {low}..={high}, but the slice has {len}{cause}")
            }
            Self::Overlap { shape, strides } => {
                let repeats = shape.iter().zip(strides).any(|(&n, &stride)| n > 1 && stride == 0);
                let cause = if repeats { "; a stride of 0 repeats elements, which only inputs may" } else { "" };
                write!(f, "a mutable view of shape {shape:?} with strides {strides:?} holds an element twice{cause}")
            }
            Self::Interleaved { shape, strides } => write!(
                f,
                "a mutable view of shape {shape:?} with strides {strides:?} interleaves: that it holds no element twice takes \
                 too long to find out"
            ),
            Self::Heads { heads, kv_heads } => {
                write!(f, "packed heads do not fit: {heads} query heads, {kv_heads} key/value heads")
            }
            Self::Columns { heads: 1, columns, into } => write!(f, "rows of {columns} elements are no {into} heads"),
            Self::Columns { heads, .. } => write!(f, "rows of {heads} heads cannot be divided into heads once more"),
            Self::Dimensions { got } => write!(
                f,
                "a view has 4 dimensions, [batch, heads, rows, dim], or 3 without heads, but the array has {got}"
            ),
            Self::TooLarge { shape } => write!(f, "a view of shape {shape:?} is larger than the address space"),
        }
    }
}

impl core::error::Error for LayoutError {}

/// Location of the elements, `offset + Σ index·stride`: a view without its data.
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
        let layout = Self { offset, shape, strides };
        if !layout.shape_is_countable() {
            return Err(LayoutError::TooLarge { shape });
        }
        if let Some(reach) = layout.reach()
            && (reach.0 < 0 || reach.1 >= len as i128)
        {
            return Err(LayoutError::OutOfBounds { shape, strides, reach, len });
        }
        Ok(layout)
    }

    /// Returns the layout of each head of rows that hold several, side by side.
    pub(crate) fn split_heads(self, into: usize) -> Result<Self, LayoutError> {
        let Self { offset, shape: [b, heads, l, columns], strides: [of_b, _, of_l, of_d] } = self;
        if heads != 1 || into == 0 || !columns.is_multiple_of(into) {
            return Err(LayoutError::Columns { heads, columns, into });
        }
        let dim = columns / into;
        // Steps inside a row that is there do not overflow; without elements nobody steps.
        Ok(Self { offset, shape: [b, into, l, dim], strides: [of_b, of_d.wrapping_mul(dim as isize), of_l, of_d] })
    }

    /// Returns the layout with index 0 at its lowest element.
    #[cfg(feature = "ndarray")]
    pub(crate) fn from_lowest(shape: [usize; 4], strides: [isize; 4]) -> Result<Self, LayoutError> {
        let reach = Self { offset: 0, shape, strides }.reach().unwrap_or((0, -1));
        let numbers = usize::try_from(-reach.0).ok().zip(usize::try_from(reach.1 - reach.0 + 1).ok());
        let (offset, len) = numbers.ok_or(LayoutError::TooLarge { shape })?;
        Self::checked(len, offset, shape, strides)
    }

    /// Returns true if the dimensions and the number of elements fit the address space.
    pub(crate) fn shape_is_countable(&self) -> bool {
        self.shape.iter().all(|&n| n <= isize::MAX as usize)
            && self.shape.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).is_some()
    }

    /// Returns the lowest and the highest index, unless there are no elements.
    fn reach(&self) -> Option<(i128, i128)> {
        if self.shape.contains(&0) {
            return None;
        }
        // i128 holds offset + 4 · (2⁶³ · 2⁶³) without overflow... barely: each product is below 2¹²⁶.
        let mut reach = (self.offset as i128, self.offset as i128);
        for (&n, &stride) in self.shape.iter().zip(&self.strides) {
            let span = (n as i128 - 1).saturating_mul(stride as i128);
            if span < 0 {
                reach.0 = reach.0.saturating_add(span);
            } else {
                reach.1 = reach.1.saturating_add(span);
            }
        }
        Some(reach)
    }

    /// Returns true if every index from the lowest to the highest is that of an element.
    #[cfg(feature = "ndarray")]
    pub(crate) fn has_no_gaps(&self) -> bool {
        let count = self.shape.iter().product::<usize>() as i128;
        self.reach().is_none_or(|(low, high)| high - low + 1 == count) && self.is_injective() == Some(true)
    }

    /// Returns the layout itself if no element is held twice.
    pub(crate) fn holds_each_once(self) -> Result<Self, LayoutError> {
        let Self { shape, strides, .. } = self;
        match self.is_injective() {
            Some(true) => Ok(self),
            Some(false) => Err(LayoutError::Overlap { shape, strides }),
            None => Err(LayoutError::Interleaved { shape, strides }),
        }
    }

    /// Returns true if no element is held twice. Nested dimensions (sorted by stride, every stride steps over the whole extent of
    /// the dimensions below it) are recognised at once, interleaved ones by a search of the [differences](Differences) of
    /// indices; if those are too many, the result is `None`.
    pub(crate) fn is_injective(&self) -> Option<bool> {
        if self.shape.contains(&0) {
            return Some(true);
        }
        let mut dims = [Dim { stride: 0, last: 0 }; 4];
        for (dim, (&n, &stride)) in dims.iter_mut().zip(self.shape.iter().zip(&self.strides)) {
            // A dimension of one index has no use for its stride; otherwise both numbers are below 2⁶⁴.
            if n > 1 {
                *dim = Dim { stride: stride.unsigned_abs() as i128, last: n as i128 - 1 };
            }
        }
        dims.sort_unstable_by_key(|dim| dim.stride);
        let mut extent = 0;
        let nested = dims.iter().filter(|dim| dim.last > 0).all(|dim| {
            let beyond = dim.stride > extent;
            extent += dim.stride * dim.last;
            beyond
        });
        if nested { Some(true) } else { Differences { left: MAX_DIFFERENCES }.none_is_zero(&dims, 0, true) }
    }

    /// Returns the element index of `[b, h, l, 0]`. In bounds for indices inside the shape of a view with elements.
    #[inline]
    pub(crate) fn row(&self, b: usize, h: usize, l: usize) -> usize {
        debug_assert!(b < self.shape[0] && h < self.shape[1] && l < self.shape[2]);
        let [sb, sh, sl, _] = self.strides;
        (self.offset as isize + b as isize * sb + h as isize * sh + l as isize * sl) as usize
    }

    /// Returns the index of an element inside the shape.
    pub(crate) fn element(&self, [b, h, l, d]: [usize; 4]) -> usize {
        (self.row(b, h, l) as isize + d as isize * self.strides[3]) as usize
    }
}

/// Dimension of more than one index, its stride made positive: the sign of a stride does not matter to whether two
/// indices share an element.
#[derive(Clone, Copy)]
struct Dim {
    stride: i128,
    last: i128,
}

/// Largest number of differences of two indices that are examined before the search gives up.
const MAX_DIFFERENCES: usize = 1 << 16;

/// Search for two indices of the same element: for a nonzero difference of indices with an offset of zero.
struct Differences {
    left: usize,
}

impl Differences {
    /// Returns false if some difference of indices in these dimensions has the offset `−moved`, not counting the zero
    /// difference if `exclude_none` is set. Returns `None` if there were too many to examine. The largest strides come
    /// first: few of their differences can be cancelled by the others.
    fn none_is_zero(&mut self, dims: &[Dim], moved: i128, exclude_none: bool) -> Option<bool> {
        let Some((dim, smaller)) = dims.split_last() else { return Some(moved != 0 || exclude_none) };
        if dim.last == 0 {
            return self.none_is_zero(smaller, moved, exclude_none);
        }
        if dim.stride == 0 {
            return Some(false);
        }
        let reach: i128 = smaller.iter().map(|dim| dim.stride * dim.last).sum();
        // −reach ≤ moved + n·stride ≤ reach. Of two opposite differences one suffices.
        let from = (-reach - moved).div_euclid(dim.stride) + i128::from((-reach - moved).rem_euclid(dim.stride) != 0);
        let from = from.max(if exclude_none { 0 } else { -dim.last });
        let to = (reach - moved).div_euclid(dim.stride).min(dim.last);
        for n in from..=to {
            self.left = self.left.checked_sub(1)?;
            if !self.none_is_zero(smaller, moved + n * dim.stride, exclude_none && n == 0)? {
                return Some(false);
            }
        }
        Some(true)
    }
}

/// Returns the strides of a dense array with dimensions stored in the order given, outermost first.
pub(crate) fn dense<const N: usize>(shape: [usize; N]) -> Result<[isize; N], ()> {
    let mut strides = [0isize; N];
    let mut step = 1isize;
    for i in (0..N).rev() {
        strides[i] = step;
        step = isize::try_from(shape[i]).ok().and_then(|n| step.checked_mul(n.max(1))).ok_or(())?;
    }
    Ok(strides)
}

/// Returns shape and strides, in `[batch, heads, rows, dim]` order, of an array stored batch, rows, heads, dim.
pub(crate) fn blhd_layout([b, l, h, d]: [usize; 4]) -> Result<([usize; 4], [isize; 4]), LayoutError> {
    let [sb, sl, sh, sd] = dense([b, l, h, d]).map_err(|()| LayoutError::TooLarge { shape: [b, h, l, d] })?;
    Ok(([b, h, l, d], [sb, sh, sl, sd]))
}

/// Returns the layouts of the queries, keys and values of a packed projection: see [`View::packed_qkv`](super::view::View::packed_qkv).
pub(crate) fn packed_qkv(len: usize, shape: [usize; 4], kv_heads: usize) -> Result<[Layout; 3], LayoutError> {
    let [b, l, h, d] = shape;
    if kv_heads == 0 || h % kv_heads != 0 {
        return Err(LayoutError::Heads { heads: h, kv_heads });
    }
    let too_large = LayoutError::TooLarge { shape };
    let all = kv_heads.checked_mul(2).and_then(|n| n.checked_add(h)).ok_or(too_large.clone())?;
    let (_, strides) = blhd_layout([b, l, all, d])?;
    let at = |heads: usize| heads.checked_mul(d).ok_or(too_large.clone());
    Ok([
        Layout::checked(len, 0, [b, h, l, d], strides)?,
        Layout::checked(len, at(h)?, [b, kv_heads, l, d], strides)?,
        Layout::checked(len, at(h + kv_heads)?, [b, kv_heads, l, d], strides)?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Compares the result with a count of the elements, for every small layout.
    #[test]
    fn layouts_that_hold_an_element_twice() {
        let (mut once, mut interleaved) = (0, 0);
        let sizes = [[1, 2, 3, 4], [2, 3, 1, 2], [3, 2, 2, 2], [1, 1, 3, 2]];
        let strides = [-7isize, -4, -3, 0, 1, 2, 3, 5, 6, 9];
        for (shape, n) in sizes.iter().flat_map(|&shape| (0..strides.len().pow(4)).map(move |n| (shape, n))) {
            let layout = Layout { offset: 1000, shape, strides: [1, 10, 100, 1000].map(|by| strides[n / by % 10]) };
            let [b, h, l, d] = shape;
            let indices = (0..b * h * l * d).map(|i| [i / d / l / h, i / d / l % h, i / d % l, i % d]);
            let at = |i: [usize; 4]| i.iter().zip(layout.strides).map(|(&i, s)| i as isize * s).sum::<isize>();
            let elements: HashSet<isize> = indices.map(at).collect();
            let injective = elements.len() == b * h * l * d;
            assert_eq!(layout.is_injective(), Some(injective), "{layout:?}");
            once += usize::from(injective);
            // Counts the layouts that do not nest.
            let mut dims: Vec<_> =
                (0..4).filter(|&i| shape[i] > 1).map(|i| (layout.strides[i].abs(), shape[i])).collect();
            dims.sort_unstable();
            let nested =
                (1..dims.len()).all(|i| dims[i].0 > dims[..i].iter().map(|(s, n)| s * (*n as isize - 1)).sum());
            interleaved += usize::from(injective && !nested);
        }
        assert!(once > 1000 && interleaved > 100, "{once} hold each element once, {interleaved} of them interleaved");
    }

    #[cfg(feature = "ndarray")]
    #[test]
    fn layouts_without_gaps() {
        let has_no_gaps = |shape, strides| Layout { offset: 9, shape, strides }.has_no_gaps();
        assert!(has_no_gaps([2, 3, 1, 4], [12, 4, 0, 1]) && has_no_gaps([2, 3, 4, 1], [-1, 2, 6, 0]));
        assert!(has_no_gaps([1; 4], [5; 4]) && has_no_gaps([1, 0, 2, 2], [0; 4]));
        assert!(!has_no_gaps([2, 3, 1, 4], [13, 4, 0, 1]) && !has_no_gaps([1, 1, 2, 4], [0, 0, 0, 1]));
    }
}
