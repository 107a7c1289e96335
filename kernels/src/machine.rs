//! Measurements of one core: its peak arithmetic and its read bandwidth.

use crate::matmul::finite;
use crate::simd::isa::Isa;
use crate::simd::{Simd, exp};
use crate::tensor::any::Typed;
use crate::tensor::rows::Rows;

/// Level that this crate was optimised with, as Cargo writes it: `3`, `s`, …. Its loops need `2` or `3`.
pub const OPT_LEVEL: &str = env!("SDPA_OPT_LEVEL");

/// Measures the floating-point operations per second of one core in this instruction set, when it does nothing else:
/// the best of several short bursts of independent FMAs, or products and sums where that is faster. Takes about 50 ms.
pub fn peak_flops(isa: Isa) -> f64 {
    const ROUNDS: usize = 100_000;
    let best = |burst: &dyn Fn() -> (u64, f32)| {
        let timed = |_| {
            let start = std::time::Instant::now();
            let (operations, sum) = burst();
            core::hint::black_box(sum);
            operations as f64 / start.elapsed().as_secs_f64()
        };
        (0..16).map(timed).fold(0.0, f64::max)
    };
    let fused = best(&|| {
        dispatch!(isa, |s| s.vectorize(
            #[inline(always)]
            || exp::fma_burst(s, ROUNDS),
        ))
    });
    fused.max(best(&|| {
        dispatch!(isa, |s| s.vectorize(
            #[inline(always)]
            || exp::mul_add_burst(s, ROUNDS),
        ))
    }))
}

/// Reads every float with almost no arithmetic: its time is the baseline of a kernel that waits for memory. Returns
/// true if all are finite.
pub(crate) fn read(floats: &[f32]) -> bool {
    let (whole, rest) = floats.split_at(floats.len() / 1024 * 1024);
    let rows = Typed::F32(Rows::strided(whole.as_ptr(), 1024, 1));
    // SAFETY: the slice holds this many rows of 1024 floats.
    let all_finite = dispatch!(Isa::detect(), |s| unsafe { finite::all_finite(s, rows, whole.len() / 1024, 1024) });
    all_finite && rest.iter().all(|x| x.is_finite())
}

/// Measures the bytes per second that one core reads from memory: the best of a few passes over 128 MiB.
pub fn read_bandwidth() -> f64 {
    let floats = vec![1.0f32; 32 << 20];
    let pass = || {
        let start = std::time::Instant::now();
        core::hint::black_box(read(&floats));
        (floats.len() * size_of::<f32>()) as f64 / start.elapsed().as_secs_f64()
    };
    (0..3).map(|_| pass()).fold(0.0, f64::max)
}
