//! Conversions from the 16-bit types of the crate `half`: the same bits, `#[repr(transparent)]` over `u16` on both
//! sides.

use crate::tensor::any::{Tensor, TensorMut};
use crate::tensor::element::{Bf16, F16};
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;

macro_rules! from_half {
    ($($half:ty, $Element:ty;)*) => {$(
        /// Conversion from elements of the crate half, version 2. Needs the feature `half`.
        impl<'a> From<View<'a, $half>> for View<'a, $Element> {
            fn from(view: View<'a, $half>) -> Self {
                // SAFETY: both types are a transparent u16; every bit pattern is valid.
                unsafe { view.cast() }
            }
        }

        /// Conversion from elements of the crate half, version 2. Needs the feature `half`.
        impl<'a> From<ViewMut<'a, $half>> for ViewMut<'a, $Element> {
            fn from(view: ViewMut<'a, $half>) -> Self {
                // SAFETY: both types are a transparent u16; every bit pattern is valid.
                unsafe { view.cast() }
            }
        }

        /// Conversion from elements of the crate half, version 2. Needs the feature `half`.
        impl<'a> From<View<'a, $half>> for Tensor<'a> {
            fn from(view: View<'a, $half>) -> Self {
                View::<$Element>::from(view).into()
            }
        }

        /// Conversion from elements of the crate half, version 2. Needs the feature `half`.
        impl<'a> From<ViewMut<'a, $half>> for TensorMut<'a> {
            fn from(view: ViewMut<'a, $half>) -> Self {
                ViewMut::<$Element>::from(view).into()
            }
        }
    )*};
}

from_half!(half::bf16, Bf16; half::f16, F16;);
