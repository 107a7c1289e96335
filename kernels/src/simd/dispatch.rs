//! Dispatch over the instruction sets: the one place that lists their tokens.

/// Panic message of `dispatch!`: a token's `detect` cannot fail for an `Isa`, which exists only for a detected
/// instruction set.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) const PROOF: &str = "an Isa is made only for what was detected";

/// Evaluates an expression with the token of an instruction set. This is the one dispatch; the expression is compiled
/// once for each token, as a concrete type.
macro_rules! dispatch {
    ($isa:expr, |$s:ident| $work:expr) => {
        match $isa.kind() {
            $crate::simd::isa::Kind::Portable => {
                let $s = $crate::simd::portable::Portable;
                $work
            }
            #[cfg(target_arch = "aarch64")]
            $crate::simd::isa::Kind::Neon => {
                let $s = $crate::simd::aarch64::neon::Neon::detect().expect($crate::simd::dispatch::PROOF);
                $work
            }
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Kind::Avx2 => {
                let $s = $crate::simd::x86::avx2::Avx2::detect().expect($crate::simd::dispatch::PROOF);
                $work
            }
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Kind::Avx512 => {
                let $s = $crate::simd::x86::avx512::Avx512::detect().expect($crate::simd::dispatch::PROOF);
                $work
            }
        }
    };
}

/// Calls a macro with the type of every token. It is for traits that are implemented for each token, so that their
/// methods are compiled in this crate.
macro_rules! for_each_token {
    ($implement:ident) => {
        $implement!($crate::simd::portable::Portable);
        #[cfg(target_arch = "aarch64")]
        $implement!($crate::simd::aarch64::neon::Neon);
        #[cfg(target_arch = "x86_64")]
        $implement!($crate::simd::x86::avx2::Avx2);
        #[cfg(target_arch = "x86_64")]
        $implement!($crate::simd::x86::avx512::Avx512);
    };
}
