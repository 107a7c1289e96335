//! Linear attention, recurrent against chunked: every rule, on states that fit the first-level cache and that do not.
//! Interleaved runs, medians.
//!
//! ```text
//! cargo bench -p sdpa-layers --bench linear_attention
//! ```

#[path = "../../benches/support/interleaved.rs"]
mod interleaved;

use interleaved::{medians, random};
use sdpa::{Exec, Isa, View, ViewMut};
use sdpa_layers::{Compute, Form, LinearAttention, LinearInputs, LinearState, Update};

const FORMS: [Form; 4] = [Form::Recurrent, Form::Chunked(16), Form::Chunked(32), Form::Chunked(64)];

/// `[heads, kv_heads, len, dim]`, on one thread: nanoseconds for a token and key/value head.
fn shape([heads, kv_heads, len, dim]: [usize; 4], rounds: usize) {
    let scaled = |n: usize, seed, by: f32| random(n, seed).iter().map(|x| x * by).collect::<Vec<_>>();
    let unit = (dim as f32).sqrt().recip();
    let (q, k, v) =
        (random(heads * len * dim, 1), scaled(kv_heads * len * dim, 2, unit), random(kv_heads * len * dim, 3));
    let log_decay: Vec<f32> = random(kv_heads * len * dim, 4).iter().map(|x| -0.1 * x.abs()).collect();
    let beta: Vec<f32> = random(kv_heads * len, 5).iter().map(|x| x.abs().min(1.0)).collect();
    let view = |data, heads, dim| View::bhld(data, [1, heads, len, dim]).expect("sizes fit");
    let (log_decay, beta) = (view(&log_decay, kv_heads, dim), view(&beta, kv_heads, 1));
    println!("{heads} heads on {kv_heads}, {len} tokens, {dim} → {dim}: ns a token and key/value head, {FORMS:?}");
    for (name, update) in [
        ("linear", Update::Linear),
        ("gated", Update::Gated { log_decay }),
        ("delta", Update::Delta { beta }),
        ("gated delta", Update::GatedDelta { log_decay, beta }),
    ] {
        let inputs = LinearInputs::new(view(&q, heads, dim), view(&k, kv_heads, dim), view(&v, kv_heads, dim), update);
        let run = |form: Form| {
            let mut compute = Compute::new(Exec::serial());
            let mut state = LinearState::new([1, kv_heads, dim, dim]).expect("sizes fit");
            let mut out = vec![0.0; heads * len * dim];
            move || {
                state.as_mut_slice().fill(0.0);
                let out = ViewMut::bhld(&mut out, [1, heads, len, dim]).expect("sizes fit");
                LinearAttention::new().form(form).forward(inputs, &mut state, out, &mut compute).expect("sizes fit");
            }
        };
        let [mut a, mut b, mut c, mut d] = FORMS.map(run);
        let times = medians(rounds, [&mut a, &mut b, &mut c, &mut d]);
        let each = times.map(|seconds| format!("{:6.0}", seconds * 1e9 / (kv_heads * len) as f64));
        println!("  {name:11} {}", each.join(" "));
    }
}

fn main() {
    println!("{}, one thread", Isa::detect());
    // `cargo bench -- --test` only wants to see that it runs.
    if std::env::args().any(|arg| arg == "--test") {
        return shape([2, 1, 20, 8], 1);
    }
    for sizes in [[4, 4, 512, 64], [16, 4, 512, 64], [4, 4, 512, 128], [4, 4, 512, 256]] {
        shape(sizes, 11);
    }
}
