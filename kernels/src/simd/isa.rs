//! Instruction sets: what this machine has, and which one a run uses.

use crate::simd::Simd;
use crate::simd::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Avx2, avx512::Avx512};
use core::fmt;

/// An instruction set that this machine has. Values exist only for what was detected, so holding one is the proof.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(Kind);

/// The instruction sets that this build knows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Every kind this build knows, narrowest first.
const KINDS: &[Kind] = &[
    Kind::Portable,
    #[cfg(target_arch = "x86_64")]
    Kind::Avx2,
    #[cfg(target_arch = "x86_64")]
    Kind::Avx512,
];

impl Isa {
    /// The widest instruction set of this machine.
    pub fn detect() -> Self {
        Self::available().last().unwrap_or(Self(Kind::Portable))
    }

    /// All that this machine has, narrowest first. The portable one is always there.
    pub fn available() -> impl Iterator<Item = Self> + Clone {
        KINDS.iter().filter(|kind| kind.is_present()).map(|&kind| Self(kind))
    }

    /// All that this build knows by name, whether this machine has them or not.
    pub fn known() -> impl Iterator<Item = &'static str> + Clone {
        KINDS.iter().map(|&kind| Self(kind).name())
    }

    /// The instruction set of this name, if this machine has it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::available().find(|isa| isa.name() == name)
    }

    /// `portable`, `avx2` or `avx512`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
        }
    }

    /// True if products and sums are fused. All such instruction sets give the same bits.
    pub fn has_fma(self) -> bool {
        match self.0 {
            Kind::Portable => Portable::FUSED,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Avx2::FUSED,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Avx512::FUSED,
        }
    }

    /// True if this instruction set comes with products of bfloat16 of the machine's own, for
    /// [`Precision::Native`](crate::Precision::Native).
    pub fn has_native_bf16(self) -> bool {
        dispatch!(self, |s| s.has_bf16_dot())
    }

    /// Rows and keys of the register tile.
    pub fn tile(self) -> (usize, usize) {
        use crate::simd::LANES;
        fn shape<S: Simd>() -> (usize, usize) {
            (S::TILE_ROWS, S::TILE_VECS * LANES)
        }
        match self.0 {
            Kind::Portable => shape::<Portable>(),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => shape::<Avx2>(),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => shape::<Avx512>(),
        }
    }

    /// Which of them it is, for [`dispatch!`].
    #[inline]
    pub(crate) fn kind(self) -> Kind {
        self.0
    }
}

/// Runs `f` compiled for an instruction set, as far as it inlines: pass a closure marked `#[inline(always)]` that calls
/// functions so marked. For loops that the compiler can turn into vectors by itself; what they compute does not depend
/// on the instruction set, since products and sums are fused or reordered nowhere.
#[inline(always)]
pub fn vectorized<R>(isa: Isa, f: impl FnOnce() -> R) -> R {
    dispatch!(isa, |s| s.vectorize(f))
}

impl Kind {
    fn is_present(self) -> bool {
        match self {
            Self::Portable => true,
            // Miri and friends interpret: give them the code they can follow.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => !cfg!(miri) && Avx2::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => !cfg!(miri) && Avx512::detect().is_some(),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
