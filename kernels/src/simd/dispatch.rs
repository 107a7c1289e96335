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
                let $s = $crate::simd::x86::avx512_token::Avx512::detect().expect($crate::simd::dispatch::PROOF);
                $work
            }
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Kind::Amx => {
                let $s =
                    $crate::simd::x86::avx512_token::Avx512::detect_with_unit().expect($crate::simd::dispatch::PROOF);
                $work
            }
        }
    };
}

/// Defines a trait of all that implements `$of<S>` for every token `S`: a `dyn` of it becomes a `dyn $of<S>`.
macro_rules! of_every_token {
    ($(#[$doc:meta])* $name:ident: $of:ident) => {
        $(#[$doc])*
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        pub(crate) trait $name: $of<$crate::simd::portable::Portable> {}
        $(#[$doc])*
        #[cfg(target_arch = "aarch64")]
        pub(crate) trait $name: $of<$crate::simd::portable::Portable> + $of<$crate::simd::aarch64::neon::Neon> {}
        $(#[$doc])*
        #[cfg(target_arch = "x86_64")]
        pub(crate) trait $name:
            $of<$crate::simd::portable::Portable> + $of<$crate::simd::x86::avx2::Avx2> + $of<$crate::simd::x86::avx512_token::Avx512>
        {
        }
    };
}
