//! What each option costs over the plain fused pass: interleaved runs on one thread, medians, ratios.
//!
//! ```text
//! cargo bench --bench options
//! ```
//! Not criterion's way of one case after another: a machine that slows down half-way would show in the ratios.

#[path = "support/interleaved.rs"]
mod interleaved;

use interleaved::{median, random};
use sdpa::{
    Alignment, Attention, Bf16, BlockClass, BlockPosition, Exec, Inputs, Isa, Mask, MaskMod, Mods, Outputs, Plan,
    Position, Run, View, ViewMut, Window, Workspace, alibi_slopes,
};
use std::num::NonZero;
use std::time::Instant;

const HEADS: usize = 12;
const DIM: usize = 64;

/// The causal rule as a user would write it, with the hint that lets it skip blocks.
struct Causal;

impl MaskMod for Causal {
    fn keep(&self, at: Position) -> bool {
        at.key <= at.row
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        if block.keys.end <= block.rows.start + 1 {
            BlockClass::All
        } else if block.keys.start >= block.rows.end {
            BlockClass::None
        } else {
            BlockClass::Mixed
        }
    }
}

/// What a variant asks for besides its settings and inputs.
#[derive(Clone, Copy, PartialEq)]
enum Extra {
    None,
    Lse,
    Weights,
    Function,
    Closure(Closure),
}

/// Mask functions without a hint.
#[derive(Clone, Copy, PartialEq)]
enum Closure {
    Causal,
    Modulo,
    Table,
}

struct Variant<'a> {
    name: &'a str,
    attention: Attention,
    inputs: Inputs<'a>,
    extra: Extra,
}

/// Tensors of one length, and somewhere to write.
struct Tensors {
    len: usize,
    qkv: [Vec<f32>; 3],
    bias: Vec<f32>,
    bf16_bias: Vec<Bf16>,
    masks: [Vec<u8>; 3],
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    lens: Vec<usize>,
    /// Keys that a closure keeps.
    keys: Vec<bool>,
}

impl Tensors {
    fn new(len: usize) -> Self {
        let pairs = len * len;
        let bias = random(HEADS * pairs, 4);
        Self {
            len,
            qkv: [1, 2, 3].map(|seed| random(HEADS * len * DIM, seed)),
            bf16_bias: bias.iter().map(|&x| Bf16::from_f32(x)).collect(),
            bias,
            masks: [
                (0..pairs).map(|i| u8::from(i * 7919 % 13 != 0)).collect(),
                vec![1; pairs],
                (0..pairs).map(|i| u8::from(i % len <= i / len)).collect(),
            ],
            slopes: alibi_slopes(HEADS),
            sinks: vec![0.5; HEADS],
            lens: vec![len - 1],
            keys: (0..len).map(|key| !(key * 7919).is_multiple_of(13)).collect(),
        }
    }

    fn variants(&self, plain: Attention) -> Vec<Variant<'_>> {
        let (l, full) = (self.len, Attention::new().align(Alignment::TopLeft));
        let view = |x| View::bhld(x, [1, HEADS, l, DIM]).expect("dense");
        let [q, k, v] = &self.qkv;
        let base = Inputs::new(view(q), view(k), view(v));
        let [random, ones, triangle] =
            self.masks.each_ref().map(|x| Mask::Keep(View::bhld(x, [1, 1, l, l]).expect("dense")));
        let bias = View::bhld(&self.bias, [1, HEADS, l, l]).expect("dense");
        let bf16_bias = View::bhld(&self.bf16_bias, [1, HEADS, l, l]).expect("dense");
        let window = Window::last_tokens(NonZero::new(256).expect("not 0"));
        let variant = |name, attention, inputs, extra| Variant { name, attention, inputs, extra };
        vec![
            variant("plain", plain, base, Extra::None),
            variant("full", full, base, Extra::None),
            variant("causal", full.causal(), base, Extra::None),
            variant("causal by function", full, base, Extra::Function),
            variant("causal by closure", full, base, Extra::Closure(Closure::Causal)),
            variant("closure: key modulo 13", full, base, Extra::Closure(Closure::Modulo)),
            variant("closure: table of keys", full, base, Extra::Closure(Closure::Table)),
            variant("causal by mask", full, base.mask(triangle), Extra::None),
            variant("window 256, causal", full.causal().window(window), base, Extra::None),
            variant("lse", plain, base, Extra::Lse),
            variant("kv_lens", plain, base.kv_lens(&self.lens), Extra::None),
            variant("sinks", plain, base.sinks(&self.sinks), Extra::None),
            variant("alibi", plain, base.alibi(&self.slopes), Extra::None),
            variant("softcap 30", plain.softcap(30.0), base, Extra::None),
            variant("softcap 5", plain.softcap(5.0), base, Extra::None),
            variant("mask, 1 in 13 hidden", plain, base.mask(random), Extra::None),
            variant("mask, none hidden", plain, base.mask(ones), Extra::None),
            variant("bias per head", plain, base.bias(bias), Extra::None),
            variant("bias per head, bf16", plain, base.bias(bf16_bias), Extra::None),
            variant("weights", plain, base, Extra::Weights),
        ]
    }
}

