//! Instruction sets: the ones that this machine has, and the one that a run uses.

#[cfg(target_arch = "aarch64")]
use crate::simd::aarch64::neon::Neon;
use crate::simd::tiles::{MatrixUnit, NoMatrixUnit};
use crate::simd::unit::Unit;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{avx2::Avx2, avx512_token::Avx512};
use crate::simd::{LANES, Simd};
use core::fmt;

/// Instruction set that this machine has. Values exist only for detected instruction sets, so holding one is the proof.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(Kind);

/// Instruction sets that this build knows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    Portable,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 and a matrix unit.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// List of every kind that this build knows, narrowest first.
const KINDS: &[Kind] = &[
    Kind::Portable,
    #[cfg(target_arch = "aarch64")]
    Kind::Neon,
    #[cfg(target_arch = "x86_64")]
    Kind::Avx2,
    #[cfg(target_arch = "x86_64")]
    Kind::Avx512,
    #[cfg(target_arch = "x86_64")]
    Kind::Amx,
];

impl Isa {
    /// Returns the widest instruction set of this machine, that with the matrix unit if there is one.
    pub fn detect() -> Self {
        Self::available().last().unwrap_or(Self(Kind::Portable))
    }

    /// Returns the instruction sets of this machine, narrowest first. The portable one is always among them.
    pub fn available() -> impl Iterator<Item = Self> + Clone {
        KINDS.iter().filter(|kind| kind.is_present()).map(|&kind| Self(kind))
    }

    /// Returns the names of the instruction sets that this build knows, on this machine or not.
    pub fn known() -> impl Iterator<Item = &'static str> + Clone {
        KINDS.iter().map(|&kind| Self(kind).name())
    }

    /// Returns the instruction set of this name, if this machine has it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::available().find(|isa| isa.name() == name)
    }

    /// Returns the name: `portable`, `avx2`, `avx512`, `amx` (AVX-512 with that matrix unit) or `neon`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => "amx",
        }
    }

    /// Returns true if products and sums are fused. All such instruction sets give the same bits.
    pub fn has_fma(self) -> bool {
        fn is_fused<S: Simd>(_: S) -> bool {
            S::FUSED
        }
        dispatch!(self, |s| is_fused(s))
    }

    /// Returns the numbers of rows and keys of the register tile.
    pub fn tile(self) -> (usize, usize) {
        fn shape<S: Simd>(_: S) -> (usize, usize) {
            (S::TILE_ROWS, S::TILE_VECS * LANES)
        }
        dispatch!(self, |s| shape(s))
    }

    /// Returns an error, with the reason, if this instruction set has no matrix unit.
    pub fn matrix_unit(self) -> Result<(), NoMatrixUnit> {
        match self.0 {
            // Every one has the model.
            _ if cfg!(matrix_unit_model) => Ok(()),
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => Ok(()),
            _ => Err(Unit::detect().err().unwrap_or(NoMatrixUnit::Elsewhere)),
        }
    }

    /// Returns the kind, for [`dispatch!`].
    #[inline]
    pub(crate) fn kind(self) -> Kind {
        self.0
    }
}

/// Runs `f` compiled for an instruction set, as far as it inlines: pass a closure marked `#[inline(always)]` that calls
/// functions that are marked so too. It is for loops that the compiler vectorises; their results do not depend on
/// the instruction set, since products and sums are neither fused nor reordered.
#[inline(always)]
pub fn vectorized<R>(isa: Isa, f: impl FnOnce() -> R) -> R {
    dispatch!(isa, |s| s.vectorize(f))
}

impl Kind {
    fn is_present(self) -> bool {
        match self {
            Self::Portable => true,
            // Miri and similar interpreters get the portable code, which they can execute.
            #[cfg(target_arch = "aarch64")]
            Self::Neon => !cfg!(miri) && Neon::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => !cfg!(miri) && Avx2::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => !cfg!(miri) && Avx512::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => !cfg!(miri) && Avx512::detect_with_unit().is_some(),
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
