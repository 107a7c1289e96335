//! Measurements of one core: what it computes and what it reads at most.

use crate::isa::{Isa, Visitor};
use crate::rows::Rows;
use crate::steps::Steps;
use crate::tensor::Typed;

/// Floating-point operations per second that one core can do in this instruction set, when it does nothing else: the
/// best of several short bursts of independent FMAs, or products and sums where that is faster. Takes about 50 ms.
pub fn peak_flops(isa: Isa) -> f64 {
    struct Bursts(usize);
    impl Visitor for Bursts {
        type Output = f64;
        fn visit<S: Steps>(self, s: S) -> f64 {
            let timed = |burst: fn(S, usize) -> (u64, f32)| {
                let start = std::time::Instant::now();
                let (operations, sum) = burst(s, self.0);
                core::hint::black_box(sum);
                operations as f64 / start.elapsed().as_secs_f64()
            };
            timed(S::fma_burst).max(timed(S::mul_add_burst))
        }
    }
    (0..16).map(|_| isa.dispatch(Bursts(100_000))).fold(0.0, f64::max)
}

/// Reads every float and does next to nothing with them: how long that takes is what a kernel that waits for memory is
/// held against. True if all are finite.
pub fn read(floats: &[f32]) -> bool {
    struct Read<'a>(&'a [f32]);
    impl Visitor for Read<'_> {
        type Output = bool;
        fn visit<S: Steps>(self, s: S) -> bool {
            let rows = Typed::F32(Rows::strided(self.0.as_ptr(), 1024, 1));
            // SAFETY: the slice holds this many rows of 1024.
            unsafe { s.all_finite(rows, self.0.len() / 1024, 1024) }
        }
    }
    let (whole, rest) = floats.split_at(floats.len() / 1024 * 1024);
    Isa::detect().dispatch(Read(whole)) && rest.iter().all(|x| x.is_finite())
}

/// Bytes per second that one core reads from memory: the best of a few passes over 128 MiB.
pub fn read_bandwidth() -> f64 {
    let floats = vec![1.0f32; 32 << 20];
    let pass = || {
        let start = std::time::Instant::now();
        core::hint::black_box(read(&floats));
        (floats.len() * size_of::<f32>()) as f64 / start.elapsed().as_secs_f64()
    };
    (0..3).map(|_| pass()).fold(0.0, f64::max)
}
