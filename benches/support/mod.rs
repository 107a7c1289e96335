//! What the benchmarks share: named workloads, seeded data, the check before the clock starts, the machine line.
#![allow(dead_code, reason = "each benchmark uses its part")]

use rand::{RngExt, SeedableRng, rngs::ChaCha8Rng};
use sdpa::{Alignment, Attention, Exec, Inputs, Isa, Outputs, Shape, View, ViewMut, Window, naive, probe};
use std::num::NonZeroUsize;
use std::ops::Range;

/// Returns more memory than any third-level cache here holds, 128 MiB: reading it makes a call's memory cold.
pub(crate) fn flush() -> Vec<f32> {
    vec![1.0; if test_mode() { 1024 } else { 32 << 20 }]
}

/// A shape that somebody runs, by the name of the model that has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    pub(crate) shape: Shape,
    pub(crate) causal: bool,
    /// Keys that a row sees at most, its own included.
    pub(crate) window: Option<NonZeroUsize>,
    pub(crate) softcap: Option<f32>,
}

const fn dims(
    name: &'static str,
    [batch, heads, kv_heads]: [usize; 3],
    [q_len, kv_len]: [usize; 2],
    [head_dim, value_dim]: [usize; 2],
    causal: bool,
) -> Workload {
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    Workload { name, shape, causal, window: None, softcap: None }
}

const fn causal(name: &'static str, len: usize) -> Workload {
    dims(name, [1, 12, 12], [len, len], [64, 64], true)
}

/// One row against a cache of keys.
const fn decode(name: &'static str, keys: usize) -> Workload {
    dims(name, [1, 32, 8], [1, keys], [128, 128], false)
}

pub(crate) const WORKLOADS: &[Workload] = &[
    dims("bert-512", [1, 12, 12], [512, 512], [64, 64], false),
    dims("bert-b8-128", [8, 12, 12], [128, 128], [64, 64], false),
    dims("minilm-b32-128", [32, 12, 12], [128, 128], [32, 32], false),
    dims("vit-b8-197", [8, 12, 12], [197, 197], [64, 64], false),
    dims("sd-cross", [2, 8, 8], [4096, 77], [40, 40], false),
    dims("siglip-729", [1, 16, 16], [729, 729], [72, 72], false),
    causal("gpt2-1024-causal", 1024),
    dims("long-4096", [1, 12, 12], [4096, 4096], [64, 64], false),
    causal("long-4096-causal", 4096),
    dims("llama-2048-gqa", [1, 32, 8], [2048, 2048], [128, 128], true),
    dims("d256-1024-causal", [1, 8, 8], [1024, 1024], [256, 256], true),
    Workload { window: NonZeroUsize::new(256), ..causal("window-256-of-4096", 4096) },
    Workload { softcap: Some(30.0), ..causal("softcap-1024-causal", 1024) },
    dims("tiny-16", [1, 12, 12], [16, 16], [64, 64], false),
    decode("decode-4k", 4096),
    decode("decode-16k", 16384),
    dims("odd", [3, 5, 5], [333, 1111], [72, 56], false),
];

const fn length(name: &'static str, len: usize) -> Workload {
    dims(name, [1, 12, 12], [len, len], [64, 64], false)
}

/// 12 heads of 64, nothing masked, as many keys as rows: for curves against length.
pub(crate) const LENGTHS: &[Workload] = &[
    length("length-64", 64),
    length("length-128", 128),
    length("length-256", 256),
    length("length-512", 512),
    length("length-1024", 1024),
    length("length-2048", 2048),
    length("length-4096", 4096),
];

impl Workload {
    /// In test mode, the same kind of shape with little to compute.
    pub(crate) fn for_mode(self) -> Self {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        if !test_mode() {
            return self;
        }
        // A few rows beyond a block of keys, so that several blocks meet.
        let (batch, kv) = (batch.min(2), kv_heads.min(2));
        let shape = Shape {
            batch,
            heads: kv * (heads / kv_heads),
            kv_heads: kv,
            q_len: q_len.min(267),
            kv_len: kv_len.min(267),
            head_dim,
            value_dim,
        };
        Self { shape, ..self }
    }

    /// Useful floating-point operations: two for each visible pair of row and key and each of the dimensions.
    pub(crate) fn flops(&self) -> u64 {
        let Shape { batch, heads, q_len, kv_len, head_dim, value_dim, .. } = self.shape;
        let most = self.window.map_or(kv_len, |window| window.get().min(kv_len));
        let pairs = if self.causal { (1..=q_len).map(|p| p.min(most)).sum() } else { q_len * kv_len };
        (2 * batch * heads * pairs * (head_dim + value_dim)) as u64
    }

    pub(crate) fn attention(&self) -> Attention {
        let mut attention = Attention::new();
        if self.causal {
            attention = attention.causal();
        }
        if let Some(n) = self.window {
            attention = attention.window(Window::last_tokens(n));
        }
        if let Some(c) = self.softcap {
            attention = attention.softcap(c);
        }
        attention
    }

    /// Unit-normal tensors, the same on every run.
    pub(crate) fn tensors(self) -> Tensors {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let mut normal = normal(42);
        let mut fill = |n: usize| (0..n).map(|_| normal()).collect::<Vec<f32>>();
        Tensors {
            workload: self,
            q: fill(batch * heads * q_len * head_dim),
            k: fill(batch * kv_heads * kv_len * head_dim),
            v: fill(batch * kv_heads * kv_len * value_dim),
            out: vec![0.0; batch * heads * q_len * value_dim],
        }
    }
}