fn measure(name: &str, len: usize, plain: Attention, rounds: usize) {
    let tensors = Tensors::new(len);
    let variants = tensors.variants(plain);
    let (mut out, mut lse) = (vec![0.0; HEADS * len * DIM], vec![0.0; HEADS * len]);
    let mut weights = vec![0.0; HEADS * len * len];
    let mut workspace = Workspace::new();
    let mut seconds = vec![Vec::new(); variants.len()];
    for _ in 0..rounds {
        for (variant, seconds) in variants.iter().zip(&mut seconds) {
            let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, HEADS, len, DIM]).expect("dense"));
            let outputs = match variant.extra {
                Extra::Lse => outputs.lse(ViewMut::bhl(&mut lse, [1, HEADS, len]).expect("dense")),
                Extra::Weights => outputs.weights(ViewMut::bhld(&mut weights, [1, HEADS, len, len]).expect("dense")),
                Extra::None | Extra::Function | Extra::Closure(_) => outputs,
            };
            let problem = variant.attention.problem(variant.inputs, outputs).expect("consistent");
            let plan = Plan::new(&problem, Exec::serial());
            let start = Instant::now();
            let fits = match variant.extra {
                Extra::Function => problem.run_with(&plan, &mut workspace, Run::new().mods(&Mods::new().mask(Causal))),
                Extra::Closure(Closure::Causal) => problem.run_with(
                    &plan,
                    &mut workspace,
                    Run::new().mods(&Mods::new().mask(|at: Position| at.key <= at.row)),
                ),
                Extra::Closure(Closure::Modulo) => problem.run_with(
                    &plan,
                    &mut workspace,
                    Run::new().mods(&Mods::new().mask(|at: Position| !(at.key + at.row).is_multiple_of(13))),
                ),
                Extra::Closure(Closure::Table) => problem.run_with(
                    &plan,
                    &mut workspace,
                    Run::new().mods(&Mods::new().mask(|at: Position| tensors.keys[at.key])),
                ),
                _ => {
                    problem.run(&plan, &mut workspace);
                    Ok(())
                }
            };
            fits.expect("functions that fit");
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    let medians: Vec<f64> = seconds.iter_mut().map(|times| median(times)).collect();
    println!("\n{name}: 12 heads, {len} rows and keys, 64 dimensions, {}, one thread, {rounds} rounds", Isa::detect());
    println!("{:22} {:>9} {:>8} {:>8}", "", "ms", "× plain", "× full");
    for (variant, time) in variants.iter().zip(&medians) {
        println!("{:22} {:9.3} {:8.3} {:8.3}", variant.name, time * 1e3, time / medians[0], time / medians[1]);
    }
}

fn main() {
    let full = Attention::new().align(Alignment::TopLeft);
    // `cargo bench -- --test` only wants to see that it runs.
    if std::env::args().any(|arg| arg == "--test") {
        measure("test", 128, full, 1);
        return;
    }
    measure("bert-512", 512, full, 41);
    measure("gpt2-1024-causal", 1024, full.causal(), 41);
    measure("long-4096", 4096, full, 3);
}
