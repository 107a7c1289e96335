//! Golden bits of the layers: calls by number, each the same for ever, held against what `tests/golden` says they wrote.
//! Numbers are finite; sizes are small.

mod blocks;
mod linear_attention;
mod simple;

use crate::golden_file::{ACCURATE, Call, EXACT, Hash, check, normal};
use crate::support::Rng;
use sdpa::{Exec, Isa, Precision};
use sdpa_layers::{Activation, Compute, Linear, Norm, Weights};
use std::sync::OnceLock;

/// Calls of each kind.
const OF_EACH: u64 = 40;
/// Calls of each kind with [`Precision::Accurate`]: fewer, because a scalar model takes longer.
const ACCURATE_OF_EACH: u64 = 10;

/// A kind of calls.
type Kind = fn(&mut Draw, &mut Recorder);

/// Number n is of kind n mod 12, for ever.
const KINDS: [(&str, Kind); 12] = [
    ("linear", simple::linear),
    ("norm", simple::norm),
    ("feed-forward", simple::feed_forward),
    ("activation", simple::activation),
    ("positions", simple::positions),
    ("look-up", simple::look_up),
    ("multi-head", blocks::multi_head),
    ("decode", blocks::decode),
    ("transformer", blocks::transformer),
    ("linear attention", linear_attention::forward),
    ("BERT", blocks::bert),
    ("steps", blocks::steps),
];

/// Random numbers, and layers of them that have a precision.
struct Draw(Rng, Precision);

impl Draw {
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        self.0.pick(from)
    }

    /// From 1 to `most`.
    fn upto(&mut self, most: usize) -> usize {
        1 + self.0.below(most)
    }

    fn flip(&mut self) -> bool {
        self.0.below(2) == 0
    }

    fn normal(&mut self) -> f32 {
        normal(|| self.0.bits())
    }

    fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    /// Between 0 and 1.
    fn unit(&mut self) -> f32 {
        self.0.below(1 << 20) as f32 / (1 << 20) as f32
    }

    /// Numbers around 1.
    fn gains(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| 1.0 + 0.25 * self.normal()).collect()
    }

    fn any_activation(&mut self) -> Activation {
        use Activation::{Gelu, GeluTanh, Identity, Relu, Silu};
        self.pick(&[Identity, Relu, Gelu, GeluTanh, Silu])
    }

    /// Outputs of about the size of the inputs.
    fn any_linear(&mut self, outputs: usize, inputs: usize) -> Linear {
        let size = 1.0 / (inputs as f32).sqrt();
        let weights: Vec<f32> = self.numbers(outputs * inputs).into_iter().map(|w| size * w).collect();
        let bias = self.flip().then(|| self.numbers(outputs));
        let weights = if self.flip() {
            Weights::rows(&weights, [outputs, inputs])
        } else {
            Weights::columns(&weights, [inputs, outputs])
        };
        let weights = weights.expect("good sizes");
        let linear = Linear::new(match &bias {
            Some(bias) => weights.bias(bias).expect("one for each output"),
            None => weights,
        });
        linear.precision(self.1)
    }

    fn any_norm(&mut self, width: usize) -> Norm {
        let (gains, eps) = (self.gains(width), self.pick(&[1e-5, 1e-12]));
        let norm = if self.flip() { Norm::layer(gains, eps) } else { Norm::rms(gains, eps) };
        let norm = norm.expect("a good size");
        if self.flip() { norm.bias(self.numbers(width)).expect("one for each gain") } else { norm }
    }
}

/// What a call says of itself and writes.
struct Recorder {
    hashes: Vec<(Isa, Hash)>,
    threads: usize,
    what: String,
}

impl Recorder {
    fn say(&mut self, what: impl core::fmt::Display) {
        self.what.push_str(&format!(", {what}"));
    }

    /// Makes the call on each instruction set, and records what it wrote.
    fn each<W: IntoIterator<Item = Vec<f32>> + Send>(&mut self, run: impl Fn(&mut Compute) -> W + Sync) {
        for (isa, hash) in &mut self.hashes {
            let mut compute = Compute::new(Exec::serial().isa(*isa).threads(self.threads));
            // WebAssembly has one thread.
            let written =
                if cfg!(target_family = "wasm") { run(&mut compute) } else { pool().install(|| run(&mut compute)) };
            written.into_iter().for_each(|written| hash.floats(&written));
        }
    }
}

/// Two threads.
fn pool() -> &'static rayon::ThreadPool {
    static POOL: OnceLock<rayon::ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("two threads"))
}

fn call(number: u64, precision: Precision) -> Call {
    let (name, make) = KINDS[(number % KINDS.len() as u64) as usize];
    let mut draw = Draw(Rng::new(number.wrapping_mul(0xd134_2543_de82_ef95)), precision);
    let threads = draw.pick(&[1, 1, 2]);
    let hashes = Isa::available().map(|isa| (isa, Hash::new())).collect();
    let mut recorder = Recorder { hashes, threads, what: name.to_owned() };
    make(&mut draw, &mut recorder);
    if threads > 1 {
        recorder.say("two threads");
    }
    let hashes = recorder.hashes.into_iter().map(|(isa, hash)| (isa, hash.value())).collect();
    Call { what: recorder.what, hashes }
}

#[test]
fn golden_bits() {
    for (of_each, precision, files) in
        [(OF_EACH, Precision::Exact, &EXACT[..]), (ACCURATE_OF_EACH, Precision::Accurate, &ACCURATE)]
    {
        let calls: Vec<Call> = (0..of_each * KINDS.len() as u64).map(|number| call(number, precision)).collect();
        check(&calls, files, &[], "cargo test -p sdpa-layers --test layers golden");
    }
}