/// A workload's data, and room for its output.
#[derive(Debug)]
pub(crate) struct Tensors {
    pub(crate) workload: Workload,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
}

impl Tensors {
    pub(crate) fn bind(&mut self) -> (Inputs<'_>, Outputs<'_>) {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.workload.shape;
        let inputs = Inputs::new(
            View::bhld(&self.q, [batch, heads, q_len, head_dim]).expect("q fits"),
            View::bhld(&self.k, [batch, kv_heads, kv_len, head_dim]).expect("k fits"),
            View::bhld(&self.v, [batch, kv_heads, kv_len, value_dim]).expect("v fits"),
        );
        let out = ViewMut::bhld(&mut self.out, [batch, heads, q_len, value_dim]).expect("out fits");
        (inputs, Outputs::new(out))
    }

    /// The data of q, k and v.
    pub(crate) fn parts(&self) -> [&[f32]; 3] {
        [&self.q, &self.k, &self.v]
    }

    /// Some rows of one head as a separate problem.
    pub(crate) fn strip(&self, [b, h]: [usize; 2], rows: Range<usize>) -> (Attention, Inputs<'_>) {
        let Shape { heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = self.workload.shape;
        let kv = b * kv_heads + h / (heads / kv_heads);
        let row = (b * heads + h) * q_len + rows.start;
        let inputs = Inputs::new(
            View::bhld(&self.q[row * head_dim..], [1, 1, rows.len(), head_dim]).expect("rows of one head"),
            View::bhld(&self.k[kv * kv_len * head_dim..], [1, 1, kv_len, head_dim]).expect("one head"),
            View::bhld(&self.v[kv * kv_len * value_dim..], [1, 1, kv_len, value_dim]).expect("one head"),
        );
        (self.workload.attention().align(Alignment::Offset(rows.start as isize)), inputs)
    }

    /// Runs once and holds sampled rows of the output against the oracle.
    ///
    /// # Panics
    /// If one of them is off by more than rounding explains.
    pub(crate) fn check(&mut self, path: &str, run: impl FnOnce(&mut Self)) {
        self.out.fill(f32::NAN);
        run(self);
        let Shape { batch, heads, q_len, value_dim, .. } = self.workload.shape;
        let name = self.workload.name;
        assert!(!self.out.iter().any(|x| x.is_nan()), "{name}, {path}: not every element was written");
        // First and last row and some between, a different head each time.
        for sample in 0..8 {
            let (b, h, i) = (sample % batch, sample * 5 % heads, sample * (q_len - 1) / 7);
            let row = (b * heads + h) * q_len + i;
            let (alone, inputs) = self.strip([b, h], i..i + 1);
            let expected = naive::oracle(&alone, &inputs).expect("the shapes fit").out;
            for (d, (want, &got)) in expected.iter().zip(&self.out[row * value_dim..]).enumerate() {
                let error = (want - f64::from(got)).abs();
                assert!(error <= 5e-6, "{name}, {path}: out[{b}, {h}, {i}, {d}] is {got}, the oracle says {want}");
            }
        }
    }
}

/// True under `cargo bench -- --test` and `cargo test --benches`: everything runs once, nothing is timed.
pub(crate) fn test_mode() -> bool {
    let mut args = std::env::args();
    let (bench, test) = args.by_ref().fold((false, false), |(b, t), a| (b || a == "--bench", t || a == "--test"));
    test || !bench
}

/// Unit-normal numbers by Box and Muller.
pub(crate) fn normal(seed: u64) -> impl FnMut() -> f32 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    move || {
        let (radius, angle): (f64, f64) = (rng.random(), rng.random());
        ((-2.0 * (1.0 - radius).ln()).sqrt() * (core::f64::consts::TAU * angle).cos()) as f32
    }
}

/// Threads to measure with: one and all.
pub(crate) fn thread_counts() -> Vec<usize> {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    if cfg!(feature = "rayon") && all > 1 { vec![1, all] } else { vec![1] }
}

/// Returns the instruction set to measure: the widest, or what `SDPA_ISA` names; an error if the machine has no such.
pub(crate) fn held_isa() -> Result<Isa, String> {
    let Ok(name) = std::env::var("SDPA_ISA") else { return Ok(Isa::detect()) };
    Isa::from_name(&name).ok_or_else(|| format!("SDPA_ISA: this machine has no {name}"))
}

/// Returns the [instruction set](held_isa) to measure.
///
/// # Panics
/// If the machine has no such.
pub(crate) fn isa() -> Isa {
    held_isa().unwrap_or_else(|error| panic!("{error}"))
}

/// Returns `threads` threads, on the [instruction set](isa) to measure.
pub(crate) fn exec(threads: usize) -> Exec<'static> {
    Exec::default().threads(threads).isa(isa())
}

/// Prints where the figures come from.
pub(crate) fn print_machine() {
    println!("{}", machine());
}

/// One line that says where the figures come from.
pub(crate) fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or(std::env::consts::ARCH, |(_, name)| name);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let peaks: Vec<_> = Isa::available().map(|isa| format!("{isa} {:.0}", probe::peak_flops(isa) / 1e9)).collect();
    format!("machine: {model}, {threads} threads, {}; peak of one thread in GFLOP/s: {}", isa(), peaks.join(", "))
}
