//! Tokens of AVX-512: proofs, by detection, that the machine has it, and what goes with it.

use crate::simd::tiles::MatrixUnit;
use crate::simd::unit::Unit;

/// Proof that this machine has AVX-512F and the extension that `EXTRA` names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Token<const EXTRA: u8> {
    /// Result of [`Simd::has_large_l1`].
    pub(super) large_l1: bool,
    /// Result of [`Simd::has_matrix_unit`].
    pub(super) unit: bool,
    /// Extensions that the machine has.
    extensions: Extensions,
}

/// Extensions of AVX-512 that the machine has, each with AVX-512BW: looking for them once more takes a hundredth of a step.
#[derive(Clone, Copy, Debug)]
struct Extensions {
    vnni: bool,
    bf16: bool,
}

impl Extensions {
    #[inline(always)]
    fn has(self, extra: u8) -> bool {
        match extra {
            VNNI => self.vnni,
            BF16 => self.bf16,
            _ => true,
        }
    }
}

const NOTHING: u8 = 0;
pub(super) const VNNI: u8 = 1;
pub(super) const BF16: u8 = 2;

/// Proof that this machine has AVX-512F.
pub(crate) type Avx512 = Avx512Token<NOTHING>;

/// Proof that this machine has AVX-512 VNNI and, for 16-bit numbers, AVX-512BW, too. It is not an instruction set to
/// choose: [`Simd::with_int8_dot`] hands it out.
pub(crate) type Avx512Vnni = Avx512Token<VNNI>;

/// Proof that this machine has AVX512_BF16 and, to shuffle words, AVX-512BW, too: [`Simd::with_bf16_dot`] hands it out.
pub(crate) type Avx512Bf16 = Avx512Token<BF16>;

impl<const EXTRA: u8> Avx512Token<EXTRA> {
    /// Returns the proof if the machine has the features. There is no other constructor, but [`Self::with`].
    pub(crate) fn detect() -> Option<Self> {
        let words = is_x86_feature_detected!("avx512bw");
        let extensions = Extensions {
            vnni: words && is_x86_feature_detected!("avx512vnni"),
            bf16: words && is_x86_feature_detected!("avx512bf16"),
        };
        // Among machines with AVX-512, those with AVX-VNNI have 48 KiB of first-level cache (Zen 5, Sapphire Rapids);
        // of the others some have (Ice Lake), most have 32 (Zen 4, Skylake). The cache size is not queried: a virtual
        // machine takes microseconds to answer.
        let large_l1 = is_x86_feature_detected!("avxvnni");
        let present = is_x86_feature_detected!("avx512f") && extensions.has(EXTRA);
        present.then_some(Self { large_l1, unit: cfg!(matrix_unit_model), extensions })
    }

    /// Returns the proof of an extension, if the machine has it.
    #[inline(always)]
    pub(super) fn with<const OTHER: u8>(self) -> Option<Avx512Token<OTHER>> {
        let Self { large_l1, unit, extensions } = self;
        extensions.has(OTHER).then_some(Avx512Token { large_l1, unit, extensions })
    }

    /// Overrides [`Simd::has_large_l1`].
    #[cfg(test)]
    pub(crate) fn with_room(mut self, large_l1: bool) -> Self {
        self.large_l1 = large_l1;
        self
    }
}

impl Avx512 {
    /// Returns the proof with that of the matrix unit, if the machine has this, all products of AVX-512 beside it, and the process
    /// may use it.
    pub(crate) fn detect_with_unit() -> Option<Self> {
        let beside = Avx512Vnni::detect().is_some() && Avx512Bf16::detect().is_some();
        let unit = beside && Unit::detect().is_ok();
        Self::detect().filter(|_| unit).map(|vectors| Self { unit, ..vectors })
    }
}
